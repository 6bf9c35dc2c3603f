"""The client of vLLM's token protocol, against engines that answer well, badly, late, or not at all."""

import asyncio
import contextlib
import json
import socket
from collections.abc import AsyncIterator, Iterator
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import SecretStr

from proxy.app import build_engine
from proxy.generate.engines.base import Flow, Timeouts
from proxy.generate.engines.vllm import VllmEngine
from proxy.generate.engines.vllm_answer import AnswerReader
from proxy.generate.errors import (
    EngineDisconnected,
    EngineError,
    EngineFailed,
    EngineProtocolError,
    EngineRefused,
    EngineTimeout,
    EngineUnreachable,
)
from proxy.protocol.errors import ApiError
from proxy.protocol.generate import GenerateRequest, Outcome, TokenDelta
from tests.engines.scripted import Exchange, Script, choice, event, says, scripted, silent, silent_after_headers
from tests.losses import nothing_is_lost

JSON = "content-type: application/json\r\n"


@pytest.fixture(autouse=True, scope="module")
def all_is_cleaned_up() -> Iterator[None]:
    with nothing_is_lost():
        yield


@contextlib.asynccontextmanager
async def client_of(url: str, *, api_key: str | None = None, **timeouts: float) -> AsyncIterator[VllmEngine]:
    key = SecretStr(api_key) if api_key else None
    engine = build_engine(url, key, Timeouts(**timeouts))
    try:
        yield engine
    finally:
        await engine.close()


def request(n: int = 1, stream: bool = True, token_ids: list[int] | None = None) -> GenerateRequest:
    return GenerateRequest("id-1", token_ids or [7, 8, 9], {"n": n} if n > 1 else {}, stream=stream)


class Got:
    """A sink that keeps what it is given, and what `generate` ended with."""

    def __init__(self) -> None:
        self.batches: list[list[TokenDelta]] = []
        self.outcome: Outcome | None = None
        self.error: Exception | None = None
        self.some = asyncio.Event()

    def __call__(self, deltas: list[TokenDelta]) -> None:
        self.batches.append(deltas)
        self.some.set()

    @property
    def deltas(self) -> list[TokenDelta]:
        return [delta for batch in self.batches for delta in batch]

    def ids(self, index: int = 0) -> list[int]:
        return [i for delta in self.deltas if delta.index == index for i in delta.token_ids]

    def finish(self, index: int = 0) -> list[str]:
        return [d.finish_reason for d in self.deltas if d.index == index and d.finish_reason is not None]


async def generated(script: Script, asked: GenerateRequest | None = None, **client: Any) -> tuple[Got, str]:
    """What an engine with that script brings the sink, and its name."""
    got = Got()
    async with scripted(script) as engine, client_of(engine.url, **client) as of, asyncio.timeout(10):
        try:
            got.outcome = await of.generate(asked or request(), got, Flow())
        except ApiError as error:
            got.error = error
        assert of.in_flight == 0
        return got, of.name


def sends(*events: bytes, done: bool = True) -> Script:
    """Sends each as an HTTP chunk of its own, and ends the stream."""

    async def script(exchange: Exchange) -> None:
        await exchange.begin()
        for data in events:
            await exchange.data(data)
        await exchange.end(done)

    return script


def answers(status: str, body: bytes = b"", headers: str = "") -> Script:
    async def script(exchange: Exchange) -> None:
        await exchange.status(status, body, headers)

    return script


# What a healthy engine may do


async def test_it_asks_as_the_protocol_says() -> None:
    async with scripted(says([[1]])) as engine, client_of(engine.url, api_key="sesame") as client:
        await client.generate(
            GenerateRequest("id-1", [7, 8], {"max_tokens": 3}, cache_salt="s", priority=2), Got(), Flow()
        )

    [exchange] = engine.exchanges
    assert exchange.path == "/inference/v1/generate"
    assert exchange.headers["x-request-id"] == "id-1"
    assert exchange.headers["authorization"] == "Bearer sesame"
    assert exchange.headers["content-type"] == "application/json"
    assert exchange.body == {
        "request_id": "id-1",
        "token_ids": [7, 8],
        "sampling_params": {"max_tokens": 3},
        "stream": True,
        "stream_options": {"include_usage": True},
        "cache_salt": "s",
        "priority": 2,
    }


async def test_several_ids_in_an_event_and_several_events_in_a_read_come_in_order() -> None:
    got, _ = await generated(sends(event(choice([1, 2, 3])) + event(choice([])) + event(choice([4], finish="length"))))
    assert got.ids() == [1, 2, 3, 4]
    assert got.finish() == ["length"]


async def test_events_in_single_bytes_are_the_same_events() -> None:
    async def script(exchange: Exchange) -> None:
        await exchange.begin()
        for byte in event(choice([1, 2])) + event(choice([3], finish="stop", stop=3)):
            await exchange.data(bytes([byte]))
        await exchange.end()

    got, _ = await generated(script)
    assert got.ids() == [1, 2, 3]
    assert got.deltas[-1] == TokenDelta(0, [3], None, "stop", 3)


async def test_an_event_of_a_mebibyte_arrives() -> None:
    ids = list(range(100_000, 250_000))
    data = event(choice(ids, finish="length"))
    assert len(data) > 1 << 20

    got, _ = await generated(sends(data))
    assert got.ids() == ids


async def test_the_choices_of_n_interleave_and_may_share_an_event() -> None:
    got, _ = await generated(
        sends(
            event(choice([20], index=2)),
            event(choice([1], index=0), choice([10], index=1)),
            event(choice([11], index=1, finish="stop", stop=11)),
            event(choice([2], index=0), choice([21], index=2, finish="length")),
            event(choice([], index=0, finish="abort")),
        ),
        request(n=3),
    )
    assert [got.ids(index) for index in range(3)] == [[1, 2], [10, 11], [20, 21]]
    assert [got.finish(index) for index in range(3)] == [["abort"], ["stop"], ["length"]]
    assert isinstance(got.outcome, Outcome)


