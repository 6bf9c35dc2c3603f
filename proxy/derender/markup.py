"""The markup machine: sorts an output's text into reasoning, content and tool calls.

The law: the result does not depend on how the text was cut into pieces. Text is read once; what is held back is a real
prefix of a marker, white space that may be the template's, or markup that is not known to be a call yet. Markup that
never becomes a call is given back as the text that it is. What a format looks like is in `proxy.formats`, how its calls
are read in `codecs/`; here is only where one thing ends and the next begins.

White space that stands before a call or after one, and nowhere else, belongs to the template and is dropped.
"""

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from proxy.derender.codecs.base import LONGEST_SPACE, Codec, MarkupLimits, Schemas, Step, Syntax, skip_space
from proxy.derender.markers import Literals, Marks, Quiet
from proxy.formats.kinds import Reasoning

REMEMBERED_IDS = 64
_BASE62 = "0123456789ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz"


@dataclass(slots=True)
class CallPieces:
    """One call's share of a `Found`: `id` and `name` where it begins here."""

    index: int
    id: str | None = None
    name: str | None = None
    arguments: list[str] = field(default_factory=list)


@dataclass(slots=True)
class Found:
    """What some text was sorted into, in pieces. `content` is drained by whoever looks for stop strings in it."""

    content: list[str] = field(default_factory=list)
    reasoning: list[str] = field(default_factory=list)
    calls: list[CallPieces] = field(default_factory=list)


class Reader(Protocol):
    """What `ChoiceStream` knows of a markup machine. `place` is what the text is at: "reasoning", "content", "call" or
    "header". `quiet` is None, or tells of which texts nothing needs to be
    known but that they are text: they go to the reasoning where `in_reasoning`, to the content otherwise."""

    place: str
    in_reasoning: bool
    quiet: Quiet | None

    @property
    def called(self) -> bool:
        """Whether a call was shown."""

    def feed(self, text: str, found: Found) -> None:
        """The next text, with marks."""

    def finish(self, found: Found, stopped: bool) -> None:
        """No more text will come; `stopped`: the model ended by itself and was not cut."""

    def dump(self) -> Any: ...
    def load(self, state: Any) -> None: ...


@dataclass(frozen=True, slots=True)
class CallPolicy:
    """What the request wants of calls. `shown` false: they are read and dropped; `only_first`: all but the first are;
    `text` false: what stands beside them is dropped."""

    shown: bool = True
    only_first: bool = False
    nine_ids: bool = False
    text: bool = True


class CallSink:
    """Where codecs put calls: numbers them, gives them ids, keeps their pieces in the current `Found`.

    Ids are made from a seed and the call's number, so that reading the same output again gives the same ids.
    """

    def __init__(self, marks: Marks, policy: CallPolicy, seed: str) -> None:
        self._marks, self._policy, self._seed = marks, policy, seed
        self.active = False
        self.count = 0
        self._shown = False
        self._native: list[str] = []
        self.found = Found()

    @property
    def called(self) -> bool:
        return self.count > 0 and self._policy.shown

    @property
    def shows_text(self) -> bool:
        return self._policy.text

    def begin(self, name: str, native_id: str | None = None) -> None:
        self.active = True
        self._shown = self._policy.shown and not (self._policy.only_first and self.count)
        if self._shown:
            self.found.calls.append(CallPieces(self.count, self._id(native_id), self._marks.text(name)))
        self.count += 1

    def _id(self, native_id: str | None) -> str:
        if native_id and native_id not in self._native:
            self._native = [*self._native[1 - REMEMBERED_IDS :], native_id]
            return native_id
        digest = hashlib.sha256(f"{self._seed}/{self.count}".encode()).digest()
        if not self._policy.nine_ids:
            return f"call_{digest.hex()[:24]}"
        return "".join(_BASE62[byte % 62] for byte in digest[:9])

    def arguments(self, text: str) -> None:
        if not self._shown or not text:
            return
        calls = self.found.calls
        if not calls:
            calls.append(CallPieces(self.count - 1))
        calls[-1].arguments.append(self._marks.text(text))

    def end(self) -> None:
        self.active = False

    def prose(self, text: str) -> None:
        if self._policy.text:
            self.found.content.append(self._marks.text(text))

    def dump(self) -> Any:
        return [self.count, self.active, self._shown, self._native]

    def load(self, state: Any) -> None:
        fits = isinstance(state, list) and [type(part) for part in state] == [int, bool, bool, list]
        if not fits or state[0] < 0 or not all(isinstance(native, str) for native in state[3]):
            raise ValueError("the state of the calls is not as it was dumped")
        self.count, self.active, self._shown, self._native = state


