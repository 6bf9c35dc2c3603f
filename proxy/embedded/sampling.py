"""What a generate request may ask of the embedded engine, and how llama.cpp is asked for the next token.

Pure. The fields, defaults and limits are vLLM's. A key that this engine cannot honour exactly is refused with a
message, a key that it does not know is ignored, null means "not given".

llama.cpp is asked for one token at a time with everything so far as its prompt, so what depends on the output alone
(`min_tokens`, presence and frequency penalties) becomes a logit bias that is computed anew for each token. Its samplers
are put in vLLM's order, and all of them are set, because their defaults are not neutral.
"""

from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from hashlib import blake2b
from typing import Annotated, Any, Final, Literal

import orjson
from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError, model_validator

from proxy.protocol.errors import ApiError

TokenId = Annotated[int, Field(ge=0)]
BiasKey = Annotated[TokenId, BeforeValidator(lambda key: int(key) if isinstance(key, str) and key.isdecimal() else key)]
Finite = Annotated[float, Field(allow_inf_nan=False)]

_GREEDY_BELOW: Final = 1e-5  # vLLM's thresholds: below the first it is greedy, below the second it is the second
_LOWEST_TEMPERATURE: Final = 0.01

_REFUSED: Final[Mapping[str, str]] = {
    "stop": "a tokens-only engine cannot match stop strings; use stop_token_ids, or stop strings at the proxy",
    "structured_outputs": "the embedded engine cannot constrain its output",
    "prompt_logprobs": "the embedded engine has no logprobs of the prompt",
    "bad_words": "a tokens-only engine has no tokenizer for words; use logit_bias",
    "allowed_token_ids": "the embedded engine cannot restrict the vocabulary; use logit_bias",
    "logprob_token_ids": "the embedded engine has the logprobs of the most likely tokens only; use logprobs",
    "thinking_token_budget": "the embedded model does not think",
    "repetition_detection": "the embedded engine does not detect repetition",
    "features": "the embedded model reads text only",
    "content_parts": "the embedded model reads text only",
    "kv_transfer_params": "the embedded engine cannot transfer its cache",
    "ec_transfer_params": "the embedded engine has no encoder",
}


def bad_request(message: str, param: str | None) -> ApiError:
    return ApiError(400, message, type="BadRequestError", param=param)


class _Fields(BaseModel):
    model_config = ConfigDict(extra="ignore", strict=True, frozen=True)

    @model_validator(mode="before")
    @classmethod
    def _null_is_not_given(cls, data: Any) -> Any:
        if not isinstance(data, dict):
            return data
        return {key: value for key, value in data.items() if value is not None}


class StreamOptions(_Fields):
    include_usage: bool = True
    continuous_usage_stats: bool = False


class SamplingParams(_Fields):
    n: int = Field(default=1, ge=1, le=64)
    temperature: Finite = Field(default=1.0, ge=0)
    top_p: float = Field(default=1.0, gt=0, le=1)
    top_k: int = Field(default=0, ge=-1)
    min_p: float = Field(default=0.0, ge=0, le=1)
    seed: int | None = None
    max_tokens: int | None = Field(default=None, ge=1)
    min_tokens: int = Field(default=0, ge=0)
    stop_token_ids: list[TokenId] = []
    ignore_eos: bool = False
    logprobs: int | None = Field(default=None, ge=0, le=20)
    presence_penalty: float = Field(default=0.0, ge=-2, le=2)
    frequency_penalty: float = Field(default=0.0, ge=-2, le=2)
    repetition_penalty: Finite = Field(default=1.0, gt=0)
    logit_bias: dict[BiasKey, Finite] = {}

    def llama_settings(
        self, output: Sequence[int], never_yet: Collection[int], seed: int, context: int
    ) -> dict[str, Any]:
        """llama.cpp's sampling fields for the token after `output`; `never_yet` are the ids it must not be."""
        bias: dict[int, float | bool] = dict(self.logit_bias)
        if self.presence_penalty or self.frequency_penalty:
            for token_id, count in Counter(output).items():
                penalty = self.presence_penalty + self.frequency_penalty * count
                bias[token_id] = bias.get(token_id, 0.0) - penalty
        bias.update(dict.fromkeys(never_yet, False))
        penalties = ["penalties"] if self.repetition_penalty != 1 else []
        return {
            "temperature": self._temperature,
            "min_p": self.min_p,
            "top_k": max(self.top_k, 0),
            "top_p": self.top_p,
            "repeat_penalty": self.repetition_penalty,
            "repeat_last_n": context,
            "presence_penalty": 0,
            "frequency_penalty": 0,
            "samplers": [*penalties, "temperature", "min_p", "top_k", "top_p"],
            "logit_bias": list(bias.items()),
            "seed": seed,
        }

    @property
    def _temperature(self) -> float:
        return 0.0 if self.temperature < _GREEDY_BELOW else max(self.temperature, _LOWEST_TEMPERATURE)