async def test_the_last_usage_is_the_outcomes() -> None:
    usage = {"prompt_tokens": 3, "completion_tokens": 1, "total_tokens": 4}
    got, _ = await generated(
        sends(
            event(choice([1]), usage=usage | {"completion_tokens": 0}),
            event(choice([2], finish="stop")),
            event(usage=usage),
        )
    )
    assert got.outcome == Outcome(usage=usage)
    assert got.ids() == [1, 2]


async def test_logprobs_come_as_the_engine_gives_them() -> None:
    entry = {"token_id": 1, "logprob": -0.5, "rank": 1, "top_logprobs": [{"token_id": 1, "logprob": -0.5, "rank": 1}]}
    got, _ = await generated(sends(event(choice([1], logprobs={"content": [entry]}, finish="length"))))
    assert got.deltas[0].logprobs == [entry]


async def test_comments_and_other_fields_mean_nothing() -> None:
    got, _ = await generated(sends(b": ping\n\n", b"event: token\n" + event(choice([1], finish="stop")), b": ping\n\n"))
    assert [delta.token_ids for delta in got.deltas] == [[1]]


async def test_a_stream_is_complete_when_every_choice_has_finished_even_without_done() -> None:
    got, _ = await generated(sends(event(choice([1], finish="stop")), done=False))
    assert (got.ids(), got.error) == ([1], None)


async def test_a_connection_that_breaks_after_every_choice_has_finished_does_not_matter() -> None:
    async def script(exchange: Exchange) -> None:
        await exchange.begin()
        await exchange.event(choice([1], finish="stop"))
        exchange.reset()

    got, _ = await generated(script)
    assert (got.ids(), got.error) == ([1], None)


async def test_what_comes_after_done_is_not_read() -> None:
    async def script(exchange: Exchange) -> None:
        await exchange.begin()
        await exchange.event(choice([1], finish="stop"))
        await exchange.data(b"data: [DONE]\n\ndata: what is this\n\n")
        await exchange.end(done=False)

    got, _ = await generated(script)
    assert (got.ids(), got.error) == ([1], None)


async def test_a_whole_answer_comes_as_one_batch() -> None:
    body = {
        "choices": [choice([1, 2], finish="stop", stop=2), choice([3], index=1, finish="length")],
        "usage": {"prompt_tokens": 3},
        "prompt_logprobs": [None, {"8": {"logprob": -1.0, "rank": 1}}],
        "kv_transfer_params": {"remote_host": "a"},
    }
    got, _ = await generated(answers("200 OK", json.dumps(body).encode(), JSON), request(n=2, stream=False))

    assert got.batches == [[TokenDelta(0, [1, 2], None, "stop", 2), TokenDelta(1, [3], None, "length")]]
    assert got.outcome == Outcome({"prompt_tokens": 3}, body["prompt_logprobs"], {"remote_host": "a"}, body)


# What is not the protocol


def choice_with(**fields: Any) -> bytes:
    return event({**choice([1]), **fields})