class MarkupRules:
    """A pair of formats for one vocabulary: compiled once, constant. `reads_calls` false: calls stay text, but their
    openers end the reasoning as ever."""

    def __init__(
        self, reasoning: Reasoning | None, syntaxes: Sequence[Syntax], marks: Marks, reads_calls: bool = True
    ) -> None:
        self.marks, self.reads_calls = marks, reads_calls
        self.syntaxes = tuple(syntaxes)
        openers = [opener for syntax in syntaxes for opener in syntax.openers]
        self.by_opener = {o: tuple(n for n, s in enumerate(self.syntaxes) if o in s.openers) for o in openers}
        self.bare = tuple(number for number, syntax in enumerate(self.syntaxes) if syntax.bare) if reads_calls else ()
        self.bare_firsts = frozenset().union(*(self.syntaxes[number].bare for number in self.bare))
        encode = marks.encode
        self.trim = reasoning.trim if reasoning else ""
        self.open = frozenset(map(encode, reasoning.open)) if reasoning else frozenset()
        self.close = frozenset(map(encode, reasoning.close)) if reasoning else frozenset()
        ends = map(encode, reasoning.ends) if reasoning else ()
        self.dropped = frozenset(map(encode, reasoning.dropped)) if reasoning else frozenset()
        ended_by = openers if reasoning and reasoning.ended_by_calls else []
        self.in_content = Literals([*(openers if reads_calls else ()), *self.open, *self.close, *self.dropped])
        self.in_reasoning = Literals([*ended_by, *self.open, *self.close, *ends])
        firsts_of_content = self.in_content.firsts.union(marks.by_id.values())
        firsts_of_reasoning = self.in_reasoning.firsts.union(marks.by_id.values())
        self.quiet_content = Quiet(firsts_of_content.isdisjoint)
        self.quiet_reasoning = Quiet(
            lambda text: firsts_of_reasoning.isdisjoint(text) and not (self.trim and text[-1:].isspace())
        )


