"""What all codecs share: how they are called, where calls go, how their state is kept.

The law: a codec reads a text from a position on and says how far it came. It never looks at text that it has read
before, and it reads the same whatever the pieces are: where the end of the text leaves a doubt, it waits. Its state is
the fields named in `STATE`, plain values that become JSON. No recursion on the depth of what it reads.
"""

import re
from abc import ABC, abstractmethod
from collections.abc import Mapping
from enum import Enum
from typing import Any, ClassVar, Protocol

from proxy.derender.codecs.json_text import JsonValue
from proxy.derender.markers import Literals, Marks

SPACE = re.compile(r"[ \t\r\n]*")
LONGEST_HEADER = 512
"""Characters of a name, a key, or a tag with its attributes; what is longer is not markup."""
LONGEST_SPACE = 1024
"""White space in a row that can still be the template's, between two markers."""


class Step(Enum):
    """Why a codec returned. WAIT: it needs more text. GO: it made progress at a place where the caller keeps books, and
    wants to go on. DROP: the same, and what it read closes what was before. DONE: the region of calls ended. FAILED:
    what was read since the last call, if any, is no call."""

    WAIT = 0
    GO = 1
    DROP = 2
    DONE = 3
    FAILED = 4


class Sink(Protocol):
    """Where calls go. `active`: a call has begun and not ended. Marks may stand in every text."""

    active: bool

    def begin(self, name: str, native_id: str | None = None) -> None: ...
    def arguments(self, text: str) -> None:
        """JSON, the next piece of it."""

    def end(self) -> None: ...
    def prose(self, text: str) -> None:
        """What stands inside a call and does not belong to it."""


class Schemas(Protocol):
    """What the request's tools say of their parameters."""

    def types(self, function: str, key: str) -> frozenset[str]: ...
    def declares(self, function: str) -> bool: ...
    def knows(self, function: str, key: str) -> bool: ...
    def parameter(self, function: str, key: str) -> Mapping[str, Any] | None: ...


class Syntax(Protocol):
    """A tool syntax for one vocabulary: compiled once, constant. `openers` are the markers that begin it, none where it
    begins the answer itself with one of `bare`, a set of characters."""

    openers: tuple[str, ...]
    bare: frozenset[str]

    def codec(self, opener: str, schemas: Schemas, limits: "MarkupLimits") -> "Codec":
        """A reader for what follows `opener`."""


class MarkupLimits:
    """How deep arguments may nest, and how many characters may be held until something is known of them."""

    __slots__ = ("depth", "held")

    def __init__(self, depth: int = 128, held: int = 1 << 20) -> None:
        self.depth, self.held = depth, held


class Codec(ABC):
    STATE: ClassVar[dict[str, type]]
    """The fields of the state and their types: int (never negative), bool, str, list (of strings), or JsonValue."""

    @abstractmethod
    def read(self, text: str, at: int, last: bool, sink: Sink) -> tuple[int, Step]:
        """Reads from `at`. Gives where the unread text begins. It returns with GO directly after a call began and
        directly after one ended."""

    def finish(self, sink: Sink, stopped: bool) -> None:
        """The output ended inside a call. What is complete may be closed where the model `stopped` by itself."""
        return

    def dump(self, marks: Marks) -> Any:
        return [_dumped(getattr(self, name), marks) for name in self.STATE]

    def load(self, state: Any, marks: Marks) -> None:
        """Raises ValueError for a state that `dump` did not write."""
        if not isinstance(state, list) or len(state) != len(self.STATE):
            raise ValueError("the state of a call does not fit its syntax")
        for (name, kind), value in zip(self.STATE.items(), state, strict=True):
            setattr(self, name, _loaded(kind, value, marks))


def _dumped(value: Any, marks: Marks) -> Any:
    if isinstance(value, str):
        return marks.dump(value)
    if isinstance(value, JsonValue):
        return value.dump()
    return [marks.dump(part) for part in value] if isinstance(value, list) else value


def _loaded(kind: type, value: Any, marks: Marks) -> Any:
    if kind is str:
        return marks.load(value)
    if kind is JsonValue:
        return JsonValue.load(value)
    if kind is list and isinstance(value, list):
        return [marks.load(part) for part in value]
    if type(value) is not kind or (isinstance(value, int) and value < 0):
        raise ValueError("the state of a call holds a value of another type")
    return value


def skip_space(text: str, at: int) -> int:
    match = SPACE.match(text, at)
    assert match is not None
    return match.end()


class Between:
    """A place where markers stand with nothing but white space around them."""

    __slots__ = ("_all",)

    def __init__(self, *markers: str) -> None:
        self._all = Literals([marker for marker in markers if marker])

    def next(self, text: str, at: int, last: bool) -> tuple[int, str | None]:
        """The marker that comes next after white space, and the position behind it. None and `at`: something else
        comes. "" and `at`: not known yet."""
        start = skip_space(text, at)
        if start - at > LONGEST_SPACE:
            return at, None
        if start == len(text):
            return at, None if last else ""
        marker = self._all.at(text, start, last)
        return (start + len(marker), marker) if marker else (at, marker)
