from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import pytest

from proxy.protocol.errors import BadRequest
from proxy.protocol.openai import ChatRequest, CompletionRequest, GenerationRequest
from proxy.render.sampling import (
    Limits,
    SamplingDefaults,
    check_prompt_length,
    check_text_length,
    check_token_ids,
    max_tokens,
    sampling_params,
    truncated,
)

LIMITS = Limits(vocabulary_size=100, engine_vocabulary_size=None, longest_token=10, max_model_len=50, max_logprobs=5)
UNBOUNDED = replace(LIMITS, max_model_len=None)
NO_DEFAULTS = SamplingDefaults.of({}, {})


def chat(**fields: Any) -> ChatRequest:
    return ChatRequest.model_validate({"messages": [{"role": "user", "content": "tide?"}]} | fields)


def completion(**fields: Any) -> CompletionRequest:
    return CompletionRequest.model_validate({"prompt": "tide"} | fields)


def params(
    request: GenerationRequest,
    limits: Limits = UNBOUNDED,
    generation_config: Mapping[str, Any] = {},
    override: Mapping[str, Any] = {},
    eos: frozenset[int] = frozenset(),
    structured_outputs: dict[str, Any] | None = None,
) -> dict[str, Any]:
    return sampling_params(
        request,
        prompt_length=10,
        limits=limits,
        defaults=SamplingDefaults.of(generation_config, override),
        eos_token_ids=eos,
        structured_outputs=structured_outputs,
    )


def test_keys_that_nobody_set_are_not_sent() -> None:
    assert params(chat()) == {}
    assert params(completion()) == {"max_tokens": 16}


@pytest.mark.parametrize(
    "sent",
    [
        {"n": 2},
        {"seed": 7},
        {"temperature": 0.0},
        {"top_p": 0.5},
        {"top_k": -1},
        {"min_p": 0.0},
        {"repetition_penalty": 1.5},
        {"presence_penalty": -1.0},
        {"frequency_penalty": 0.0},
        {"min_tokens": 3},
        {"ignore_eos": False},
        {"allowed_token_ids": [3, 99]},
        {"bad_words": ["gull"]},
        {"prompt_logprobs": 0},
        {"thinking_token_budget": 0},
        {"max_tokens": 9},
        {"logit_bias": {"7": 1.5}},
    ],
)
def test_what_the_client_set_is_sent_as_it_is(sent: dict[str, Any]) -> None:
    assert params(chat(**sent)) == sent


@pytest.mark.parametrize(
    "kept",
    [
        {"stop": ["\n"]},
        {"include_stop_str_in_output": True},
        {"skip_special_tokens": False},
        {"stream": True},
        {"temperature": None},
        {"unknown": 1},
    ],
)
def test_what_the_proxy_does_itself_is_not_sent(kept: dict[str, Any]) -> None:
    assert params(chat(**kept)) == {}


@pytest.mark.parametrize(
    ("client", "override", "generation_config", "sent"),
    [
        ({}, {}, {"temperature": 0.6}, {"temperature": 0.6}),
        ({}, {"temperature": 0.7}, {"temperature": 0.6}, {"temperature": 0.7}),
        ({"temperature": 0.8}, {"temperature": 0.7}, {"temperature": 0.6}, {"temperature": 0.8}),
        ({"temperature": 0.0}, {}, {"temperature": 0.6}, {"temperature": 0.0}),
        ({"temperature": None}, {}, {"temperature": 0.6}, {"temperature": 0.6}),
        ({}, {"temperature": None}, {"temperature": 0.6}, {}),
        ({"top_p": 0.9}, {"top_k": 5}, {"min_p": 0.1}, {"top_p": 0.9, "top_k": 5, "min_p": 0.1}),
        ({}, {}, {"repetition_penalty": 1.1, "top_p": None}, {"repetition_penalty": 1.1}),
        ({}, {}, {"do_sample": True, "eos_token_id": 3, "presence_penalty": 1.0}, {}),
    ],
)
def test_a_client_goes_before_the_operator_and_he_before_the_model(
    client: dict[str, Any], override: dict[str, Any], generation_config: dict[str, Any], sent: dict[str, Any]
) -> None:
    assert params(chat(**client), override=override, generation_config=generation_config) == sent


