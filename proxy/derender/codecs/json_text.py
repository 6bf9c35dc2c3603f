"""JSON text that is passed on as it was written: where a value ends, and nothing more.

The law: only brackets and strings are looked at. What a model wrote wrongly between them reaches the client as it is.
"""

import re
from typing import Any

import orjson

_OUTSIDE = re.compile(r'["{}\[\]]')
_INSIDE = re.compile(r'["\\]')
_SCALAR_END = re.compile(r"[\s,}\]]")


class JsonValue:
    """The state of reading one value: nesting, and whether the position is inside a string, behind a backslash, or in
    a value without brackets or quotes. `started` is false until its first character came."""

    __slots__ = ("depth", "escaped", "in_string", "scalar", "started")

    def __init__(self) -> None:
        self.depth = 0
        self.started = self.in_string = self.escaped = self.scalar = False

    def read(self, text: str, at: int, deepest: int) -> tuple[int, bool]:
        """The end of what belongs to the value, and whether the value ends there, or nests deeper than `deepest`. The
        text at `at` must not be white space before the value."""
        end = len(text)
        if at == end:
            return at, False
        if not self.started:
            self.started = True
            self.scalar = text[at] not in '"{['
        if self.scalar:
            match = _SCALAR_END.search(text, at)
            return (match.start(), True) if match else (end, False)
        while at < end:
            if self.in_string:
                if self.escaped:
                    self.escaped = False
                    at += 1
                    continue
                match = _INSIDE.search(text, at)
                if match is None:
                    return end, False
                at = match.end()
                if match[0] == "\\":
                    self.escaped = True
                else:
                    self.in_string = False
                    if self.depth == 0:
                        return at, True
            else:
                match = _OUTSIDE.search(text, at)
                if match is None:
                    return end, False
                at = match.end()
                if match[0] == '"':
                    self.in_string = True
                elif match[0] in "{[":
                    self.depth += 1
                    if self.depth > deepest:
                        return at, True
                else:
                    self.depth -= 1
                    if self.depth <= 0:
                        return at, True
        return at, False

    def dump(self) -> Any:
        return [self.depth, self.started, self.in_string, self.escaped, self.scalar]

    @classmethod
    def load(cls, state: Any) -> "JsonValue":
        """Raises ValueError for what `dump` did not write."""
        if not isinstance(state, list) or [type(part) for part in state] != [int, bool, bool, bool, bool]:
            raise ValueError("the state of a JSON value is not as it was dumped")
        value = cls()
        value.depth, value.started, value.in_string, value.escaped, value.scalar = state
        if value.depth < 0:
            raise ValueError("the depth of a JSON value is negative")
        return value


_STRING = re.compile(r'"((?:[^"\\]|\\.)*)"', re.DOTALL)


def json_string(text: str, at: int, longest: int) -> tuple[int, str | None]:
    """The string that begins at `at`, decoded, and the position behind it. None and `at` where its end is not there
    yet; None and -1 where it is no string, or longer than `longest`."""
    if text[at] != '"':
        return -1, None
    match = _STRING.match(text, at)
    if match is None or match.end() - at > longest + 2:
        return (at, None) if match is None and len(text) - at <= longest + 2 else (-1, None)
    try:
        decoded = orjson.loads(match[0])
    except orjson.JSONDecodeError:
        decoded = match[1]
    return match.end(), decoded


def quoted(text: str) -> str:
    """`text` as the inside of a JSON string. Marks must be gone."""
    return orjson.dumps(text)[1:-1].decode()
