"""The requests of the token routes, `/inference/v1/generate` and `/abort_requests`, as far as the proxy reads them.

What it does not read goes to the engine as it came.
"""

from typing import Annotated

from pydantic import Field, field_validator

from proxy.protocol.openai import LONGEST_ID, MAX_N, Fields, List, RequestIdField, StreamOptions, TokenIds


class TokenSamplingParams(Fields):
    """What could make an engine fail, or says how many choices there will be."""

    n: Annotated[int, Field(ge=1, le=MAX_N, strict=True)] | None = None
    stop_token_ids: TokenIds | None = None
    allowed_token_ids: TokenIds | None = None
    logit_bias: dict[str, float] | None = None

    @field_validator("logit_bias")
    @classmethod
    def _has_ids_as_keys(cls, biases: dict[str, float] | None) -> dict[str, float] | None:
        for key in biases or ():
            if not (key.isascii() and key.isdecimal() and len(key) <= LONGEST_ID):
                raise ValueError(f'has the key {key!r:.40}; keys are token ids such as "50256"')
        return biases

    @property
    def biased(self) -> list[int]:
        return [int(key) for key in self.logit_bias or ()]


class GenerateBody(Fields):
    """`POST /inference/v1/generate`."""

    request_id: RequestIdField | None = None
    model: str | None = None
    token_ids: TokenIds = Field(min_length=1)
    sampling_params: TokenSamplingParams
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    return_token_ids: bool | None = None


class AbortRequest(Fields):
    """`POST /abort_requests`: ids as the answers bear them."""

    request_ids: List[str]
