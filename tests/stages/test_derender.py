"""The derender routes: what they make of an engine's answer, and what they refuse before they decode anything."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from proxy.derender.vocabulary import Vocabulary
from proxy.formats.reasoning import REASONING
from proxy.formats.tools import TOOLS
from tests.api.talk import CHAT, COMPLETIONS, END, HELLO, TOKENIZER, Json, Talk, ids_of, joined, only, spoken, talk
from tests.derender.readings import ASKED, known_format
from tests.derender.writers import Writer
from tests.stages.talk import DERENDER, DERENDER_COMPLETION, derendered, said, step, whole
from tests.tokenizers import word_piece

GULLS = ids_of("Seven gulls 🌊 sat")
CHAT_REQUEST = {"messages": HELLO}


def logprob_entries(ids: Sequence[int]) -> Json:
    return {
        "content": [{"token_id": i, "logprob": -0.5, "top_logprobs": [{"token_id": i, "logprob": -0.5}]} for i in ids]
    }


# Whole answers


async def test_a_whole_answer_becomes_a_chat_completion(tmp_path: Path) -> None:
    async with talk(tmp_path) as t:
        answer = await t.ask(
            DERENDER,
            {"generate_response": whole(said(*GULLS, END, finish="stop", stop_reason=END)), "prompt_tokens": 7},
        )
    assert answer["id"] == "generate-tokens-1"
    assert (answer["object"], answer["model"]) == ("chat.completion", "m")
    assert only(answer["choices"]) == {
        "index": 0,
        "message": {"role": "assistant", "content": "Seven gulls 🌊 sat", "refusal": None, "reasoning": None},
        "logprobs": None,
        "finish_reason": "stop",
        "stop_reason": None,
    }
    completion = len(GULLS) + 1
    assert answer["usage"] == {"prompt_tokens": 7, "completion_tokens": completion, "total_tokens": 7 + completion}


async def test_choices_keep_the_indexes_that_the_engine_gave_them(tmp_path: Path) -> None:
    choices = [{**said(*ids_of("b"), finish="length"), "index": 2}, said(*ids_of("a"), finish="length")]
    async with talk(tmp_path) as t:
        answer = await t.ask(DERENDER, {"generate_response": whole(*choices)})
    assert [(c["index"], c["message"]["content"]) for c in answer["choices"]] == [(2, "b"), (0, "a")]


async def test_choices_of_completions_are_counted_over_all_responses(tmp_path: Path) -> None:
    first = whole(said(*ids_of("a"), finish="length"), {**said(*ids_of("b"), finish="length"), "index": 1})
    second = whole(said(*ids_of("c"), finish="length"))
    body = {"generate_responses": [first, second], "prompt_tokens": [3, 4], "prompt_token_ids": [[1, 2, 3], None]}
    async with talk(tmp_path) as t:
        answer = await t.ask(DERENDER_COMPLETION, body)
    assert [(c["index"], c["text"]) for c in answer["choices"]] == [(0, "a"), (1, "b"), (2, "c")]
    assert answer["usage"] == {"prompt_tokens": 7, "completion_tokens": 3, "total_tokens": 10}


@pytest.mark.parametrize(
    ("params", "shown"), [(({"a": 1}, {"a": 1}), {"a": 1}), (({"a": 1}, {"a": 2}), None), (({"a": 1}, None), None)]
)
async def test_transfer_parameters_pass_where_all_responses_have_the_same(
    tmp_path: Path, params: tuple[Any, Any], shown: Any
) -> None:
    responses = [whole(said(*GULLS, finish="stop"), kv_transfer_params=p) for p in params]
    async with talk(tmp_path) as t:
        answer = await t.ask(DERENDER_COMPLETION, {"generate_responses": responses})
    assert answer.get("kv_transfer_params") == shown


async def test_a_stop_reason_that_is_a_string_cuts_the_text_there(tmp_path: Path) -> None:
    choice = said(*ids_of("Seven gulls sat"), finish="stop", stop_reason="gulls")
    async with talk(tmp_path) as t:
        answer = await t.ask(DERENDER, {"generate_response": whole(choice)})
        included = await t.ask(
            DERENDER,
            {
                "generate_response": whole(choice),
                "chat_request": {**CHAT_REQUEST, "include_stop_str_in_output": True},
            },
        )
    assert only(answer["choices"])["message"]["content"] == "Seven "
    assert (only(answer["choices"])["finish_reason"], only(answer["choices"])["stop_reason"]) == ("stop", "gulls")
    assert only(included["choices"])["message"]["content"] == "Seven gulls"


async def test_without_a_request_all_log_probabilities_that_came_are_shown(tmp_path: Path) -> None:
    body = {"generate_response": whole(said(*GULLS, finish="stop", logprobs=logprob_entries(GULLS)))}
    async with talk(tmp_path) as t:
        shown = only((await t.ask(DERENDER, body))["choices"])["logprobs"]["content"]
        fewer = {**CHAT_REQUEST, "logprobs": True, "top_logprobs": 0}
        sampled = only((await t.ask(DERENDER, {**body, "chat_request": fewer}))["choices"])["logprobs"]["content"]
    v = Vocabulary.of_tokenizer(TOKENIZER)
    assert [bytes(entry["bytes"]) for entry in shown] == [v.bytes_of(i) for i in GULLS]
    assert {len(entry["top_logprobs"]) for entry in shown} == {1}
    assert {len(entry["top_logprobs"]) for entry in sampled} == {0}


async def test_an_id_outside_the_vocabulary_decodes_to_nothing(tmp_path: Path) -> None:
    async with talk(tmp_path) as t:
        answer = await t.ask(
            DERENDER, {"generate_response": whole(said(*ids_of("a"), 10**9, *ids_of("b"), finish="stop"))}
        )
    assert only(answer["choices"])["message"]["content"] == "ab"


# Streams


async def test_the_role_comes_with_the_first_chunk_and_the_finish_reason_with_the_last(tmp_path: Path) -> None:
    events = [step(said(i))["generate_chunk"] for i in GULLS]
    events += [step(said(finish="length"))["generate_chunk"], step(usage={"completion_tokens": 9})["generate_chunk"]]
    async with talk(tmp_path) as t:
        chunks = await derendered(t, DERENDER, events, {"prompt_token_ids": [1, 2]}, prompt_tokens=2)
    deltas = [only(chunk["choices"])["delta"] for chunk in chunks[:-1]]
    assert [delta.get("role") for delta in deltas] == ["assistant", *[None] * len(GULLS)]
    assert "".join(delta.get("content", "") for delta in deltas) == "Seven gulls 🌊 sat"
    assert [only(c["choices"])["finish_reason"] for c in chunks[:-1]] == [*[None] * len(GULLS), "length"]
    assert chunks[-1]["choices"] == []
    assert chunks[-1]["usage"] == {"prompt_tokens": 2, "completion_tokens": 9, "total_tokens": 11}
    assert {chunk["id"] for chunk in chunks} == {"generate-tokens-1"}
    assert {chunk["object"] for chunk in chunks} == {"chat.completion.chunk"}
    assert len({chunk["created"] for chunk in chunks}) == 1


async def test_usage_takes_the_engines_count_of_the_prompt_where_the_request_has_none(tmp_path: Path) -> None:
    async with talk(tmp_path) as t:
        answer = await t.ask(DERENDER, step(usage={"prompt_tokens": 5, "completion_tokens": 9}))
    assert answer["chunk"]["usage"] == {"prompt_tokens": 5, "completion_tokens": 9, "total_tokens": 14}


async def test_a_usage_chunk_leaves_the_state_as_it_came(tmp_path: Path) -> None:
    async with talk(tmp_path) as t:
        state = (await t.ask(DERENDER, step(said(GULLS[0]))))["stream_state"]
        again = await t.ask(DERENDER, step(state=state, usage={"completion_tokens": 1}))
    assert again["stream_state"] == state


async def test_an_interrupted_call_can_be_repeated(tmp_path: Path) -> None:
    async with talk(tmp_path) as t:
        state = (await t.ask(DERENDER, step(said(*GULLS[:3]))))["stream_state"]
        body = step(said(*GULLS[3:5]), state=state)
        assert await t.ask(DERENDER, body) == await t.ask(DERENDER, body)


async def test_a_stop_string_over_several_chunks_ends_the_stream(tmp_path: Path) -> None:
    request = {**CHAT_REQUEST, "stop": ["gulls sat"], "stream": True}
    events = [step(said(i))["generate_chunk"] for i in ids_of("Seven gulls sat on")]
    async with talk(tmp_path) as t:
        chunks = await derendered(t, DERENDER, events, {}, chat_request=request)
    ended = joined(chunks)[0]
    assert (ended["text"], ended["finish_reason"], ended["stop_reason"]) == ("Seven ", "stop", "gulls sat")
    assert chunks[-1]["choices"] == []


async def test_the_state_stays_small_however_long_the_prompt_and_the_answer(tmp_path: Path) -> None:
    async with talk(tmp_path) as t:
        ids = ids_of("gulls " * 300)
        long = await t.ask(DERENDER, step(said(*ids), prompt_token_ids=ids_of("lamp " * 500)))
        short = await t.ask(DERENDER, step(said(ids[0])))
    sizes = [len(json.dumps(answer["stream_state"])) for answer in (long, short)]
    assert sizes[0] - sizes[1] < 20  # digits of counts


@pytest.mark.parametrize("tokenizer", [TOKENIZER, word_piece()], ids=["table", "window"])
async def test_the_prompt_is_needed_in_the_first_call_only(tmp_path: Path, tokenizer: Any) -> None:
    from tests.tokenizers import model_folder

    model_folder(tmp_path, tokenizer)
    prompt, ids = (tokenizer.encode(text, add_special_tokens=False).ids for text in ("Seven gulls", " sat on the pier"))
    events = [step(said(i))["generate_chunk"] for i in ids]
    async with talk(tmp_path) as t:
        once = await derendered(t, DERENDER, events, {"prompt_token_ids": prompt})
        always = await derendered(t, DERENDER, events, {}, prompt_token_ids=prompt)
    assert [only(c["choices"]) for c in once] == [only(c["choices"]) for c in always]


async def test_completions_stream_with_offsets_that_go_on(tmp_path: Path) -> None:
    events = [step(said(i, logprobs=logprob_entries([i])))["generate_chunk"] for i in ids_of("Seven gulls")]
    events.append(step(said(finish="length"))["generate_chunk"])
    async with talk(tmp_path) as t:
        chunks = await derendered(t, DERENDER_COMPLETION, events, {})
    whole_choice = joined(chunks)[0]
    assert whole_choice["text"] == "Seven gulls"
    starts = whole_choice["logprobs"]["text_offset"]
    assert starts == sorted(set(starts)) and starts[0] == 0
    assert {chunk["object"] for chunk in chunks} == {"text_completion"}


# What is refused before anything is decoded


LONG = list(range(1, 40)) * 20
BAD_LOGPROBS = {"content": [{"token_id": 1}]}
MANY_TOPS = {"content": [{"token_id": 1, "logprob": -1.0, "top_logprobs": [{"token_id": 1, "logprob": -1.0}] * 30}]}

REFUSALS: list[tuple[str, Json, int, str | None, str]] = [
    (DERENDER, {}, 400, "generate_response", "field required"),
    (DERENDER, {"stream": True}, 400, "generate_chunk", "field required"),
    (DERENDER, {"stream": "yes"}, 400, "stream", "should be False"),
    (DERENDER, {"generate_response": whole(said(1)), "model": "nope"}, 404, "model", "does not exist"),
    (DERENDER, step(said(1), model="nope"), 404, "model", "does not exist"),
    (DERENDER_COMPLETION, {"generate_responses": [whole(said(1))], "model": "nope"}, 404, "model", "does not exist"),
    (
        DERENDER,
        {"generate_response": whole(said())},
        400,
        "generate_response.choices",
        "choice 0 has empty or null token_ids",
    ),
    (
        DERENDER,
        {"generate_response": whole({"index": 3, "token_ids": None})},
        400,
        "generate_response.choices",
        "choice 3 has empty or null token_ids",
    ),
    (DERENDER, {"generate_response": whole(said(1), said(1))}, 400, "generate_response.choices", "same index"),
    (
        DERENDER,
        {"generate_response": whole(*({**said(1), "index": i} for i in range(129)))},
        400,
        "generate_response.choices",
        "at most 128",
    ),
    (
        DERENDER,
        {"generate_response": whole(said(-1))},
        400,
        "generate_response.choices[0].token_ids[0]",
        "or equal to 0",
    ),
    (
        DERENDER,
        {"generate_response": whole(said(*LONG))},
        400,
        "generate_response.choices[0].token_ids",
        "max_model_len",
    ),
    (
        DERENDER,
        {"generate_response": whole(said(1), output_mode="text")},
        400,
        "generate_response.output_mode",
        "tokens",
    ),
    (
        DERENDER,
        {"generate_response": whole(said(1)), "prompt_token_ids": LONG},
        400,
        "prompt_token_ids",
        "max_model_len",
    ),
    (
        DERENDER,
        {"generate_response": whole(said(1, logprobs=BAD_LOGPROBS))},
        400,
        "generate_response.choices[0]",
        "without token_id and logprob",
    ),
    (
        DERENDER,
        {"generate_response": whole(said(1, logprobs={"content": []}))},
        400,
        "generate_response.choices[0]",
        "0 entries for 1 token ids",
    ),
    (
        DERENDER,
        {"generate_response": whole(said(1, logprobs=MANY_TOPS))},
        400,
        "generate_response.choices[0].logprobs",
        "max_logprobs",
    ),
    (
        DERENDER,
        {"generate_response": whole(said(1), prompt_logprobs=[None] * 600)},
        400,
        "generate_response.prompt_logprobs",
        "max_model_len",
    ),
    (
        DERENDER,
        {"generate_response": whole(said(1), prompt_logprobs=[{str(i): {"logprob": -1.0} for i in range(30)}])},
        400,
        "generate_response.prompt_logprobs",
        "max_logprobs",
    ),
    (
        DERENDER,
        {"generate_response": whole(said(1)), "chat_request": {"messages": []}},
        400,
        "chat_request.messages",
        "at least 1 item",
    ),
    (
        DERENDER,
        {"generate_response": whole(said(1)), "chat_request": {**CHAT_REQUEST, "stop": [""]}},
        400,
        "stop",
        "must not be empty",
    ),
    (DERENDER, step(said(1), {**said(1), "index": 1}), 400, "generate_chunk.choices", "one choice each"),
    (DERENDER, step(said(*LONG)), 400, "generate_chunk.choices[0].token_ids", "max_model_len"),
    (DERENDER, step(said(1), prompt_token_ids=LONG), 400, "prompt_token_ids", "max_model_len"),
    (DERENDER, step(said(*LONG[:300]), prompt_token_ids=LONG[:300]), 400, "generate_chunk", "max_model_len"),
    (DERENDER, step(said(1), state={"v": 99}), 400, "stream_state", "version"),
    (DERENDER, step(said(1), state={"v": 1}), 400, "stream_state", "missing"),
    (DERENDER, step(said(1), state={"other": 1}), 400, "stream_state.other", "not permitted"),
    (DERENDER, step(said(1), state=[]), 400, "stream_state", "object"),
    (DERENDER, step(said(1), state={"output_token_ids": [1, 2], "output_chunk_lens": [1]}), 400, "stream_state", "sum"),
    (
        DERENDER,
        step(said(1), state={"output_token_ids": [1], "output_chunk_lens": [1, 0]}),
        400,
        "stream_state.output_chunk_lens[1]",
        "greater than 0",
    ),
    (DERENDER, step(said(1), state={"prefix_offset": -1}), 400, "stream_state.prefix_offset", "or equal to 0"),
    (DERENDER, step(said(1), state={"read_offset": 1}), 400, "stream_state", "not in this order"),
    (
        DERENDER,
        step(said(1), state={"output_token_ids": LONG, "output_chunk_lens": [len(LONG)]}),
        400,
        "stream_state",
        "max_model_len",
    ),
    (
        DERENDER,
        step(said(1), state={"prev_tokens": ["no such token"], "read_offset": 1}),
        400,
        "stream_state",
        "does not have",
    ),
    (DERENDER_COMPLETION, {"generate_responses": []}, 400, "generate_responses", "at least 1 item"),
    (
        DERENDER_COMPLETION,
        {"generate_responses": [whole(said(1))], "prompt_tokens": [1, 2]},
        400,
        None,
        "prompt_tokens has 2 entries for 1 generate_responses",
    ),
    (
        DERENDER_COMPLETION,
        {"generate_responses": [whole(said(1))], "prompt_token_ids": []},
        400,
        None,
        "prompt_token_ids has 0 entries for 1 generate_responses",
    ),
    (
        DERENDER_COMPLETION,
        {"generate_responses": [whole(said(1)), whole(said())]},
        400,
        "generate_responses[1].choices",
        "choice 0 has empty or null token_ids",
    ),
    (
        DERENDER_COMPLETION,
        {"generate_responses": [whole(said(1)), whole(said(*LONG))]},
        400,
        "generate_responses[1].choices[0].token_ids",
        "max_model_len",
    ),
]


@pytest.mark.parametrize(("path", "body", "status", "param", "words"), REFUSALS)
async def test_a_request_that_does_not_fit_is_refused(
    tmp_path: Path, path: str, body: Json, status: int, param: str | None, words: str
) -> None:
    async with talk(tmp_path, max_model_len=512) as t:
        error = await t.refused(path, body, status)
    assert (error["param"], words in error["message"]) == (param, True), error


async def test_a_state_of_one_choice_is_not_taken_for_another(tmp_path: Path) -> None:
    async with talk(tmp_path) as t:
        state = (await t.ask(DERENDER, step(said(1))))["stream_state"]
        error = await t.refused(DERENDER, step({**said(1), "index": 1}, state=state))
    assert error["param"] == "stream_state"
    assert "of choice 0, but the chunk is of choice 1" in error["message"]


async def test_prompt_state_and_delta_together_have_to_fit(tmp_path: Path) -> None:
    async with talk(tmp_path, max_model_len=64) as t:
        state = (await t.ask(DERENDER, step(said(*LONG[:30]), prompt_token_ids=LONG[:30])))["stream_state"]
        assert await t.ask(DERENDER, step(said(*LONG[:4]), state=state))
        error = await t.refused(DERENDER, step(said(*LONG[:5]), state=state))
    assert "65 tokens" in error["message"]


# States from anybody

JSON = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**63), 2**64 - 1)
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=5,
)


def places(value: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    return [path, *(place for key, inner in items for place in places(inner, (*path, key)))]


def changed(value: Any, path: tuple[Any, ...], new: Any) -> Any:
    if not path:
        return new
    copy = dict(value) if isinstance(value, dict) else list(value)
    copy[path[0]] = changed(copy[path[0]], path[1:], new)
    return copy


PARSERS = {"tool_call_parser": "hermes", "reasoning_parser": "qwen3", "enable_auto_tool_choice": True}
TOOL = {"type": "function", "function": {"name": "log", "parameters": {"type": "object", "properties": {}}}}
CALL = '<tool_call>\n{"name": "log", "arguments": {"text": "Tide in"}}\n</tool_call>'


@pytest.mark.parametrize(
    ("model", "before"),
    [
        ({}, [*ids_of("Seven gulls"), ids_of("🦀")[0]]),
        (PARSERS, ids_of("<think>The tide")),
        (PARSERS, ids_of("Noted. <tool_c")),
        (PARSERS, ids_of(CALL)[:-20]),
    ],
    ids=["text", "reasoning", "marker", "call"],
)
async def test_a_state_that_somebody_changed_is_refused_or_works_but_breaks_nothing(
    tmp_path: Path, model: Json, before: list[int]
) -> None:
    async with talk(tmp_path, **model) as t:
        request = {**CHAT_REQUEST, "stop": ["gulls sat"], "stream": True, "tools": [TOOL]}
        first = step(said(*before), chat_request=request, prompt_token_ids=[1])
        state = (await t.ask(DERENDER, first))["stream_state"]
        changes: list[Json] = []

        @settings(max_examples=150, suppress_health_check=list(HealthCheck), deadline=None)
        @given(st.sampled_from(places(state)), JSON)
        def collect(place: tuple[Any, ...], new: Any) -> None:
            body = step(said(*GULLS, *ids_of(CALL), finish="stop"), state=changed(state, place, new))
            changes.append({**body, "chat_request": request, "prompt_token_ids": [1]})

        collect()
        for body in changes:
            async with t.client.post(DERENDER, json=body) as response:
                answer = await response.json()
                assert response.status in (200, 400), (body, answer)
                assert response.status == 200 or (answer["error"]["param"] or "").startswith("stream_state"), answer


# Streams that began on a vLLM server


async def test_a_parsed_stream_of_vllm_is_taken_over(tmp_path: Path) -> None:
    state = {
        "role_sent": True,
        "output_token_ids": GULLS[:4],
        "output_chunk_lens": [1, 3],
        "tools_streamed": False,
        "last_tool_call_ids": [],
    }
    async with talk(tmp_path) as t:
        answer = await t.ask(DERENDER, step(said(*GULLS[4:], finish="stop"), state=state))
    choice = only(answer["chunk"]["choices"])
    before = Vocabulary.of_tokenizer(TOKENIZER)
    shown = b"".join(before.bytes_of(i) for i in GULLS[:4]).decode(errors="ignore")
    assert "role" not in choice["delta"]
    assert shown + choice["delta"]["content"] == "Seven gulls 🌊 sat"
    assert "output_token_ids" not in answer["stream_state"]


async def test_a_plain_stream_of_vllm_goes_on_with_the_text_that_it_held_back(tmp_path: Path) -> None:
    wave = ids_of("🦀")
    assert len(wave) > 1
    window = [TOKENIZER.id_to_token(i) for i in (*ids_of("gulls"), wave[0])]
    state = {"prev_tokens": window, "read_offset": len(window) - 1, "role_sent": True, "logprob_text_offset": 5}
    async with talk(tmp_path) as t:
        answer = await t.ask(DERENDER, step(said(*wave[1:], *ids_of(" sat"), finish="stop"), state=state))
        usage = await t.ask(DERENDER, step(state=state, usage={"completion_tokens": 1}))
    assert only(answer["chunk"]["choices"])["delta"]["content"] == "🦀 sat"
    assert usage["stream_state"]["prev_tokens"] == window


async def test_an_empty_state_of_vllm_is_a_beginning(tmp_path: Path) -> None:
    async with talk(tmp_path) as t:
        answer = await t.ask(DERENDER, step(said(*GULLS), state={}))
    assert only(answer["chunk"]["choices"])["delta"] == {"role": "assistant", "content": "Seven gulls 🌊 sat"}


# Large calls


async def test_large_calls_beyond_the_limit_are_told_to_come_back(tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.setattr("proxy.api.stages.HEAVY_CALLS", 0)
    large = {"generate_response": whole(said(*GULLS * 2000, finish="stop"))}
    async with talk(tmp_path, max_model_len=100_000) as t:
        error = await t.refused(DERENDER, large, 429)
        small = await t.ask(DERENDER, {"generate_response": whole(said(*GULLS, finish="stop"))})
    assert (error["type"], error["code"]) == ("rate_limit_error", "busy")
    assert only(small["choices"])["message"]["content"] == "Seven gulls 🌊 sat"


async def test_a_large_answer_is_the_same_as_a_small_one(tmp_path: Path) -> None:
    async with talk(tmp_path, max_model_len=100_000) as t:
        answer = await t.ask(DERENDER, {"generate_response": whole(said(*GULLS * 2000, finish="stop"))})
    assert only(answer["choices"])["message"]["content"] == "Seven gulls 🌊 sat" * 2000


# Round trips


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"n": 3},
        {"stop": ["lls"]},
        {"logprobs": True, "top_logprobs": 1},
        {"return_token_ids": True},
        {"include_stop_str_in_output": True},
        {"skip_special_tokens": False},
    ],
    ids=lambda fields: ",".join(fields) or "plain",
)
async def test_the_stages_by_hand_give_what_the_chat_route_gives(tmp_path: Path, stream: bool, fields: Json) -> None:
    request = {"messages": HELLO, **fields}
    async with talk(tmp_path, "Seven gu", "lls 🌊", " sat", END) as t:
        direct = joined(await t.stream(CHAT, request)) if stream else spoken(await t.ask(CHAT, request))
        by_hand = await through_the_stages(t, CHAT, "chat_request", request, stream)
    assert by_hand == direct


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("fields", [{}, {"n": 2}, {"stop": ["lls"]}, {"logprobs": 1}], ids=str)
async def test_the_stages_by_hand_give_what_the_completion_route_gives(
    tmp_path: Path, stream: bool, fields: Json
) -> None:
    request = {"prompt": "Hello", **fields}
    async with talk(tmp_path, "Seven gu", "lls 🌊", " sat", END) as t:
        direct = joined(await t.stream(COMPLETIONS, request)) if stream else spoken(await t.ask(COMPLETIONS, request))
        by_hand = await through_the_stages(t, COMPLETIONS, "completion_request", request, stream)
    assert by_hand == direct


async def through_the_stages(t: Talk, path: str, name: str, request: Json, stream: bool) -> dict[int, Json]:
    rendered: Any = await t.ask(f"{path}/render", {**request, "stream": stream})
    (generate,) = rendered if isinstance(rendered, list) else [rendered]
    common = {"prompt_tokens": len(generate["token_ids"]), "prompt_token_ids": generate["token_ids"], name: request}
    if stream:
        events = await t.stream("/inference/v1/generate", generate)
        common[name] = {**request, "stream": True}
        return joined(await derendered(t, f"{path}/derender", events, {}, **common))
    response = await t.ask("/inference/v1/generate", generate)
    if path == CHAT:
        return spoken(await t.ask(DERENDER, {"generate_response": response, **common}))
    lists = {key: [common[key]] for key in ("prompt_tokens", "prompt_token_ids")}
    return spoken(await t.ask(DERENDER_COMPLETION, {"generate_responses": [response], **common, **lists}))


# Models with parsers


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        (DERENDER, {"generate_response": whole(said(1))}, "chat_request"),
        (DERENDER, step(said(1), prompt_token_ids=[1]), "chat_request"),
        (DERENDER, step(said(1), chat_request=CHAT_REQUEST), "prompt_token_ids"),
        (DERENDER, step(said(1), chat_request=CHAT_REQUEST, state={}), "prompt_token_ids"),
        (DERENDER, step(usage={"completion_tokens": 1}), "chat_request"),
    ],
)
async def test_markup_is_not_read_without_what_it_takes(tmp_path: Path, path: str, body: Json, param: str) -> None:
    async with talk(tmp_path, **PARSERS) as t:
        error = await t.refused(path, body)
    assert (error["param"], "is missing" in error["message"]) == (param, True)


async def test_completions_need_no_request_for_they_have_no_markup(tmp_path: Path) -> None:
    async with talk(tmp_path, **PARSERS) as t:
        answer = await t.ask(DERENDER_COMPLETION, {"generate_responses": [whole(said(*ids_of(CALL), finish="stop"))]})
    assert only(answer["choices"])["text"] == CALL


def read_by_a_client(message: Json) -> tuple[str, str, list[tuple[str, str]]]:
    calls = [(c["function"]["name"], c["function"]["arguments"]) for c in message.get("tool_calls") or ()]
    return message.get("reasoning") or "", message.get("content") or "", calls


def put_together(chunks: list[Json]) -> Json:
    message: Json = {"reasoning": "", "content": "", "tool_calls": []}
    for delta in (only(chunk["choices"])["delta"] for chunk in chunks if chunk["choices"]):
        for field in ("reasoning", "content"):
            message[field] += delta.get(field) or ""
        for call in delta.get("tool_calls", ()):
            if "name" in call["function"]:
                message["tool_calls"].append(call)
            else:
                message["tool_calls"][-1]["function"]["arguments"] += call["function"]["arguments"]
    return message


@pytest.mark.parametrize("name", [*TOOLS, *(name for name in REASONING if name not in TOOLS)])
async def test_the_stages_by_hand_read_every_format_as_the_chat_route_does(tmp_path: Path, name: str) -> None:
    names = (name if name in TOOLS else None, name if name in REASONING else None)
    written = [Writer(known_format(*names, by_id=False), seed, 2).write() for seed in range(8)]
    output = "".join(max(written, key=lambda w: len(w.meant.calls) + bool(w.meant.reasoning)).pieces)
    parsers = {"tool_call_parser": names[0], "reasoning_parser": names[1], "enable_auto_tool_choice": True}
    request = {"messages": HELLO, "tools": list(ASKED.tools), "request_id": "r"}
    async with talk(tmp_path, *([i] for i in ids_of(output)), END, **parsers) as t:
        direct = only((await t.ask(CHAT, request))["choices"])
        generate = await t.ask(f"{CHAT}/render", {**request, "stream": True})
        common = {"chat_request": {**request, "stream": True}}
        first = {"prompt_token_ids": generate["token_ids"]}
        chunks = await derendered(t, DERENDER, await t.stream("/inference/v1/generate", generate), first, **common)
    reasoning, content, calls = read_by_a_client(direct["message"])
    assert read_by_a_client(put_together(chunks)) == (reasoning, content, calls)
    assert reasoning or calls
    assert only(chunks[-1]["choices"])["finish_reason"] == direct["finish_reason"]


async def test_a_parsed_stream_of_vllm_is_taken_over_inside_a_call(tmp_path: Path) -> None:
    ids = ids_of(CALL)
    state = {"role_sent": True, "output_token_ids": ids[:-12], "output_chunk_lens": [1] * (len(ids) - 12)}
    request = {**CHAT_REQUEST, "tools": [TOOL], "stream": True}
    async with talk(tmp_path, **PARSERS) as t:
        body = step(said(*ids[-12:], END, finish="stop"), state=state, chat_request=request, prompt_token_ids=[1])
        choice = only((await t.ask(DERENDER, body))["chunk"]["choices"])
    assert choice["finish_reason"] == "tool_calls"
    assert all("name" not in call["function"] for call in choice["delta"].get("tool_calls", ()))
