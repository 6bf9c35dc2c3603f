"""`/v1/completions`: what it has of its own (prompts of four kinds, echo, the columns of its log probabilities).

What it shares with the chat route is tried there.
"""

import json
from pathlib import Path

import pytest

from proxy import pipeline
from proxy.protocol.openai import MAX_PROMPTS, CompletionRequest
from tests.api.talk import (
    COMPLETIONS,
    END,
    Json,
    ids_of,
    joined,
    only,
    speaks,
    spoken,
    talk,
    talk_to,
    text_of,
    with_bos,
)
from tests.engines.scripted import Exchange
from tests.tokenizers import BOS, END_TURN, model_folder


async def test_an_answer_is_a_text_completion(tmp_path: Path) -> None:
    async with talk(tmp_path, " harbour", " lamp", END) as t:
        answer = await t.complete(model="m", prompt="The")
        assert t.prompt == "The"
    assert answer.pop("id").startswith("cmpl-")
    assert isinstance(answer.pop("created"), int)
    prompt, completion = len(ids_of("The")), len(ids_of(" harbour lamp")) + 1
    assert answer == {
        "object": "text_completion",
        "model": "m",
        "choices": [
            {"index": 0, "text": " harbour lamp", "logprobs": None, "finish_reason": "stop", "stop_reason": None}
        ],
        "usage": {"prompt_tokens": prompt, "completion_tokens": completion, "total_tokens": prompt + completion},
    }


async def test_a_stream_has_a_chunk_per_event_and_one_for_the_end(tmp_path: Path) -> None:
    async with talk(tmp_path, " harbour", " lamp", END) as t:
        chunks = await t.completion_chunks(prompt="The", stream_options={"include_usage": True})
        answer = await t.complete(prompt="The")
    assert {(c["id"], c["object"], c["model"]) for c in chunks} == {(chunks[0]["id"], "text_completion", "m")}
    nothing = {"index": 0, "logprobs": None, "finish_reason": None, "stop_reason": None}
    assert [only(chunk["choices"]) for chunk in chunks[:-1]] == [
        {**nothing, "text": " harbour"},
        {**nothing, "text": " lamp"},
        {**nothing, "text": "", "finish_reason": "stop"},
    ]
    assert [chunk["usage"] for chunk in chunks] == [None, None, None, answer["usage"]]
    assert chunks[-1]["choices"] == []


REQUESTS: list[Json] = [
    {},
    {"n": 2},
    {"prompt": ["Seven", "gulls"], "n": 2},
    {"prompt": [ids_of("Seven"), ids_of("gulls sat")]},
    {"logprobs": 2},
    {"logprobs": 0, "return_tokens_as_token_ids": True},
    {"return_token_ids": True, "prompt": ["Seven", "gulls"]},
    {"return_token_ids": True, "logprobs": 1},
    {"stop": [" lamp", "zz"]},
    {"stop": "minute", "include_stop_str_in_output": True, "logprobs": 1},
    {"stop_token_ids": [END]},
    {"skip_special_tokens": False, "ignore_eos": True},
    {"echo": True},
    {"echo": True, "prompt": ["Seven", "gulls"], "n": 2},
    {"echo": True, "max_tokens": 0},
    {"min_tokens": 4, "stop": "lamp", "max_tokens": 50},
]


@pytest.mark.parametrize("fields", REQUESTS, ids=str)
async def test_the_chunks_of_a_stream_add_up_to_the_whole_answer(tmp_path: Path, fields: Json) -> None:
    events = [[i] for i in ids_of("The harbour lamp turns twice a minute, 灯台は and")] + [[END]]
    async with talk(tmp_path, *events) as t:
        answer = await t.complete(**fields)
        chunks = await t.completion_chunks(**fields, stream_options={"include_usage": True})
    assert joined(chunks) == spoken(answer)
    assert chunks[-1]["usage"] == answer["usage"]


# Prompts


