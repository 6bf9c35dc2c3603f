import functools
import json
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate, chain, pairwise
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from proxy.derender.choice import ChoiceContext, ChoiceStream, Delta
from proxy.derender.detokenizer import decoder_for
from proxy.derender.stop import StopRule
from proxy.derender.vocabulary import Vocabulary
from proxy.protocol.generate import TokenLogprob
from tests import tokenizers
from tests.derender.test_stop import first_match

KINDS = ["byte_level", "byte_fallback", "metaspace", "word_piece"]


@functools.cache
def vocabulary(kind: str = "byte_level") -> Vocabulary:
    return Vocabulary.of_tokenizer(getattr(tokenizers, kind)())


def bytes_as_ids(text: str) -> list[int]:
    """A text whose every byte is a token."""
    v = vocabulary()
    by_bytes = {v.bytes_of(token_id): token_id for token_id in range(v.size)}
    return [by_bytes[bytes([byte])] for byte in text.encode()]


def logprobs_of(ids: Sequence[int], start: int = 0) -> list[TokenLogprob]:
    return [{"token_id": token_id, "logprob": -float(start + at)} for at, token_id in enumerate(ids)]


@dataclass
class Event:
    """What an engine says at once."""

    ids: Sequence[int] = ()
    finish: str | None = None
    reason: int | str | None = None
    logprobs: list[TokenLogprob] | None = None


@dataclass
class Total:
    """All deltas together."""

    content: str = ""
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprob] = field(default_factory=list)
    offsets: list[int] = field(default_factory=list)
    finish: list[tuple[str, int | str | None]] = field(default_factory=list)
    tokens: int = 0

    def add(self, delta: Delta) -> None:
        self.content += delta.content
        self.token_ids += delta.token_ids
        self.logprobs += delta.logprobs or []
        self.offsets += delta.offsets or []
        if delta.finish_reason is not None:
            self.finish.append((delta.finish_reason, delta.stop_reason))
        assert len(delta.logprobs or ()) == len(delta.offsets or ())


def reloaded(context: ChoiceContext, stream: ChoiceStream) -> ChoiceStream:
    return ChoiceStream.load(context, json.loads(json.dumps(stream.dump())))


def run(context: ChoiceContext, events: Sequence[Event], reloads: Collection[int] = ()) -> tuple[Total, ChoiceStream]:
    """Everything that came out, and the stream; its state is written and read before the events at `reloads`."""
    stream, total = ChoiceStream(context), Total()
    for at, event in enumerate(events):
        if at in reloads:
            stream = reloaded(context, stream)
        total.add(stream.feed(event.ids, event.logprobs, event.finish, event.reason))
    total.tokens = stream.tokens
    return total, stream


def context(kind: str = "byte_level", stop: Sequence[str] = (), include: bool = False, **more: Any) -> ChoiceContext:
    rule = StopRule(stop, include) if stop else None
    return ChoiceContext(
        **{"vocabulary": vocabulary(kind), "prompt_token_ids": (), "stop": rule, "include_stop_str_in_output": include}
        | more
    )


@dataclass
class Output:
    """One output sequence of an engine, and a request that it answers."""

    context: ChoiceContext
    ids: list[int]
    finish: str | None
    reason: int | str | None
    with_logprobs: bool

    @property
    def may_finish_later(self) -> bool:
        """Whether the finish reason may come in an event of its own. A stop at an id that we do not know as an end
        token comes with that id."""
        known = bool(self.ids) and self.ids[-1] in self.context.end_token_ids
        return self.finish != "stop" or known or isinstance(self.reason, str)

    def events(self, cuts: Collection[int], finish_later: bool) -> list[Event]:
        edges = [0, *sorted(cut for cut in cuts if cut < len(self.ids)), len(self.ids)]
        events = [
            Event(self.ids[begin:end], logprobs=logprobs_of(self.ids[begin:end], begin) if self.with_logprobs else None)
            for begin, end in pairwise(edges)
        ]
        if finish_later and self.may_finish_later:
            events.append(Event())
        events[-1] = replace(events[-1], finish=self.finish, reason=self.reason)
        return events


some_or_all: st.SearchStrategy[Collection[int]] = st.one_of(st.sets(st.integers(0, 30)), st.just(range(1000)))


