"""The event splitter: the same events however the bytes come, in work that is linear in them."""

import re
from collections.abc import Iterator

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from proxy.generate import sse
from proxy.generate.sse import EventSplitter, EventTooLong


def events_of(*pieces: bytes) -> list[bytes]:
    splitter = EventSplitter()
    return [data for piece in pieces for data in splitter.feed(piece)]


def in_pieces_of(size: int, stream: bytes) -> list[bytes]:
    return [stream[start : start + size] for start in range(0, len(stream), size)]


@pytest.mark.parametrize(
    ("stream", "data"),
    [
        pytest.param(b"data: a\n\n", [b"a"], id="one event"),
        pytest.param(b"data: a\n\ndata: b\n\ndata: c\n\n", [b"a", b"b", b"c"], id="several"),
        pytest.param(b"data: a\n\ndata: b", [b"a"], id="an event without its end is not there yet"),
        pytest.param(b"data: a\r\n\r\ndata: b\r\n\r\n", [b"a", b"b"], id="CRLF"),
        pytest.param(b"data: a\r\n\ndata: b\n\r\ndata: c\n\n", [b"a", b"b", b"c"], id="line ends of both kinds"),
        pytest.param(b"data:a\n\ndata:  b\n\n", [b"a", b" b"], id="one space after the colon, which may be missing"),
        pytest.param(b"data:\n\n", [b""], id="empty data"),
        pytest.param(b"data: a\ndata: b\n\n", [b"a\nb"], id="two lines of data"),
        pytest.param(b": ping\n\ndata: a\n\n:\n\n", [b"a"], id="comments"),
        pytest.param(b": ping\ndata: a\n: pong\n\n", [b"a"], id="comments inside an event"),
        pytest.param(b"event: x\nid: 1\ndata: a\nretry: 5\n\n", [b"a"], id="other fields"),
        pytest.param(b"event: end\n\ndata: a\n\n", [b"a"], id="an event without data"),
        pytest.param(b"\n\n\ndata: a\n\n\n\n\ndata: b\n\n", [b"a", b"b"], id="more blank lines than needed"),
        pytest.param(b"database: x\n\ndata: a\n\n", [b"a"], id="a field whose name begins with data"),
        pytest.param(b'data: {"t": "data: x"}\n\n', [b'{"t": "data: x"}'], id="data that looks like a field"),
    ],
)
def test_only_the_data_of_complete_events_is_given(stream: bytes, data: list[bytes]) -> None:
    assert events_of(stream) == data
    assert events_of(*in_pieces_of(1, stream)) == data


LINE_END = st.sampled_from([b"\n", b"\r\n"])
TEXT = st.text(st.characters(codec="utf-8", exclude_characters="\r\n"), max_size=12).map(str.encode)
COMMENT = TEXT.map(lambda text: b":" + text)
OTHER_FIELD = st.builds(lambda name, text: name + b": " + text, st.sampled_from([b"event", b"id", b"x"]), TEXT)


@st.composite
def written_event(draw: st.DrawFn) -> tuple[list[bytes], bytes]:
    """The data that a stream's event has, as a list of none or one, and a way to write it."""
    lines = draw(st.lists(TEXT, max_size=3))
    fields = [b"data: " + line for line in lines]
    for extra in draw(st.lists(COMMENT | OTHER_FIELD, max_size=2)):
        fields.insert(draw(st.integers(0, len(fields))), extra)
    written = b"".join(field + draw(LINE_END) for field in fields) + draw(LINE_END)
    return ([b"\n".join(lines)] if lines else []), written


@settings(deadline=None)
@given(st.lists(written_event(), max_size=6), st.data())
def test_any_split_of_any_events_gives_the_same_data(
    events: list[tuple[list[bytes], bytes]], data: st.DataObject
) -> None:
    stream = b"".join(written for _, written in events)
    cuts = sorted(data.draw(st.lists(st.integers(0, len(stream)), max_size=8)))
    pieces = [stream[start:end] for start, end in zip([0, *cuts], [*cuts, len(stream)], strict=True)]

    assert events_of(*pieces) == [line for lines, _ in events for line in lines]


class CountedSearch:
    """The search for blank lines, and how many bytes it has looked at."""

    def __init__(self, pattern: re.Pattern[bytes]) -> None:
        self._pattern, self.scanned = pattern, 0

    def finditer(self, data: bytes | bytearray, start: int) -> Iterator[re.Match[bytes]]:
        self.scanned += len(data) - start
        return self._pattern.finditer(data, start)


@pytest.mark.parametrize("size", [1, 7, 100, 65536])
def test_a_long_event_in_small_pieces_is_looked_at_about_once(size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    search = CountedSearch(sse._BLANK_LINE)
    monkeypatch.setattr(sse, "_BLANK_LINE", search)
    payload = b"x" * (1 << 20)

    assert events_of(*in_pieces_of(size, b"data: " + payload + b"\n\n")) == [payload]
    overlap = 3 * (len(payload) // size + 1)  # what may be the beginning of a blank line is looked at again
    assert search.scanned <= len(payload) + overlap + 100


def test_many_events_in_small_pieces_are_looked_at_about_once(monkeypatch: pytest.MonkeyPatch) -> None:
    search = CountedSearch(sse._BLANK_LINE)
    monkeypatch.setattr(sse, "_BLANK_LINE", search)
    stream = b"data: 0123456789\n\n" * 10_000

    assert len(events_of(*in_pieces_of(5, stream))) == 10_000
    assert search.scanned <= 1.7 * len(stream)


def test_an_event_above_the_cap_is_an_error_before_its_end_has_come() -> None:
    splitter = EventSplitter(cap=100)
    splitter.feed(b"data: " + b"x" * 80)

    with pytest.raises(EventTooLong, match="an event is longer than 100 bytes"):
        splitter.feed(b"x" * 80)


def test_the_cap_is_on_one_event_and_not_on_the_stream() -> None:
    splitter = EventSplitter(cap=100)

    for _ in range(50):
        assert splitter.feed(b"data: " + b"x" * 50) == []
        assert splitter.feed(b"\n\n") == [b"x" * 50]


@pytest.mark.parametrize(
    ("stream", "pending"),
    [
        (b"", False),
        (b"data: a\n\n", False),
        (b"data: a\r\n\r\n", False),
        (b"data: a\n\n\n", False),
        (b"data: a\n\nda", True),
        (b"data: a\n", True),
    ],
)
def test_it_knows_whether_the_stream_stands_inside_an_event(stream: bytes, pending: bool) -> None:
    for size in (1, len(stream) or 1):
        splitter = EventSplitter()
        for piece in in_pieces_of(size, stream):
            splitter.feed(piece)
        assert splitter.pending is pending