NOT_THE_PROTOCOL = [
    pytest.param(b"data: {oops}\n\n", "an event is not JSON", id="no JSON"),
    pytest.param(b"data: \xff\xfe\n\n", "an event is not JSON", id="no UTF-8"),
    pytest.param(b"data: " + b"[" * 5000 + b"\n\n", "an event is not JSON", id="nested too deep"),
    pytest.param(b"data: 5\n\n", "an event is not of the generate protocol", id="a number"),
    pytest.param(b"data: []\n\n", "an event is not of the generate protocol", id="a list"),
    pytest.param(b"data: null\n\n", "an event is not of the generate protocol", id="null"),
    pytest.param(b"data: {}\n\n", "'choices' is missing", id="no choices"),
    pytest.param(b'data: {"choices": null}\n\n', "choices", id="choices null"),
    pytest.param(b'data: {"choices": {"index": 0}}\n\n', "choices", id="choices an object"),
    pytest.param(b'data: {"choices": ""}\n\n', "choices", id="choices a string"),
    pytest.param(b'data: {"choices": [null]}\n\n', "choice", id="a choice that is null"),
    pytest.param(b'data: {"choices": [{"token_ids": [1]}]}\n\n', "'index' is missing", id="no index"),
    pytest.param(b'data: {"choices": [{"index": 0}]}\n\n', "'token_ids' is missing", id="no ids"),
    pytest.param(choice_with(index=1), "choice 1 was not asked for or has finished", id="an index too high"),
    pytest.param(choice_with(index=-1), "choice -1 was not asked for", id="a negative index"),
    pytest.param(choice_with(index=0.0), "choice 0.0 was not asked for", id="an index that is no integer"),
    pytest.param(choice_with(index=False), "choice False was not asked for", id="an index that is a boolean"),
    pytest.param(choice_with(index=[0]), "was not asked for", id="an index that is a list"),
    pytest.param(choice_with(token_ids=5), "token_ids is not a list of token ids", id="ids a number"),
    pytest.param(choice_with(token_ids="12"), "token_ids is not a list of token ids", id="ids a string"),
    pytest.param(choice_with(token_ids={"1": 1}), "token_ids is not a list of token ids", id="ids an object"),
    pytest.param(choice_with(token_ids=[1, -2]), "token_ids is not a list of token ids", id="a negative id"),
    pytest.param(choice_with(token_ids=["1"]), "token_ids is not a list of token ids", id="an id that is a string"),
    pytest.param(choice_with(token_ids=[None]), "token_ids is not a list of token ids", id="an id that is null"),
    pytest.param(choice_with(token_ids=[True]), "token_ids is not a list of token ids", id="an id that is a boolean"),
    pytest.param(choice_with(token_ids=[1.0]), "token_ids is not a list of token ids", id="an id that is a float"),
    pytest.param(choice_with(token_ids=[2**70]), "token_ids is not a list of token ids", id="an id beyond 64 bits"),
    pytest.param(choice_with(finish_reason=1), "finish_reason is not a string", id="finish a number"),
    pytest.param(choice_with(finish_reason=["stop"]), "finish_reason is not a string", id="finish a list"),
    pytest.param(choice_with(stop_reason=[1]), "stop_reason", id="stop reason a list"),
    pytest.param(choice_with(stop_reason={}), "stop_reason", id="stop reason an object"),
    pytest.param(choice_with(stop_reason=1.5), "stop_reason", id="stop reason a float"),
    pytest.param(choice_with(logprobs=5), "logprobs", id="logprobs a number"),
    pytest.param(choice_with(logprobs=[]), "logprobs", id="logprobs a list"),
    pytest.param(choice_with(logprobs={}), "content", id="logprobs without content"),
    pytest.param(choice_with(logprobs={"content": 1}), "logprobs", id="content a number"),
    pytest.param(choice_with(logprobs={"content": {}}), "logprobs", id="content an object"),
    pytest.param(choice_with(logprobs={"content": ""}), "logprobs", id="content a string"),
    pytest.param(choice_with(logprobs={"content": [None]}), "logprobs", id="an entry that is null"),
    pytest.param(choice_with(logprobs={"content": [{"logprob": -1}]}), "logprobs", id="an entry without its id"),
    pytest.param(
        choice_with(logprobs={"content": [{"token_id": 1, "logprob": None}]}), "logprobs", id="an entry without a value"
    ),
    pytest.param(
        choice_with(logprobs={"content": [{"token_id": -1, "logprob": -1.0}]}), "logprobs", id="an entry's id negative"
    ),
    pytest.param(
        choice_with(logprobs={"content": [{"token_id": 1, "logprob": -1.0, "top_logprobs": 5}]}),
        "logprobs",
        id="alternatives a number",
    ),
    pytest.param(
        choice_with(logprobs={"content": [{"token_id": 1, "logprob": -1.0, "top_logprobs": [{"token_id": "1"}]}]}),
        "logprobs",
        id="an alternative's id a string",
    ),
    pytest.param(choice_with(logprobs={"content": []}), "1 token", id="fewer entries than ids"),
    pytest.param(event(usage=5), "usage", id="usage a number"),
    pytest.param(event(usage=[]), "usage", id="usage a list"),
    pytest.param(event(usage={"prompt_tokens": "3"}), "usage.prompt_tokens", id="prompt tokens a string"),
    pytest.param(event(usage={"prompt_tokens_details": 5}), "prompt_tokens_details", id="token details a number"),
    pytest.param(
        event(usage={"prompt_tokens_details": {"cached_tokens": "5"}}), "cached_tokens", id="cached tokens a string"
    ),
]


@pytest.mark.parametrize(("data", "message"), NOT_THE_PROTOCOL)
async def test_an_event_of_a_wrong_shape_is_an_error_after_the_tokens_before_it(data: bytes, message: str) -> None:
    got, name = await generated(sends(event(choice([5])) + data))

    assert isinstance(got.error, EngineProtocolError)
    assert (got.error.status, got.error.type, got.error.engine) == (502, "engine_protocol_error", name)
    assert got.error.message.startswith(f"engine {name}: ")
    assert message in got.error.message
    assert got.ids()[:1] == [5]


@pytest.mark.parametrize(("data", "message"), NOT_THE_PROTOCOL)
async def test_a_whole_answer_of_a_wrong_shape_is_an_error(data: bytes, message: str) -> None:
    body = data.removeprefix(b"data: ").strip()
    got, _ = await generated(answers("200 OK", body, JSON), request(stream=False))

    assert isinstance(got.error, EngineProtocolError)
    assert message.replace("an event", "the answer") in got.error.message
    assert got.batches == []


JSON_VALUES = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-2, 2**70)
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(max_size=3),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=3),
    max_leaves=5,
)


@st.composite
def damaged(draw: st.DrawFn) -> dict[str, Any]:
    """A good answer, in which anything may stand anywhere."""
    logprob = {"token_id": 1, "logprob": -0.5, "top_logprobs": [{"token_id": 1, "logprob": -0.5}]}
    answer: dict[str, Any] = {
        "choices": [choice([1], finish="stop", stop=1, logprobs={"content": [logprob]})],
        "usage": {"prompt_tokens": 3, "prompt_tokens_details": {"cached_tokens": 1}},
        "prompt_logprobs": [None, {"5": {"logprob": -1.0}}],
    }
    place: Any = answer
    while True:
        key = draw(st.sampled_from(sorted(place) if isinstance(place, dict) else range(len(place))))
        if not place[key] or not isinstance(place[key], dict | list) or draw(st.booleans()):
            break
        place = place[key]
    if isinstance(place, dict) and draw(st.booleans()):
        place[draw(st.text(max_size=3))] = place.pop(key)
    else:
        place[key] = draw(JSON_VALUES)
    return answer


@settings(deadline=None, max_examples=300)
@given(damaged())
def test_whatever_stands_in_an_answer_is_read_or_refused(answer: dict[str, Any]) -> None:
    written = json.dumps(answer).encode()

    reader = AnswerReader("e", 1)
    deltas = reader.feed(b"data: " + written + b"\n\n")
    assert reader.failure is not None or [delta.index for delta in deltas] in ([0], [])
    with contextlib.suppress(EngineError):
        AnswerReader("e", 1).whole(written)