@st.composite
def outputs(draw: st.DrawFn) -> Output:
    kind = draw(st.sampled_from(KINDS))
    v = vocabulary(kind)
    eos, turn, think = (v.tokenizer.token_to_id(token) for token in (tokenizers.EOS, tokenizers.TURN, tokenizers.THINK))
    single = st.one_of(st.integers(0, v.size + 1), st.sampled_from([eos, turn, think])).map(lambda i: [i])
    text = st.one_of(st.sampled_from(["the tide", "灯台🌊", "\n\n", "a", "é"]), st.text("abe 🌊é", max_size=6))
    part = st.one_of(single, text.map(lambda t: v.tokenizer.encode(t).ids))
    ids: list[int] = list(chain.from_iterable(draw(st.lists(part, max_size=8))))
    whole = v.tokenizer.decode(ids, skip_special_tokens=False)
    places = st.tuples(st.integers(0, max(len(whole) - 1, 0)), st.integers(1, 4))
    found = places.map(lambda p: whole[p[0] : p[0] + p[1]] or "the")
    stops = draw(st.lists(st.one_of(found, st.sampled_from(["e", "tide", "\n\n", "\ufffd", " "])), max_size=3))
    stop_ids = frozenset(draw(st.sets(st.sampled_from([turn, *ids[-1:], think]), max_size=2)))
    include = draw(st.booleans())
    return Output(
        context(
            kind,
            stops,
            include,
            prompt_token_ids=draw(st.sampled_from([[], [turn], v.tokenizer.encode("The lamp").ids])),
            end_token_ids=stop_ids | draw(st.sampled_from([frozenset(), frozenset([eos])])),
            stop_token_ids=stop_ids,
            min_tokens=draw(st.sampled_from([0, 0, 1, 3, 30])),
            skip_special_tokens=draw(st.booleans()),
            spaces_between_special_tokens=draw(st.booleans()),
        ),
        ids,
        draw(st.sampled_from([None, "stop", "stop", "length", "abort"])),
        draw(st.sampled_from([None, None, eos, turn, "tide"])),
        draw(st.booleans()),
    )


@settings(deadline=None, max_examples=400)
@given(outputs(), some_or_all, st.booleans(), some_or_all)
def test_neither_grouping_nor_reloading_changes_a_choice(
    output: Output, cuts: Collection[int], finish_later: bool, reloads: Collection[int]
) -> None:
    at_once, whole = run(output.context, output.events([], finish_later=False))
    in_parts, stream = run(output.context, output.events(cuts, finish_later), reloads)
    assert in_parts == at_once
    assert stream.finish_reason == whole.finish_reason
    if whole.finish_reason is None:
        assert stream.dump() == whole.dump()


@settings(deadline=None, max_examples=400)
@given(outputs())
def test_a_choice_is_the_text_of_its_ids_up_to_the_first_stop(output: Output) -> None:
    c, ids = output.context, output.ids
    ended_by_id = output.finish == "stop" and ids[-1:] != [] and ids[-1] in c.end_token_ids
    is_pending = output.finish is None and ids[-1:] != [] and ids[-1] in c.end_token_ids
    hidden = is_pending or (ended_by_id and not c.include_stop_str_in_output)
    decoder = decoder_for(
        c.vocabulary,
        c.prompt_token_ids,
        skip_special_tokens=c.skip_special_tokens,
        spaces_between_special_tokens=c.spaces_between_special_tokens,
    )
    pieces = [decoder.feed(i) for i in (ids[:-1] if hidden else ids)] + [""] * hidden
    text = "".join(pieces) + (decoder.flush() if output.finish else "")
    unarmed = "".join(pieces[: c.min_tokens]) if c.min_tokens < len(pieces) or not c.min_tokens else text
    match = first_match(text, list(c.stop.strings), begin=len(unarmed)) if c.stop else None
    total, stream = run(c, output.events([], finish_later=False))

    tokens = len(ids)
    if match is not None:
        end, stop = match
        tokens = next((n for n, got in enumerate(accumulate(map(len, pieces)), 1) if got >= end), len(ids))
        assert total.content == text[: end if c.include_stop_str_in_output else end - len(stop)]
        assert total.finish == [("stop", stop)]
    elif output.finish is not None:
        assert total.content == text
        reason = ids[-1] if output.finish == "stop" and output.reason is None and ids else output.reason
        shown = reason if reason == "tide" or reason in c.stop_token_ids else None
        assert total.finish == [(output.finish, shown)]
    else:
        assert text.startswith(total.content)
        assert total.finish == []
    assert (total.tokens, total.token_ids) == (tokens, ids[:tokens])
    assert stream.finish_reason == (total.finish[0][0] if total.finish else None)
    if output.with_logprobs:
        assert total.logprobs == logprobs_of(ids[:tokens])
        assert total.offsets == [0, *accumulate(map(len, pieces))][:tokens]


