"""A model's format over a small vocabulary, and outputs read with it.

Outputs are written as *marked text*: the text of the output, with one character that no text holds (a mark) for each
added token. So a test says exactly what is a token and what is the same characters typed as ordinary text.
"""

import functools
import itertools
import json
import random
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from tokenizers import AddedToken, Tokenizer

from proxy.derender.choice import ChoiceContext, ChoiceStream, Delta
from proxy.derender.codecs.base import MarkupLimits
from proxy.derender.output_format import OutputFormat, ToolUse
from proxy.derender.vocabulary import Vocabulary
from proxy.formats.kinds import Calls, Channels, Reasoning, markers
from proxy.formats.reasoning import REASONING
from proxy.formats.tools import TOOLS
from tests import tokenizers

TOKENS = re.compile(r"｜DSML｜|\]<\]minimax\[>\[|<(?!/?｜DSML)[^<>{}\s=]+>|\[/?[A-Z_]+\]")
"""What is one added token where a format's markers are tokens, by the look of it."""


@functools.cache
def bare_tokenizer() -> Tokenizer:
    """A byte-level tokenizer without any added tokens."""
    spec = json.loads(tokenizers.byte_level().to_str())
    return Tokenizer.from_str(json.dumps({**spec, "added_tokens": []}))


@functools.cache
def vocabulary(added: tuple[str, ...]) -> Vocabulary:
    tokenizer = Tokenizer.from_str(bare_tokenizer().to_str())
    contents = (tokenizers.EOS, tokenizers.TURN, *added)
    tokenizer.add_special_tokens([AddedToken(text, special=True, normalized=False) for text in contents])
    return Vocabulary.of_tokenizer(tokenizer)


def marker_tokens(declarations: Iterable[Reasoning | Calls]) -> tuple[str, ...]:
    found = (token for d in declarations for text in markers(d) for token in TOKENS.findall(text))
    return tuple(dict.fromkeys(found))


class Format:
    """A pair of declarations over a vocabulary that has their markers as added tokens (`by_id`), or has not."""

    def __init__(
        self, reasoning: Reasoning | None, calls: Sequence[Calls], by_id: bool, limits: MarkupLimits | None = None
    ) -> None:
        self.reasoning, self.calls = reasoning, tuple(calls)
        declarations = [*([reasoning] if reasoning else []), *calls]
        self.vocabulary = vocabulary(marker_tokens(declarations) if by_id else ())
        self.output = OutputFormat(reasoning, self.calls, self.vocabulary, limits or MarkupLimits())
        self.marks = self.output.marks
        self._ids = {mark: token_id for token_id, mark in self.marks.by_id.items()}
        self.eos, self.turn = map(self.vocabulary.tokenizer.token_to_id, (tokenizers.EOS, tokenizers.TURN))

    def ids(self, marked: str, whole_words: bool = True) -> list[int]:
        """The tokens of a marked text; its ordinary text byte by byte where not in `whole_words`."""
        ids: list[int] = []
        for part in re.split("([\ud800-\udfff])", marked):
            if part in self._ids:
                ids.append(self._ids[part])
            elif whole_words:
                ids += bare_tokenizer().encode(part).ids
            else:
                ids += map(_id_of_byte().__getitem__, part.encode())
        return ids

    def context(self, use: ToolUse, prompt: Sequence[int] = (), **more: Any) -> ChoiceContext:
        variables: Mapping[str, Any] = more.pop("variables", {})
        plan = self.output.plan(use, prompt, variables)
        fields = {"vocabulary": self.vocabulary, "prompt_token_ids": prompt, "end_token_ids": frozenset([self.eos])}
        return ChoiceContext(**(fields | {"markup": plan} | more))


@functools.cache
def _id_of_byte() -> dict[int, int]:
    v = vocabulary(())
    return {v.bytes_of(i)[0]: i for i in range(v.size) if len(v.bytes_of(i)) == 1}