@pytest.mark.parametrize(
    ("override", "generation_config", "message"),
    [
        ({"seed": 3}, {}, "override_generation_config has seed, but takes only temperature"),
        ({"temprature": 0.7}, {}, "override_generation_config has temprature"),
        ({"temperature": "hot"}, {}, "override_generation_config: temperature: "),
        ({"top_p": 1.5}, {}, "override_generation_config: top_p: "),
        ({"max_new_tokens": 0}, {}, "override_generation_config: max_new_tokens should be a whole number above 0"),
        ({}, {"temperature": -1}, "generation_config.json: temperature: "),
        ({}, {"max_new_tokens": "all"}, "generation_config.json: max_new_tokens "),
    ],
)
def test_defaults_that_no_request_could_have_are_refused_when_they_are_loaded(
    override: dict[str, Any], generation_config: dict[str, Any], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        SamplingDefaults.of(generation_config, override)


@pytest.mark.parametrize(("length", "fits"), [(0, True), (500, True), (501, False), (10**9, False)])
def test_a_text_that_could_never_fit_is_refused_before_it_is_tokenized(length: int, fits: bool) -> None:
    check_text_length(length, UNBOUNDED)
    if fits:
        check_text_length(length, LIMITS)
    else:
        with pytest.raises(BadRequest, match=r"maximum context length is 50 tokens.* resulted in at least"):
            check_text_length(length, LIMITS)


@pytest.mark.parametrize(
    ("asked", "eos", "sent"),
    [
        ({}, {2, 1}, [1, 2]),
        ({"stop_token_ids": [9, 2]}, {2, 1}, [1, 2, 9]),
        ({"ignore_eos": False}, {2}, [2]),
        ({"ignore_eos": True}, {2}, None),
        ({"ignore_eos": True, "stop_token_ids": [2]}, {2}, [2]),
        ({"stop_token_ids": []}, set(), None),
    ],
)
def test_eos_ids_are_stop_token_ids_unless_they_are_ignored(
    asked: dict[str, Any], eos: set[int], sent: list[int] | None
) -> None:
    assert params(chat(**asked), eos=frozenset(eos)).get("stop_token_ids") == sent


@pytest.mark.parametrize(
    ("request_", "limits", "generation_config", "override", "expected"),
    [
        (chat(), LIMITS, {}, {}, 40),
        (chat(), UNBOUNDED, {}, {}, None),
        (chat(max_tokens=7), UNBOUNDED, {}, {}, 7),
        (chat(max_tokens=7), LIMITS, {}, {}, 7),
        (chat(max_tokens=50), LIMITS, {}, {}, 40),
        (chat(max_tokens=7, max_completion_tokens=8), LIMITS, {}, {}, 8),
        (chat(), LIMITS, {"max_new_tokens": 5}, {}, 5),
        (chat(max_tokens=7), LIMITS, {"max_new_tokens": 5}, {}, 7),
        (chat(max_tokens=7), LIMITS, {}, {"max_new_tokens": 5}, 5),
        (chat(max_tokens=3), LIMITS, {}, {"max_new_tokens": 5}, 3),
        (chat(), UNBOUNDED, {}, {"max_new_tokens": 5}, 5),
        (chat(), UNBOUNDED, {"max_new_tokens": 4}, {"max_new_tokens": 5}, 4),
        (chat(), LIMITS, {"max_new_tokens": 500}, {}, 40),
        (completion(), LIMITS, {}, {}, 16),
        (completion(), LIMITS, {"max_new_tokens": 5}, {}, 16),
        (completion(max_tokens=45), LIMITS, {}, {}, 40),
    ],
)
def test_tokens_are_limited_by_the_request_the_context_and_the_operator(
    request_: GenerationRequest,
    limits: Limits,
    generation_config: dict[str, Any],
    override: dict[str, Any],
    expected: int | None,
) -> None:
    assert max_tokens(request_, 10, limits, SamplingDefaults.of(generation_config, override)) == expected
    sent = params(request_, limits, generation_config, override)
    assert sent.get("max_tokens") == expected


def test_an_engine_is_asked_for_one_token_at_least() -> None:
    assert params(completion(max_tokens=0, echo=True))["max_tokens"] == 1


@pytest.mark.parametrize(
    ("request_", "sent"),
    [
        (chat(), {}),
        (chat(logprobs=False), {}),
        (chat(logprobs=True), {"logprobs": 0}),
        (chat(logprobs=True, top_logprobs=0), {"logprobs": 0}),
        (chat(logprobs=True, top_logprobs=5), {"logprobs": 5}),
        (chat(prompt_logprobs=5), {"prompt_logprobs": 5}),
        (completion(logprobs=0), {"max_tokens": 16, "logprobs": 0}),
        (completion(logprobs=3), {"max_tokens": 16, "logprobs": 3}),
        (completion(echo=True), {"max_tokens": 16}),
        (completion(logprobs=3, echo=True), {"max_tokens": 16, "logprobs": 3, "prompt_logprobs": 3}),
        (completion(logprobs=0, echo=True), {"max_tokens": 16, "logprobs": 0, "prompt_logprobs": 0}),
        (
            completion(logprobs=3, echo=True, prompt_logprobs=1),
            {"max_tokens": 16, "logprobs": 3, "prompt_logprobs": 1},
        ),
    ],
)
def test_log_probabilities_are_asked_for_as_the_answer_needs_them(
    request_: GenerationRequest, sent: dict[str, Any]
) -> None:
    assert params(request_) == sent


def test_biases_are_clamped() -> None:
    bias = {"7": -1000, "8": 101.5, "9": 0.25}
    assert params(chat(logit_bias=bias))["logit_bias"] == {"7": -100.0, "8": 100.0, "9": 0.25}
    assert "logit_bias" not in params(chat(logit_bias={}))


def test_extra_arguments_and_structured_outputs_are_passed_on() -> None:
    sent = params(chat(vllm_xargs={"mode": 1}), structured_outputs={"regex": "a+"})
    assert sent == {"extra_args": {"mode": 1}, "structured_outputs": {"regex": "a+"}}


@pytest.mark.parametrize(
    ("request_", "param", "words"),
    [
        (chat(stop_token_ids=[1, 100]), "stop_token_ids", "token id 100 in stop_token_ids"),
        (chat(allowed_token_ids=[1, 2**70]), "allowed_token_ids", f"token id {2**70} in allowed_token_ids"),
        (chat(logit_bias={"100": 1}), "logit_bias", "token id 100 in logit_bias is not in the vocabulary (0 to 99)"),
        (chat(logit_bias={"-1": 1}), "logit_bias", "'-1'"),
        (chat(logit_bias={"1.5": 1}), "logit_bias", "'1.5'"),
        (chat(logit_bias={"": 1}), "logit_bias", "''"),
        (chat(logit_bias={"٣": 1}), "logit_bias", "keys are token ids"),
        (chat(logprobs=True, top_logprobs=6), "top_logprobs", "limit of 5"),
        (chat(prompt_logprobs=6), "prompt_logprobs", "6 log probabilities"),
        (completion(logprobs=6), "logprobs", "limit of 5"),
        (chat(max_tokens=51), "max_tokens", "max_tokens (51) is above"),
        (chat(max_completion_tokens=51), "max_completion_tokens", "max_completion_tokens (51) is above"),
        (completion(max_tokens=51), "max_tokens", "maximum context length (50 tokens)"),
        (chat(min_tokens=41), "min_tokens", "above the 40 tokens"),
    ],
)
def test_what_an_engine_would_choke_on_is_refused(request_: GenerationRequest, param: str, words: str) -> None:
    with pytest.raises(BadRequest) as refused:
        params(request_, LIMITS)
    assert (refused.value.status, refused.value.param) == (400, param)
    assert words in refused.value.message


@pytest.mark.parametrize(("ids", "wrong"), [([], None), ([0, 99], None), ([5, 100, 200], 100), ([5, -1], -1)])
def test_ids_are_in_the_vocabulary_or_named(ids: list[int], wrong: int | None) -> None:
    if wrong is None:
        check_token_ids(ids, 100, "prompt")
        return
    with pytest.raises(BadRequest, match=f"token id {wrong} in prompt is not in the vocabulary \\(0 to 99\\)"):
        check_token_ids(ids, 100, "prompt")


@pytest.mark.parametrize(("length", "max_model_len"), [(1, None), (1, 50), (49, 50), (10**6, None)])
def test_a_prompt_that_leaves_room_for_a_token_fits(length: int, max_model_len: int | None) -> None:
    check_prompt_length(length, max_model_len)


@pytest.mark.parametrize("length", [50, 51, 1000])
def test_a_prompt_that_fills_the_context_is_refused_as_the_openai_api_does(length: int) -> None:
    with pytest.raises(BadRequest) as refused:
        check_prompt_length(length, 50)
    error = refused.value.body()["error"]
    assert (error["code"], error["param"], error["type"]) == (
        "context_length_exceeded",
        "input_tokens",
        "invalid_request_error",
    )
    assert "maximum context length is 50 tokens" in error["message"]
    assert f"resulted in {length} tokens" in error["message"]


def test_an_empty_prompt_is_refused() -> None:
    with pytest.raises(BadRequest, match="no tokens") as refused:
        check_prompt_length(0, None)
    assert refused.value.param == "prompt"


@pytest.mark.parametrize(
    ("keep", "max_model_len", "kept"),
    [
        (None, 3, [1, 2, 3, 4]),
        (-1, None, [1, 2, 3, 4]),
        (-1, 9, [1, 2, 3, 4]),
        (-1, 4, [2, 3, 4]),
        (-1, 1, []),
        (0, 9, []),
        (2, 9, [3, 4]),
        (4, 9, [1, 2, 3, 4]),
        (9, 9, [1, 2, 3, 4]),
        (9, None, [1, 2, 3, 4]),
    ],
)
def test_a_prompt_is_cut_at_its_beginning(keep: int | None, max_model_len: int | None, kept: list[int]) -> None:
    assert truncated([1, 2, 3, 4], keep, max_model_len) == kept


def test_a_prompt_is_not_cut_to_more_than_the_context() -> None:
    with pytest.raises(BadRequest, match=r"truncate_prompt_tokens \(10\) is above .*\(9\)") as refused:
        truncated([1, 2], 10, 9)
    assert refused.value.param == "truncate_prompt_tokens"
