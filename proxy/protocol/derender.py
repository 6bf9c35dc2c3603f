"""The requests of the derender routes, and the answers and events of an engine that they carry.

As in `openai.py`, every rule that needs nothing but the request itself stands here. What is in `stream_state` is
checked where it is read, `derender/carried.py`: to this file it is any JSON.
"""

from typing import Annotated, Any, Literal, Self

from pydantic import (
    AfterValidator,
    BeforeValidator,
    ConfigDict,
    Discriminator,
    Field,
    Tag,
    field_validator,
    model_validator,
)

from proxy.protocol.generate import JsonObject, TokenDelta, TokenLogprob
from proxy.protocol.generated import checked_logprobs, checked_prompt_logprobs, checked_usage
from proxy.protocol.openai import (
    INT64,
    MAX_CHOICES,
    MAX_N,
    MAX_STOP_LENGTH,
    ChatRequest,
    CompletionRequest,
    Fields,
    List,
    TokenIds,
)

LONGEST_REQUEST_ID = 1024

Count = Annotated[int, Field(ge=0, lt=INT64, strict=True)]
RequestId = Annotated[str, Field(max_length=LONGEST_REQUEST_ID)]


class GeneratedChoice(Fields):
    """What an engine says of one choice. `logprobs` are kept as they came, for there may be very many."""

    index: Annotated[int, Field(ge=0, lt=MAX_CHOICES, strict=True)] = 0
    token_ids: TokenIds | None = None
    logprobs: JsonObject | None = None
    finish_reason: Annotated[str, Field(max_length=64)] | None = None
    stop_reason: (
        Annotated[int, Field(strict=True, ge=-INT64, lt=INT64)]
        | Annotated[str, Field(max_length=MAX_STOP_LENGTH)]
        | None
    ) = None

    @model_validator(mode="after")
    def _has_logprobs_of_its_tokens(self) -> Self:
        if self.logprobs is not None:
            checked_logprobs(self.logprobs, len(self.token_ids or ()))
        return self

    @property
    def entries(self) -> list[TokenLogprob] | None:
        return None if self.logprobs is None else self.logprobs["content"]

    def event(self, index: int) -> TokenDelta:
        return TokenDelta(index, self.token_ids or [], self.entries, self.finish_reason, self.stop_reason)


class _Generated(Fields):
    request_id: RequestId | None = None
    choices: List[GeneratedChoice]
    prompt_token_ids: TokenIds | None = None
    output_mode: Literal["tokens"] = "tokens"


class GenerateResponse(_Generated):
    """A whole answer of `/inference/v1/generate`."""

    prompt_logprobs: Annotated[list[Any], BeforeValidator(checked_prompt_logprobs)] | None = None
    kv_transfer_params: JsonObject | None = None

    @field_validator("choices")
    @classmethod
    def _is_whole(cls, choices: list[GeneratedChoice]) -> list[GeneratedChoice]:
        if len(choices) > MAX_N:
            raise ValueError(f"has {len(choices)} choices; at most {MAX_N}")
        for choice in choices:
            if not choice.token_ids:
                raise ValueError(f"choice {choice.index} has empty or null token_ids")
        if len({choice.index for choice in choices}) < len(choices):
            raise ValueError("two choices have the same index")
        return choices


class GenerateChunk(_Generated):
    """One event of a streamed answer of `/inference/v1/generate`."""

    usage: Annotated[JsonObject, AfterValidator(checked_usage)] | None = None

    @field_validator("choices")
    @classmethod
    def _has_one_choice(cls, choices: list[GeneratedChoice]) -> list[GeneratedChoice]:
        if len(choices) > 1:
            raise ValueError(f"has {len(choices)} choices; send a chunk with one choice each")
        return choices


class VllmState(Fields):
    """The `stream_state` of a vLLM server. A plain stream's is a window of tokens as the vocabulary writes them, of
    which those from `read_offset` on are not shown yet; a parsed stream's is all ids so far."""

    model_config = ConfigDict(extra="forbid")

    prev_tokens: List[str] = Field(default=[])
    prefix_offset: Count = 0
    read_offset: Count = 0
    role_sent: bool = False
    logprob_context_token_ids: TokenIds = Field(default=[])
    logprob_text_offset: Count = 0
    output_token_ids: TokenIds = Field(default=[])
    output_chunk_lens: List[Annotated[int, Field(gt=0, strict=True)]] = Field(default=[])
    tools_streamed: bool = False
    last_tool_call_ids: List[str] = Field(default=[])

    @model_validator(mode="after")
    def _adds_up(self) -> Self:
        if sum(self.output_chunk_lens) != len(self.output_token_ids):
            raise ValueError("output_chunk_lens do not sum to the number of output_token_ids")
        if not self.prefix_offset <= self.read_offset <= len(self.prev_tokens):
            raise ValueError("prefix_offset, read_offset and the number of prev_tokens are not in this order")
        return self


def _whose(state: Any) -> str:
    return "one of ours" if isinstance(state, dict) and "v" in state else "one of vLLM's"


StreamState = Annotated[
    Annotated[JsonObject, Tag("one of ours")] | Annotated[VllmState, Tag("one of vLLM's")],
    Discriminator(_whose),
]


class DerenderWhole(Fields):
    """What the whole answers of both routes share."""

    model: str | None = None
    stream: Literal[False] = False


class DerenderStep(Fields):
    """What both routes share of one call of the streaming road; `stream_state` is null in the first."""

    model: str | None = None
    stream: Literal[True]
    generate_chunk: GenerateChunk
    stream_state: StreamState | None = None
    prompt_tokens: Count | None = None
    prompt_token_ids: TokenIds | None = None

    @property
    def prompt(self) -> list[int] | None:
        """The prompt's ids, from wherever this call has them."""
        return self.generate_chunk.prompt_token_ids if self.prompt_token_ids is None else self.prompt_token_ids


class ChatDerenderWhole(DerenderWhole):
    generate_response: GenerateResponse
    prompt_tokens: Count | None = None
    prompt_token_ids: TokenIds | None = None
    chat_request: ChatRequest | None = None


class ChatDerenderStep(DerenderStep):
    chat_request: ChatRequest | None = None


class CompletionDerenderWhole(DerenderWhole):
    """`prompt_tokens` and `prompt_token_ids`, where given, have one entry per response."""

    generate_responses: List[GenerateResponse] = Field(min_length=1)
    prompt_tokens: List[Count] | None = None
    prompt_token_ids: List[TokenIds | None] | None = None
    completion_request: CompletionRequest | None = None

    @model_validator(mode="after")
    def _adds_up(self) -> Self:
        responses = len(self.generate_responses)
        for name, values in (("prompt_tokens", self.prompt_tokens), ("prompt_token_ids", self.prompt_token_ids)):
            if values is not None and len(values) != responses:
                raise ValueError(f"{name} has {len(values)} entries for {responses} generate_responses")
        if (choices := sum(len(response.choices) for response in self.generate_responses)) > MAX_CHOICES:
            raise ValueError(f"generate_responses has {choices} choices; at most {MAX_CHOICES}")
        return self


class CompletionDerenderStep(DerenderStep):
    completion_request: CompletionRequest | None = None
