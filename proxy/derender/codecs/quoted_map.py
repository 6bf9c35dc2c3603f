"""Calls as maps with bare keys, whose strings stand between two equal markers: `call:f{room:<q>attic<q>,level:4}`.

The law: what stands between quotes is taken as it is, whatever it looks like, and streams where it can only be a
string. A bare value is held to its end; the tool's schema says what an argument is, and inside of lists and maps the
value says it itself.
"""

import re
from typing import Any, ClassVar

from proxy.derender.codecs.base import (
    LONGEST_HEADER,
    Between,
    Codec,
    MarkupLimits,
    Schemas,
    Sink,
    Step,
    skip_space,
)
from proxy.derender.codecs.json_text import quoted
from proxy.derender.codecs.scalar import literal
from proxy.derender.markers import Literals, Marks
from proxy.derender.schemas import STRING, typed
from proxy.formats.kinds import HOLE, QuotedMapCalls

_STATES = frozenset(
    ("name", "close", "first", "next", "colon", "value", "string", "held string", "bare", "after", "cut")
)
"""Where the reader is. Outside of a call: before its name, after its map. Inside: before the first part of a map or a
list or before a further one, behind a quoted key, before a value, in one, after a part. "cut": the output ended in a
part that says nothing."""

_CLOSERS = {"{": "}", "(": ")", "[": "]"}
_NAME = re.compile(r"[\w.-]+(?=[{(])")
_NAME_PREFIX = re.compile(r"[\w.-]*\Z")
_KEY = re.compile(r"([^,:{}()\[\]\r\n\ud800-\udfff]+):")
_KEY_PREFIX = re.compile(r"[^,:{}()\[\]\r\n\ud800-\udfff]*\Z")


class QuotedMapSyntax:
    bare: frozenset[str] = frozenset()

    def __init__(self, declaration: QuotedMapCalls, marks: Marks) -> None:
        self.openers = tuple(map(marks.encode, declaration.open))
        self.marks = marks
        self.types_quoted = declaration.quoted == "schema"
        closers = tuple(map(marks.encode, declaration.close))
        quote = marks.encode(declaration.quote)
        self.prefix = marks.encode(HOLE.split(declaration.call)[0])
        self.before_name = Literals([self.prefix] if self.prefix else [])
        self.after_map = Between(*closers)
        self.quote = Literals([quote])
        self.closers = Literals(closers)
        structure = (",", "[", "]", "{", "}", quote, *closers, *self.openers)
        self.ends_bare = {"{": Literals(structure), "(": Literals([*structure, ")"])}

    def codec(self, opener: str, schemas: Schemas, limits: MarkupLimits) -> "QuotedMapCodec":
        return QuotedMapCodec(self, schemas, limits)


class _Broken(Exception):
    """What stands here cannot go on the call."""


