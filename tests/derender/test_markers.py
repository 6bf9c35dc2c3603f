"""Finding markers in text that comes in pieces."""

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from proxy.derender.markers import FIRST_MARK, Literals, Marks, Prefixes, Quiet

MARKS = Marks(
    {7: "<think>", 8: "</think>", 9: "<tool", 10: "\n", 11: "unused"}, ["<think>", "</think>", "<tool_call>\n"]
)
OPEN, CLOSE, TOOL = (MARKS.by_id[i] for i in (7, 8, 9))


def test_tokens_that_occur_in_markers_have_marks() -> None:
    assert MARKS.by_id.keys() == {7, 8, 9}
    assert all(FIRST_MARK <= ord(mark) < FIRST_MARK + 3 for mark in MARKS.by_id.values())
    assert MARKS.encode("<think>") == OPEN
    assert MARKS.encode("<tool_call>\n") == f"{TOOL}_call>\n"
    assert MARKS.text(f"a{OPEN}é{TOOL}") == "a<think>é<tool"


@pytest.mark.parametrize("text", ["", "low tide", OPEN, f"a{OPEN}{CLOSE}é", f"{TOOL}_call>\n"])
def test_a_text_with_marks_goes_through_json(text: str) -> None:
    assert MARKS.load(MARKS.dump(text)) == text


@pytest.mark.parametrize(
    "value", [None, 4, {}, [4], ["a", 3, "b"], ["a", -1, "b"], ["a", True, "b"], ["a", "b", "c"], "\ud900", [["a"]]]
)
def test_what_no_dump_wrote_is_refused(value: object) -> None:
    with pytest.raises(ValueError):
        MARKS.load(value)


@pytest.mark.parametrize(
    ("text", "last", "found"),
    [
        ("low tide", False, (8, None)),
        ("low <think> tide", False, (4, "<think>")),
        ("low <thi", False, (4, None)),
        ("low <thi", True, (8, None)),
        ("low <tide", False, (9, None)),
        ("<<think>", False, (1, "<think>")),
        ("<th<think>", False, (3, "<think>")),
        ("<end>", False, (0, None)),
        ("<end>", True, (0, "<end>")),
        ("<end>\n", False, (0, "<end>\n")),
        ("<end> ", False, (0, "<end>")),
    ],
)
def test_the_first_marker_and_of_those_the_longest(text: str, last: bool, found: tuple[int, str | None]) -> None:
    assert Literals(["<think>", "<end>", "<end>\n"]).find(text, 0, last) == found


def test_a_marker_at_a_place() -> None:
    literals = Literals(["<think>", "```"])
    assert literals.at("a<think>", 1, False) == "<think>"
    assert literals.at("a<think>", 0, False) is None
    assert literals.at("a<th", 1, False) == ""
    assert literals.at("a<th", 1, True) is None
    assert literals.at("a", 1, False) == ""


def test_only_a_real_prefix_is_held() -> None:
    prefixes = Prefixes(["<think>", "aab"])
    assert prefixes.start("low <thi") == 4
    assert prefixes.start("low tide") == 8
    assert prefixes.start("aaaa") == 2
    assert prefixes.start("<think>") == 7


texts = st.text("<ab>", max_size=12)


@given(st.lists(st.text("<ab>", min_size=1, max_size=4), min_size=1, max_size=4), texts, st.integers(0, 1 << 32))
def test_markers_are_the_same_in_pieces_and_whole(markers: list[str], text: str, seed: int) -> None:
    def found(splits: random.Random | None) -> list[str]:
        literals, all_found, held = Literals(markers), [], ""
        at = 0
        while True:
            end = min(len(text), at + splits.randint(1, 3)) if splits else len(text)
            held, at = held + text[at:end], end
            last, position = at == len(text), 0
            while True:
                position, marker = literals.find(held, position, last)
                if marker is None:
                    break
                all_found.append(marker)
                position += len(marker)
            held = held[position:]
            if last:
                return all_found

    assert found(random.Random(seed)) == found(None)


def test_a_token_is_quiet_by_its_text_and_asked_once() -> None:
    asked = []
    quiet = Quiet(lambda text: asked.append(text) or "<" not in text)  # type: ignore[func-returns-value]
    assert [quiet["low"], quiet["<"], quiet["low"]] == [True, False, True]
    assert asked == ["low", "<"]