@pytest.mark.parametrize(
    ("prompt", "sent"),
    [
        ("Seven gulls", [ids_of("Seven gulls")]),
        (["Seven", "gulls"], [ids_of("Seven"), ids_of("gulls")]),
        (ids_of("Seven gulls"), [ids_of("Seven gulls")]),
        ([ids_of("Seven"), ids_of("gulls"), [0, 505]], [ids_of("Seven"), ids_of("gulls"), [0, 505]]),
        (f"Seven{END_TURN}", [[*ids_of("Seven"), END]]),
    ],
)
async def test_each_prompt_is_a_request_to_the_engine(tmp_path: Path, prompt: object, sent: list[list[int]]) -> None:
    async with talk(tmp_path) as t:
        answer = await t.complete(prompt=prompt)
        assert sorted(exchange.body["token_ids"] for exchange in t.engine.exchanges) == sorted(sent)
        assert len({exchange.body["request_id"] for exchange in t.engine.exchanges}) == len(sent)
    assert [part["index"] for part in answer["choices"]] == list(range(len(sent)))
    assert answer["usage"]["prompt_tokens"] == sum(map(len, sent))


async def test_choices_are_numbered_over_all_prompts_in_their_order(tmp_path: Path) -> None:
    async def script(exchange: Exchange) -> None:
        await speaks(text_of(exchange.body["token_ids"]) + "!")(exchange)

    async with talk_to(tmp_path, script) as t:
        answer = await t.complete(prompt=["ebb", "flood"], n=2)
        chunks = await t.completion_chunks(prompt=["ebb", "flood"], n=2)
    assert [(part["index"], part["text"]) for part in answer["choices"]] == [
        (0, "ebb!"),
        (1, "ebb!"),
        (2, "flood!"),
        (3, "flood!"),
    ]
    assert joined(chunks) == spoken(answer)


async def test_many_prompts_are_generated_so_many_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pipeline, "PROMPTS_AT_ONCE", 3)

    async def script(exchange: Exchange) -> None:
        await t.engine.until(lambda: len(t.engine.exchanges) >= 3)
        await speaks(text_of(exchange.body["token_ids"]) + "!")(exchange)

    async with talk_to(tmp_path, script) as t:
        answer = await t.complete(prompt=list("abcdefgh"))
        assert t.engine.connections == 3
    assert [part["text"] for part in answer["choices"]] == ["a!", "b!", "c!", "d!", "e!", "f!", "g!", "h!"]


@pytest.mark.parametrize("stream", [False, True])
async def test_a_prompt_that_fails_ends_the_request_with_its_error_and_the_others_on_the_engine(
    tmp_path: Path, stream: bool
) -> None:
    async def script(exchange: Exchange) -> None:
        if exchange.body["token_ids"] == ids_of("gulls"):
            await t.engine.until(lambda: len(t.engine.exchanges) == 3)
            await exchange.status("400 Bad Request", b'{"error": {"message": "no gulls"}}')
        await exchange.gone.wait()

    async with talk_to(tmp_path, script) as t:
        body = {"prompt": ["Seven", "gulls", "sat"], "stream": stream}
        error = await t.refused(COMPLETIONS, body)
        await t.engine.until(lambda: sum(exchange.gone.is_set() for exchange in t.engine.exchanges) >= 2)
    assert error["message"] == f"engine {t.engine.url} refused the request: no gulls"


async def test_add_special_tokens_puts_around_a_text_what_the_tokenizer_does(tmp_path: Path) -> None:
    bos = with_bos().token_to_id(BOS)
    model_folder(tmp_path, with_bos())
    async with talk(tmp_path) as t:
        for fields, ids in (
            ({}, [bos, *ids_of("Seven")]),
            ({"add_special_tokens": True}, [bos, *ids_of("Seven")]),
            ({"add_special_tokens": False}, ids_of("Seven")),
        ):
            await t.complete(prompt="Seven", **fields)
            assert t.sent["token_ids"] == ids
        await t.complete(prompt=ids_of("Seven"))
        assert t.sent["token_ids"] == ids_of("Seven"), "token ids are a prompt as it is"


