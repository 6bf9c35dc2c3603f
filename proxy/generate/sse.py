"""Server-sent events out of a byte stream, in whatever pieces it comes. No I/O.

An event may be as long as the cap allows, and costs time in proportion to its length: the search for its end goes on
where it stopped. Only `data:` is read; comments and other fields mean nothing to an engine's stream.
"""

import re

MAX_EVENT_BYTES = 64 << 20

_BLANK_LINE = re.compile(rb"\r?\n\r?\n")


class EventTooLong(ValueError):
    """More than the cap without an end of event."""


class EventSplitter:
    """`feed` returns the data of the events that `piece` completed, in order."""

    __slots__ = ("_cap", "_rest", "_searched")

    def __init__(self, cap: int = MAX_EVENT_BYTES) -> None:
        self._rest = bytearray()
        self._searched = 0
        self._cap = cap

    @property
    def pending(self) -> bool:
        """Whether the stream stands inside an event."""
        return bool(self._rest.strip())

    def feed(self, piece: bytes) -> list[bytes]:
        if self._rest:
            self._rest += piece
            end = self._last_end(self._rest, self._searched)
            complete = bytes(self._rest[:end])
            del self._rest[:end]
        else:
            end = len(piece) if piece.endswith(b"\n\n") else self._last_end(piece, 0)
            complete = piece[:end]
            self._rest += piece[end:]
        self._searched = max(0, len(self._rest) - 3)  # a blank line may have begun there
        if end == 0:
            if len(self._rest) > self._cap:
                raise EventTooLong(f"an event is longer than {self._cap} bytes")
            return []
        if b"\r" in complete:
            complete = complete.replace(b"\r\n", b"\n")
        return [data for event in complete.split(b"\n\n") if (data := _data(event)) is not None]

    @staticmethod
    def _last_end(data: bytes | bytearray, start: int) -> int:
        """Where the last blank line at or after `start` ends, 0 if there is none."""
        end = 0
        for match in _BLANK_LINE.finditer(data, start):
            end = match.end()
        return end


def _data(event: bytes) -> bytes | None:
    """The data of one event; lines of data are joined, as the standard says."""
    if event.startswith(b"data: ") and b"\n" not in event:
        return event[6:]
    lines = [line[5:].removeprefix(b" ") for line in event.split(b"\n") if line.startswith(b"data:")]
    return b"\n".join(lines) if lines else None
