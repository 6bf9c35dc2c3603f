"""Streams through the running proxy, over real sockets: long, many, slow, cut short by either side, and silent."""

import asyncio
import contextlib
import json
import logging
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.engines.scripted import (
    Exchange,
    Script,
    ScriptedEngine,
    choice,
    event,
    says,
    scripted,
    silent,
    silent_after_headers,
)
from tests.losses import nothing_is_lost
from tests.raw_client import RawClient, raw_client
from tests.server import Running, proxy, running
from tests.tokenizers import byte_level

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
HELLO: dict[str, Any] = {"model": "m", "messages": [{"role": "user", "content": "Hello"}]}
TEXT = "The harbour lamp turns twice a minute, and the keeper counts each turn aloud."
IDS: list[int] = byte_level().encode(TEXT).ids


@pytest.fixture(autouse=True, scope="module")
def all_is_cleaned_up() -> Iterator[None]:
    with nothing_is_lost():
        yield


def streamed(**fields: Any) -> dict[str, Any]:
    return {**HELLO, "stream": True, **fields}


def data_of(body: bytes) -> list[Any]:
    """The data of a stream's events; `[DONE]` stays as it is, comments are left out."""
    assert body.endswith(b"\n\n")
    events = [event for event in body.decode().removesuffix("\n\n").split("\n\n") if not event.startswith(":")]
    assert all(event.startswith("data: ") and "\n" not in event for event in events)
    return [data if (data := event.removeprefix("data: ")) == "[DONE]" else json.loads(data) for event in events]


def text_of(events: list[Any], index: int = 0) -> str:
    """What a chat stream says in one choice."""
    choices = [choice for event in events if event != "[DONE]" for choice in event["choices"]]
    return "".join(choice["delta"].get("content") or "" for choice in choices if choice["index"] == index)


async def until(condition: Callable[[], bool]) -> None:
    while not condition():  # noqa: ASYNC110 (what aiohttp holds has no event)
        await asyncio.sleep(0)


@contextlib.asynccontextmanager
async def connected(
    tmp_path: Path, script: Script, *, buffer: int | None = None, **settings: Any
) -> AsyncIterator[tuple[ScriptedEngine, Running, RawClient]]:
    """An engine, a proxy in front of it, and a client with one connection."""
    async with (
        scripted(script) as engine,
        running(tmp_path, engine.url, **settings) as those,
        raw_client(those.client.port or 0, buffer=buffer) as client,
        asyncio.timeout(20),
    ):
        yield engine, those, client


async def silent_after_a_token(exchange: Exchange) -> None:
    await exchange.begin()
    for index in range(exchange.body["sampling_params"].get("n", 1)):
        await exchange.event(choice(IDS[:1], index=index))
    await exchange.gone.wait()


async def endless(exchange: Exchange) -> None:
    await exchange.begin()
    while not exchange.gone.is_set():
        await exchange.event(choice(IDS))
        await asyncio.sleep(0)


# Long, and many


async def test_a_stream_says_what_the_engine_said(tmp_path: Path) -> None:
    async with scripted(says([[i] for i in IDS])) as engine, proxy(tmp_path, engine.url) as client:
        response = await client.post(CHAT, json=streamed())
        events = data_of(await response.read())

    assert (response.status, response.headers["content-type"]) == (200, "text/event-stream; charset=utf-8")
    assert events[-1] == "[DONE]"
    assert text_of(events) == TEXT


async def test_an_event_of_a_mebibyte_passes(tmp_path: Path) -> None:
    ids = IDS * 20_000
    assert len(event(choice(ids))) > 1 << 20

    async with scripted(says([ids])) as engine, proxy(tmp_path, engine.url) as client:
        events = data_of(await (await client.post(CHAT, json=streamed())).read())

    assert text_of(events) == TEXT * 20_000
    assert events[-1] == "[DONE]"


