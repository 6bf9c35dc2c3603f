"""The embedded engine over real HTTP, with its real model: what a token engine must do, and what it refuses."""

import asyncio
import json
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator
from mmap import ACCESS_READ, mmap
from typing import Any

import aiohttp
import pytest
from tokenizers import Tokenizer

from proxy.embedded import MODEL_NAME, model_path
from proxy.render.gguf import read_gguf

GENERATE = "/inference/v1/generate"
EOS = 2
CONTEXT = 4096


@pytest.fixture(scope="session")
def engine_url() -> Iterator[str]:
    command = "from proxy.embedded.server import run; run('127.0.0.1', 0, until_stdin_closes=True)"
    with subprocess.Popen(
        [sys.executable, "-c", command], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        ready = process.stdout.readline()  # written once it serves
        yield ready.split()[-1]
        process.communicate()  # closes its standard input and waits for its end


@pytest.fixture(scope="session")
def tokenizer() -> Tokenizer:
    with model_path().open("rb") as file, mmap(file.fileno(), 0, access=ACCESS_READ) as data:
        return Tokenizer.from_str(read_gguf(data).tokenizer_json)


@pytest.fixture
async def client(engine_url: str) -> AsyncIterator[aiohttp.ClientSession]:
    async with aiohttp.ClientSession(engine_url) as session:
        yield session


@pytest.fixture(scope="session")
def hello(tokenizer: Tokenizer) -> list[int]:
    ids: list[int] = tokenizer.encode("<|im_start|>user\nSay hello.<|im_end|>\n<|im_start|>assistant\n").ids
    return ids


async def whole(client: aiohttp.ClientSession, token_ids: list[int], **sampling_params: Any) -> dict[str, Any]:
    body = {"token_ids": token_ids, "sampling_params": sampling_params}
    async with client.post(GENERATE, json=body) as response:
        assert response.status == 200, await response.text()
        answer: dict[str, Any] = await response.json()
        return answer


async def only_choice(client: aiohttp.ClientSession, token_ids: list[int], **sampling_params: Any) -> dict[str, Any]:
    [choice] = (await whole(client, token_ids, **sampling_params))["choices"]
    assert isinstance(choice, dict)
    return choice


async def streamed(client: aiohttp.ClientSession, body: dict[str, Any]) -> list[dict[str, Any]]:
    """All events of a stream that ends as it should."""
    async with client.post(GENERATE, json={**body, "stream": True}) as response:
        assert response.status == 200, await response.text()
        assert response.content_type == "text/event-stream"
        events = (await response.text()).split("\n\n")
    assert events[-2:] == ["data: [DONE]", ""]
    return [json.loads(event.removeprefix("data: ")) for event in events[:-2]]


async def until_load_is(client: aiohttp.ClientSession, load: int) -> None:
    async with asyncio.timeout(10):
        while (await (await client.get("/load")).json())["server_load"] != load:
            pass


def joined(events: list[dict[str, Any]], index: int = 0) -> list[int]:
    parts = [part for event in events for part in event["choices"] if part["index"] == index]
    return [token_id for part in parts for token_id in part["token_ids"]]


async def test_it_is_healthy_and_names_its_model_and_context(client: aiohttp.ClientSession) -> None:
    assert (await client.get("/health")).status == 200
    models = await (await client.get("/v1/models")).json()
    assert [(model["id"], model["max_model_len"]) for model in models["data"]] == [(MODEL_NAME, CONTEXT)]


async def test_a_whole_answer_has_vllms_shape(client: aiohttp.ClientSession, hello: list[int]) -> None:
    body = {"token_ids": hello, "sampling_params": {"max_tokens": 2, "temperature": 0}, "request_id": "mine"}
    answer = await (await client.post(GENERATE, json=body)).json()

    assert answer.pop("created") > 0
    ids = answer["choices"][0]["token_ids"]
    assert len(ids) == 2
    assert answer == {
        "request_id": "generate-tokens-mine",
        "model": MODEL_NAME,
        "usage": {
            "prompt_tokens": len(hello),
            "completion_tokens": 2,
            "total_tokens": len(hello) + 2,
            "prompt_tokens_details": None,
        },
        "choices": [
            {
                "index": 0,
                "finish_reason": "length",
                "stop_reason": None,
                "token_ids": ids,
                "routed_experts": None,
                "sampling_mask": None,
                "weight_versions": None,
                "logprobs": None,
            }
        ],
        "prompt_logprobs": None,
        "prompt_token_ids": None,
        "kv_transfer_params": None,
        "ec_transfer_params": None,
        "output_mode": "tokens",
    }


async def test_an_event_has_vllms_shape_and_the_header_names_the_request(
    client: aiohttp.ClientSession, hello: list[int]
) -> None:
    body = {"token_ids": hello, "sampling_params": {"max_tokens": 1}, "stream": True, "request_id": "body"}
    async with client.post(GENERATE, json=body, headers={"X-Request-Id": "header"}) as response:
        event = json.loads((await response.text()).split("\n\n")[0].removeprefix("data: "))

    assert event == {
        "request_id": "generate-tokens-header",
        "usage": None,
        "output_mode": "tokens",
        "choices": [
            {
                "index": 0,
                "finish_reason": "length",
                "stop_reason": None,
                "token_ids": event["choices"][0]["token_ids"],
                "routed_experts": None,
                "sampling_mask": None,
                "weight_versions": None,
                "logprobs": None,
            }
        ],
    }


async def test_requests_without_an_id_get_one_each(client: aiohttp.ClientSession, hello: list[int]) -> None:
    first, second = [(await whole(client, hello, max_tokens=1))["request_id"] for _ in range(2)]
    assert first != second
    assert first.startswith("generate-tokens-")


async def test_streamed_and_whole_are_the_same_tokens(client: aiohttp.ClientSession, hello: list[int]) -> None:
    params = {"temperature": 0, "max_tokens": 24}
    events = await streamed(client, {"token_ids": hello, "sampling_params": params})
    choice = await only_choice(client, hello, **params)

    assert joined(events) == choice["token_ids"]
    assert [event["choices"][0]["finish_reason"] for event in events] == [None] * 23 + ["length"]


async def test_characters_of_several_tokens_lose_no_id_and_no_logprob(
    client: aiohttp.ClientSession, tokenizer: Tokenizer
) -> None:
    prompt = tokenizer.encode("naïve 日本 🙂 naïve 日本 🙂 naïve").ids
    params = {"temperature": 0, "max_tokens": 4, "logprobs": 0}
    events = await streamed(client, {"token_ids": prompt, "sampling_params": params})
    choice = await only_choice(client, prompt, **params)

    assert joined(events) == choice["token_ids"]
    assert tokenizer.decode(choice["token_ids"]) == " 日本"
    logprobs = [entry for event in events for entry in event["choices"][0]["logprobs"]["content"]]
    assert [entry["token_id"] for entry in logprobs] == choice["token_ids"]
    assert [entry["rank"] for entry in logprobs] == [1, 1, 1, 1]


async def test_forced_bytes_of_an_emoji_come_one_by_one(client: aiohttp.ClientSession, tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode("🙂").ids
    assert len(ids) > 1
    answer = [
        await only_choice(client, [1, *ids[:i]], max_tokens=1, logit_bias={id_: 100}) for i, id_ in enumerate(ids)
    ]
    assert [choice["token_ids"] for choice in answer] == [[id_] for id_ in ids]


@pytest.mark.parametrize(
    ("options", "on_tokens", "at_the_end"),
    [
        (None, False, False),
        ({"include_usage": False}, False, False),
        ({"include_usage": True}, False, True),
        ({"include_usage": True, "continuous_usage_stats": True}, True, True),
    ],
)
async def test_usage_is_in_the_events_that_were_asked_for(
    client: aiohttp.ClientSession,
    hello: list[int],
    options: dict[str, bool] | None,
    on_tokens: bool,
    at_the_end: bool,
) -> None:
    body = {"token_ids": hello, "sampling_params": {"max_tokens": 2, "ignore_eos": True}, "stream_options": options}
    events = await streamed(client, body)

    completion_tokens = [event["usage"] and event["usage"]["completion_tokens"] for event in events]
    assert completion_tokens == ([1, 2] if on_tokens else [None, None]) + ([2] if at_the_end else [])
    assert [len(event["choices"]) for event in events] == [1, 1] + ([0] if at_the_end else [])


async def test_the_prompts_ids_come_back_once_if_asked_for(client: aiohttp.ClientSession, hello: list[int]) -> None:
    body = {"token_ids": hello, "sampling_params": {"max_tokens": 2, "ignore_eos": True}, "return_token_ids": True}
    events = await streamed(client, body)
    answer = await (await client.post(GENERATE, json=body)).json()

    assert events[0]["prompt_token_ids"] == answer["prompt_token_ids"] == hello
    assert "prompt_token_ids" not in events[1]


async def test_choices_differ_and_the_same_seed_gives_the_same_ones(
    client: aiohttp.ClientSession, hello: list[int]
) -> None:
    params = {"n": 2, "seed": 3, "max_tokens": 8}
    first, again = [await whole(client, hello, **params) for _ in range(2)]
    events = await streamed(client, {"token_ids": hello, "sampling_params": params})
    other = await whole(client, hello, **{**params, "seed": 4})

    one, two = [choice["token_ids"] for choice in first["choices"]]
    assert one != two
    assert [choice["token_ids"] for choice in again["choices"]] == [one, two]
    assert [joined(events, 0), joined(events, 1)] == [one, two]
    assert [choice["token_ids"] for choice in other["choices"]] != [one, two]
    assert first["usage"]["completion_tokens"] == len(one) + len(two)


async def test_eos_ends_it_with_its_own_id_included(client: aiohttp.ClientSession, hello: list[int]) -> None:
    choice = await only_choice(client, hello, max_tokens=8, logit_bias={str(EOS): 100})
    assert (choice["token_ids"], choice["finish_reason"], choice["stop_reason"]) == ([EOS], "stop", EOS)


async def test_ignored_eos_is_a_token_like_others(client: aiohttp.ClientSession, hello: list[int]) -> None:
    choice = await only_choice(client, hello, max_tokens=3, logit_bias={str(EOS): 100}, ignore_eos=True)
    assert (choice["token_ids"], choice["finish_reason"]) == ([EOS] * 3, "length")


async def test_before_min_tokens_neither_eos_nor_a_stop_token_comes(
    client: aiohttp.ClientSession, hello: list[int]
) -> None:
    choice = await only_choice(
        client, hello, min_tokens=3, max_tokens=8, stop_token_ids=[5], logit_bias={str(EOS): 100, "5": 90}
    )
    assert len(choice["token_ids"]) == 4
    assert not {EOS, 5} & set(choice["token_ids"][:3])
    assert (choice["token_ids"][3], choice["stop_reason"]) == (EOS, EOS)


async def test_a_stop_token_ends_it_and_is_included(client: aiohttp.ClientSession, hello: list[int]) -> None:
    free = (await only_choice(client, hello, temperature=0, max_tokens=8))["token_ids"]
    choice = await only_choice(client, hello, temperature=0, max_tokens=8, stop_token_ids=[free[4]])
    assert (choice["token_ids"], choice["finish_reason"], choice["stop_reason"]) == (free[:5], "stop", free[4])


@pytest.mark.parametrize("count", [0, 1, 3])
async def test_logprobs_have_the_sampled_token_first_and_then_the_best(
    client: aiohttp.ClientSession, hello: list[int], count: int
) -> None:
    choice = await only_choice(client, hello, seed=1, temperature=1.5, max_tokens=6, logprobs=count)

    entries = choice["logprobs"]["content"]
    assert [entry["token_id"] for entry in entries] == choice["token_ids"]
    for entry in entries:
        tops = entry["top_logprobs"]
        assert tops[0] == {key: entry[key] for key in ("token_id", "logprob", "rank")}
        best = [top["rank"] for top in tops[1:]]
        assert best == [rank for rank in range(1, count + 1) if rank != entry["rank"]]
        assert all(top["logprob"] <= 0 for top in tops)


async def test_repetition_penalty_reaches_prompt_and_output(client: aiohttp.ClientSession, hello: list[int]) -> None:
    ids = (await only_choice(client, hello, temperature=0, max_tokens=16, repetition_penalty=1000.0))["token_ids"]
    assert len(set(ids)) == len(ids)
    assert not set(ids) & set(hello)


async def test_top_k_of_one_is_greedy_and_unknown_keys_and_nulls_are_ignored(
    client: aiohttp.ClientSession, hello: list[int]
) -> None:
    greedy = await only_choice(client, hello, temperature=0, max_tokens=5)
    one = await only_choice(
        client, hello, top_k=1, max_tokens=5, skip_special_tokens=False, novelty=3, stop=[], seed=None, top_p=None
    )
    assert one["token_ids"] == greedy["token_ids"]


async def test_twelve_requests_at_once_are_all_answered_as_alone(
    client: aiohttp.ClientSession, tokenizer: Tokenizer
) -> None:
    prompts = [
        tokenizer.encode(f"<|im_start|>user\n{i} + 1 =<|im_end|>\n<|im_start|>assistant\n").ids for i in range(12)
    ]
    params = {"max_tokens": 6, "temperature": 0, "ignore_eos": True}
    together = await asyncio.gather(*(only_choice(client, prompt, **params) for prompt in prompts))

    assert [len(choice["token_ids"]) for choice in together] == [6] * 12
    assert together[7]["token_ids"] == (await only_choice(client, prompts[7], **params))["token_ids"]
    await until_load_is(client, 0)


async def test_neither_neighbours_nor_cached_prompts_change_a_logprob(
    client: aiohttp.ClientSession, hello: list[int]
) -> None:
    params = {"seed": 1, "max_tokens": 6, "logprobs": 3}
    alone = (await only_choice(client, hello, **params))["logprobs"]
    others = (only_choice(client, list(range(2000 + i, 2040 + 3 * i)), max_tokens=12) for i in range(7))
    beside, *_ = await asyncio.gather(only_choice(client, hello, **params), *others)

    assert beside["logprobs"] == alone
    assert (await only_choice(client, hello, **params))["logprobs"] == alone


async def test_a_long_prompt_does_not_hold_up_a_short_request(client: aiohttp.ClientSession, hello: list[int]) -> None:
    long = asyncio.create_task(only_choice(client, list(range(1000, 1600)), max_tokens=1))
    await until_load_is(client, 1)
    await only_choice(client, hello, max_tokens=2, ignore_eos=True)

    assert not long.done()
    assert len((await long)["token_ids"]) == 1


@pytest.mark.parametrize("stream", [True, False])
async def test_a_client_that_leaves_frees_the_engine(
    client: aiohttp.ClientSession, hello: list[int], stream: bool
) -> None:
    body = {"token_ids": hello, "stream": stream, "sampling_params": {"ignore_eos": True, "n": 10}}
    request = asyncio.create_task(read_to_the_end(client, body))
    await until_load_is(client, 1)
    request.cancel()
    await until_load_is(client, 0)


async def read_to_the_end(client: aiohttp.ClientSession, body: dict[str, Any]) -> bytes:
    async with client.post(GENERATE, json=body) as response:
        return await response.read()


@pytest.mark.parametrize("path", ["/abort_requests", "/inference/v1/abort_requests"])
async def test_an_aborted_stream_ends_with_abort_usage_and_done(
    client: aiohttp.ClientSession, hello: list[int], path: str
) -> None:
    body = {
        "token_ids": hello,
        "stream": True,
        "request_id": "long",
        "sampling_params": {"ignore_eos": True},
        "stream_options": {"include_usage": True},
    }
    async with client.post(GENERATE, json=body) as response:
        await response.content.readuntil(b"\n\n")
        assert (await client.post(path, json={"request_ids": ["long"]})).status == 200  # not its id
        await response.content.readuntil(b"\n\n")
        assert (await client.post(path, json={"request_ids": ["generate-tokens-long"]})).status == 200
        events = (await response.text()).split("\n\n")

    last, usage, done, rest = events[-4:]
    [choice] = json.loads(last.removeprefix("data: "))["choices"]
    assert (choice["finish_reason"], choice["token_ids"]) == ("abort", [])
    assert json.loads(usage.removeprefix("data: "))["usage"]["completion_tokens"] >= 2
    assert (done, rest) == ("data: [DONE]", "")


async def test_an_aborted_whole_answer_has_the_tokens_so_far(client: aiohttp.ClientSession, hello: list[int]) -> None:
    body = {"token_ids": hello, "request_id": "long", "sampling_params": {"ignore_eos": True}}
    request = asyncio.create_task(read_to_the_end(client, body))
    await until_load_is(client, 1)
    await client.post("/abort_requests", json={"request_ids": ["generate-tokens-long"]})
    answer = json.loads(await request)

    assert answer["choices"][0]["finish_reason"] == "abort"
    assert answer["usage"]["completion_tokens"] == len(answer["choices"][0]["token_ids"])


OK: dict[str, Any] = {"max_tokens": 1}

REFUSED: list[tuple[dict[str, Any], str | None, str]] = [
    ({"sampling_params": OK}, "token_ids", "Field required"),
    ({"token_ids": [1]}, "sampling_params", "Field required"),
    ({"token_ids": [], "sampling_params": OK}, "token_ids", "at least 1"),
    ({"token_ids": "1", "sampling_params": OK}, "token_ids", "valid list"),
    ({"token_ids": [1, "2"], "sampling_params": OK}, "token_ids.1", "valid integer"),
    ({"token_ids": [1, True], "sampling_params": OK}, "token_ids.1", "valid integer"),
    ({"token_ids": [-1], "sampling_params": OK}, "token_ids.0", "greater than or equal to 0"),
    ({"token_ids": [49152], "sampling_params": OK}, "token_ids", "outside the vocabulary"),
    ({"token_ids": [1] * CONTEXT, "sampling_params": OK}, "token_ids", "maximum context length is 4096"),
    ({"token_ids": [1], "sampling_params": []}, "sampling_params", "valid dictionary"),
    ({"token_ids": [1], "sampling_params": OK, "stream": "yes"}, "stream", "valid boolean"),
    ({"token_ids": [1], "sampling_params": OK, "output_mode": "text"}, "output_mode", "'tokens'"),
    ({"token_ids": [1], "sampling_params": OK, "features": {"mm_hashes": {}}}, "features", "reads text only"),
    ({"token_ids": [1], "sampling_params": OK, "content_parts": [{}]}, "content_parts", "reads text only"),
    (
        {"token_ids": [1], "sampling_params": OK, "kv_transfer_params": {"do_remote_decode": True}},
        "kv_transfer_params",
        "cannot transfer",
    ),
]

REFUSED_PARAMS: list[tuple[dict[str, Any], str, str]] = [
    ({"temperature": "hot"}, "temperature", "valid number"),
    ({"temperature": -0.1}, "temperature", "greater than or equal to 0"),
    ({"top_p": 0}, "top_p", "greater than 0"),
    ({"top_p": 1.1}, "top_p", "less than or equal to 1"),
    ({"top_k": -2}, "top_k", "greater than or equal to -1"),
    ({"top_k": 1.5}, "top_k", "valid integer"),
    ({"min_p": 2}, "min_p", "less than or equal to 1"),
    ({"n": 0}, "n", "greater than or equal to 1"),
    ({"n": 1000}, "n", "less than or equal to 64"),
    ({"seed": "s"}, "seed", "valid integer"),
    ({"max_tokens": 0}, "max_tokens", "greater than or equal to 1"),
    ({"min_tokens": -1}, "min_tokens", "greater than or equal to 0"),
    ({"min_tokens": 3, "max_tokens": 2}, "min_tokens", "at most max_tokens"),
    ({"stop_token_ids": [49152]}, "stop_token_ids", "outside the vocabulary"),
    ({"stop_token_ids": 5}, "stop_token_ids", "valid list"),
    ({"logit_bias": {"49152": 1}}, "logit_bias", "outside the vocabulary"),
    ({"logit_bias": {"1": "much"}}, "logit_bias.1", "valid number"),
    ({"logprobs": 21}, "logprobs", "less than or equal to 20"),
    ({"logprobs": -1}, "logprobs", "greater than or equal to 0"),
    ({"presence_penalty": 3}, "presence_penalty", "less than or equal to 2"),
    ({"frequency_penalty": -3}, "frequency_penalty", "greater than or equal to -2"),
    ({"repetition_penalty": 0}, "repetition_penalty", "greater than 0"),
    ({"repetition_penalty": 1.1, "presence_penalty": 1}, "repetition_penalty", "cannot be combined"),
    ({"ignore_eos": "no"}, "ignore_eos", "valid boolean"),
    ({"stop": ["\n"]}, "stop", "stop_token_ids"),
    ({"stop": "\n"}, "stop", "stop_token_ids"),
    ({"structured_outputs": {"regex": "a+"}}, "structured_outputs", "cannot constrain"),
    ({"prompt_logprobs": 0}, "prompt_logprobs", "logprobs of the prompt"),
    ({"bad_words": ["x"]}, "bad_words", "no tokenizer"),
    ({"allowed_token_ids": [1]}, "allowed_token_ids", "cannot restrict"),
    ({"extra_args": {"kv_transfer_params": {"x": 1}}}, "extra_args.kv_transfer_params", "cannot transfer"),
]


@pytest.mark.parametrize(
    ("body", "param", "reason"),
    REFUSED
    + [
        ({"token_ids": [1], "sampling_params": params}, f"sampling_params.{param}", reason)
        for params, param, reason in REFUSED_PARAMS
    ],
)
async def test_what_cannot_be_done_is_a_400_that_names_the_field(
    client: aiohttp.ClientSession, body: dict[str, Any], param: str, reason: str
) -> None:
    async with client.post(GENERATE, json=body) as response:
        error = (await response.json())["error"]

    assert response.status == 400
    assert (error["type"], error["code"], error["param"]) == ("BadRequestError", 400, param)
    assert reason in error["message"]


@pytest.mark.parametrize("body", [b"", b"{", b"[]", b"1", b"\xff"])
async def test_a_body_that_is_no_json_object_is_a_400(client: aiohttp.ClientSession, body: bytes) -> None:
    async with client.post(GENERATE, data=body) as response:
        assert (response.status, (await response.json())["error"]["code"]) == (400, 400)


@pytest.mark.parametrize("body", [b"", b"{}", b"[]", b'{"request_ids": "x"}', b'{"request_ids": [1]}'])
async def test_an_abort_without_ids_is_a_400(client: aiohttp.ClientSession, body: bytes) -> None:
    async with client.post("/abort_requests", data=body) as response:
        assert (response.status, (await response.json())["error"]["param"]) == (400, "request_ids")


async def test_another_model_and_an_unknown_path_are_404s(client: aiohttp.ClientSession) -> None:
    body = {"token_ids": [1], "sampling_params": OK, "model": "gpt-5"}
    for response in (await client.post(GENERATE, json=body), await client.get("/nowhere")):
        assert response.status == 404
        assert (await response.json())["error"]["type"] == "NotFoundError"
