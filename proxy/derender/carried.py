"""The stateless road: what a client carries from one call to the next for one choice, and what a call makes of it.

The law: the server keeps nothing, so the state holds all that the next call needs, prompt included, in a size that
depends on neither the prompt's length nor the answer's. It comes back from a client, who may have written anything
into it: `load` takes only what `dump` can have written. The same state and the same event give the same chunk.

A stream that began on a vLLM server is taken over: its state is replayed once, and what is carried on is ours.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from proxy.derender.answer import Form, Head
from proxy.derender.choice import LARGEST_COUNT, ChoiceContext, ChoiceStream, Delta
from proxy.protocol.derender import VllmState
from proxy.protocol.generate import JsonObject, TokenDelta

CARRIED_VERSION = 1

AT_REST: JsonObject = {
    "decoder": ["", 0, False],
    "markup": None,
    "held": "",
    "end": None,
    "chars": 0,
    "finish": None,
}
"""What of a choice's state is left out, and stands for itself when it is missing: most of it, most of the time."""


@dataclass(slots=True)
class Carried:
    """`created` is when the first call was, in Unix seconds, `prompt` the prompt's length in tokens. `index` is the
    choice's, None while no call has told it; `opened` says whether the choice's first chunk, with its role, is out.
    `late` is text that a vLLM server held back and that is to be shown with the next event."""

    stream: ChoiceStream
    created: int
    prompt: int
    index: int | None = None
    opened: bool = False
    late: str = ""

    def dump(self) -> JsonObject:
        choice = self.stream.dump()
        state: JsonObject = {
            "v": CARRIED_VERSION,
            "created": self.created,
            "prompt": self.prompt,
            "index": self.index,
            "choice": {key: value for key, value in choice.items() if key not in AT_REST or value != AT_REST[key]},
        }
        if not self.opened:
            state["opened"] = False
        return state

    @classmethod
    def load(cls, context: ChoiceContext, state: JsonObject, name: str) -> "Carried":
        """`name` as for `ChoiceStream`. Raises ValueError that says what is wrong with the state."""
        if state.get("v") != CARRIED_VERSION:
            raise ValueError(f"its version is not {CARRIED_VERSION}")
        created, prompt, index = (_count(state, key) for key in ("created", "prompt", "index"))
        opened, choice = state.get("opened", True), state.get("choice")
        if created is None or prompt is None or type(opened) is not bool:
            raise ValueError("created or prompt is missing, or opened is no boolean")
        if type(choice) is not dict:
            raise ValueError("choice is not an object")
        return cls(ChoiceStream.load(context, AT_REST | choice, name), created, prompt, index, opened)

    @classmethod
    def of_vllm(cls, context: ChoiceContext, state: VllmState, created: int, name: str) -> "Carried":
        """`context` has the prompt, as far as the client sent it. Raises ValueError."""
        prompt = len(context.prompt_token_ids)
        if state.output_token_ids:
            stream = ChoiceStream(context, name)
            stream.feed(state.output_token_ids)
            return cls(stream, created, prompt, opened=state.role_sent)
        shown, held = (
            _ids(context, tokens)
            for tokens in (state.prev_tokens[: state.read_offset], state.prev_tokens[state.read_offset :])
        )
        stream = ChoiceStream(replace(context, prompt_token_ids=shown or context.prompt_token_ids), name)
        late = stream.feed(held).content
        counts = {"chars": state.logprob_text_offset + len(late), "tokens": 0}
        stream = ChoiceStream.load(context, stream.dump() | counts, name)
        return cls(stream, created, prompt, opened=state.role_sent or state.logprob_text_offset > 0, late=late)


def _ids(context: ChoiceContext, tokens: Sequence[str]) -> list[int]:
    """Of tokens as the vocabulary writes them; vLLM writes an empty one for an id that means nothing."""
    tokenizer, ids = context.vocabulary.tokenizer, []
    if tokenizer is None:
        raise ValueError("prev_tokens cannot be read: the model's tokenizer does not write tokens as vLLM does")
    for token in filter(None, tokens):
        token_id = tokenizer.token_to_id(token)
        if token_id is None:
            raise ValueError("prev_tokens has a token that the model's tokenizer does not have")
        ids.append(token_id)
    return ids


def _count(state: JsonObject, key: str) -> int | None:
    value: Any = state.get(key)
    if value is not None and not (type(value) is int and 0 <= value < LARGEST_COUNT):
        raise ValueError(f"{key} is not a count")
    return value


def step(carried: Carried, head: Head, form: Form, event: TokenDelta | None) -> JsonObject:
    """The chunk that an event makes, and the state moved on. There is no choice in it where the event has none, or
    comes after the choice's end, as it does where a stop string ended it before the engine knew."""
    body: JsonObject = {
        "id": head.id,
        "object": form.chunk_object,
        "created": head.created,
        "model": head.model,
        "choices": [],
    }
    if event is None or carried.stream.finish_reason is not None:
        return body
    parts = [form.piece(event.index, Delta(carried.late, ()))] if carried.late else []
    carried.index = event.index
    if not carried.opened:
        carried.opened = True
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