async def test_null_where_the_protocol_allows_it_is_no_error() -> None:
    got, _ = await generated(
        sends(
            choice_with(token_ids=None, logprobs=None),
            choice_with(logprobs={"content": None}),
            choice_with(logprobs={"content": [{"token_id": 1, "logprob": -1, "rank": None, "top_logprobs": None}]}),
            event(usage={"prompt_tokens": None, "prompt_tokens_details": None}),
            event(usage={"prompt_tokens_details": {"cached_tokens": None}}),
            event({"index": 0, "token_ids": [], "finish_reason": "length"}),
        )
    )
    assert got.error is None
    assert got.ids() == [1, 1]


async def test_a_choice_that_goes_on_after_it_finished_is_an_error() -> None:
    got, _ = await generated(
        sends(
            event(
                choice([1], finish="stop"),
            ),
            event(choice([2])),
        ),
        request(n=2),
    )
    assert isinstance(got.error, EngineProtocolError)
    assert "choice 0 was not asked for or has finished" in got.error.message
    assert [delta.token_ids for delta in got.deltas] == [[1]]


@pytest.mark.parametrize(
    ("script", "type_", "message"),
    [
        pytest.param(
            answers("200 OK", b"<html>hello</html>", "content-type: text/html\r\n"),
            EngineProtocolError,
            "answered with text/html where text/event-stream was expected",
            id="HTML",
        ),
        pytest.param(
            answers("200 OK", b"{}", JSON),
            EngineProtocolError,
            "answered with application/json where text/event-stream was expected",
            id="JSON",
        ),
        pytest.param(answers("200 OK"), EngineProtocolError, "application/octet-stream", id="nothing"),
        pytest.param(
            answers("307 Temporary Redirect", b"", "location: /\r\n"), EngineFailed, "HTTP 307", id="redirect"
        ),
    ],
)
async def test_an_answer_that_is_no_event_stream_is_an_error(
    script: Script, type_: type[EngineError], message: str
) -> None:
    got, name = await generated(script)
    assert type(got.error) is type_
    assert message in str(got.error)
    assert name in str(got.error)


async def test_html_in_place_of_a_whole_answer_is_an_error() -> None:
    got, name = await generated(
        answers("200 OK", b"<html>hello</html>", "content-type: text/html\r\n"), request(stream=False)
    )
    assert isinstance(got.error, EngineProtocolError)
    assert f"engine {name}: the answer is not JSON" in str(got.error)


async def test_something_that_does_not_speak_http_is_an_error() -> None:
    async def script(exchange: Exchange) -> None:
        await exchange.raw(b"220 smtp.example ESMTP\r\n\r\n")
        exchange.close()

    got, name = await generated(script)
    assert isinstance(got.error, EngineProtocolError)
    assert f"engine {name}: did not answer with HTTP" in str(got.error)


async def test_chunks_that_are_framed_wrongly_end_the_request_after_the_tokens() -> None:
    async def script(exchange: Exchange) -> None:
        await exchange.begin()
        await exchange.event(choice([1]))
        await got.some.wait()
        await exchange.raw(b"what is this\r\n")
        await exchange.gone.wait()

    got = Got()
    async with scripted(script) as engine, client_of(engine.url, idle=0.1) as client, asyncio.timeout(5):
        with pytest.raises(EngineTimeout, match=r"silent for 0\.1 s"):  # aiohttp does not tell the reader of a body
            await client.generate(request(), got, Flow())
    assert [delta.token_ids for delta in got.deltas] == [[1]]


# What an engine says of its own failure


@pytest.mark.parametrize(
    ("error", "said"),
    [
        ({"message": "out of memory", "type": "InternalServerError", "code": 500}, "out of memory"),
        ("out of memory", "out of memory"),
        ({"code": 500}, '{"code":500}'),
        ({}, "{}"),
    ],
)
@pytest.mark.parametrize("before", [[], [1, 2]])
async def test_an_error_event_is_the_engines_error_after_the_tokens_before_it(
    error: object, said: str, before: list[int]
) -> None:
    tokens = event(choice(before)) if before else b""
    got, name = await generated(sends(tokens + b"data: " + json.dumps({"error": error}).encode() + b"\n\n"))

    assert isinstance(got.error, EngineFailed)
    assert (got.error.status, got.error.type) == (502, "engine_error")
    assert got.error.message == f"engine {name}: failed while it generated: {said}"
    assert got.ids() == before


async def test_a_choice_that_finishes_with_an_error_is_the_engines_error() -> None:
    got, _ = await generated(sends(event(choice([1])), event(choice([2], finish="error"))))
    assert isinstance(got.error, EngineFailed)
    assert got.ids() == [1, 2]
    assert got.finish() == []


@pytest.mark.parametrize(
    ("status", "type_", "proxied", "type_name"),
    [
        ("400 Bad Request", EngineRefused, 400, "invalid_request_error"),
        ("413 Payload Too Large", EngineRefused, 400, "invalid_request_error"),
        ("422 Unprocessable Entity", EngineRefused, 400, "invalid_request_error"),
        ("401 Unauthorized", EngineFailed, 502, "engine_error"),
        ("403 Forbidden", EngineFailed, 502, "engine_error"),
        ("404 Not Found", EngineFailed, 502, "engine_error"),
        ("429 Too Many Requests", EngineFailed, 429, "engine_error"),
        ("500 Internal Server Error", EngineFailed, 502, "engine_error"),
        ("503 Service Unavailable", EngineFailed, 503, "engine_error"),
        ("599 ", EngineFailed, 502, "engine_error"),
    ],
)
@pytest.mark.parametrize("stream", [True, False])
async def test_an_http_error_is_the_clients_fault_or_the_engines(
    status: str, type_: type[ApiError], proxied: int, type_name: str, stream: bool
) -> None:
    body = b'{"error": {"message": "no good"}}'
    got, name = await generated(answers(status, body, JSON), request(stream=stream))

    assert type(got.error) is type_
    assert (got.error.status, got.error.type) == (proxied, type_name)
    assert got.error.message.startswith(f"engine {name}")
    assert got.error.message.endswith("no good")
    if type_ is EngineFailed:
        assert f"HTTP {status[:3]}: " in got.error.message