async def test_truncate_prompt_tokens_keeps_the_end_of_each_prompt(tmp_path: Path) -> None:
    async with talk(tmp_path, max_model_len=100) as t:
        await t.complete(prompt=ids_of("Seven gulls sat"), truncate_prompt_tokens=3)
        assert t.sent["token_ids"] == ids_of("Seven gulls sat")[-3:]
        await t.complete(prompt=[7] * 200, truncate_prompt_tokens=-1, max_tokens=1)
        assert t.sent["token_ids"] == [7] * 99


async def test_sixteen_tokens_are_generated_unless_the_request_says_more(tmp_path: Path) -> None:
    async with talk(tmp_path, max_model_len=100) as t:
        for fields, max_tokens in (({}, 16), ({"max_tokens": 40}, 40), ({"prompt": [7] * 90}, 10)):
            await t.complete(**fields)
            assert t.params["max_tokens"] == max_tokens


# Echo


@pytest.mark.parametrize(
    ("prompt", "text"),
    [
        ("Seven gulls", "Seven gulls"),
        (ids_of("Seven gulls"), "Seven gulls"),
        ([*ids_of("½ mile"), END], f"½ mile{END_TURN}"),
    ],
)
async def test_echo_repeats_the_prompt(tmp_path: Path, prompt: object, text: str) -> None:
    async with talk(tmp_path, " sat") as t:
        answer = await t.complete(prompt=prompt, echo=True)
        chunks = await t.completion_chunks(prompt=prompt, echo=True)
    assert only(answer["choices"])["text"] == f"{text} sat"
    assert only(chunks[0]["choices"])["text"] == text
    assert joined(chunks) == spoken(answer)


async def test_echo_repeats_what_is_left_of_a_truncated_prompt(tmp_path: Path) -> None:
    async with talk(tmp_path, " sat") as t:
        answer = await t.complete(prompt="Seven gulls", echo=True, truncate_prompt_tokens=2)
        assert only(answer["choices"])["text"] == text_of(ids_of("Seven gulls")[-2:]) + " sat"


async def test_echo_without_new_tokens_is_the_prompt_alone(tmp_path: Path) -> None:
    async with talk(tmp_path, " sat") as t:
        answer = await t.complete(prompt="Seven gulls", echo=True, max_tokens=0, return_token_ids=True)
        assert t.params["max_tokens"] == 1, "an engine cannot be asked for none"
    part = only(answer["choices"])
    assert (part["text"], part["finish_reason"]) == ("Seven gulls", "length")
    assert (part["token_ids"], part["prompt_token_ids"]) == ([], ids_of("Seven gulls"))
    assert answer["usage"]["completion_tokens"] == 0


@pytest.mark.parametrize("max_tokens", [0, 5])
async def test_echo_with_logprobs_has_those_of_the_prompt_too(tmp_path: Path, max_tokens: int) -> None:
    async with talk(tmp_path, " sat", " on") as t:
        answer = await t.complete(prompt="Seven gulls", echo=True, logprobs=1, max_tokens=max_tokens)
        assert (t.params["prompt_logprobs"], t.params["logprobs"], t.sent["stream"]) == (1, 1, False)
    part = only(answer["choices"])
    prompt, new = ids_of("Seven gulls"), ids_of(" sat") + ids_of(" on") if max_tokens else []
    columns = part["logprobs"]
    assert columns["tokens"] == [text_of([i]) for i in prompt + new]
    assert columns["token_logprobs"] == [None, *[-0.25] * (len(prompt) - 1), *[-1.5] * len(new)]
    for token, at in zip(columns["tokens"], columns["text_offset"], strict=True):
        assert part["text"][at:].startswith(token)
    assert columns["text_offset"][0] == 0
    assert columns["top_logprobs"][1] == {text_of([prompt[1]]): -0.25}


# Log probabilities and ids