async def test_150_streams_at_once_are_all_right(tmp_path: Path) -> None:
    async def repeats_the_prompt(exchange: Exchange) -> None:
        await says([[i] for i in exchange.body["token_ids"]] * 5)(exchange)

    async with scripted(repeats_the_prompt) as engine, running(tmp_path, engine.url) as those:

        async def ask(number: int) -> str:
            body = {"model": "m", "prompt": [number, *IDS], "stream": True, "max_tokens": 1000}
            response = await those.client.post(COMPLETIONS, json=body)
            events = data_of(await response.read())
            assert events.pop() == "[DONE]"
            return "".join(choice["text"] for event in events for choice in event["choices"])

        answers = await asyncio.gather(*(ask(number) for number in range(150)))
        assert those.in_flight == 0

    for number, answer in enumerate(answers):
        assert answer == byte_level().decode([number, *IDS] * 5)


async def test_several_choices_and_prompts_share_a_stream(tmp_path: Path) -> None:
    async with scripted(says([[i] for i in IDS])) as engine, proxy(tmp_path, engine.url) as client:
        body = {"model": "m", "prompt": [[1], [2], [3]], "n": 2, "stream": True, "max_tokens": 50}
        events = data_of(await (await client.post(COMPLETIONS, json=body)).read())

    assert events.pop() == "[DONE]"
    for index in range(6):
        choices = [choice for event in events for choice in event["choices"] if choice["index"] == index]
        assert "".join(choice["text"] for choice in choices) == TEXT
        assert [c["finish_reason"] for c in choices if c["finish_reason"] is not None] == ["length"]


# Slow clients

BATCH, BATCHES = IDS * 20, 8000
PADDING = "x" * 8192


async def a_lot(exchange: Exchange) -> None:
    """About 80 MiB of events, which become 13 MiB for the client."""
    await exchange.begin()
    for number in range(BATCHES):
        await exchange.event(choice(BATCH, finish="length" if number == BATCHES - 1 else None), padding=PADDING)
    await exchange.end()


async def test_a_client_that_reads_slowly_holds_its_engine_back(tmp_path: Path) -> None:
    async with connected(tmp_path, a_lot, buffer=4096, keep_alive_interval=0.001) as (engine, those, client):
        await client.post(CHAT, streamed())
        exchange = await engine.exchange()
        taken, ahead = bytearray(), 0
        while len(taken) < 200_000:
            taken += await client.reader.read(1024)
            ahead = max(ahead, exchange.sent)
        assert ahead < 48 << 20  # what the kernel's buffers of two connections hold, of 80 MiB

        while not taken.endswith(b"0\r\n\r\n"):
            taken += await client.reader.read(1 << 16)
        assert those.in_flight == 0
    assert taken.count(b"lamp") == BATCHES * 20
    assert taken.endswith(b"data: [DONE]\n\n\r\n0\r\n\r\n")


async def test_a_client_that_stops_reading_costs_no_more_and_frees_its_engine_when_it_leaves(tmp_path: Path) -> None:
    async with connected(tmp_path, a_lot, buffer=4096, keep_alive_interval=0.001) as (engine, those, client):
        await client.post(CHAT, streamed())
        exchange = await engine.exchange()
        sent = -1
        while sent != exchange.sent:
            sent = exchange.sent
            for _ in range(200):
                await asyncio.sleep(0)
        assert not exchange.gone.is_set()
        unsent = those.unsent
        assert 0 < unsent < 2 << 20
        await asyncio.sleep(0.05)  # many keep-alive intervals: it is the client who is silent
        assert those.unsent == unsent

        client.leave()
        async with asyncio.timeout(1):
            await exchange.gone.wait()
            await until(lambda: those.in_flight == 0 and those.connections == 0)


# Clients that leave


