"""A request's sampling parameters, as the engine takes them.

Three layers: what the client sent, over `override_generation_config`, over the model's `generation_config.json`. A key
that none of them sets is not sent, so that the engine's own default holds. `stop` strings are never sent: the proxy
matches them. Token ids that are not in the vocabulary are refused here, because an engine may die of one.
"""

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any

from pydantic import ValidationError

from proxy.protocol.errors import BadRequest
from proxy.protocol.generate import JsonObject
from proxy.protocol.openai import ChatRequest, CompletionRequest, GenerationRequest

_DEFAULTABLE = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")
"""What vLLM takes from a generation config, besides `max_new_tokens`."""

_SENT = (
    "n",
    "seed",
    "presence_penalty",
    "frequency_penalty",
    "min_tokens",
    "ignore_eos",
    "allowed_token_ids",
    "bad_words",
    "prompt_logprobs",
    "thinking_token_budget",
)


@dataclass(frozen=True, slots=True)
class SamplingDefaults:
    """`max_new_tokens` of `generation_config.json` is used where the client says nothing; that of
    `override_generation_config` is a ceiling."""

    params: Mapping[str, Any]
    max_tokens: int | None
    max_tokens_ceiling: int | None

    @classmethod
    def of(cls, generation_config: Mapping[str, Any], override: Mapping[str, Any]) -> "SamplingDefaults":
        """Raises ValueError for a key or a value that no request could have."""
        known = (*_DEFAULTABLE, "max_new_tokens")
        for key in override:
            if key not in known:
                raise ValueError(f"override_generation_config has {key}, but takes only {', '.join(known)}")
        for name, values in (("generation_config.json", generation_config), ("override_generation_config", override)):
            _check_defaults(name, {key: values[key] for key in known if values.get(key) is not None})
        merged = {**generation_config, **override}
        params = {key: merged[key] for key in _DEFAULTABLE if merged.get(key) is not None}
        return cls(params, generation_config.get("max_new_tokens"), override.get("max_new_tokens"))


def _check_defaults(name: str, values: Mapping[str, Any]) -> None:
    """By the rules that hold for a request's own values."""
    limit = values.get("max_new_tokens", 1)
    if type(limit) is not int or limit < 1:
        raise ValueError(f"{name}: max_new_tokens should be a whole number above 0")
    try:
        GenerationRequest.model_validate(values)
    except ValidationError as error:
        problem = error.errors()[0]
        raise ValueError(f"{name}: {problem['loc'][0]}: {problem['msg']}") from None


@dataclass(frozen=True, slots=True)
class Limits:
    """`vocabulary_size` is the tokenizer's; that of the model, which may have ids without a text on top of it, is None
    where its files do not tell it. `max_model_len` is None where nobody told it; the engine then has the last word.
    `longest_token` is in characters."""

    vocabulary_size: int
    engine_vocabulary_size: int | None
    longest_token: int
    max_model_len: int | None
    max_logprobs: int


def check_token_ids(token_ids: Collection[int], size: int, param: str) -> None:
    """Raises `BadRequest` where an id is not in the vocabulary."""
    if token_ids and not (min(token_ids) >= 0 and max(token_ids) < size):
        wrong = next(i for i in token_ids if not 0 <= i < size)
        raise BadRequest(f"token id {wrong} in {param} is not in the vocabulary (0 to {size - 1})", param=param)


def check_prompt_length(length: int, max_model_len: int | None) -> None:
    """There must be room for one token at least."""
    if length == 0:
        raise BadRequest("the prompt has no tokens; give some text", param="prompt")
    if max_model_len is not None and length >= max_model_len:
        raise _too_long(f"{length} tokens", max_model_len)


def check_text_length(length: int, limits: Limits) -> None:
    """Refuses a text that no tokenization could make fit, before it costs the time and memory of one."""
    longest, limit = limits.longest_token, limits.max_model_len
    if limit is not None and length > limit * longest:
        raise _too_long(f"at least {length // longest} tokens", limit)


def _too_long(length: str, max_model_len: int) -> BadRequest:
    """Worded as the OpenAI API does."""
    return BadRequest(
        f"This model's maximum context length is {max_model_len} tokens. However, your messages resulted in {length}. "
        "Please reduce the length of the messages.",
        param="input_tokens",
        code="context_length_exceeded",
    )


