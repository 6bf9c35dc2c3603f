"""The stateless road: what a client carries from one call to the next for one choice, and what a call makes of it.

The law: the server keeps nothing, so the state holds all that the next call needs, prompt included, in a size that
depends on neither the prompt's length nor the answer's. It comes back from a client, who may have written anything
into it: `load` takes only what `dump` can have written. The same state and the same event give the same chunk.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from proxy.derender.answer import Form, Head
from proxy.derender.choice import LARGEST_COUNT, ChoiceContext, ChoiceStream
from proxy.protocol.generate import JsonObject, TokenDelta

CARRIED_VERSION = 1


@dataclass(slots=True)
class Carried:
    """`index` is the choice's, None before its first chunk. `prompt` is the prompt's length in tokens, `created` when
    the first call was, in Unix seconds."""

    stream: ChoiceStream
    created: int
    prompt: int
    index: int | None = None

    def dump(self) -> JsonObject:
        return {
            "v": CARRIED_VERSION,
            "created": self.created,
            "prompt": self.prompt,
            "index": self.index,
            "choice": self.stream.dump(),
        }

    @classmethod
    def load(cls, context: ChoiceContext, state: JsonObject) -> "Carried":
        """Raises ValueError that says what is wrong with the state."""
        if state.get("v") != CARRIED_VERSION:
            raise ValueError(f"its version is not {CARRIED_VERSION}")
        created, prompt, index = (_count(state, key) for key in ("created", "prompt", "index"))
        if created is None or prompt is None:
            raise ValueError("created or prompt is missing")
        return cls(ChoiceStream.load(context, state.get("choice")), created, prompt, index)


def _count(state: JsonObject, key: str) -> int | None:
    value: Any = state.get(key)
    if value is not None and not (type(value) is int and 0 <= value < LARGEST_COUNT):
        raise ValueError(f"{key} is not a count")
    return value


def step(carried: Carried, head: Head, form: Form, event: TokenDelta | None) -> JsonObject:
    """The chunk that an event makes, of one choice at most, and the state moved on."""
    body: JsonObject = {
        "id": head.id,
        "object": form.chunk_object,
        "created": head.created,
        "model": head.model,
        "choices": [],
    }
    if event is None:
        return body
    parts = []
    if carried.index is None:
        carried.index = event.index
        parts += form.opening(event.index)
        body |= form.top(None)
    delta = carried.stream.feed(event.token_ids, event.logprobs, event.finish_reason, event.stop_reason)
    if delta.content or delta.reasoning or delta.tool_calls or delta.token_ids:
        parts.append(form.piece(event.index, delta))
    parts.append(form.closing(event.index, delta))
    body["choices"] = [_joined(parts)]
    return body


def _joined(parts: Sequence[JsonObject]) -> JsonObject:
    """What a stream spreads over several chunks, as one choice."""
    choice: JsonObject = {}
    for part in parts:
        for key, value in part.items():
            if key == "delta":
                choice[key] = _joined([choice.get(key, {}), value])
            elif key in ("content", "text"):
                choice[key] = choice.get(key, "") + value
            elif value is not None or key not in choice:
                choice[key] = value
    return choice
