"""The embedded engine's rules without its runtime: settings, endings, logprobs, slots, and a runtime that fails."""

import json
from collections.abc import Mapping, Sequence
from typing import Any, cast

import pytest
from aiohttp.test_utils import TestClient, TestServer

from proxy.embedded.choice import Choice, Token
from proxy.embedded.engine import Engine, pick_slot
from proxy.embedded.llama import CHUNK, Llama, LlamaError
from proxy.embedded.sampling import GenerateRequest, parse_request, step_seed
from proxy.embedded.server import create_app

EOS, EOT = 2, 3


def request(token_ids: Sequence[int] = (7, 8), **sampling_params: Any) -> GenerateRequest:
    body = json.dumps({"token_ids": token_ids, "sampling_params": sampling_params}).encode()
    return parse_request(body, vocab_size=100, context=10)


def choice(**sampling_params: Any) -> Choice:
    return Choice(request(**sampling_params), index=0, seed=1, eos_token_ids=(EOS, EOT), context=10)


def settings(output: Sequence[int], **sampling_params: Any) -> dict[str, Any]:
    return request(**sampling_params).sampling_params.llama_settings(output, (), seed=0, context=10)


def test_every_sampler_is_set_and_vllms_defaults_are_neutral() -> None:
    assert settings([]) == {
        "temperature": 1.0,
        "min_p": 0.0,
        "top_k": 0,
        "top_p": 1.0,
        "repeat_penalty": 1.0,
        "repeat_last_n": 10,
        "presence_penalty": 0,
        "frequency_penalty": 0,
        "samplers": ["temperature", "min_p", "top_k", "top_p"],
        "logit_bias": [],
        "seed": 0,
    }


@pytest.mark.parametrize(
    ("params", "key", "expected"),
    [
        ({"temperature": 0}, "temperature", 0.0),
        ({"temperature": 1e-6}, "temperature", 0.0),
        ({"temperature": 0.001}, "temperature", 0.01),
        ({"temperature": 0.7}, "temperature", 0.7),
        ({"top_k": -1}, "top_k", 0),
        ({"top_k": 5}, "top_k", 5),
        ({"repetition_penalty": 1.2}, "samplers", ["penalties", "temperature", "min_p", "top_k", "top_p"]),
        ({"logit_bias": {"5": 1.5}}, "logit_bias", [(5, 1.5)]),
        ({"presence_penalty": 0.5}, "logit_bias", [(4, -0.5), (6, -0.5)]),
        ({"frequency_penalty": 0.5}, "logit_bias", [(4, -1.0), (6, -0.5)]),
        (
            {"presence_penalty": 1, "frequency_penalty": 0.5, "logit_bias": {"4": 3}},
            "logit_bias",
            [(4, 1.0), (6, -1.5)],
        ),
    ],
)
def test_a_parameter_becomes_llama_cpps(params: dict[str, Any], key: str, expected: object) -> None:
    assert settings([4, 6, 4], **params)[key] == expected


def test_before_min_tokens_what_would_end_it_is_impossible() -> None:
    short = choice(min_tokens=1, stop_token_ids=[5], logit_bias={"5": 9})
    assert short.next_settings()["logit_bias"] == [(5, False), (EOS, False), (EOT, False)]
    short.feed(Token(50))
    assert short.next_settings()["logit_bias"] == [(5, 9.0)]


def test_each_step_of_each_choice_has_its_own_seed_and_none_is_llama_cpps_random_one() -> None:
    seeds = [step_seed(seed, index, position) for seed in range(3) for index in range(3) for position in range(50)]
    assert len(set(seeds)) == len(seeds)
    assert all(0 <= seed < 0xFFFF_FFFF for seed in seeds)


@pytest.mark.parametrize(
    ("params", "tokens", "finish_reason", "stop_reason"),
    [
        ({}, [50], None, None),
        ({}, [50, EOS], "stop", EOS),
        ({}, [EOT], "stop", EOT),
        ({"ignore_eos": True}, [EOS], None, None),
        ({"ignore_eos": True, "stop_token_ids": [EOS]}, [EOS], "stop", EOS),
        ({"stop_token_ids": [60]}, [50, 60], "stop", 60),
        ({"max_tokens": 2}, [50, 50], "length", None),
        ({"max_tokens": 2}, [50, EOS], "stop", EOS),
        ({"max_tokens": 99}, [50] * 8, "length", None),  # ten tokens of context, two of them the prompt
        ({}, [50] * 7, None, None),
        ({}, [50] * 8, "length", None),
    ],
)
def test_how_a_choice_ends(
    params: dict[str, Any], tokens: list[int], finish_reason: str | None, stop_reason: int | None
) -> None:
    one = choice(**params)
    parts = [one.feed(Token(token)) for token in tokens]

    assert [token_id for part in parts for token_id in part["token_ids"]] == tokens
    assert (one.finish_reason, parts[-1]["stop_reason"]) == (finish_reason, stop_reason)
    assert all(part["finish_reason"] is None for part in parts[:-1])