@pytest.mark.parametrize("body", [HELLO, streamed(), streamed(n=3), {**HELLO, "n": 3}], ids=str)
@pytest.mark.parametrize("script", [silent, silent_after_headers, silent_after_a_token, endless])
@pytest.mark.parametrize("keep_alive_interval", [0, 0.001])
async def test_a_client_that_leaves_frees_its_engine_and_leaves_nothing(
    tmp_path: Path, body: dict[str, Any], script: Script, keep_alive_interval: float
) -> None:
    settings = {"keep_alive_interval": keep_alive_interval}
    async with scripted(script) as engine, running(tmp_path, engine.url, **settings) as those:
        tasks = len(asyncio.all_tasks())
        for number in range(3):
            async with raw_client(those.client.port or 0) as client:
                await client.post(CHAT, body)
                exchange = await engine.exchange(number)
                if body.get("stream") and script in (silent_after_a_token, endless):
                    assert (await client.head())[0] == 200
                    await client.chunk()
                client.leave()
            async with asyncio.timeout(1):
                await exchange.gone.wait()
                await engine.until(lambda: engine.open == 0)
                await until(lambda: those.in_flight == 0 and those.connections == 0)
                await until(lambda: len(asyncio.all_tasks()) == tasks)


async def test_a_client_that_leaves_frees_the_engines_of_all_its_prompts(tmp_path: Path) -> None:
    async with connected(tmp_path, endless) as (engine, those, client):
        await client.post(COMPLETIONS, {"model": "m", "prompt": [[1], [2], [3]], "stream": True})
        await client.head()
        await engine.exchange(2)
        client.leave()
        async with asyncio.timeout(1):
            await engine.until(lambda: engine.open == 0)
            await until(lambda: those.in_flight == 0 and those.connections == 0)


async def test_a_stop_string_frees_the_engine(tmp_path: Path) -> None:
    async with scripted(endless) as engine, running(tmp_path, engine.url) as those:
        response = await those.client.post(CHAT, json=streamed(stop=["lamp"]))
        events = data_of(await response.read())
        async with asyncio.timeout(1):
            await engine.exchanges[0].gone.wait()
        assert those.in_flight == 0

    assert text_of(events) == "The harbour "
    assert events[-2]["choices"][0]["finish_reason"] == "stop"
    assert events[-1] == "[DONE]"


# Signs of life


async def test_a_silent_stream_shows_signs_of_life_and_is_still_right(tmp_path: Path) -> None:
    go_on = [asyncio.Event() for _ in range(3)]

    async def script(exchange: Exchange) -> None:
        await exchange.begin()
        await go_on[0].wait()
        await exchange.event(choice(IDS[:5]))
        await go_on[1].wait()
        await exchange.event(choice(IDS[5:]))
        await go_on[2].wait()
        await exchange.event(choice([], finish="stop"))
        await exchange.end()

    async with connected(tmp_path, script, keep_alive_interval=0.01) as (_, _, client):
        await client.post(CHAT, streamed())
        status, headers = await client.head()
        body = bytearray()
        for event_ in go_on:
            comments = 0
            while comments < 3:
                chunk = await client.chunk()
                comments = comments + 1 if chunk == b": keep-alive\n\n" else 0
                body += chunk
            event_.set()
        body += await client.chunks()

        go_on[2].set()
        await client.post(CHAT, streamed())
        assert (await client.response())[0] == 200  # the connection is still good

    assert (status, headers["transfer-encoding"]) == (200, "chunked")
    assert body.startswith(b": keep-alive\n\n" * 3 + b"data: ")
    events = data_of(bytes(body))
    assert text_of(events) == TEXT
    assert events[-1] == "[DONE]"


async def test_without_an_interval_a_silent_stream_says_nothing(tmp_path: Path) -> None:
    async def script(exchange: Exchange) -> None:
        await exchange.begin()
        await asyncio.sleep(0.05)
        await says([IDS])(exchange)

    async with scripted(says([IDS])) as engine, proxy(tmp_path, engine.url, keep_alive_interval=0) as client:
        body = await (await client.post(CHAT, json=streamed())).read()
    assert b"keep-alive" not in body


async def test_a_whole_answer_has_no_signs_of_life(tmp_path: Path) -> None:
    async def script(exchange: Exchange) -> None:
        await asyncio.sleep(0.05)
        await says([IDS])(exchange)

    async with scripted(script) as engine, proxy(tmp_path, engine.url, keep_alive_interval=0.01) as client:
        response = await client.post(CHAT, json=HELLO)
        assert (await response.json())["choices"][0]["message"]["content"] == TEXT


