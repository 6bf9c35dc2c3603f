"""The token-in/token-out protocol of vLLM's `POST /inference/v1/generate`: what a render makes, what an engine answers.

`GenerateRequest` is a plain dataclass because it is made here and sent as it is; `TokenDelta` is what every engine
client, of whatever protocol, turns its events into.
"""

from dataclasses import dataclass, field
from typing import Any, NotRequired, TypedDict

JsonObject = dict[str, Any]
"""JSON that is passed through untouched."""


class TopLogprob(TypedDict):
    token_id: int
    logprob: float
    rank: NotRequired[int | None]


class TokenLogprob(TopLogprob):
    """One generated token: its own log probability, and the alternatives by rank, itself included."""

    top_logprobs: NotRequired[list[TopLogprob]]


@dataclass(slots=True)
class GenerateRequest:
    """One prompt for a token engine. `token_ids` are within the model's vocabulary and at least one.

    `vocabulary_size` bounds the ids that may come back, where the model's files tell it. `reasoning_ended` and
    `reasoning_parser_kwargs` say where a constraint on the output begins: with the first token, or where the engine's
    own reasoning parser, made with these arguments, sees the reasoning end. The model is not named: an engine has one,
    under a name of its own. `body` is that of a client who speaks this protocol itself: it goes to the engine as it
    came.
    """

    request_id: str
    token_ids: list[int]
    sampling_params: JsonObject
    stream: bool = True
    cache_salt: str | None = None
    priority: int = 0
    kv_transfer_params: JsonObject | None = None
    content_parts: list[JsonObject] = field(default_factory=list)
    vocabulary_size: int | None = None
    body: JsonObject | None = None
    reasoning_ended: bool | None = None
    reasoning_parser_kwargs: JsonObject | None = None

    @property
    def n(self) -> int:
        return int(self.sampling_params.get("n", 1))

    def wire(self) -> JsonObject:
        """The request's JSON; what nobody set is left out, so that the engine's own defaults hold."""
        if self.body is not None:
            return {key: value for key, value in self.body.items() if key != "model"} | {"request_id": self.request_id}
        body: JsonObject = {
            "request_id": self.request_id,
            "token_ids": self.token_ids,
            "sampling_params": self.sampling_params,
            "stream": self.stream,
        }
        if self.stream:
            body["stream_options"] = {"include_usage": True}
        if self.cache_salt is not None:
            body["cache_salt"] = self.cache_salt
        if self.priority:
            body["priority"] = self.priority
        if self.kv_transfer_params is not None:
            body["kv_transfer_params"] = self.kv_transfer_params
            # Where vLLM before 0.33 reads them.
            extra = {**self.sampling_params.get("extra_args", {}), "kv_transfer_params": self.kv_transfer_params}
            body["sampling_params"] = {**self.sampling_params, "extra_args": extra}
        if self.reasoning_ended is not None:
            body["reasoning_ended"] = self.reasoning_ended
        if self.reasoning_parser_kwargs is not None:
            body["reasoning_parser_kwargs"] = self.reasoning_parser_kwargs
        if self.content_parts:
            body["content_parts"] = self.content_parts
        return body


@dataclass(slots=True)
class TokenDelta:
    """What one engine event says of one choice.

    `token_ids` are the new ids only, none negative. `logprobs`, where asked for, has one entry per id. `finish_reason`
    is None until the choice's last event; `stop_reason` is the stop token's id, a stop string, or None.
    """

    index: int
    token_ids: list[int]
    logprobs: list[TokenLogprob] | None = None
    finish_reason: str | None = None
    stop_reason: int | str | None = None


@dataclass(slots=True)
class Outcome:
    """What an engine says of the whole request once it is over; `answer` is all of it where it came in one piece."""

    usage: JsonObject | None = None
    prompt_logprobs: list[JsonObject | None] | None = None
    kv_transfer_params: JsonObject | None = None
    answer: JsonObject | None = None
