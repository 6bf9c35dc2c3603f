"""Calls with their name in a header and a JSON object after it, one after the other in an optional section.

The law: the header is everything before the first `{`, and has to be what the declaration says from its first
character on; so prose that mentions a marker is given back at once. Arguments are passed on as they were written.
"""

import re
from collections.abc import Sequence

from proxy.derender.codecs.base import LONGEST_HEADER, Between, Codec, MarkupLimits, Schemas, Sink, Step
from proxy.derender.codecs.json_text import JsonValue
from proxy.derender.markers import Literals, Marks
from proxy.formats.kinds import HOLE, HeaderCalls

_HOLES = {"name": r"(?P<name>[\w.:/-]+)", "id": r"(?P<id>[\w./:-]+)", "index": r"(?P<index>\d+)"}
_PARTIAL = {"name": r"[\w.:/-]*", "id": r"[\w./:-]*", "index": r"\d*"}


class HeaderSyntax:
    bare: frozenset[str] = frozenset()

    def __init__(self, declaration: HeaderCalls, marks: Marks) -> None:
        encode = marks.encode
        self.call = encode(declaration.call)
        self.sections = tuple(map(encode, declaration.section))
        self.openers = (*self.sections, self.call)
        section_ends = tuple(map(encode, declaration.section_end))
        call_end = encode(declaration.call_end)
        fence = declaration.fence[:3]
        self.between = Between(fence, call_end, *section_ends, *self.openers)
        self.ends_header = Literals([m for m in ("{", call_end, *section_ends) if m])
        templates = [encode(header) for header in declaration.header]
        fence_pattern = rf"(?:\s*{re.escape(declaration.fence)})?" if declaration.fence else ""
        self.headers = [re.compile(rf"\s*{_whole(t)}{fence_pattern}\s*") for t in templates]
        self.partial = re.compile("|".join(rf"\s*{_partial(t, declaration.fence)}" for t in templates))

    def codec(self, opener: str, schemas: Schemas, limits: MarkupLimits) -> "HeaderCodec":
        return HeaderCodec(self, "header" if opener == self.call else "section", limits)


def _whole(template: str) -> str:
    """A regular expression for a header; white space may stand around what is in a hole."""
    parts = HOLE.split(template)
    parts[::2] = map(re.escape, parts[::2])
    parts[1::2] = [rf"\s*{_HOLES[hole]}\s*" for hole in parts[1::2]]
    return "".join(parts)


def _partial(template: str, fence: str) -> str:
    """One for the beginning of a header, of any length."""
    parts = HOLE.split(template)
    pattern = _beginnings(list(fence)) if fence else ""
    pattern = rf"\s*{pattern}\s*"
    for number in range(len(parts) - 1, -1, -1):
        if number % 2:
            pattern = rf"\s*{_PARTIAL[parts[number]]}\s*{pattern}"
        else:
            pattern = _beginnings(list(parts[number]), pattern)
    return pattern


def _beginnings(characters: Sequence[str], rest: str = "") -> str:
    for character in reversed(characters):
        rest = f"(?:{re.escape(character)}{rest})?"
    return rest


class HeaderCodec(Codec):
    STATE = {"state": str, "value": JsonValue}  # noqa: RUF012

    def __init__(self, syntax: HeaderSyntax, state: str, limits: MarkupLimits) -> None:
        self._syntax, self._limits = syntax, limits
        self.state = state
        self.value = JsonValue()

    def read(self, text: str, at: int, last: bool, sink: Sink) -> tuple[int, Step]:
        match self.state:
            case "header":
                return self._header(text, at, last, sink)
            case "arguments":
                return self._arguments(text, at, sink)
        end, marker = self._syntax.between.next(text, at, last)
        if marker == "":
            return at, Step.WAIT
        if marker is None:
            return at, Step.FAILED if self.state == "section" else Step.DONE
        if marker == self._syntax.call:
            if not self._syntax.sections:  # the next call may be in another of the family's syntaxes
                return at, Step.DONE
            self.state = "header"
        elif marker in self._syntax.sections:
            self.state = "section"
        else:
            self.state = "after"
            return end, Step.DROP
        return end, Step.GO

    def _header(self, text: str, at: int, last: bool, sink: Sink) -> tuple[int, Step]:
        end, marker = self._syntax.ends_header.find(text, at, last)
        if not self._syntax.partial.fullmatch(text, at, end) or end - at > LONGEST_HEADER:
            return at, Step.FAILED
        if marker is None:
            return at, Step.WAIT
        match = next((m for header in self._syntax.headers if (m := header.fullmatch(text, at, end))), None)
        if match is None:
            return at, Step.FAILED
        found = match.groupdict()
        native_id = found.get("id")
        sink.begin(found.get("name") or _name_in(native_id or ""), native_id)
        self.state, self.value = "arguments", JsonValue()
        return end, Step.GO

    def _arguments(self, text: str, at: int, sink: Sink) -> tuple[int, Step]:
        if at == len(text):
            return at, Step.WAIT
        if not self.value.started and text[at] != "{":  # the header ended at a marker: there are none
            sink.arguments("{}")
            end, ended = at, True
        else:
            end, ended = self.value.read(text, at, self._limits.depth)
            sink.arguments(text[at:end])
        if not ended:
            return end, Step.WAIT
        sink.end()
        if self.value.depth > self._limits.depth:
            return end, Step.DONE
        self.state = "after"
        return end, Step.GO


def _name_in(native_id: str) -> str:
    """Of Kimi's `functions.get_tide:0`."""
    return re.sub(r":\d+$", "", native_id.strip()).removeprefix("functions.")