async def test_logprobs_are_columns_with_the_offset_of_each_token_in_the_text(tmp_path: Path) -> None:
    async with talk(tmp_path, " harbour", " lamp") as t:
        part = only((await t.complete(logprobs=1))["choices"])
    columns = part["logprobs"]
    assert columns.keys() == {"tokens", "token_logprobs", "top_logprobs", "text_offset"}
    assert "".join(columns["tokens"]) == part["text"]
    for token, at in zip(columns["tokens"], columns["text_offset"], strict=True):
        assert part["text"][at:].startswith(token)
    assert set(columns["token_logprobs"]) == {-1.5}
    own, other = text_of([ids_of(" harbour")[0]]), text_of([ids_of(" harbour")[0] + 1])
    assert columns["top_logprobs"][0] == {other: -0.5, own: -1.5}, "the sampled token is always there"


async def test_offsets_of_streamed_logprobs_begin_after_the_echo(tmp_path: Path) -> None:
    async with talk(tmp_path, " harbour", " lamp") as t:
        chunks = await t.completion_chunks(prompt="The", logprobs=0)
    offsets = [
        at for chunk in chunks for part in chunk["choices"] for at in (part["logprobs"] or {}).get("text_offset", [])
    ]
    assert offsets[0] == 0
    assert offsets == sorted(set(offsets))


async def test_prompt_logprobs_belong_to_the_choices(tmp_path: Path) -> None:
    async with talk(tmp_path) as t:
        answer = await t.complete(prompt=["Seven", "gulls"], prompt_logprobs=0)
    for part, prompt in zip(answer["choices"], ("Seven", "gulls"), strict=True):
        first, *others = part["prompt_logprobs"]
        texts = [next(iter(entry.values()))["decoded_token"] for entry in others]
        assert (first, "".join(texts)) == (None, text_of(ids_of(prompt)[1:]))


async def test_return_token_ids_gives_each_choice_the_ids_of_its_prompt(tmp_path: Path) -> None:
    async with talk(tmp_path, " harbour", END) as t:
        answer = await t.complete(prompt=["Seven", "gulls"], return_token_ids=True)
        chunks = await t.completion_chunks(prompt=["Seven", "gulls"], return_token_ids=True)
    for part, prompt in zip(answer["choices"], ("Seven", "gulls"), strict=True):
        assert part["prompt_token_ids"] == ids_of(prompt)
        assert part["token_ids"] == [*ids_of(" harbour"), END]
    prompts = [part["prompt_token_ids"] for chunk in chunks for part in chunk["choices"] if "prompt_token_ids" in part]
    assert prompts == [ids_of("Seven"), ids_of("gulls")]


async def test_cache_transfer_parameters_come_back_when_all_prompts_agree(tmp_path: Path) -> None:
    async with talk(tmp_path) as t:
        answer = await t.complete(prompt=["a", "b"], kv_transfer_params={"do_remote_decode": True})
    assert answer["kv_transfer_params"] == {"remote_block_ids": [7]}

    async def script(exchange: Exchange) -> None:
        answer = {
            "choices": [{"index": 0, "token_ids": [40], "finish_reason": "length"}],
            "kv_transfer_params": exchange.body["token_ids"],
        }
        await exchange.status("200 OK", json.dumps(answer).encode())

    async with talk_to(tmp_path, script) as t:
        assert "kv_transfer_params" not in await t.complete(prompt=["a", "b"], kv_transfer_params={"x": 1})


# What is let through, and what is refused


async def test_a_null_is_the_same_as_a_field_left_out(tmp_path: Path) -> None:
    async with talk(tmp_path) as t:
        answer, plain = await t.complete(), t.sent
        nulls = await t.complete(**dict.fromkeys(CompletionRequest.model_fields.keys() - {"prompt"}))
        assert {**t.sent, "request_id": ""} == {**plain, "request_id": ""}
    assert nulls["choices"] == answer["choices"]


async def test_what_is_of_no_use_here_does_no_harm(tmp_path: Path) -> None:
    async with talk(tmp_path) as t:
        await t.complete(best_of=1, suffix="", user="keeper", messages="ignored", max_completion_tokens=0)
        await t.complete(best_of=2, n=2)
        assert t.params["n"] == 2