@pytest.mark.parametrize(
    ("count", "sampled", "tops"),
    [
        (0, 50, [(50, 1)]),
        (1, 50, [(50, 1)]),
        (1, 51, [(51, 2), (50, 1)]),
        (2, 51, [(51, 2), (50, 1)]),
        (2, 99, [(99, None), (50, 1), (51, 2)]),
    ],
)
def test_the_sampled_token_leads_its_logprobs(count: int, sampled: int, tops: list[tuple[int, int | None]]) -> None:
    part = choice(logprobs=count).feed(Token(sampled, -3.0, ((50, -1.0), (51, -2.0), (52, -3.0))))
    [entry] = part["logprobs"]["content"]
    assert [(top["token_id"], top["rank"]) for top in entry["top_logprobs"]] == tops


@pytest.mark.parametrize(
    ("idle", "prompt", "slot"),
    [
        ({0: [], 1: []}, [1, 2], 0),
        ({0: [], 1: [1, 2]}, [1, 2, 3], 1),  # the next turn of a conversation
        ({0: [], 1: [1, 2, 9, 9, 9]}, [1, 2, 3], 0),  # would lose more than it keeps
        ({3: [1, 9], 2: [1, 9]}, [1, 2], 3),  # the longest idle
        ({0: [1, 2], 1: [1, 2, 3]}, [1, 2, 3, 4], 1),
    ],
)
def test_a_prompt_goes_where_most_of_it_is_already(idle: dict[int, list[int]], prompt: list[int], slot: int) -> None:
    assert pick_slot(idle, prompt) == slot


class NotingLlama:
    """Notes how much of a prompt it was given at each call, and makes one token."""

    def __init__(self) -> None:
        self.lengths: list[int] = []

    async def read(self, token_ids: Sequence[int], _slot: int) -> None:
        self.lengths.append(len(token_ids))

    async def next_token(
        self, token_ids: Sequence[int], _slot: int, _settings: Mapping[str, Any], _ranked: int = 0
    ) -> Token:
        self.lengths.append(len(token_ids))
        return Token(EOS)


async def test_a_long_prompt_is_read_in_chunks_from_where_the_slot_does_not_know_it() -> None:
    llama = NotingLlama()
    engine = Engine(cast(Llama, llama), parallel=1, context=1000, eos_token_ids=(EOS,))

    async def ignore(_part: dict[str, Any]) -> None:
        pass

    async def generate(prompt: list[int]) -> list[int]:
        llama.lengths.clear()
        body = json.dumps({"token_ids": prompt, "sampling_params": {}}).encode()
        await engine.generate(engine.begin("id", parse_request(body, vocab_size=100, context=1000)), ignore)
        return list(llama.lengths)

    first = [7] * (2 * CHUNK + 1)
    assert await generate(first) == [CHUNK, 2 * CHUNK, len(first)]
    answered = [*first, EOS]
    assert await generate([*answered, *[8] * CHUNK]) == [len(answered) + CHUNK]
    assert await generate([9] * CHUNK) == [CHUNK]


class FailingLlama:
    """Makes some tokens, then fails."""

    def __init__(self, tokens: int) -> None:
        self._left = tokens

    async def next_token(
        self, _token_ids: Sequence[int], _slot: int, _settings: Mapping[str, Any], _ranked: int = 0
    ) -> Token:
        self._left -= 1
        if self._left < 0:
            raise LlamaError("out of order")
        return Token(50)


def failing_engine(tokens: int) -> TestClient[Any, Any]:
    engine = Engine(cast(Llama, FailingLlama(tokens)), parallel=1, context=10, eos_token_ids=(EOS,))
    return TestClient(TestServer(create_app(engine, vocab_size=100, context=10)))


BODY: dict[str, Any] = {"token_ids": [7], "sampling_params": {}}


async def test_a_failing_runtime_is_a_500_without_a_stream() -> None:
    async with failing_engine(tokens=2) as client:
        response = await client.post("/inference/v1/generate", json=BODY)
        assert response.status == 500
        assert (await response.json())["error"]["message"] == "out of order"
        assert await (await client.get("/load")).json() == {"server_load": 0}


async def test_a_failing_runtime_is_an_event_and_then_done_in_a_stream() -> None:
    async with failing_engine(tokens=2) as client:
        response = await client.post("/inference/v1/generate", json={**BODY, "stream": True})
        events = (await response.text()).split("\n\n")

    assert [json.loads(event.removeprefix("data: "))["choices"][0]["token_ids"] for event in events[:2]] == [[50], [50]]
    assert json.loads(events[2].removeprefix("data: ")) == {
        "error": {"message": "out of order", "type": "InternalServerError", "param": None, "code": 500}
    }
    assert events[3:] == ["data: [DONE]", ""]