def truncated(token_ids: list[int], keep: int | None, max_model_len: int | None) -> list[int]:
    """The last `keep` ids of a prompt; -1 keeps as many as the context holds and leaves room for one token."""
    if keep is None:
        return token_ids
    if keep == -1:
        keep = len(token_ids) if max_model_len is None else max_model_len - 1
    elif max_model_len is not None and keep > max_model_len:
        raise BadRequest(
            f"truncate_prompt_tokens ({keep}) is above the model's maximum context length ({max_model_len})",
            param="truncate_prompt_tokens",
        )
    return token_ids[max(len(token_ids) - keep, 0) :]


def max_tokens(
    request: GenerationRequest, prompt_length: int, limits: Limits, defaults: SamplingDefaults
) -> int | None:
    """How many tokens may be generated: never more than what is left of the context. None: the engine decides."""
    wanted = request.output_limit
    if wanted is not None and limits.max_model_len is not None and wanted > limits.max_model_len:
        newer = isinstance(request, ChatRequest) and request.max_completion_tokens is not None
        param = "max_completion_tokens" if newer else "max_tokens"
        raise BadRequest(
            f"{param} ({wanted}) is above the model's maximum context length ({limits.max_model_len} tokens)",
            param=param,
        )
    if wanted is None:
        wanted = defaults.max_tokens
    left = None if limits.max_model_len is None else limits.max_model_len - prompt_length
    return min((limit for limit in (wanted, left, defaults.max_tokens_ceiling) if limit is not None), default=None)


def sampling_params(
    request: GenerationRequest,
    *,
    prompt_length: int,
    limits: Limits,
    defaults: SamplingDefaults,
    eos_token_ids: frozenset[int],
    structured_outputs: JsonObject | None,
) -> JsonObject:
    """The `sampling_params` of a generate request. EOS ids are among its `stop_token_ids` unless they are ignored: a
    tokens-only engine has no tokenizer to know them from."""
    params: JsonObject = dict(defaults.params)
    for key in (*_DEFAULTABLE, *_SENT):
        if (value := getattr(request, key)) is not None:
            params[key] = value
    if (limit := max_tokens(request, prompt_length, limits, defaults)) is not None:
        params["max_tokens"] = limit = max(limit, 1)
        if (request.min_tokens or 0) > limit:
            raise BadRequest(
                f"min_tokens ({request.min_tokens}) is above the {limit} tokens that can be generated here",
                param="min_tokens",
            )
    if (logprobs := _logprobs(request, limits)) is not None:
        params["logprobs"] = logprobs
        if isinstance(request, CompletionRequest) and request.echo:
            params.setdefault("prompt_logprobs", logprobs)
    stop_ids = set(request.stop_token_ids or ()) | (frozenset() if request.ignore_eos else eos_token_ids)
    if stop_ids:
        params["stop_token_ids"] = sorted(stop_ids)
    if request.logit_bias:
        params["logit_bias"] = _logit_bias(request.logit_bias, limits.vocabulary_size)
    if request.vllm_xargs:
        params["extra_args"] = request.vllm_xargs
    if structured_outputs is not None:
        params["structured_outputs"] = structured_outputs
    check_token_ids(request.stop_token_ids or (), limits.vocabulary_size, "stop_token_ids")
    check_token_ids(request.allowed_token_ids or (), limits.vocabulary_size, "allowed_token_ids")
    return params


def _logprobs(request: GenerationRequest, limits: Limits) -> int | None:
    generated = "top_logprobs" if isinstance(request, ChatRequest) else "logprobs"
    for param, count in ((generated, request.wanted_logprobs), ("prompt_logprobs", request.prompt_logprobs)):
        if count is not None and count > limits.max_logprobs:
            raise BadRequest(
                f"{count} log probabilities per token are above the limit of {limits.max_logprobs} (max_logprobs)",
                param=param,
            )
    return request.wanted_logprobs


def _logit_bias(bias: Mapping[str, float], size: int) -> dict[str, float]:
    """Keys are token ids as strings; values are clamped to -100..100, as vLLM does."""
    for key in bias:
        if not (key.isascii() and key.isdecimal()):
            raise BadRequest(f'logit_bias has the key {key!r}; keys are token ids such as "50256"', param="logit_bias")
    check_token_ids([int(key) for key in bias], size, "logit_bias")
    return {key: max(-100.0, min(100.0, value)) for key, value in bias.items()}