class GenerateRequest(_Fields):
    token_ids: list[TokenId] = Field(min_length=1)
    sampling_params: SamplingParams
    request_id: str | None = None
    model: str | None = None
    stream: bool = False
    stream_options: StreamOptions | None = None
    return_token_ids: bool = False
    output_mode: Literal["tokens"] = "tokens"


def parse_request(body: bytes, *, vocab_size: int, context: int) -> GenerateRequest:
    """The request in the body. Raises a 400 that names the field at fault."""
    try:
        data = orjson.loads(body)
    except orjson.JSONDecodeError as error:
        raise bad_request(f"the body is not JSON: {error}", None) from None
    if not isinstance(data, dict):
        raise bad_request(f"the body is {type(data).__name__}, expected a JSON object", None)
    _refuse(data, "")
    try:
        request = GenerateRequest.model_validate(data)
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False, include_context=False)[0]
        field = ".".join(str(part) for part in first["loc"])
        raise bad_request(f"{field}: {first['msg']}", field) from None
    _check_together(request, vocab_size, context)
    return request


def step_seed(seed: int, index: int, position: int) -> int:
    """The seed of one token: the same for the same request seed, choice and place in the output."""
    digest = blake2b(f"{seed}/{index}/{position}".encode(), digest_size=4).digest()
    return int.from_bytes(digest, "big") % 0xFFFF_FFFF  # llama.cpp takes the largest value for "random"


def _refuse(data: Mapping[str, Any], path: str) -> None:
    for key, reason in _REFUSED.items():
        if data.get(key) not in (None, "", [], {}):
            raise bad_request(f"{path}{key} is not supported: {reason}", path + key)
    for inner in ("sampling_params", "extra_args"):
        if isinstance(data.get(inner), dict):
            _refuse(data[inner], f"{path}{inner}.")


def _check_together(request: GenerateRequest, vocab_size: int, context: int) -> None:
    """The rules that look at more than one field, or at the model."""
    params = request.sampling_params
    for field, ids in (
        ("token_ids", request.token_ids),
        ("sampling_params.stop_token_ids", params.stop_token_ids),
        ("sampling_params.logit_bias", params.logit_bias),
    ):
        if outside := [token_id for token_id in ids if token_id >= vocab_size]:
            raise bad_request(
                f"{field}: {outside[0]} is outside the vocabulary, expected ids from 0 to {vocab_size - 1}", field
            )
    if len(request.token_ids) >= context:
        raise bad_request(
            f"the prompt is {len(request.token_ids)} tokens long, but the maximum context length is {context} tokens, "
            "prompt and output together; shorten the prompt",
            "token_ids",
        )
    if params.max_tokens is not None and params.min_tokens > params.max_tokens:
        raise bad_request(
            f"min_tokens is {params.min_tokens}, expected at most max_tokens, {params.max_tokens}",
            "sampling_params.min_tokens",
        )
    if params.repetition_penalty != 1 and (params.presence_penalty or params.frequency_penalty):
        raise bad_request(
            "repetition_penalty cannot be combined with presence_penalty or frequency_penalty in the embedded engine; "
            "use one or the other",
            "sampling_params.repetition_penalty",
        )
