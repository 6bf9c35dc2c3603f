"""What holds of every format: random outputs that a writer made from the declaration, mutations of them, and garbage.

Each kind of syntax is tried over all declarations that are of it, beside several ways of reasoning, with the markers as
added tokens and with markers that are ordinary text.
"""

import json
import random
from dataclasses import dataclass
from itertools import chain
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from proxy.derender.choice import ChoiceContext, ChoiceStream
from proxy.derender.output_format import ToolUse
from proxy.formats.kinds import (
    Calls,
    Channels,
    ElementCalls,
    HeaderCalls,
    JsonCalls,
    PythonicCalls,
    QuotedMapCalls,
    TaggedCalls,
    markers,
)
from proxy.formats.reasoning import REASONING
from proxy.formats.tools import TOOLS
from tests.derender.readings import ASKED, Format, known_format, read
from tests.derender.writers import WORDS, Writer, Written

BESIDE = [None, "deepseek_r1", "qwen3", "kimi_k2", "gemma4", "hunyuan_a13b", "granite", "mistral"]


def kind_of(calls: Calls) -> str:
    match calls:
        case JsonCalls():
            return "JSON array" if calls.array else "JSON object"
        case HeaderCalls():
            return "header"
        case TaggedCalls():
            return "key and value tags" if calls.value else "tag per parameter"
        case ElementCalls():
            return "elements"
        case PythonicCalls():
            return "pythonic"
        case QuotedMapCalls():
            return "quoted map"
        case Channels():
            return "channels"


Names = tuple[str | None, str | None]
KINDS: dict[str, list[Names]] = {"reasoning": [(tool, r) for r in REASONING for tool in (None, "hermes")]}
for tool, declarations in TOOLS.items():
    for declaration in declarations:
        beside = [None] if isinstance(declaration, Channels) else BESIDE
        KINDS.setdefault(kind_of(declaration), []).extend((tool, r) for r in beside)
KINDS["reasoning"] = [(None if r == "openai_gptoss" else tool, r) for tool, r in KINDS["reasoning"]]


@dataclass
class Output:
    names: Names
    by_id: bool
    written: Written
    whole_words: bool
    splits: int

    @property
    def form(self) -> Format:
        return known_format(*self.names, self.by_id)

    def context(self, use: ToolUse = ASKED) -> ChoiceContext:
        return self.form.context(use, self.form.ids(self.written.prompt))

    @property
    def ids(self) -> list[int]:
        return list(chain.from_iterable(self.form.ids(piece, self.whole_words) for piece in self.written.pieces))


@st.composite
def outputs(draw: st.DrawFn, kind: str) -> Output:
    names, by_id = draw(st.sampled_from(KINDS[kind])), draw(st.booleans())
    size, seed = draw(st.integers(0, 4)), draw(st.integers(0, 1 << 32))
    written = Writer(known_format(*names, by_id), seed, size).write()
    return Output(names, by_id, written, draw(st.booleans()), draw(st.integers(0, 1 << 32)))


@st.composite
def broken_outputs(draw: st.DrawFn, kind: str) -> Output:
    """A well-formed output with pieces lost, swapped, repeated, or cut; or pieces of anything in any order."""
    output = draw(outputs(kind))
    rng = random.Random(draw(st.integers(0, 1 << 32)))
    pieces = output.written.pieces
    if draw(st.booleans()):
        for _ in range(draw(st.integers(1, 4))):
            mutate(pieces, rng)
    else:
        form = output.form
        declared = [*([form.reasoning] if form.reasoning else []), *form.calls]
        declared_markers = [form.marks.encode(text) for d in declared for text in markers(d)]
        parts = [marker[: rng.randint(1, len(marker))] for marker in declared_markers if marker]
        pool = [
            *declared_markers,
            *declared_markers,
            *parts,
            *WORDS,
            *pieces,
            "set_lamp",
            "now",
            "name",
            '{"',
            '": ',
            '"room"',
            "(",
            ")",
        ]
        pieces[:] = rng.choices(pool, k=rng.randint(0, 25))
    return output