BAD: list[tuple[Json, str | None, str]] = [
    ({"prompt": None}, "prompt", "field required"),
    ({"prompt": 5}, "prompt", "should be a string, a list of token ids, or a list of either"),
    ({"prompt": {"text": "a"}}, "prompt", "should be a string, a list of token ids, or a list of either"),
    ({"prompt": []}, "prompt", "1 to 1024 prompts"),
    ({"prompt": ["a"] * (MAX_PROMPTS + 1)}, "prompt", "1 to 1024 prompts, but is a list of 1025"),
    ({"prompt": ""}, "prompt", "has no tokens"),
    ({"prompt": [[]]}, "prompt", "has no tokens"),
    ({"prompt": ["a", 1]}, "prompt[1]", "should be a valid string"),
    ({"prompt": [1, "a"]}, "prompt[1]", "should be a valid integer"),
    ({"prompt": [[1], "a"]}, "prompt[1]", "should be a valid list"),
    ({"prompt": [[1, 2], [3, 4.5]]}, "prompt[1][1]", "should be a valid integer"),
    ({"prompt": [True]}, "prompt[0]", "should be a valid integer"),
    ({"prompt": [None]}, "prompt[0]", "should be a valid integer"),
    ({"prompt": [1, -1]}, "prompt[1]", "greater than or equal to 0"),
    ({"prompt": [1, 506]}, "prompt", "token id 506 in prompt is not in the vocabulary (0 to 505)"),
    ({"prompt": [[1], [2**63]]}, "prompt", "not in the vocabulary (0 to 505)"),
    ({"prompt": [1] * 300}, "input_tokens", "maximum context length is 200 tokens"),
    ({"max_tokens": -1}, "max_tokens", "greater than or equal to 0"),
    ({"max_tokens": 0}, "max_tokens", "only with echo: true"),
    ({"max_tokens": 1e300}, "max_tokens", "integer"),
    ({"min_tokens": 17}, "min_tokens", "must not be above max_tokens (16)"),
    ({"logprobs": 21}, "logprobs", "above the limit of 20 (max_logprobs)"),
    ({"logprobs": "many"}, "logprobs", "should be a valid integer"),
    ({"echo": True, "logprobs": 1, "stream": True}, "logprobs", "only with stream: false"),
    ({"best_of": 3}, "best_of", "ask for n choices instead"),
    ({"suffix": "."}, "suffix", "write it into the prompt"),
    ({"use_beam_search": True}, "use_beam_search", "leave use_beam_search out"),
    ({"stream_options": {}}, "stream_options", "needs stream: true"),
]


@pytest.mark.parametrize(("fields", "param", "words"), BAD, ids=lambda value: str(value)[:60])
async def test_a_bad_request_is_told_which_field_and_what_it_should_be(
    tmp_path: Path, fields: Json, param: str | None, words: str
) -> None:
    async with talk(tmp_path, max_model_len=200) as t:
        error = await t.refused(COMPLETIONS, {"prompt": "Hello", **fields})
        assert not t.engine.exchanges, "the engine does not hear of it"
    assert words in error["message"]
    assert (error["param"], error["type"]) == (param, "invalid_request_error")


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("prompt", [1.5] * 100_000, "prompt[0]: input should be a valid integer"),
        ("prompt", [[7], [1.5] * 100_000], "prompt[1][0]: input should be a valid integer"),
        ("stop_token_ids", ["a"] * 100_000, "stop_token_ids[0]: input should be a valid integer"),
        ("bad_words", [5] * 100_000, "bad_words[0]: input should be a valid string"),
        ("logit_bias", {str(i): "x" for i in range(100_000)}, "logit_bias: the bias of '0' should be a number"),
    ],
)
async def test_of_many_wrong_elements_the_first_is_told(
    tmp_path: Path, field: str, value: object, message: str
) -> None:
    async with talk(tmp_path) as t:
        error = await t.refused(COMPLETIONS, {"prompt": "Hello", field: value})
    assert (error["message"], error["param"]) == (message, message.partition(":")[0])
