"""Engine events in, a response out: streamed as SSE events, or whole as one JSON body.

Both are the same `ChoiceStream`s behind the same two methods, so that a host feeds an `Answer` without knowing which it
is: `feed` gives the bytes to write now, `end` the bytes to write last. How a route writes a choice is its `Form`
(`chat.py`, `completion.py`). The common event, some text and nothing else, is spliced between two byte strings prepared
when the answer begins.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import orjson

from proxy.derender.choice import ChoiceStream, Delta
from proxy.derender.markup import CallPieces
from proxy.protocol.generate import JsonObject, Outcome, TokenDelta, TokenLogprob

DONE = b"data: [DONE]\n\n"

MARK = "\x00"
"""Stands for the text in a chunk made in advance. A client's id, which the chunk repeats, cannot hold it."""


@dataclass(frozen=True, slots=True)
class Head:
    """The fields that every chunk of a response repeats; `created` in Unix seconds."""

    id: str
    created: int
    model: str


@dataclass(slots=True)
class Collected:
    """All deltas of one choice, put together."""

    content: list[str] = field(default_factory=list)
    reasoning: list[str] = field(default_factory=list)
    tool_calls: list[CallPieces] = field(default_factory=list)
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprob] = field(default_factory=list)
    offsets: list[int] = field(default_factory=list)
    finish_reason: str | None = None
    stop_reason: int | str | None = None

    def add(self, delta: Delta) -> None:
        self.content.append(delta.content)
        self.reasoning.append(delta.reasoning)
        self.token_ids.extend(delta.token_ids)
        self.logprobs.extend(delta.logprobs or ())
        self.offsets.extend(delta.offsets or ())
        for call in delta.tool_calls:
            if call.name is not None:
                self.tool_calls.append(CallPieces(call.index, call.id, call.name))
            self.tool_calls[-1].arguments.append(call.arguments)
        if delta.finish_reason is not None:
            self.finish_reason, self.stop_reason = delta.finish_reason, delta.stop_reason


class Form(Protocol):
    """How one route writes its choices; `index` counts over all prompts of the request."""

    chunk_object: str
    whole_object: str

    def opening(self, index: int) -> list[JsonObject]:
        """The choices of the chunks that come before the first delta."""

    def piece(self, index: int, delta: Delta) -> JsonObject:
        """A choice of a chunk, with what `delta` adds; its finish reason left out."""

    def closing(self, index: int, delta: Delta) -> JsonObject:
        """The last choice, with the finish reason and nothing else."""

    def whole(self, index: int, collected: Collected, outcome: Outcome) -> JsonObject:
        """The choice of a whole response; `outcome` is that of its prompt."""

    def top(self, outcomes: Sequence[Outcome] | None) -> JsonObject:
        """Further fields of a whole response, or, with None, of a stream's first chunk."""


class Answer(Protocol):
    """Where a host puts engine events. `index` counts choices over all prompts of the request."""

    def ended(self, index: int) -> bool:
        """Whether a choice has its finish reason, be it the engine's or a stop string's."""

    def feed(self, index: int, event: TokenDelta) -> bytes: ...
    def end(self, outcomes: Sequence[Outcome]) -> bytes: ...


def usage_of(prompt: int, completion: int) -> JsonObject:
    """A response's usage, in tokens."""
    return {"prompt_tokens": prompt, "total_tokens": prompt + completion, "completion_tokens": completion}


@dataclass(slots=True)
class Prompts:
    """What usage needs to know: the length of each prompt in tokens, and how many choices each has."""

    lengths: Sequence[int]
    n: int

    def usage(self, streams: Sequence[ChoiceStream], outcomes: Sequence[Outcome] = ()) -> JsonObject:
        """Completion tokens as counted here; prompt tokens as the engines counted them, who may know of images."""
        facts = [outcome.usage or {} for outcome in outcomes]
        counted = [fact.get("prompt_tokens") for fact in facts] or [None] * len(self.lengths)
        prompt = sum(length if count is None else count for length, count in zip(self.lengths, counted, strict=True))
        completion = sum(stream.tokens for stream in streams)
        usage = usage_of(prompt, completion)
        cached = [details.get("cached_tokens") for fact in facts if (details := fact.get("prompt_tokens_details"))]
        if any(count is not None for count in cached):
            usage["prompt_tokens_details"] = {"cached_tokens": sum(count or 0 for count in cached)}
        return usage


def sse(body: JsonObject) -> bytes:
    return b"data: " + orjson.dumps(body) + b"\n\n"