# Engines that fail


def fails(how: str, *, after: asyncio.Event | None = None) -> Script:
    """Fails at once, or after some tokens: `after` is set once the client has them."""

    async def script(exchange: Exchange) -> None:
        if how == "http":
            await exchange.status("500 Oh", b'{"error": {"message": "no good"}}')
            return
        await exchange.begin()
        if after is not None:
            await exchange.event(choice(IDS[:5]))
            await after.wait()
        if how == "finish":
            await exchange.event(choice([], finish="stop"))
            await exchange.end()
        elif how == "event":
            await exchange.data(b'data: {"error": {"message": "no good"}}\n\n')
            await exchange.end()
        elif how == "nonsense":
            await exchange.data(b"data: no good\n\n")
            await exchange.end()
        elif how == "end":
            await exchange.end()
        else:
            getattr(exchange, how)()

    return script


ENDS = [("event", "engine_error"), ("nonsense", "engine_protocol_error"), ("end", "engine_disconnected")]
BREAKS = [("reset", "engine_disconnected"), ("close", "engine_disconnected")]


@pytest.mark.parametrize(
    ("how", "type_"),
    [
        ("http", "engine_error"),
        ("event", "engine_error"),
        ("nonsense", "engine_protocol_error"),
        ("end", "engine_unreachable"),
        ("reset", "engine_unreachable"),
        ("close", "engine_unreachable"),
    ],
)
@pytest.mark.parametrize("body", [HELLO, streamed()], ids=["whole", "streamed"])
async def test_an_engines_error_before_the_first_event_is_an_http_status(
    tmp_path: Path, how: str, type_: str, body: dict[str, Any]
) -> None:
    async with connected(tmp_path, fails(how)) as (engine, _, client):
        await client.post(CHAT, body)
        status, headers, answer = await client.response()
        error = json.loads(answer)["error"]
        assert status == (503 if type_ == "engine_unreachable" else 502)
        assert error["type"] == type_
        assert engine.url in error["message"]
        assert headers["content-type"].startswith("application/json")
        assert headers["x-request-id"]

        await client.post(CHAT, body)
        assert (await client.response())[0] in (502, 503)  # on the same connection


@pytest.mark.parametrize(("how", "type_"), [*ENDS, *BREAKS])
async def test_an_engines_error_after_the_first_event_is_the_last_event(tmp_path: Path, how: str, type_: str) -> None:
    has_tokens = asyncio.Event()
    async with connected(tmp_path, fails(how, after=has_tokens)) as (engine, those, client):
        for _ in range(2):  # the connection stays usable
            has_tokens.clear()
            await client.post(CHAT, streamed())
            status, _ = await client.head()
            first = await client.chunk()
            has_tokens.set()
            *events, last = data_of(first + await client.chunks())

            assert status == 200
            assert list(last) == ["error"]
            assert last["error"]["type"] == type_
            assert set(last["error"]) == {"message", "type", "code", "param"}
            assert engine.url in last["error"]["message"]
            assert text_of(events) == byte_level().decode(IDS[:5])
        assert those.in_flight == 0


async def test_an_error_that_comes_together_with_the_first_tokens_is_an_http_status(tmp_path: Path) -> None:
    async def script(exchange: Exchange) -> None:
        await exchange.begin()
        await exchange.data(event(choice(IDS)) + b'data: {"error": "no good"}\n\n')
        await exchange.end()

    async with scripted(script) as engine, proxy(tmp_path, engine.url) as client:
        response = await client.post(CHAT, json=streamed())
        assert response.status == 502
        assert (await response.json())["error"]["message"].endswith("no good")


async def test_an_engines_error_after_a_sign_of_life_is_the_only_event(tmp_path: Path) -> None:
    alive = asyncio.Event()

    async def script(exchange: Exchange) -> None:
        await alive.wait()
        await exchange.status("500 Oh", b"no good")

    async with connected(tmp_path, script, keep_alive_interval=0.01) as (engine, _, client):
        await client.post(CHAT, streamed())
        assert (await client.head())[0] == 200
        assert await client.chunk() == b": keep-alive\n\n"
        alive.set()
        [error] = data_of(await client.chunks())
    assert error["error"]["message"] == f"engine {engine.url}: HTTP 500: no good"