class Markup:
    """The state of one choice. `place` is "reasoning", "content" or "call"; `fresh` means that nothing but white space
    stands since the content began or the last call ended."""

    __slots__ = (
        "_back",
        "_candidates",
        "_codec",
        "_held",
        "_limits",
        "_opener",
        "_raw",
        "_rules",
        "_schemas",
        "_sink",
        "_space",
        "_thought",
        "fresh",
        "in_reasoning",
        "place",
        "quiet",
    )

    def __init__(
        self, rules: MarkupRules, sink: CallSink, schemas: Schemas, limits: MarkupLimits, *, inside: bool
    ) -> None:
        self._rules, self._sink, self._schemas, self._limits = rules, sink, schemas, limits
        self.place = self._back = "reasoning" if inside else "content"
        self.fresh = True
        self._thought = False
        self._held = self._space = ""
        self._raw: list[str] = []
        self._opener = ""
        self._candidates: tuple[int, ...] = ()
        self._codec: Codec | None = None
        self.quiet: Quiet | None = None
        self._settle()

    @property
    def called(self) -> bool:
        return self._sink.called

    def _settle(self) -> None:
        """After a text was read: what the fast way of the next one is."""
        self.in_reasoning = self.place == "reasoning" or (self.place == "call" and self._back == "reasoning")
        idle = not (self._held or self._space)
        if self.place == "reasoning" and idle and self._thought:
            self.quiet = self._rules.quiet_reasoning
        elif self.place == "content" and idle and not self.fresh and self._sink.shows_text:
            self.quiet = self._rules.quiet_content
        else:
            self.quiet = None

    def feed(self, text: str, found: Found) -> None:
        self._sink.found = found
        self._read(self._held + text, False, found)
        self._settle()

    def finish(self, found: Found, stopped: bool) -> None:
        self._sink.found = found
        if self.place != "call" or stopped:
            self._read(self._held, True, found)
        elif self._sink.active:  # what cannot be read of a call that was cut is no content
            text, at, more, shown = self._held, 0, True, len(found.content)
            while more and self.place == "call":
                text, at, more = self._call(text, at, True, found)
            del found.content[shown:]
        if self.place == "call":
            assert self._codec is not None
            if self._sink.active:
                self._codec.finish(self._sink, stopped)
                self._sink.end()
            elif stopped:
                self._give_back("".join(self._raw) + self._held, found)
        if self.place == "content" and not self._sink.count:
            self._show("")
        self._held = ""
        self._settle()

    def _read(self, text: str, last: bool, found: Found) -> None:
        at, more = 0, True
        while more:
            if self.place == "content":
                at, more = self._content(text, at, last)
            elif self.place == "reasoning":
                at, more = self._reasoning(text, at, last, found)
            else:
                text, at, more = self._call(text, at, last, found)
        self._held = text[at:]

    def _content(self, text: str, at: int, last: bool) -> tuple[int, bool]:
        rules = self._rules
        start, marker = rules.in_content.find(text, at, last)
        if self.fresh:
            end = skip_space(text, at)
            is_bare = end < len(text) and text[end] in rules.bare_firsts and start != end
            end = end if is_bare else min(end, start)  # a marker may begin with white space
            self._space += text[at:end]
            at = end
            if len(self._space) > LONGEST_SPACE:
                self._show("")
            if is_bare:
                numbers = tuple(n for n in rules.bare if text[at] in rules.syntaxes[n].bare)
                self._attempt("", numbers)
                return at, True
        if start > at:
            self._show(text[at:start])
        if marker is None:
            return start, False
        end = start + len(marker)
        if marker in rules.by_opener:
            self._attempt(marker, rules.by_opener[marker])
        elif marker in rules.open and marker not in rules.close:
            if self.fresh:
                self._space, self._thought, self.place = "", False, "reasoning"
            else:
                self._show(marker)
        return end, True

    def _reasoning(self, text: str, at: int, last: bool, found: Found) -> tuple[int, bool]:
        rules = self._rules
        start, marker = rules.in_reasoning.find(text, at, last)
        if start > at:
            self._think(text[at:start], found)
        if marker is None:
            return start, False
        end = start + len(marker)
        if marker in rules.close:
            self._end_reasoning()
        elif marker in rules.open:
            if self._thought:
                self._think(marker, found)
        elif marker in rules.by_opener and rules.reads_calls:
            self._attempt(marker, rules.by_opener[marker])
        else:
            self._end_reasoning()
            if marker not in rules.by_opener:
                return start, True
            self._show(marker)
        return end, True

    def _end_reasoning(self) -> None:
        self.place, self.fresh, self._space = "content", True, ""

    def _attempt(self, opener: str, numbers: tuple[int, ...]) -> None:
        """Begins to read calls, in the first of the syntaxes that begin so."""
        self._back, self.place = self.place, "call"
        self._opener, self._candidates, self._raw = opener, numbers, [opener] if opener else []
        self._codec = self._new_codec()

    def _new_codec(self) -> Codec:
        return self._rules.syntaxes[self._candidates[0]].codec(self._opener, self._schemas, self._limits)

    def _call(self, text: str, at: int, last: bool, found: Found) -> tuple[str, int, bool]:
        assert self._codec is not None
        was_active = self._sink.active
        count = self._sink.count
        end, step = self._codec.read(text, at, last, self._sink)
        if was_active or self._sink.active or step is Step.DROP:
            self._raw = []
        else:
            self._raw.append(text[at:end])
        if self._sink.count > count:  # now it is a call, and ends the reasoning
            self._back, self._space, self._candidates = "content", "", self._candidates[:1]
        if step is Step.WAIT:
            return text, end, False
        if step is Step.FAILED and len(self._candidates) > 1:
            self._candidates = self._candidates[1:]
            self._codec = self._new_codec()
            text = "".join(self._raw)[len(self._opener) :] + text[end:]
            self._raw = [self._opener] if self._opener else []
            return text, 0, True
        if step is Step.DONE or step is Step.FAILED:
            back = self._back
            self.place, self.fresh, self._codec = back, self.fresh if back == "reasoning" else True, None
            raw, self._raw = "".join(self._raw), []
            if step is Step.FAILED and not self._opener and raw[:1] in self._rules.bare_firsts:
                self._show(raw[0])  # the white space behind it may begin a marker
                return raw[1:] + text[end:], 0, True
            if step is Step.FAILED:
                self._give_back(raw, found)
        return text, end, True

    def _give_back(self, text: str, found: Found) -> None:
        """What turned out to be no call goes where it stands."""
        self.place = self._back
        if self.place == "reasoning":
            self._think(text, found)
        elif text.isspace():
            self._space += text
        elif text:
            self._show(text)

    def _show(self, text: str) -> None:
        text = self._space + text
        self._space, self.fresh = "", False
        if text:
            self._sink.prose(text)

    def _think(self, text: str, found: Found) -> None:
        trim = self._rules.trim
        if trim:
            text = self._space + text
            if trim == "both" and not self._thought:
                text = text.lstrip()
            end = len(text.rstrip())
            text, self._space = text[:end], text[end:]
            if len(self._space) > LONGEST_SPACE:
                text, self._space = text + self._space, ""
        if text:
            self._thought = self._thought or not text.isspace()
            found.reasoning.append(self._rules.marks.text(text))

    def dump(self) -> Any:
        marks, codec = self._rules.marks, self._codec
        state: dict[str, Any] = {"place": self.place, "sink": self._sink.dump()}
        for name, value in (("held", self._held), ("space", self._space)):
            if value:
                state[name] = marks.dump(value)
        state["fresh"], state["thought"] = self.fresh, self._thought
        if codec is not None:
            state["back"], state["candidates"] = self._back, list(self._candidates)
            state["opener"], state["raw"] = marks.dump(self._opener), marks.dump("".join(self._raw))
            state["codec"] = codec.dump(marks)
        return state

    def load(self, state: Any) -> None:
        """Raises ValueError for what `dump` did not write."""
        if not isinstance(state, Mapping) or state.get("place") not in ("reasoning", "content", "call"):
            raise ValueError("the state of the markup is not as it was dumped")
        marks = self._rules.marks
        self.place = state["place"]
        self._sink.load(state.get("sink"))
        self._held, self._space = marks.load(state.get("held", "")), marks.load(state.get("space", ""))
        self.fresh, self._thought = state.get("fresh") is True, state.get("thought") is True
        if self.place == "call":
            self._load_call(state, marks)
        self._settle()

    def _load_call(self, state: Mapping[str, Any], marks: Marks) -> None:
        candidates = state.get("candidates")
        known = range(len(self._rules.syntaxes))
        if state.get("back") not in ("reasoning", "content") or not isinstance(candidates, list) or not candidates:
            raise ValueError("the state of a call is not as it was dumped")
        if not all(type(number) is int and number in known for number in candidates):
            raise ValueError("the state of a call names a syntax that there is not")
        self._back, self._candidates = state["back"], tuple(candidates)
        self._opener, self._raw = marks.load(state.get("opener")), [marks.load(state.get("raw"))]
        if self._opener and self._opener not in self._rules.syntaxes[candidates[0]].openers:
            raise ValueError("the state of a call names an opener that there is not")
        self._codec = self._new_codec()
        self._codec.load(state.get("codec"), marks)