@pytest.mark.parametrize(
    ("body", "said"),
    [
        pytest.param(b'{"error": {"message": "no good", "param": "x", "code": 1}}', "no good", id="OpenAI's"),
        pytest.param(b'{"object": "error", "message": "no good"}', "no good", id="vLLM's older"),
        pytest.param(b'{"error": "no good"}', "no good", id="an error that is text"),
        pytest.param(b'{"detail": "no good"}', "no good", id="FastAPI's"),
        pytest.param(b'{"detail": [{"msg": "no good"}]}', '{"detail":[{"msg":"no good"}]}', id="FastAPI's list"),
        pytest.param(b'{"error": null}', "null", id="null"),
        pytest.param(b"<html>no good</html>", "<html>no good</html>", id="HTML"),
        pytest.param(b"[1]", "[1]", id="a list"),
        pytest.param(b"{}", "{}", id="an empty object"),
        pytest.param(b"no good \xff", "no good \ufffd", id="bytes"),
        pytest.param(b"", "no reason given", id="nothing"),
    ],
)
@pytest.mark.parametrize("status", [400, 500])
async def test_an_http_error_is_told_in_the_engines_words(body: bytes, said: str, status: int) -> None:
    got, name = await generated(answers(f"{status} Oh", body))
    told = f" refused the request: {said}" if status == 400 else f": HTTP 500: {said}"
    assert got.error is not None
    assert str(got.error) == f"engine {name}{told}"


async def test_retry_after_is_passed_on() -> None:
    got, _ = await generated(answers("429 Too Many Requests", b"", "retry-after: 7\r\n"))
    assert isinstance(got.error, EngineFailed)
    assert got.error.headers == {"Retry-After": "7"}


async def test_a_retry_after_that_cannot_be_a_header_again_is_left_out() -> None:
    async def script(exchange: Exchange) -> None:
        await exchange.raw(b"HTTP/1.1 429 Too Many\r\ncontent-length: 0\r\nretry-after: \xff\r\n\r\n")

    got, _ = await generated(script)
    assert isinstance(got.error, EngineFailed)
    assert got.error.headers == {}


async def test_an_error_body_in_pieces_is_read_as_one() -> None:
    async def script(exchange: Exchange) -> None:
        await exchange.raw(b"HTTP/1.1 500 Oh\r\ncontent-length: 33\r\n\r\n")
        for byte in b'{"error": {"message": "no good"}}':
            await exchange.raw(bytes([byte]))
            await asyncio.sleep(0)

    got, name = await generated(script)
    assert str(got.error) == f"engine {name}: HTTP 500: no good"


async def test_a_long_error_message_is_cut() -> None:
    body = json.dumps({"error": {"message": "no good " * 10_000}}).encode()
    got, name = await generated(answers("500 Oh", body))
    assert str(got.error).startswith(f"engine {name}: HTTP 500: no good no good")
    assert len(str(got.error)) < 3000


async def test_an_endless_error_body_is_not_waited_for() -> None:
    async def script(exchange: Exchange) -> None:
        await exchange.raw(b"HTTP/1.1 500 Oh\r\ncontent-length: 1000000000\r\n\r\n")
        while not exchange.gone.is_set():
            await exchange.raw(b"no good " * 1000)

    got, _ = await generated(script)
    assert isinstance(got.error, EngineFailed)
    assert "HTTP 500: no good" in str(got.error)


async def test_an_error_whose_body_breaks_off_still_tells_its_status() -> None:
    async def script(exchange: Exchange) -> None:
        await exchange.raw(b"HTTP/1.1 503 Busy\r\ncontent-length: 100\r\n\r\nno g")
        exchange.close()

    got, _ = await generated(script)
    assert isinstance(got.error, EngineFailed)
    assert got.error.status == 503


async def test_a_refusal_of_structured_outputs_says_what_to_do() -> None:
    body = b'{"error": {"message": "structured outputs are not supported", "param": "sampling_params"}}'
    got, name = await generated(answers("400 Bad Request", body, JSON))

    assert isinstance(got.error, EngineRefused)
    assert got.error.message == (
        f"engine {name} refused the request: structured outputs are not supported (a --tokens-only vLLM has no "
        "grammars; start the engine with --enable-scale-out instead, or leave response_format, structured_outputs, a "
        "forced tool_choice and strict tools out)"
    )
    assert got.error.param == "sampling_params"


@pytest.mark.parametrize(
    "script",
    [
        answers("401 Unauthorized", b'{"error": {"message": "bad token: Bearer sesame-123"}}'),
        answers("400 Bad Request", b"sesame-123 is not known"),
        sends(b'data: {"error": {"message": "auth sesame-123 expired"}}\n\n'),
    ],
)
async def test_an_engine_that_repeats_its_key_does_not_give_it_away(script: Script) -> None:
    got, _ = await generated(script, api_key="sesame-123")
    assert got.error is not None
    assert "sesame" not in str(got.error)


# Connections that break


async def test_a_refused_connection_is_told_as_such() -> None:
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))  # bound and not listening
        async with client_of(f"http://127.0.0.1:{unused.getsockname()[1]}") as client:
            with pytest.raises(EngineUnreachable) as caught:
                await client.generate(request(), Got(), Flow())

    assert caught.value.message == f"engine {client.name}: cannot connect: Connection refused"
    assert (caught.value.status, caught.value.type) == (503, "engine_unreachable")
    assert client.in_flight == 0


async def test_a_name_that_does_not_resolve_is_told_as_such() -> None:
    async with client_of("http://no-such-host.invalid:1") as client:
        with pytest.raises(EngineUnreachable, match=r"engine http://no-such-host\.invalid:1: cannot connect: \S"):
            await client.generate(request(), Got(), Flow())