class QuotedMapCodec(Codec):
    STATE: ClassVar[dict[str, type]] = {
        "state": str,
        "stack": str,
        "name": str,
        "key": str,
        "held": list,
        "size": int,
    }

    def __init__(self, syntax: QuotedMapSyntax, schemas: Schemas, limits: MarkupLimits) -> None:
        self._syntax, self._schemas, self._limits = syntax, schemas, limits
        self._out: list[str] = []
        self.state = "name"
        self.stack = ""
        """What is open, outermost first: the arguments' own bracket, then maps and lists."""
        self.name = self.key = ""
        self.held: list[str] = []
        self.size = 0

    def load(self, state: Any, marks: Marks) -> None:
        super().load(state, marks)
        known = self.state in _STATES and set(self.stack) <= _CLOSERS.keys()
        if not known or (self.stack == "") != (self.state in ("name", "close")):
            raise ValueError("the state of a call in a map is none that a call can be in")

    def read(self, text: str, at: int, last: bool, sink: Sink) -> tuple[int, Step]:
        if self.state == "name":
            return self._head(text, at, last, sink)
        if self.state == "close":
            at, marker = self._syntax.after_map.next(text, at, last)
            return at, Step.WAIT if marker == "" else Step.DONE
        out = self._out = []
        step = Step.WAIT
        try:
            while self.stack:
                if self.state not in ("string", "held string", "bare"):
                    at = skip_space(text, at)
                if at == len(text):
                    break
                reached = self._part(text, at, last)
                if reached is None and not last:
                    break
                if reached is None:
                    reached, self.state = len(text), "cut"
                at = reached
            if last and self.state == "bare":
                self._cut_bare()
        except _Broken:
            step = Step.DONE
        if not self.stack:
            step, self.state = Step.GO, "close"
        if arguments := "".join(out):
            sink.arguments(arguments)
        if step is not Step.WAIT:
            sink.end()
        return at, step

    def _head(self, text: str, at: int, last: bool, sink: Sink) -> tuple[int, Step]:
        syntax = self._syntax
        start = skip_space(text, at)
        if start == len(text):
            return start, Step.FAILED if last else Step.WAIT
        prefix = syntax.before_name.at(text, start, last)
        if prefix == "":
            return start, Step.WAIT
        after = skip_space(text, start + len(prefix)) if prefix else start
        name = _NAME.match(text, after)
        if name is None or name.end() - start > LONGEST_HEADER:
            possible = len(text) - start <= LONGEST_HEADER and _NAME_PREFIX.match(text, after) and not last
            return start, Step.WAIT if possible and name is None else Step.FAILED
        self.name, self.stack, self.state = name[0], text[name.end()], "first"
        sink.begin(self.name)
        return name.end() + 1, Step.GO

    def _part(self, text: str, at: int, last: bool) -> int | None:
        """Reads one part of the arguments; gives the position behind it, None where its end is not there yet."""
        match self.state:
            case "string" | "held string":
                return self._string(text, at, last)
            case "bare":
                return self._bare(text, at, last)
        char = text[at]
        match self.state:
            case "colon":
                if char != ":":
                    raise _Broken
                self.state = "value"
                return at + 1
            case "value":
                return self._value(text, at, last, "")
            case "after" | "next" | "first" if char == _CLOSERS[self.stack[-1]]:
                return self._close(at + 1)
        if len(self.stack) == 1 and self.state in ("after", "next", "first"):
            closer = self._syntax.closers.at(text, at, last)
            if closer:
                # The map's own end is missing, and the call ends here all the same.
                return self._close(at)
            if closer == "":
                return None
        if self.state == "after":
            if char != ",":
                raise _Broken
            self.state = "next"
            return at + 1
        between = ", " if self.state == "next" else ""
        if self.stack[-1] == "[":
            return self._value(text, at, last, between)
        opening = "{" if len(self.stack) == 1 and not between else between
        return self._key(text, at, last, opening)

    def _close(self, at: int) -> int:
        top = self.stack[-1]
        opening = "{" if len(self.stack) == 1 and self.state == "first" else ""
        self._out.append(opening + ("]" if top == "[" else "}"))
        self.stack = self.stack[:-1]
        self.state = "after"
        return at

    def _key(self, text: str, at: int, last: bool, between: str) -> int | None:
        quote = self._syntax.quote.at(text, at, last)
        if quote == "":
            return None
        if quote:
            start = at + len(quote)
            near = text[start : start + LONGEST_HEADER]
            length, closing = self._syntax.quote.find(near, 0, last)
            if closing is None:
                if len(near) < LONGEST_HEADER:
                    return None
                raise _Broken
            key, end, state = near[:length], start + length + len(quote), "colon"
        else:
            bare = _KEY.match(text, at, at + LONGEST_HEADER)
            if bare is None:
                if len(text) - at < LONGEST_HEADER and _KEY_PREFIX.match(text, at):
                    return None
                raise _Broken
            key, end, state = bare[1].strip(), bare.end(), "value"
        if len(self.stack) == 1:
            self.key = key
        self._out.append(f'{between}"{quoted(self._syntax.marks.text(key))}": ')
        self.state = state
        return end

    def _value(self, text: str, at: int, last: bool, between: str) -> int | None:
        quote = self._syntax.quote.at(text, at, last)
        if quote == "":
            return None
        if quote:
            if self._syntax.types_quoted and self._types() != STRING:
                self.state = "held string"
            else:
                self._out.append(between + '"')
                self.state = "string"
            return at + len(quote)
        if text[at] in "[{":
            if len(self.stack) > self._limits.depth:
                raise _Broken
            self._out.append(between + text[at])
            self.stack += text[at]
            self.state = "first"
            return at + 1
        if text[at] in ",]})":
            raise _Broken
        self._out.append(between)
        self.state = "bare"
        return at

    def _types(self) -> frozenset[str]:
        """Of the value that is being read, as far as a schema says it: that of an argument itself."""
        marks = self._syntax.marks
        return self._schemas.types(self.name, marks.text(self.key)) if len(self.stack) == 1 else STRING

    def _string(self, text: str, at: int, last: bool) -> int | None:
        end, quote = self._syntax.quote.find(text, at, last)
        if self.state == "string":
            self._out.append(quoted(self._syntax.marks.text(text[at:end])))
        else:
            end, quote = self._hold(text, at, end, quote)
        if quote is None:
            return end if end > at else None
        self._out.append('"' if self.state == "string" else typed(self._take(), self._types()))
        self.state = "after"
        return end + len(quote)

    def _bare(self, text: str, at: int, last: bool) -> int | None:
        end, stop = self._syntax.ends_bare[self.stack[0]].find(text, at, last)
        end, stop = self._hold(text, at, end, stop)
        if stop is None:
            return end if end > at else None
        word = self._take().strip()
        self._out.append(self._bare_value(word) or f'"{quoted(word)}"')
        self.state = "after"
        return end

    def _bare_value(self, word: str) -> str | None:
        """None where it is only a string."""
        if len(self.stack) > 1:
            return literal(word)
        types = self._types()
        if types == STRING:
            return None
        return typed("null" if word == "None" and "null" in types else word, types)

    def _cut_bare(self) -> None:
        """The output ended in a bare value: a number may have been all of it, the start of a word says nothing."""
        word = self._take().strip()
        value = self._bare_value(word)
        if value is not None and value[0] != '"':
            self._out.append(value)
            self.state = "after"
        else:
            self.state = "cut"

    def _hold(self, text: str, at: int, end: int, marker: str | None) -> tuple[int, str | None]:
        """Keeps a stretch of a value, as far as there is room for."""
        room = self._limits.held - self.size
        if end - at > room:
            if room == 0:
                raise _Broken
            end, marker = at + room, None
        self.held.append(text[at:end])
        self.size += end - at
        return end, marker

    def _take(self) -> str:
        text = self._syntax.marks.text("".join(self.held))
        self.held, self.size = [], 0
        return text

    def finish(self, sink: Sink, stopped: bool) -> None:
        if stopped and len(self.stack) == 1 and self.state in ("first", "next", "after"):
            sink.arguments("{}" if self.state == "first" else "}")