def whole_body(
    head: Head,
    form: Form,
    choices: Sequence[tuple[int, Collected, Outcome]],
    usage: JsonObject,
    outcomes: Sequence[Outcome],
) -> bytes:
    """The JSON of a whole response; of each choice its index, what it said, and the outcome of its prompt."""
    return orjson.dumps(
        {
            "id": head.id,
            "object": form.whole_object,
            "created": head.created,
            "model": head.model,
            "choices": [form.whole(index, collected, outcome) for index, collected, outcome in choices],
            "usage": usage,
            **form.top(outcomes),
        }
    )


class WholeAnswer:
    """Keeps everything and writes one JSON body."""

    def __init__(self, head: Head, form: Form, streams: Sequence[ChoiceStream], prompts: Prompts) -> None:
        self._head, self._form, self._streams, self._prompts = head, form, streams, prompts
        self._collected = [Collected() for _ in streams]

    def ended(self, index: int) -> bool:
        return self._streams[index].finish_reason is not None

    def feed(self, index: int, event: TokenDelta) -> bytes:
        self._collected[index].add(
            self._streams[index].feed(event.token_ids, event.logprobs, event.finish_reason, event.stop_reason)
        )
        return b""

    def end(self, outcomes: Sequence[Outcome]) -> bytes:
        n = self._prompts.n
        choices = [(index, choice, outcomes[index // n]) for index, choice in enumerate(self._collected)]
        return whole_body(self._head, self._form, choices, self._prompts.usage(self._streams, outcomes), outcomes)


class StreamedAnswer:
    """Writes SSE events: the opening ones, then each delta as it comes, then usage where asked for, and `[DONE]`."""

    def __init__(
        self,
        head: Head,
        form: Form,
        streams: Sequence[ChoiceStream],
        prompts: Prompts,
        *,
        include_usage: bool = False,
        continuous_usage_stats: bool = False,
        return_token_ids: bool = False,
    ) -> None:
        self._head, self._form, self._streams, self._prompts = head, form, streams, prompts
        self._include_usage, self._continuous = include_usage, continuous_usage_stats
        self._return_token_ids = return_token_ids
        self._opened = False
        self._content_splices = [self._splice(i, Delta(MARK, ())) for i in range(len(streams))]
        self._reasoning_splices = [self._splice(i, Delta("", (), reasoning=MARK)) for i in range(len(streams))]

    def ended(self, index: int) -> bool:
        return self._streams[index].finish_reason is not None

    def _chunk(self, choices: list[JsonObject], **more: Any) -> bytes:
        body = {
            "id": self._head.id,
            "object": self._form.chunk_object,
            "created": self._head.created,
            "model": self._head.model,
            "choices": choices,
        }
        if self._continuous and choices:
            body["usage"] = self._prompts.usage(self._streams)
        elif self._include_usage:
            body["usage"] = None
        return sse(body | more)

    def _splice(self, index: int, delta: Delta) -> list[bytes]:
        """What stands around the text, once or twice, in an event that has nothing else to say; empty where every
        event has more."""
        if self._continuous or self._return_token_ids:
            return []
        return self._chunk([self._form.piece(index, delta)]).split(orjson.dumps(MARK))

    def feed(self, index: int, event: TokenDelta) -> bytes:
        delta = self._streams[index].feed(event.token_ids, event.logprobs, event.finish_reason, event.stop_reason)
        if self._opened and delta.finish_reason is None and not (delta.tool_calls or delta.logprobs):
            text, splices = delta.content, self._content_splices
            if delta.reasoning:
                text, splices = delta.reasoning, self._reasoning_splices
            splice = splices[index]
            if splice and not (delta.content and delta.reasoning):
                return orjson.dumps(text).join(splice) if text else b""
        events = [] if self._opened else self._opening()
        shown = delta.content or delta.reasoning or delta.tool_calls or delta.logprobs
        if shown or (self._return_token_ids and delta.token_ids):
            events.append(self._chunk([self._form.piece(index, delta)]))
        if delta.finish_reason is not None:
            events.append(self._chunk([self._form.closing(index, delta)]))
        return b"".join(events)

    def _opening(self) -> list[bytes]:
        self._opened = True
        top = self._form.top(None)
        return [
            self._chunk([choice], **top) for index in range(len(self._streams)) for choice in self._form.opening(index)
        ]

    def end(self, outcomes: Sequence[Outcome]) -> bytes:
        if not self._include_usage:
            return DONE
        return self._chunk([], usage=self._prompts.usage(self._streams, outcomes)) + DONE