EOS, TURN = (vocabulary().tokenizer.token_to_id(token) for token in (tokenizers.EOS, tokenizers.TURN))
TIDE, COMPASS = bytes_as_ids("tide"), bytes_as_ids("🧭")
ENDS = {"end_token_ids": frozenset([EOS])}
STOPS_AT_TURN = {"end_token_ids": frozenset([EOS, TURN]), "stop_token_ids": frozenset([TURN])}
SHOW_SPECIAL = {"skip_special_tokens": False}


@pytest.mark.parametrize(
    ("asked", "events", "content", "finish", "tokens"),
    [
        pytest.param(ENDS, [Event([*TIDE, EOS], "stop")], "tide", ("stop", None), 5, id="EOS and stop at once"),
        pytest.param(ENDS, [Event([*TIDE, EOS]), Event((), "stop")], "tide", ("stop", None), 5, id="EOS, then stop"),
        pytest.param(
            ENDS | SHOW_SPECIAL,
            [Event([EOS]), Event((), "stop", EOS)],
            "",
            ("stop", None),
            1,
            id="the id of EOS is no stop reason",
        ),
        pytest.param(
            ENDS | SHOW_SPECIAL,
            [Event([EOS]), Event(TIDE), Event((), "length")],
            "</s>tide",
            ("length", None),
            5,
            id="an EOS that ended nothing is text",
        ),
        pytest.param(
            ENDS | SHOW_SPECIAL,
            [Event([*TIDE, EOS]), Event((), "length")],
            "tide</s>",
            ("length", None),
            5,
            id="as is one at which the length ran out",
        ),
        pytest.param(
            SHOW_SPECIAL,
            [Event([EOS, *TIDE, EOS], "length")],
            "</s>tide</s>",
            ("length", None),
            6,
            id="ignore_eos makes EOS text",
        ),
        pytest.param(
            STOPS_AT_TURN,
            [Event([*TIDE, TURN], "stop", TURN)],
            "tide",
            ("stop", TURN),
            5,
            id="a stop token of the request is the stop reason",
        ),
        pytest.param(
            STOPS_AT_TURN | {"include": True} | SHOW_SPECIAL,
            [Event([*TIDE, TURN], "stop", TURN)],
            "tide<|turn|>",
            ("stop", TURN),
            5,
            id="and is shown where asked for",
        ),
        pytest.param(
            STOPS_AT_TURN | {"include": True} | SHOW_SPECIAL,
            [Event([*TIDE, TURN]), Event((), "stop", TURN)],
            "tide<|turn|>",
            ("stop", TURN),
            5,
            id="also when it came earlier",
        ),
        pytest.param({"stop": ["de"]}, [Event(TIDE), Event((), "length")], "ti", ("stop", "de"), 4, id="a stop string"),
        pytest.param(
            {"stop": ["de"], "include": True},
            [Event(bytes_as_ids("the tide turns"), "stop")],
            "the tide",
            ("stop", "de"),
            8,
            id="a stop string is shown where asked for, and nothing behind it",
        ),
        pytest.param(
            {"stop": ["tide"], "min_tokens": 4},
            [Event(TIDE + TIDE, "length")],
            "tide",
            ("stop", "tide"),
            8,
            id="no stop before min_tokens",
        ),
        pytest.param(
            {"stop": ["tide"], "min_tokens": 8},
            [Event(TIDE + TIDE, "length")],
            "tidetide",
            ("length", None),
            8,
            id="nor at the last of them",
        ),
        pytest.param(
            {"stop": ["detid"], "min_tokens": 4},
            [Event(TIDE + TIDE, "length")],
            "ti",
            ("stop", "detid"),
            7,
            id="a stop string may begin in them",
        ),
        pytest.param(
            {"stop": ["tides"]},
            [Event(TIDE), Event((), "length")],
            "tide",
            ("length", None),
            4,
            id="what is held for a stop string is shown at the end",
        ),
        pytest.param({}, [Event(TIDE + COMPASS[:-1], "length")], "tide\ufffd", ("length", None), 7, id="cut off"),
        pytest.param(
            {},
            [Event(TIDE + COMPASS[:-1]), Event((), "abort")],
            "tide\ufffd",
            ("abort", None),
            7,
            id="cut off by an abort without ids",
        ),
        pytest.param(
            {"stop": ["\ufffd"]},
            [Event(TIDE + COMPASS[:-1], "length")],
            "tide",
            ("stop", "\ufffd"),
            7,
            id="a stop string in what the end shows",
        ),
        pytest.param(
            ENDS | SHOW_SPECIAL | {"stop": ["</s>"], "min_tokens": 1},
            [Event([EOS]), Event(TIDE, "length")],
            "</s>tide",
            ("length", None),
            5,
            id="the late text of an EOS is as unarmed as its token",
        ),
        pytest.param(
            ENDS | SHOW_SPECIAL | {"stop": ["t"], "min_tokens": 2},
            [Event([EOS]), Event(TIDE, "length")],
            "</s>tide",
            ("length", None),
            5,
            id="and moves the text of the others",
        ),
        pytest.param(
            ENDS | SHOW_SPECIAL | {"stop": ["i"]},
            [Event([EOS]), Event(TIDE, "length")],
            "</s>t",
            ("stop", "i"),
            3,
            id="also where tokens are counted",
        ),
        pytest.param({}, [Event((), "abort")], "", ("abort", None), 0, id="nothing"),
        pytest.param(
            {},
            [Event(TIDE, "length"), Event(bytes_as_ids("lamp"), "stop")],
            "tide",
            ("length", None),
            4,
            id="nothing comes after the end",
        ),
        pytest.param(
            {},
            [Event(TIDE, "stop", "e")],
            "tide",
            ("stop", "e"),
            4,
            id="an engine's own stop string",
        ),
    ],
)
def test_how_a_choice_ends(
    asked: dict[str, Any], events: list[Event], content: str, finish: tuple[str, Any], tokens: int
) -> None:
    total, stream = run(context(**asked), events)
    assert (total.content, total.finish, total.tokens) == (content, [finish], tokens)
    assert stream.finish_reason == finish[0]