async def test_https_to_an_engine_without_tls_is_told_as_such() -> None:
    async def answer(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(b"HTTP/1.1 400 Bad Request\r\n\r\n")
        writer.close()

    async with await asyncio.start_server(answer, "127.0.0.1", 0) as server:
        port = server.sockets[0].getsockname()[1]
        async with client_of(f"https://127.0.0.1:{port}") as client:
            with pytest.raises(EngineUnreachable, match=r"cannot connect: .*SSL"):
                await client.generate(request(), Got(), Flow())


async def test_a_connection_that_is_not_taken_in_time_is_told_as_such() -> None:
    with socket.socket() as full:
        full.bind(("127.0.0.1", 0))
        full.listen(0)
        address = full.getsockname()
        with socket.create_connection(address), contextlib.ExitStack() as stack:
            for _ in range(4):  # more than the backlog takes
                waiting = stack.enter_context(socket.socket())
                waiting.setblocking(False)
                waiting.connect_ex(address)
            async with client_of(f"http://127.0.0.1:{address[1]}", connect=0.05) as client:
                with pytest.raises(EngineUnreachable, match=r"no connection within 0\.05 s"):
                    await client.generate(request(), Got(), Flow())


@pytest.mark.parametrize("how", ["reset", "close"])
async def test_a_connection_that_ends_before_an_answer_is_tried_once_more(how: str) -> None:
    async def script(exchange: Exchange) -> None:
        getattr(exchange, how)()

    async with scripted(script) as engine, client_of(engine.url) as client:
        with pytest.raises(EngineUnreachable, match="closed the connection before it answered"):
            await client.generate(request(), Got(), Flow())
    assert len(engine.exchanges) == 2


@pytest.mark.parametrize("how", ["reset", "close"])
@pytest.mark.parametrize(
    "half_said",
    [
        pytest.param(b"", id="between events"),
        pytest.param(b'data: {"choi', id="inside an event"),
    ],
)
async def test_a_connection_that_ends_in_the_middle_is_an_error_after_the_tokens(how: str, half_said: bytes) -> None:
    async def script(exchange: Exchange) -> None:
        await exchange.begin()
        await exchange.event(choice([1, 2]))
        if half_said:
            await exchange.data(half_said)
        getattr(exchange, how)()

    got, name = await generated(script)
    assert isinstance(got.error, EngineDisconnected)
    assert (got.error.status, got.error.type) == (502, "engine_disconnected")
    assert f"engine {name}: the connection broke in the middle of the answer" in str(got.error)
    assert got.ids() == [1, 2]


async def test_what_came_before_a_break_reaches_a_sink_that_was_paused() -> None:
    broken = asyncio.Event()

    async def script(exchange: Exchange) -> None:
        await exchange.begin()
        await exchange.event(choice([1]))
        await got.some.wait()
        await exchange.event(choice([2]))
        exchange.close()
        broken.set()

    async def until() -> None:
        await broken.wait()
        await engine.until(lambda: engine.open == 0)
        for _ in range(10):
            await asyncio.sleep(0)

    class Pausing(Got):
        def __call__(self, deltas: list[TokenDelta]) -> None:
            super().__call__(deltas)
            if len(self.batches) == 1:
                flow.pause(until)

    got, flow = Pausing(), Flow()
    async with scripted(script) as engine, client_of(engine.url) as client, asyncio.timeout(5):
        with pytest.raises(EngineDisconnected):
            await client.generate(request(), got, flow)
    assert got.ids() == [1, 2]


async def test_a_whole_answer_that_breaks_off_is_an_error() -> None:
    async def script(exchange: Exchange) -> None:
        await exchange.raw(b"HTTP/1.1 200 OK\r\ncontent-length: 100\r\n\r\n{")
        exchange.close()

    got, _ = await generated(script, request(stream=False))
    assert isinstance(got.error, EngineUnreachable)  # nothing of it was heard, so another engine may be asked


@pytest.mark.parametrize(
    ("events", "done", "message"),
    [
        ([event(choice([1]))], True, "sent [DONE] before choice 0, 1 had a finish_reason"),
        ([event(choice([1], finish="stop"))], True, "sent [DONE] before choice 1 had a finish_reason"),
        ([event(choice([1], finish="stop"))], False, "ended the stream before choice 1 had a finish_reason"),
        (
            [event(choice([1])), b'data: {"choi'],
            False,
            "ended the stream inside an event before choice 0, 1 had a finish_reason",
        ),
    ],
)
async def test_a_stream_that_ends_before_every_choice_has_finished_is_an_error(
    events: list[bytes], done: bool, message: str
) -> None:
    got, name = await generated(sends(*events, done=done), request(n=2))
    assert isinstance(got.error, EngineDisconnected)
    assert got.error.message == f"engine {name}: {message}"


async def test_a_whole_answer_in_which_a_choice_has_not_finished_is_an_error() -> None:
    body = json.dumps({"choices": [choice([1], finish="stop")]}).encode()
    got, _ = await generated(answers("200 OK", body, JSON), request(n=2, stream=False))
    assert isinstance(got.error, EngineProtocolError)
    assert "choice 1 has no finish_reason" in str(got.error)
    assert got.batches == []


# Engines that are too slow


async def silent_after_a_token(exchange: Exchange) -> None:
    await exchange.begin()
    await exchange.event(choice([1]))
    await exchange.gone.wait()


async def silent_inside_an_error(exchange: Exchange) -> None:
    await exchange.raw(b"HTTP/1.1 500 Oh\r\ncontent-length: 100\r\n\r\nno g")
    await exchange.gone.wait()


async def only_comments(exchange: Exchange) -> None:
    await exchange.begin()
    while not exchange.gone.is_set():
        await exchange.data(b": ping\n\n")
        await asyncio.sleep(0.01)


async def a_token_and_comments(exchange: Exchange) -> None:
    await exchange.begin()
    await exchange.event(choice([1]))
    while not exchange.gone.is_set():
        await exchange.data(b": ping\n\n")
        await asyncio.sleep(0.01)


async def talkative(exchange: Exchange) -> None:
    await exchange.begin()
    while not exchange.gone.is_set():
        await exchange.event(choice([1]))
        await asyncio.sleep(0.01)


@pytest.mark.parametrize(
    ("script", "timeouts", "message"),
    [
        (silent, {"first_token": 0.05}, "no token within 0.05 s (first_token_timeout)"),
        (silent_after_headers, {"first_token": 0.05}, "no token within 0.05 s (first_token_timeout)"),
        (only_comments, {"first_token": 0.05}, "no token within 0.05 s (first_token_timeout)"),
        (silent_after_a_token, {"idle": 0.05}, "silent for 0.05 s between tokens (idle_timeout)"),
        (a_token_and_comments, {"idle": 0.05}, "silent for 0.05 s between tokens (idle_timeout)"),
        (talkative, {"total": 0.1}, "not finished within 0.1 s (total_timeout)"),
        (silent, {"total": 0.05}, "not finished within 0.05 s (total_timeout)"),
    ],
)
async def test_an_engine_that_is_too_slow_is_told_which_limit_it_broke(
    script: Script, timeouts: dict[str, float], message: str
) -> None:
    got, name = await generated(script, **timeouts)
    assert isinstance(got.error, EngineTimeout)
    assert (got.error.status, got.error.type) == (504, "engine_timeout")
    assert got.error.message == f"engine {name}: {message}"


async def test_comments_before_the_first_token_do_not_make_the_wait_for_it_shorter() -> None:
    async def script(exchange: Exchange) -> None:
        await exchange.begin()
        await exchange.data(b": ping\n\n")
        await asyncio.sleep(0.15)
        await exchange.event(choice([1], finish="stop"))
        await exchange.end()

    got, _ = await generated(script, idle=0.05)
    assert (got.ids(), got.error) == ([1], None)


async def test_a_whole_answer_may_take_longer_than_the_first_token() -> None:
    async def script(exchange: Exchange) -> None:
        await asyncio.sleep(0.15)
        await says([[1]])(exchange)

    got, _ = await generated(script, request(stream=False), first_token=0.05, idle=0.05)
    assert (got.ids(), got.error) == ([1], None)


async def test_an_error_whose_body_does_not_come_still_tells_its_status(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("proxy.generate.engines.vllm.LAST_WORDS_TIMEOUT", 0.05)
    got, _ = await generated(silent_inside_an_error)
    assert isinstance(got.error, EngineFailed)
    assert "HTTP 500" in str(got.error)


async def test_a_stream_that_stays_open_after_every_choice_has_finished_is_complete() -> None:
    async def stays(exchange: Exchange) -> None:
        await exchange.begin()
        await exchange.event(choice([1], finish="stop"))
        await exchange.gone.wait()

    async with scripted(stays) as engine, client_of(engine.url, idle=3600) as client, asyncio.timeout(30):
        got = Got()
        await client.generate(request(), got, Flow())
    assert [delta.token_ids for delta in got.deltas] == [[1]]


def test_ids_of_logprobs_may_be_written_as_older_engines_do() -> None:
    top = {"token": "token_id:8", "logprob": -2.0}
    entry = {"token": "token_id:7", "logprob": -0.5, "top_logprobs": [top]}
    (delta,) = AnswerReader("e", 1).feed(event(choice([7], logprobs={"content": [entry]})))
    assert delta.logprobs is not None
    assert delta.logprobs[0]["token_id"] == 7
    assert delta.logprobs[0]["top_logprobs"][0]["token_id"] == 8


async def test_a_stream_that_does_not_end_after_done_is_complete(monkeypatch: pytest.MonkeyPatch) -> None:
    async def script(exchange: Exchange) -> None:
        await exchange.begin()
        await exchange.event(choice([1], finish="stop"))
        await exchange.data(b"data: [DONE]\n\n")
        await exchange.gone.wait()

    monkeypatch.setattr("proxy.generate.engines.vllm.LAST_WORDS_TIMEOUT", 0.05)
    got, _ = await generated(script)
    assert (got.ids(), got.error) == ([1], None)


# Stopping, pausing, and connections


@pytest.mark.parametrize(
    "script", [silent, silent_after_headers, silent_after_a_token, talkative, silent_inside_an_error]
)
async def test_cancelling_closes_the_connection_at_once(script: Script) -> None:
    async with scripted(script) as engine, client_of(engine.url) as client:
        task = asyncio.create_task(client.generate(request(), Got(), Flow()))
        exchange = await engine.exchange()
        task.cancel()
        async with asyncio.timeout(1):
            await exchange.gone.wait()
            await engine.until(lambda: engine.open == 0)
        with pytest.raises(asyncio.CancelledError):
            await task
        assert client.in_flight == 0


@pytest.mark.parametrize("n", [1, 3])
async def test_stopping_the_flow_closes_the_connection_and_returns(n: int) -> None:
    async with scripted(talkative) as engine, client_of(engine.url) as client, asyncio.timeout(5):
        flow = Flow()
        outcome = await client.generate(request(n=n), lambda deltas: flow.stop(), flow)
        assert outcome == Outcome()
        async with asyncio.timeout(1):
            await engine.exchanges[0].gone.wait()
        assert client.in_flight == 0


async def test_what_an_engine_says_after_the_flow_was_stopped_does_not_matter() -> None:
    async with scripted(sends(event(choice([1])) + b"data: oops\n\n")) as engine, client_of(engine.url) as client:
        flow = Flow()
        assert await client.generate(request(), lambda deltas: flow.stop(), flow) == Outcome()


async def test_a_sink_that_fails_ends_the_request() -> None:
    def sink(deltas: list[TokenDelta]) -> None:
        raise LookupError("a fault of ours")

    async with scripted(talkative) as engine, client_of(engine.url) as client:
        with pytest.raises(LookupError, match="a fault of ours"):
            await client.generate(request(), sink, Flow())
        async with asyncio.timeout(1):
            await engine.exchanges[0].gone.wait()
        assert client.in_flight == 0


async def test_a_paused_flow_holds_the_engine_back_and_loses_nothing() -> None:
    padding = "x" * (1 << 16)
    events = 2000

    async def script(exchange: Exchange) -> None:
        await exchange.begin()
        for number in range(events):
            await exchange.event(choice([number], finish="length" if number == events - 1 else None), padding=padding)
        await exchange.end()

    resume = asyncio.Event()
    got, flow = Got(), Flow()

    def sink(deltas: list[TokenDelta]) -> None:
        got(deltas)
        if not resume.is_set():
            flow.pause(wait)

    async def wait() -> None:
        await resume.wait()

    async with scripted(script) as engine, client_of(engine.url) as client, asyncio.timeout(20):
        task = asyncio.create_task(client.generate(request(), sink, flow))
        exchange = await engine.exchange()
        await until_still(lambda: exchange.sent)
        assert len(got.batches) == 1
        assert exchange.sent < 16 << 20  # what the buffers of two sockets and of the client hold, of 128 MiB

        resume.set()
        await task
    assert got.ids() == list(range(events))


async def until_still(count: Any) -> None:
    """Waits until a count has not moved for many turns of the event loop."""
    last, turns = count(), 0
    while turns < 300:
        await asyncio.sleep(0)
        now = count()
        last, turns = now, turns + 1 if now == last else 0


async def test_a_paused_flow_is_not_silence() -> None:
    flow, got = Flow(), Got()

    def sink(deltas: list[TokenDelta]) -> None:
        got(deltas)
        flow.pause(lambda: asyncio.sleep(0.2))

    async with scripted(says([[1], [2]])) as engine, client_of(engine.url, idle=0.05) as client, asyncio.timeout(5):
        await client.generate(request(), sink, flow)
    assert got.ids() == [1, 2]


async def test_a_pause_that_fails_ends_the_request_with_its_own_error() -> None:
    async def fails() -> None:
        raise LookupError("nobody is there")

    flow = Flow()
    async with scripted(talkative) as engine, client_of(engine.url) as client, asyncio.timeout(5):
        with pytest.raises(LookupError):
            await client.generate(request(), lambda deltas: flow.pause(fails), flow)
        await engine.exchanges[0].gone.wait()


@pytest.mark.parametrize("stream", [True, False])
async def test_a_connection_is_used_again_after_a_complete_answer(stream: bool) -> None:
    async with scripted(says([[1], [2]])) as engine, client_of(engine.url) as client:
        for _ in range(5):
            await client.generate(request(stream=stream), Got(), Flow())
    assert (len(engine.exchanges), engine.connections) == (5, 1)


async def test_a_connection_is_used_again_after_an_http_error() -> None:
    async with scripted(answers("400 Bad Request", b"no")) as engine, client_of(engine.url) as client:
        for _ in range(3):
            with pytest.raises(EngineRefused):
                await client.generate(request(), Got(), Flow())
    assert engine.connections == 1


async def test_a_connection_is_not_used_again_after_a_broken_answer() -> None:
    async with scripted(sends(b"data: oops\n\n")) as engine, client_of(engine.url) as client:
        for _ in range(3):
            with pytest.raises(EngineProtocolError):
                await client.generate(request(), Got(), Flow())
    assert engine.connections >= 1


async def test_a_kept_connection_that_the_engine_closed_is_replaced_unseen() -> None:
    async with scripted(says([[1]])) as engine, client_of(engine.url) as client:
        await client.generate(request(), Got(), Flow())
        engine.exchanges[0].close()
        await engine.until(lambda: engine.open == 0)
        got = Got()
        await client.generate(request(), got, Flow())
    assert [delta.token_ids for delta in got.deltas] == [[1]]
    assert engine.connections == 2


async def test_a_kept_connection_that_the_engine_closes_as_it_is_used_is_replaced_unseen() -> None:
    async def script(exchange: Exchange) -> None:
        if len(engine.exchanges) == 2:
            exchange.close()
        else:
            await says([[1]])(exchange)

    async with scripted(script) as engine, client_of(engine.url) as client:
        await client.generate(request(), Got(), Flow())
        got = Got()
        await client.generate(request(), got, Flow())
    assert [delta.token_ids for delta in got.deltas] == [[1]]
    assert engine.connections == 2


async def test_a_prompt_of_megabytes_is_sent() -> None:
    ids = [100_000] * 400_000
    async with scripted(says([[1]])) as engine, client_of(engine.url) as client:
        await client.generate(request(token_ids=ids), Got(), Flow())
    assert engine.exchanges[0].body["token_ids"] == ids


@pytest.mark.parametrize(("healthy", "alive"), [(True, True), (False, False)])
async def test_it_is_alive_while_its_health_check_says_so(healthy: bool, alive: bool) -> None:
    async with scripted(says([[1]])) as engine, client_of(engine.url) as client:
        engine.healthy = healthy
        assert await client.alive() is alive


async def test_it_is_not_alive_when_it_does_not_answer() -> None:
    async with scripted(says([[1]])) as engine:
        url = engine.url
    async with client_of(url) as client:
        assert await client.alive() is False


async def test_many_requests_share_an_engine() -> None:
    async with scripted(says([[i] for i in range(20)])) as engine, client_of(engine.url) as client:
        everything = [Got() for _ in range(100)]
        await asyncio.gather(*(client.generate(request(), got, Flow()) for got in everything))
    assert all(got.ids() == list(range(20)) for got in everything)
