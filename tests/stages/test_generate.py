"""The token routes: a client's own generate requests through the pool, and their abort."""

import asyncio
import json
from pathlib import Path

import pytest

from tests.api.talk import END, Json, chunks_in, ids_of, only, speaks, talk, talk_to
from tests.engines.scripted import Exchange, choice, scripted, silent
from tests.server import proxy
from tests.stages.talk import GENERATE

GULLS = ids_of("Seven gulls")
REQUEST: Json = {
    "stream": False,
    "token_ids": GULLS,
    "sampling_params": {"max_tokens": 5, "logprobs": 1},
    "custom": {"kept": True},
}


async def test_the_body_goes_to_the_engine_as_it_came_but_for_the_routing(tmp_path: Path) -> None:
    async with talk(tmp_path) as t:
        await t.ask(GENERATE, {**REQUEST, "model": "m", "request_id": "mine"})
    assert t.sent.pop("request_id").startswith("generate-tokens-mine-")
    assert t.sent == REQUEST


async def test_a_whole_answer_is_the_engines_own(tmp_path: Path) -> None:
    async def script(exchange: Exchange) -> None:
        answer = {"choices": [choice([5, END], finish="stop", stop=END)], "usage": {"prompt_tokens": 9}, "other": [1]}
        await exchange.status("200 OK", json.dumps(answer).encode(), "content-type: application/json\r\n")

    async with talk_to(tmp_path, script) as t:
        answer = await t.ask(GENERATE, {**REQUEST, "request_id": "mine"})
    assert answer["request_id"] == "generate-tokens-mine"
    assert answer["choices"] == [choice([5, END], finish="stop", stop=END)]
    assert (answer["usage"], answer["other"], answer["model"]) == ({"prompt_tokens": 9}, [1], "m")


async def test_a_stream_has_an_event_per_step_and_choice_and_then_usage(tmp_path: Path) -> None:
    wishes = {"stream_options": {"include_usage": True}, "return_token_ids": True, "request_id": "mine"}
    async with talk(tmp_path, [1, 2], [3]) as t:
        body = {"token_ids": GULLS, "sampling_params": {"n": 2}, **wishes}
        events = await t.stream(GENERATE, body)
    said = [(c["index"], c["token_ids"], c["finish_reason"]) for event in events[:-1] for c in event["choices"]]
    assert said == [(0, [1, 2], None), (1, [1, 2], None), (0, [3], "length"), (1, [3], "length")]
    assert [event.get("prompt_token_ids") for event in events] == [GULLS, *[None] * 4]
    assert {(event["request_id"], event["output_mode"]) for event in events} == {("generate-tokens-mine", "tokens")}
    assert events[-1]["choices"] == []
    assert events[-1]["usage"]["completion_tokens"] == 6


async def test_log_probabilities_stay_ids(tmp_path: Path) -> None:
    async with talk(tmp_path, [1]) as t:
        (event,) = await t.stream(GENERATE, REQUEST)
    (entry,) = only(event["choices"])["logprobs"]["content"]
    assert (entry["token_id"], "token" in entry) == (1, False)


async def test_another_engine_is_asked_where_one_is_down(tmp_path: Path) -> None:
    async with (
        scripted(speaks([1])) as engine,
        proxy(tmp_path, "http://127.0.0.1:9", engine.url) as client,
    ):
        for _ in range(2):
            async with client.post(GENERATE, json=REQUEST) as response:
                assert response.status == 200


@pytest.mark.parametrize("path", ["/abort_requests", "/inference/v1/abort_requests"])
async def test_a_stream_that_is_aborted_ends_with_that_reason_and_frees_the_engine(tmp_path: Path, path: str) -> None:
    async def script(exchange: Exchange) -> None:
        await exchange.begin()
        await exchange.event(choice([1]))
        await exchange.gone.wait()

    wishes = {"stream": True, "stream_options": {"include_usage": True}}
    async with talk_to(tmp_path, script) as t:
        async with t.client.post(GENERATE, json={**REQUEST, **wishes}, headers={"X-Request-Id": "mine"}) as response:
            first = await response.content.readuntil(b"\n\n")
            async with t.client.post(path, json={"request_ids": ["generate-tokens-mine", "unknown"]}) as aborted:
                assert aborted.status == 200
            events = chunks_in((first + await response.read()).decode())
        await t.engine.exchanges[0].gone.wait()
    assert [(c["token_ids"], c["finish_reason"]) for event in events for c in event["choices"]] == [
        ([1], None),
        ([], "abort"),
    ]
    assert events[-1]["usage"]["completion_tokens"] == 1


async def test_a_whole_answer_that_is_aborted_says_so(tmp_path: Path) -> None:
    async with talk_to(tmp_path, silent) as t:
        body, headers = {**REQUEST, "request_id": "mine"}, {"Connection": "close"}
        asked = asyncio.ensure_future(t.client.post(GENERATE, json=body, headers=headers))
        await t.engine.exchange()
        async with t.client.post("/abort_requests", json={"request_ids": ["generate-tokens-mine"]}) as aborted:
            assert aborted.status == 200
        answer = await (await asked).json()
    assert [(c["token_ids"], c["finish_reason"]) for c in answer["choices"]] == [([], "abort")]


async def test_aborting_what_does_not_run_does_nothing(tmp_path: Path) -> None:
    async with talk(tmp_path) as t, t.client.post("/abort_requests", json={"request_ids": ["nobody"]}) as response:
        assert response.status == 200


@pytest.mark.parametrize(
    ("changes", "status", "param", "words"),
    [
        ({"model": "nope"}, 404, "model", "does not exist"),
        ({"token_ids": []}, 400, "token_ids", "at least 1 item"),
        ({"token_ids": [-1]}, 400, "token_ids[0]", "or equal to 0"),
        ({"token_ids": [10**9]}, 400, "token_ids", "not in the vocabulary"),
        ({"token_ids": [1] * 512}, 400, "input_tokens", "maximum context length"),
        ({"sampling_params": None}, 400, "sampling_params", "required"),
        ({"sampling_params": {"n": 0}}, 400, "sampling_params.n", "or equal to 1"),
        ({"sampling_params": {"n": 129}}, 400, "sampling_params.n", "or equal to 128"),
        ({"sampling_params": {"stop_token_ids": [10**9]}}, 400, "sampling_params.stop_token_ids", "vocabulary"),
        ({"sampling_params": {"allowed_token_ids": [10**9]}}, 400, "sampling_params.allowed_token_ids", "vocabulary"),
        ({"sampling_params": {"logit_bias": {"1000000000": 1}}}, 400, "sampling_params.logit_bias", "vocabulary"),
        ({"sampling_params": {"logit_bias": {"x": 1}}}, 400, "sampling_params.logit_bias", "token ids"),
    ],
)
async def test_what_an_engine_could_die_of_is_refused(
    tmp_path: Path, changes: Json, status: int, param: str, words: str
) -> None:
    async with talk(tmp_path, max_model_len=512) as t:
        error = await t.refused(GENERATE, {**REQUEST, **changes}, status)
        assert t.engine.exchanges == []
    assert (error["param"], words in error["message"]) == (param, True), error