def mutate(pieces: list[str], rng: random.Random) -> None:
    if not pieces:
        return
    at, other = rng.randrange(len(pieces)), rng.randrange(len(pieces))
    match rng.randrange(5):
        case 0:
            del pieces[at]
        case 1:
            pieces[at], pieces[other] = pieces[other], pieces[at]
        case 2:
            pieces.insert(other, pieces[at])
        case 3:
            pieces[at] = pieces[at][: rng.randrange(len(pieces[at]) + 1)]
        case _:
            del pieces[at:]


@pytest.mark.parametrize("kind", KINDS)
@given(data=st.data())
def test_a_well_formed_output_means_what_its_writer_meant(kind: str, data: st.DataObject) -> None:
    output = data.draw(outputs(kind), label="output")
    meant = output.written.meant
    message = read(output.context(), output.ids, splits=random.Random(output.splits))
    assert (message.reasoning, message.content) == (meant.reasoning, meant.content)
    assert message.parsed_calls == meant.calls
    assert [call.id for call, native in zip(message.calls, meant.ids, strict=True) if native] == list(
        filter(None, meant.ids)
    )
    assert len({call.id for call in message.calls}) == len(message.calls)
    assert message.finish_reason == ("tool_calls" if meant.calls else "stop")
    assert message == read(output.context(), output.ids)


USES = [ASKED, ToolUse(tools=ASKED.tools), ToolUse(tools=ASKED.tools, asked=True, parallel=False)]
USES += [ToolUse(tools=ASKED.tools, asked=True, required=True)]
USES += [ToolUse(tools=ASKED.tools, asked=True, required=True, only="set_lamp")]


@pytest.mark.parametrize("kind", KINDS)
@given(data=st.data())
def test_whatever_an_output_is_its_pieces_read_as_the_whole(kind: str, data: st.DataObject) -> None:
    output = data.draw(broken_outputs(kind), label="output")
    context, ids = output.context(data.draw(st.sampled_from(USES))), output.ids
    finish = data.draw(st.sampled_from(["stop", "length"]))
    assert read(context, ids, finish, random.Random(output.splits)) == read(context, ids, finish)


ANYTHING = [None, True, False, 0, 1, -1, 3, 1 << 70, 0.5, "", "{", "set_lamp", "value", "body", "arguments", "after"]
ANYTHING += ["reasoning", "content", "call", [], {}, [0], ["", 0, ""], ["a"], [[]], [0, True, False, False, False]]


def hostile(state: Any, rng: random.Random) -> Any:
    """`state` with something in it replaced by something else, or lost."""
    if isinstance(state, (dict, list)) and state and rng.random() < 0.9:
        changed = state.copy()
        at = rng.choice([*changed]) if isinstance(changed, dict) else rng.randrange(len(changed))
        if rng.random() < 0.1:
            del changed[at]
        else:
            changed[at] = hostile(changed[at], rng)
        return changed
    return rng.choice(ANYTHING)


@pytest.mark.parametrize("kind", KINDS)
@given(data=st.data())
def test_a_state_that_nobody_dumped_is_refused_or_goes_on(kind: str, data: st.DataObject) -> None:
    output = data.draw(st.one_of(outputs(kind), broken_outputs(kind)), label="output")
    context, ids = output.context(), output.ids
    at = data.draw(st.integers(0, len(ids)))
    stream = ChoiceStream(context, "seed")
    stream.feed(ids[:at])
    rng = random.Random(data.draw(st.integers(0, 1 << 32)))
    state = json.loads(json.dumps(stream.dump()))
    for _ in range(rng.randint(1, 3)):
        state["markup"] = hostile(state["markup"], rng)
    data.draw(st.just(state), label="state")
    try:
        loaded = ChoiceStream.load(context, state, "seed")
    except ValueError:
        return
    loaded.feed(ids[at:], None, "stop")
