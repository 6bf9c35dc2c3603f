"""Calls with a tag per parameter: XML-like ones, and pairs of a key's and a value's tag.

The law: a value that is a string streams while it is open; any other is held to its end and then typed, by the tool's
schema or by what the tag says. A missing closer ends with the next tag of the syntax. Text between parameters belongs
to nobody and is prose.
"""

import re
from html import unescape
from typing import Any

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
from proxy.derender.markers import Literals, Marks
from proxy.derender.schemas import STRING, json_or_string, typed
from proxy.formats.kinds import HOLE, TaggedCalls

_NAME = re.compile(r"[\w.:/-]+")
_BARE_NAME = re.compile(r"\s*[\w.:/-]*\s*")
_ATTRIBUTE = re.compile(r"""([\w:-]+)\s*=\s*("[^"]*"|'[^']*'|[^\s"']+)""")
_FIRST_ATTRIBUTE = re.compile(r"""\s+[\w:-]+="\{""")


class Tag:
    """A tag with holes. `prefix` begins it and `end` ends it; in between stand attributes, or the one hole's value."""

    __slots__ = ("attributes", "end", "hole", "prefix")

    def __init__(self, template: str) -> None:
        first = _FIRST_ATTRIBUTE.search(template)
        self.hole = ""
        self.attributes: dict[str, str] = {}
        if first:
            self.prefix = template[: first.start()]
            self.end = template[template.rindex('"') + 1 :]
            self.attributes = dict(re.findall(r'([\w:-]+)="\{(\w+)\}"', template))
        else:
            self.prefix, self.hole, self.end = HOLE.split(template)

    def read(self, inside: str) -> dict[str, str]:
        """What its holes hold; `inside` is the text between `prefix` and `end`."""
        if self.hole:
            return {self.hole: inside.strip()}
        found = {}
        for name, value in _ATTRIBUTE.findall(inside):
            if name in self.attributes:
                found[self.attributes[name]] = unescape(value[1:-1] if value[0] in "\"'" else value)
        return found


class TaggedSyntax:
    bare: frozenset[str] = frozenset()

    def __init__(self, declaration: TaggedCalls, marks: Marks) -> None:
        encode = marks.encode
        self.declaration, self.marks = declaration, marks
        self.call, self.parameter = Tag(encode(declaration.call)), Tag(encode(declaration.parameter))
        self.call_end, self.value = encode(declaration.call_end), encode(declaration.value)
        self.parameter_end = encode(declaration.parameter_end)
        self.sections = tuple(map(encode, declaration.section))
        self.section_ends = tuple(map(encode, declaration.section_end))
        self.openers = (*self.sections, self.call.prefix)
        structure = [m for m in (self.call_end, *self.section_ends, *self.openers) if m]
        self.outside = Between(*structure)
        self.inside = Between(self.parameter.prefix, *structure)
        self.next_tag = Literals([self.parameter.prefix, *structure])
        ends = [m for m in (self.call.end, "\n", self.parameter.prefix, *structure) if m]
        self.ends_call_tag = Literals(ends)
        self.ends_parameter_tag = Literals([self.parameter.end])
        closers = [self.parameter_end, self.parameter.prefix, *([self.call_end] if self.call_end else [])]
        framed = [f"\n{marker}" for marker in closers] if declaration.trim else []
        self.ends_value = Literals([*closers, *framed])

    def codec(self, opener: str, schemas: Schemas, limits: MarkupLimits) -> "TaggedCodec":
        return TaggedCodec(self, "lone tag" if opener == self.call.prefix else "section", schemas, limits)


