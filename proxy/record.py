"""What is kept of a request so that its output can be read again: the token stream as the engine sent it, and the words
of the request that decide how it is read. Pure: how a record looks as JSON, and nothing about files.

Of the prompt there is only what the chat template wrote behind the last message, which tells where the answer begins;
all of it only where the operator wants that.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import orjson
from pydantic import ValidationError

from proxy.protocol.generate import JsonObject, TokenDelta
from proxy.protocol.openai import ChatRequest

VERSION = 1

READ_BY = {
    "tools",
    "tool_choice",
    "parallel_tool_calls",
    "include_reasoning",
    "stop",
    "stop_token_ids",
    "include_stop_str_in_output",
    "ignore_eos",
    "min_tokens",
    "skip_special_tokens",
    "spaces_between_special_tokens",
    "chat_template_kwargs",
    "reasoning_effort",
}
"""The fields of a request that decide how its output is read."""

NO_MESSAGES = [{"role": "user", "content": ""}]


@dataclass(slots=True)
class Record:
    """`events` are as the engine sent them, of all choices in the order in which they came, log probabilities left
    out. `inside` says whether the answer begins inside the reasoning, None where the prompt is to tell."""

    id: str
    model: str
    request: JsonObject
    prompt_token_ids: list[int]
    inside: bool | None
    events: list[TokenDelta] = field(default_factory=list)

    def add(self, events: Sequence[TokenDelta]) -> None:
        self.events += [TokenDelta(e.index, e.token_ids, None, e.finish_reason, e.stop_reason) for e in events]

    def dump(self) -> bytes:
        events = [
            {"index": e.index, "token_ids": e.token_ids, "finish_reason": e.finish_reason, "stop_reason": e.stop_reason}
            for e in self.events
        ]
        body = {
            "record": VERSION,
            "id": self.id,
            "model": self.model,
            "request": self.request,
            "prompt_token_ids": self.prompt_token_ids,
            "inside": self.inside,
            "events": events,
        }
        return orjson.dumps(body) + b"\n"

    @classmethod
    def load(cls, body: JsonObject) -> "Record":
        """Raises ValueError that says what of a record is missing or wrong."""
        if body.get("record") != VERSION:
            raise ValueError(f"it is a record of version {body.get('record')}; this program reads version {VERSION}")
        try:
            events = [
                TokenDelta(e["index"], token_ids(e["token_ids"]), None, e["finish_reason"], e["stop_reason"])
                for e in body["events"]
            ]
            request = {key: value for key, value in body["request"].items() if key in READ_BY}
            prompt = token_ids(body["prompt_token_ids"])
            if type(body["inside"]) is not bool:
                raise ValueError("inside should be true or false")
            return cls(str(body["id"]), str(body["model"]), request, prompt, body["inside"], events)
        except (KeyError, TypeError, AttributeError) as error:
            raise ValueError(f"it is not as a record is written: {type(error).__name__} {error}") from None

    def chat_request(self) -> ChatRequest:
        """The request, without its messages. Raises ValueError."""
        return read_request(self.request)


def read_request(words: JsonObject) -> ChatRequest:
    """Raises ValueError that names the field."""
    try:
        return ChatRequest.model_validate({**words, "messages": NO_MESSAGES})
    except ValidationError as error:
        first = error.errors()[0]
        raise ValueError(f"{'.'.join(map(str, first['loc']))}: {first['msg']}") from None


def token_ids(value: Any) -> list[int]:
    """Raises ValueError where `value` is not a list of token ids."""
    if not isinstance(value, list) or not all(type(token_id) is int and token_id >= 0 for token_id in value):
        raise ValueError("token ids should be a list of integers from 0 on")
    return value


class Recorder(Protocol):
    """Where records go. `keep` neither waits nor raises."""

    with_prompts: bool

    def keep(self, record: Record) -> None: ...
