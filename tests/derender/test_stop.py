from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from proxy.derender.stop import Passed, StopMatcher, StopRule

texts = st.text("ab\n", max_size=16)
stop_strings = st.lists(st.text("ab\n", min_size=1, max_size=4), min_size=1, max_size=4)
many = settings(deadline=None, max_examples=500)


def first_match(text: str, stops: list[str], begin: int = 0) -> tuple[int, str] | None:
    """Where the match ends that is complete first, behind `begin`, and which string it is; of several the longest."""
    for end in range(begin + 1, len(text) + 1):
        if found := [stop for stop in stops if text[:end].endswith(stop)]:
            return end, max(found, key=len)
    return None


def held_back(text: str, stops: list[str]) -> str:
    """The longest end of a text that begins a stop string and is not all of it."""
    for start in range(len(text)):
        if any(stop.startswith(text[start:]) and stop != text[start:] for stop in stops):
            return text[start:]
    return ""


def cut(text: str, places: set[int]) -> list[str]:
    """`text` in pieces, of which some may be empty."""
    edges = [0, *sorted(min(place, len(text)) for place in places), len(text)]
    return [text[begin:end] for begin, end in pairwise(edges)]


@many
@given(texts, st.sets(st.integers(0, 16)), stop_strings, st.booleans())
def test_the_first_complete_match_ends_the_text_however_it_is_cut(
    text: str, places: set[int], stops: list[str], include: bool
) -> None:
    matcher = StopMatcher(StopRule(stops, include))
    shown, read, passed = "", 0, Passed("")
    for piece in cut(text, places):
        passed = matcher.feed(piece)
        shown += passed.text
        if passed.stop is not None:
            break
        read += len(piece)
    match first_match(text, stops):
        case None:
            assert passed.stop is None
            assert shown + matcher.flush() == text
        case end, stop:
            assert passed.stop == stop
            assert shown == text[: end if include else end - len(stop)]
            assert read + passed.used == end
            assert matcher.flush() == ""


@many
@given(st.lists(st.text("ab", max_size=4), max_size=6), stop_strings)
def test_only_what_may_become_a_stop_string_is_held(pieces: list[str], stops: list[str]) -> None:
    matcher = StopMatcher(StopRule(stops))
    shown = fed = ""
    for piece in pieces:
        fed += piece
        passed = matcher.feed(piece)
        if passed.stop is not None:
            return
        shown += passed.text
        assert matcher.held == held_back(fed, stops)
        assert shown + matcher.held == fed


@many
@given(texts, texts, st.sets(st.integers(0, 16)), st.sets(st.integers(0, 16)), stop_strings)
def test_a_match_that_ends_in_unarmed_text_is_text_and_one_that_only_begins_there_counts(
    unarmed: str, armed: str, places: set[int], armed_places: set[int], stops: list[str]
) -> None:
    matcher = StopMatcher(StopRule(stops))
    shown = "".join(matcher.feed(piece, armed=False).text for piece in cut(unarmed, places))
    assert (shown + matcher.held, matcher.held) == (unarmed, held_back(unarmed, stops))
    stop = None
    for piece in cut(armed, armed_places):
        passed = matcher.feed(piece)
        shown += passed.text
        if (stop := passed.stop) is not None:
            break
    match first_match(unarmed + armed, stops, begin=len(unarmed)):
        case None:
            assert (stop, shown + matcher.flush()) == (None, unarmed + armed)
        case end, expected:
            assert stop == expected
            assert shown == (unarmed + armed)[: end - len(expected)]


@pytest.mark.parametrize(
    ("stops", "pieces", "shown", "stop", "used"),
    [
        (["\n\n"], ["one\n", "two\n", "\nthree"], "one\ntwo", "\n\n", 1),
        (["b", "abc"], ["abc"], "a", "b", 2),
        (["bc", "abc", "c"], ["xab", "cd"], "x", "abc", 1),
        (["aab"], ["aa", "ab"], "a", "aab", 2),
        (["STOP"], ["ST", "OP", "S"], "", "STOP", 2),
        (["終わり"], ["灯台は終", "わりです"], "灯台は", "終わり", 2),
        (["🌊"], ["a🌊b"], "a", "🌊", 2),
        (["x", "x"], ["ax"], "a", "x", 2),
    ],
)
def test_what_is_shown_before_a_stop_string(
    stops: list[str], pieces: list[str], shown: str, stop: str, used: int
) -> None:
    matcher = StopMatcher(StopRule(stops))
    seen = ""
    for piece in pieces:
        passed = matcher.feed(piece)
        seen += passed.text
        if passed.stop is not None:
            break
    assert (seen, passed.stop, passed.used) == (shown, stop, used)


def test_the_stop_string_itself_is_shown_where_it_was_asked_for() -> None:
    matcher = StopMatcher(StopRule(["END"], include_in_output=True))
    assert matcher.feed("the E") == Passed("the ")
    assert matcher.feed("ND of it") == Passed("END", "END", 2)


def test_long_stop_strings_hold_as_much_as_they_must() -> None:
    stops = ["a" * 4095 + chr(0x4E00 + number) for number in range(64)]
    matcher = StopMatcher(StopRule(stops))
    shown = "".join(matcher.feed("aaaa").text for _ in range(2000))
    assert (len(shown), len(matcher.held)) == (8000 - 4095, 4095)
    assert matcher.feed("a" + stops[7][-1]) == Passed("a", stops[7], 2)