async def test_one_prompt_that_fails_ends_the_others(tmp_path: Path) -> None:
    async def script(exchange: Exchange) -> None:
        if exchange.body["token_ids"] == [2]:
            await engine.exchange(2)
            await exchange.status("500 Oh", b"no good")
        else:
            await silent(exchange)

    async with scripted(script) as engine, running(tmp_path, engine.url) as those, asyncio.timeout(5):
        response = await those.client.post(COMPLETIONS, json={"model": "m", "prompt": [[1], [2], [3]]})
        assert response.status == 502
        assert (await response.json())["error"]["message"] == f"engine {engine.url}: HTTP 500: no good"
        await engine.until(lambda: engine.open <= 1)
        assert those.in_flight == 0


async def test_a_fault_of_our_own_is_told_without_its_details(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> bytes:
        raise LookupError("a detail")

    monkeypatch.setattr("proxy.derender.answer.StreamedAnswer.end", fail)
    monkeypatch.setattr(logging.getLogger("proxy.api"), "disabled", True)
    has_tokens = asyncio.Event()
    async with connected(tmp_path, fails("finish", after=has_tokens)) as (_, _, client):
        await client.post(CHAT, streamed(), headers="x-request-id: mine\r\n")
        await client.head()
        await client.chunk()
        has_tokens.set()
        *_, last = data_of(await client.chunks())
    assert last["error"]["type"] == "internal_error"
    assert "mine" in last["error"]["message"]
    assert "a detail" not in last["error"]["message"]


@pytest.mark.parametrize("body", [HELLO, streamed()], ids=["whole", "streamed"])
async def test_an_engine_that_is_down_is_not_seen_while_another_is_up(tmp_path: Path, body: dict[str, Any]) -> None:
    async with scripted(says([IDS])) as down, scripted(says([IDS])) as up:
        await down.stop()
        async with proxy(tmp_path, down.url, up.url, pool={"policy": "round_robin"}) as client:
            for _ in range(4):
                response = await client.post(CHAT, json=body)
                assert response.status == 200
                await response.read()
    assert len(up.exchanges) == 4


@pytest.mark.parametrize("body", [HELLO, streamed()], ids=["whole", "streamed"])
async def test_an_engines_refusal_is_the_clients_400(tmp_path: Path, body: dict[str, Any]) -> None:
    async def script(exchange: Exchange) -> None:
        await exchange.status("400 Bad Request", b'{"error": {"message": "too hot", "param": "temperature"}}')

    async with scripted(script) as engine, proxy(tmp_path, engine.url) as client:
        response = await client.post(CHAT, json=body)
        assert response.status == 400
        assert (await response.json())["error"] == {
            "message": f"engine {engine.url} refused the request: too hot",
            "type": "invalid_request_error",
            "param": "temperature",
            "code": "engine_refused",
        }


async def test_a_busy_engine_says_when_to_come_back(tmp_path: Path) -> None:
    async def script(exchange: Exchange) -> None:
        await exchange.status("429 Too Many Requests", b"full", "retry-after: 3\r\n")

    async with scripted(script) as engine, proxy(tmp_path, engine.url) as client:
        response = await client.post(CHAT, json=streamed())
        assert (response.status, response.headers["retry-after"]) == (429, "3")


@pytest.mark.parametrize("how", ["http", "event"])
async def test_no_error_holds_the_engines_key(tmp_path: Path, how: str) -> None:
    async def script(exchange: Exchange) -> None:
        words = json.dumps({"error": {"message": f"not allowed: {exchange.headers['authorization']}"}}).encode()
        if how == "http":
            await exchange.status("401 Unauthorized", words)
            return
        await exchange.begin()
        await exchange.event(choice(IDS[:5]))
        await exchange.data(b"data: " + words + b"\n\n")
        await exchange.end()

    async with scripted(script) as engine:
        engines = [{"url": engine.url, "api_key": "sesame-123"}]
        async with proxy(tmp_path, pool={"engines": engines}) as client:
            body = await (await client.post(CHAT, json=streamed())).text()
    assert engine.exchanges[0].headers["authorization"] == "Bearer sesame-123"
    assert "not allowed: Bearer ***" in body
    assert "sesame" not in body


# Connections of clients


async def test_a_client_of_http_1_0_gets_the_stream_as_it_is(tmp_path: Path) -> None:
    async with connected(tmp_path, says([[i] for i in IDS])) as (_, _, client):
        await client.post(CHAT, streamed(), version="1.0", headers="connection: keep-alive\r\n")
        status, headers = await client.head()
        body = await client.reader.read()  # up to the end of the connection

    assert status == 200
    assert "transfer-encoding" not in headers
    assert headers.get("connection", "close") == "close"
    assert text_of(data_of(body)) == TEXT


async def test_a_connection_is_kept_after_a_stream(tmp_path: Path) -> None:
    async with connected(tmp_path, says([[i] for i in IDS])) as (_, _, client):
        for body in (streamed(), streamed(), HELLO, streamed()):
            await client.post(CHAT, body)
            status, _, answer = await client.response()
            assert status == 200
            assert (text_of(data_of(answer)) if body is not HELLO else TEXT) == TEXT


async def test_requests_that_were_sent_together_are_answered_in_order(tmp_path: Path) -> None:
    async def repeats_the_prompt(exchange: Exchange) -> None:
        await says([[i] for i in exchange.body["token_ids"]])(exchange)

    async with connected(tmp_path, repeats_the_prompt) as (_, _, client):
        for word in ("harbour", "lamp", "keeper"):
            body = {"model": "m", "prompt": word, "stream": True, "add_special_tokens": False}
            await client.post(COMPLETIONS, body)
        for word in ("harbour", "lamp", "keeper"):
            events = data_of((await client.response())[2])
            assert "".join(c["text"] for e in events[:-1] for c in e["choices"]) == word


async def test_a_client_that_asks_to_close_gets_its_stream_whole(tmp_path: Path) -> None:
    async with connected(tmp_path, says([[i] for i in IDS])) as (_, _, client):
        await client.post(CHAT, streamed(), headers="connection: close\r\n")
        _, headers, body = await client.response()
        assert await client.reader.read() == b""
    assert headers["connection"] == "close"
    assert text_of(data_of(body)) == TEXT


# Request ids


@pytest.mark.parametrize("stream", [True, False])
async def test_a_request_id_comes_back_and_reaches_the_engine_as_a_unique_one(tmp_path: Path, stream: bool) -> None:
    async with scripted(says([IDS])) as engine, proxy(tmp_path, engine.url) as client:
        for _ in range(2):
            response = await client.post(CHAT, json={**HELLO, "stream": stream}, headers={"X-Request-Id": "mine-1"})
            await response.read()
            assert response.headers["x-request-id"] == "mine-1"

    sent = [exchange.headers["x-request-id"] for exchange in engine.exchanges]
    assert sent == [exchange.body["request_id"] for exchange in engine.exchanges]
    assert all("mine-1" in id for id in sent)
    assert len(set(sent)) == 2


async def test_without_a_request_id_each_response_has_a_new_one(tmp_path: Path) -> None:
    async with scripted(says([IDS])) as engine, proxy(tmp_path, engine.url) as client:
        responses = [await client.post(CHAT, json=body) for body in (HELLO, HELLO, streamed(), streamed())]
        assert len({response.headers["x-request-id"] for response in responses}) == 4
    assert len({exchange.headers["x-request-id"] for exchange in engine.exchanges}) == 4


async def test_prompts_of_one_request_have_ids_of_their_own(tmp_path: Path) -> None:
    async with scripted(says([IDS])) as engine, proxy(tmp_path, engine.url) as client:
        await client.post(COMPLETIONS, json={"model": "m", "prompt": [[1], [2], [3]]}, headers={"x-request-id": "mine"})
    assert len({exchange.headers["x-request-id"] for exchange in engine.exchanges}) == 3