@functools.cache
def known_format(
    tool: str | None, reasoning: str | None, by_id: bool = True, limits: MarkupLimits | None = None
) -> Format:
    """By the names of the two parsers. Channels do the work of both."""
    thinks, calls = REASONING[reasoning] if reasoning else None, TOOLS[tool] if tool else ()
    return (
        Format(None, (thinks,), by_id, limits) if isinstance(thinks, Channels) else Format(thinks, calls, by_id, limits)
    )


@dataclass
class CallRead:
    id: str
    name: str
    arguments: str = ""


@dataclass
class Message:
    """All deltas of a choice together, as a client sees them."""

    reasoning: str = ""
    content: str = ""
    calls: list[CallRead] = field(default_factory=list)
    finish_reason: str | None = None
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[Any] = field(default_factory=list)

    def add(self, delta: Delta) -> None:
        """Checks that a call's name and id come once, with its first delta, and that calls come in order."""
        self.reasoning += delta.reasoning
        self.content += delta.content
        self.token_ids += delta.token_ids
        self.logprobs += delta.logprobs or ()
        for call in delta.tool_calls:
            if call.name is not None:
                assert call.index == len(self.calls)
                assert call.name and call.id
                self.calls.append(CallRead(call.id, call.name))
            else:
                assert call.id is None
            assert call.index == len(self.calls) - 1
            self.calls[-1].arguments += call.arguments
        if delta.finish_reason is not None:
            assert self.finish_reason is None
            self.finish_reason = delta.finish_reason

    @property
    def parsed_calls(self) -> list[tuple[str, Any]]:
        """Names and arguments, those as pairs where they are objects, so that the order of keys counts."""
        return [(c.name, json.loads(c.arguments, object_pairs_hook=list)) for c in self.calls]

    @property
    def written_calls(self) -> list[tuple[str, str]]:
        return [(c.name, c.arguments) for c in self.calls]


def read(
    context: ChoiceContext, ids: Sequence[int], finish: str | None = "stop", splits: random.Random | None = None
) -> Message:
    """Everything at once; or with `splits` in random pieces, over some of whose ends the state is written and read."""
    message, stream = Message(), ChoiceStream(context, "seed")
    at = 0
    while splits and at < len(ids):
        end = at + splits.choice((1, 1, 1, 2, 3, 8, 30))
        message.add(stream.feed(ids[at:end]))
        at = end
        if splits.random() < 0.4:
            stream = reloaded(context, stream)
    message.add(stream.feed(ids[at:], None, finish))
    return message


def reloaded(context: ChoiceContext, stream: ChoiceStream) -> ChoiceStream:
    return ChoiceStream.load(context, json.loads(json.dumps(stream.dump())), "seed")


def tool(name: str, **properties: Any) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name, "parameters": {"type": "object", "properties": properties}}}


LAMP = tool(
    "set_lamp",
    room={"type": "string"},
    level={"type": "integer"},
    dim={"type": "number"},
    on={"type": "boolean"},
    note={"type": ["string", "null"]},
    tags={"type": "array", "items": {"type": "string"}},
    spot={"type": "object", "properties": {"x": {"type": "integer"}, "label": {"type": "string"}}},
)
NOW = tool("now")
TIDE = tool("harbour.get_tide", room={"type": "string"})
ASKED = ToolUse(tools=(LAMP, NOW, TIDE), asked=True)


def pieces_of(text: str, lengths: Iterable[int]) -> list[str]:
    """`text` cut by `lengths`, over and over."""
    pieces, at = [], 0
    for length in itertools.cycle(lengths):
        if at >= len(text):
            return pieces
        pieces.append(text[at : at + length])
        at += length
    return pieces


class Plain(str):
    """Text that is ordinary tokens, whatever it spells."""

    __slots__ = ()


def said(
    names: tuple[str | None, str | None],
    *parts: str,
    by_id: bool = True,
    use: ToolUse = ASKED,
    prompt: str = "",
    finish: str = "stop",
    **more: Any,
) -> Message:
    """What an output is read as; in `parts` and `prompt` markers are written out, and are tokens where they can be."""
    form = known_format(*names, by_id)
    encode = form.marks.encode
    marked = "".join(part if isinstance(part, Plain) else encode(part) for part in parts)
    return read(form.context(use, form.ids(encode(prompt)), **more), form.ids(marked), finish)