def test_an_end_token_waits_for_what_follows() -> None:
    stream = ChoiceStream(context(**ENDS, **SHOW_SPECIAL))
    assert stream.feed([*TIDE, EOS]).content == "tide"
    assert stream.feed([EOS]).content == "</s>"
    assert stream.feed(bytes_as_ids("lamp")).content == "</s>lamp"


def test_tokens_are_counted_up_to_the_one_that_completed_the_stop_string() -> None:
    lamp = bytes_as_ids("lamp on")
    stream = ChoiceStream(context(stop=["mp"]))
    first = stream.feed(lamp[:3], logprobs_of(lamp[:3]))
    assert (first.content, first.token_ids, first.offsets) == ("la", lamp[:3], [0, 1, 2])
    last = stream.feed(lamp[3:], logprobs_of(lamp[3:], 3), "length")
    assert (last.content, last.token_ids, last.offsets) == ("", lamp[3:4], [3])
    assert last.logprobs == logprobs_of(lamp[3:4], 3)
    assert (last.finish_reason, last.stop_reason, stream.tokens) == ("stop", "mp", 4)


def test_offsets_count_characters_also_where_they_span_tokens() -> None:
    ids = bytes_as_ids("a🧭é!")
    total, _ = run(context(), [Event(ids, "length", None, logprobs_of(ids))])
    assert total.content == "a🧭é!"
    assert total.offsets == [0, 1, 1, 1, 1, 2, 2, 3]


@pytest.mark.parametrize("kind", KINDS)
def test_the_state_is_of_the_same_size_after_any_number_of_tokens(kind: str) -> None:
    v = vocabulary(kind)
    stream = ChoiceStream(context(kind, ["the tide comes"], end_token_ids=frozenset(range(0, v.size, 7))))
    for number in range(5000):
        stream.feed([number * 31 % v.size])
        if number % 97 == 0:
            stream = reloaded(stream._context, stream)
    assert stream.tokens == 5000
    assert len(json.dumps(stream.dump())) < 250


def test_the_state_says_which_version_it_is() -> None:
    assert ChoiceStream(context()).dump() == {
        "v": 2,
        "decoder": ["", 0, False],
        "markup": None,
        "held": "",
        "end": None,
        "chars": 0,
        "tokens": 0,
        "finish": None,
    }