class TaggedCodec(Codec):
    STATE = {  # noqa: RUF012
        "state": str,
        "name": str,
        "key": str,
        "count": int,
        "string": bool,
        "begun": bool,
        "held": list,
        "size": int,
        "wrapped": str,
    }

    def __init__(self, syntax: TaggedSyntax, state: str, schemas: Schemas, limits: MarkupLimits) -> None:
        self._syntax, self._schemas, self._limits = syntax, schemas, limits
        self.state = state
        self._next_call()

    def _next_call(self) -> None:
        self.name = self.key = self.wrapped = ""
        self.count = self.size = 0
        self.string = self.begun = False
        self.held: list[str] = []

    def load(self, state: Any, marks: Marks) -> None:
        super().load(state, marks)
        if self.wrapped and not self.held:
            raise ValueError("the state of a call holds wrapped arguments without their key")

    def read(self, text: str, at: int, last: bool, sink: Sink) -> tuple[int, Step]:
        while True:
            match self.state:
                case "section" | "after":
                    return self._outside(text, at, last)
                case "tag" | "lone tag":
                    return self._tag(text, at, last, sink)
                case "body":
                    at, step = self._body(text, at, last, sink)
                case "parameter":
                    at, step = self._parameter(text, at, last, sink)
                case "value tag":
                    at, step = self._value_tag(text, at, last)
                case _:
                    at, step = self._value(text, at, last, sink)
            if step is not None:
                return at, step

    def _outside(self, text: str, at: int, last: bool) -> tuple[int, Step]:
        syntax = self._syntax
        end, marker = syntax.outside.next(text, at, last)
        if marker == "":
            return at, Step.WAIT
        if marker is None:
            return at, Step.FAILED if self.state == "section" else Step.DONE
        if marker == syntax.call.prefix:
            self.state = "tag"
        elif marker in syntax.sections:
            self.state = "section"
        else:
            self.state = "after"
            return end, Step.DROP
        return end, Step.GO

    def _tag(self, text: str, at: int, last: bool, sink: Sink) -> tuple[int, Step]:
        """The rest of a call's tag. Where nothing ends the tag of its own, a marker or a new line does. Behind such a
        tag, and behind one that stands in no section, nothing but a marker may come: else it is prose about a tag."""
        syntax, tag = self._syntax, self._syntax.call
        bare = bool(tag.hole) and not tag.end
        end, marker = syntax.ends_call_tag.find(text, skip_space(text, at) if bare else at, last)
        inside = text[at:end]
        if len(inside) > LONGEST_HEADER or (bare and not _BARE_NAME.fullmatch(inside)):
            return at, Step.FAILED
        if marker is None:
            return at, Step.FAILED if last else Step.WAIT
        name = tag.read(inside).get("name", "")
        if not _NAME.fullmatch(name):
            return at, Step.FAILED
        if marker == tag.end:
            end += len(marker)
        if bare or self.state == "lone tag":
            _, following = syntax.inside.next(text, end, last)
            if following == "":
                return at, Step.WAIT
            is_call = following == syntax.parameter.prefix or not bare or self._schemas.declares(name)
            if following is None or not is_call:
                return at, Step.FAILED
        self.name, self.state = name, "body"
        sink.begin(name)
        return end, Step.GO

    def _body(self, text: str, at: int, last: bool, sink: Sink) -> tuple[int, Step | None]:
        syntax = self._syntax
        end, marker = syntax.inside.next(text, at, last)
        if marker == "":
            return at, Step.WAIT
        if marker is None:
            start = skip_space(text, at)
            end, _ = syntax.next_tag.find(text, start, last)
            if end > start:
                sink.prose(text[at:end])
            return (end, None) if end > at and end < len(text) else (end, Step.WAIT)
        if marker == syntax.parameter.prefix:
            self.state = "parameter"
            return end, None
        self._close(sink)
        if marker in syntax.openers:  # the closer is missing
            self.state = "after"
            return at, Step.GO
        self.state = "after"
        return end, Step.GO

    def _close(self, sink: Sink) -> None:
        if self.wrapped:
            sink.arguments(self.wrapped)
        else:
            sink.arguments("}" if self.count else "{}")
        sink.end()
        self._next_call()

    def _parameter(self, text: str, at: int, last: bool, sink: Sink) -> tuple[int, Step | None]:
        syntax = self._syntax
        end, marker = syntax.ends_parameter_tag.find(text, at, last)
        if end - at > LONGEST_HEADER or (marker is None and last):
            sink.end()
            return at, Step.DONE
        if marker is None:
            return at, Step.WAIT
        found = syntax.parameter.read(text[at:end])
        self.key = syntax.marks.text(found.get("key", ""))
        if syntax.declaration.types == "wire":
            self.string = found.get("string") == "true" or found.get("type") == "string"
        else:
            self.string = self._schemas.types(self.name, self.key) == STRING
        self.begun = False
        self.state = "value tag" if syntax.value else "value"
        if self.wrapped:  # it was not the only parameter
            wrapped, self.wrapped = self.wrapped, ""
            self._write_key(sink, self.held.pop())
            sink.arguments(wrapped)
        unwrap = self.key in syntax.declaration.unwraps and not self._schemas.knows(self.name, self.key)
        if self.string:
            self._write_key(sink, self.key)
            sink.arguments('"')
        elif not (unwrap and not self.count):
            self._write_key(sink, self.key)
        return end + len(marker), None

    def _write_key(self, sink: Sink, key: str) -> None:
        sink.arguments(f'{", " if self.count else "{"}"{quoted(key)}": ')
        self.count += 1

    def _value_tag(self, text: str, at: int, last: bool) -> tuple[int, Step | None]:
        """Where the value's own tag is missing, the value begins all the same."""
        start = skip_space(text, at)
        if start == len(text) and not last and start - at < LONGEST_HEADER:
            return at, Step.WAIT
        if text.startswith(self._syntax.value, start):
            start += len(self._syntax.value)
        elif self._syntax.value.startswith(text[start:]) and not last:
            return at, Step.WAIT
        self.state = "value"
        return start, None

    def _value(self, text: str, at: int, last: bool, sink: Sink) -> tuple[int, Step | None]:
        syntax = self._syntax
        if not self.begun:
            if at == len(text):
                return at, Step.WAIT
            self.begun = True
            if syntax.declaration.trim and text[at] == "\n":
                rest, closer = syntax.ends_value.find(text, at, last)
                if rest == at and closer is None and not last:  # it may be the newline before the closer
                    self.begun = False
                    return at, Step.WAIT
                if not (rest == at and closer):
                    at += 1
        end, closer = syntax.ends_value.find(text, at, last)
        piece = text[at:end]
        if self.string:
            if piece:
                sink.arguments(quoted(syntax.marks.text(piece)))
        elif self.size + len(piece) > self._limits.held:
            sink.end()
            return at + self._limits.held - self.size, Step.DONE
        elif piece:
            self.held.append(piece)
            self.size += len(piece)
        if closer is None:
            return end, Step.WAIT
        self._end_of_value(sink)
        self.state = "body"
        if closer.removeprefix("\n") != syntax.parameter_end:
            return end + closer.startswith("\n"), None
        return end + len(closer), None

    def _end_of_value(self, sink: Sink) -> None:
        if self.string:
            sink.arguments('"')
            return
        text = self._syntax.marks.text("".join(self.held))
        self.held, self.size = [], 0
        if self._syntax.declaration.types == "wire":
            value = json_or_string(text)
        else:
            value = typed(text, self._schemas.types(self.name, self.key))
        if self.count:
            sink.arguments(value)
        elif value.startswith("{"):
            self.wrapped, self.held = value, [self.key]
        else:
            self._write_key(sink, self.key)
            sink.arguments(value)

    def finish(self, sink: Sink, stopped: bool) -> None:
        if stopped and self.state == "body":
            self._close(sink)
