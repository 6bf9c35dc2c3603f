"""Calls as Python writes them."""

import ast
import json
import random
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from proxy.derender.codecs.base import MarkupLimits
from proxy.derender.codecs.pythonic import PythonicSyntax
from proxy.derender.codecs.scalar import literal
from proxy.formats.kinds import PythonicCalls
from tests.derender.codecs.driver import marks_for, run

BARE = PythonicCalls()
WRAPPED = PythonicCalls(open=("<|calls|>",), close=("<|done|>",))
LINES = PythonicCalls(open=("<calls>",), close=("</calls>",), lines=True)
MARKS = {BARE: marks_for(BARE), WRAPPED: marks_for(WRAPPED, ["<|calls|>", "<|done|>"]), LINES: marks_for(LINES)}
SYNTAXES = {declaration: PythonicSyntax(declaration, marks) for declaration, marks in MARKS.items()}


def read(declaration: PythonicCalls, text: str, **options: Any) -> Any:
    return run(SYNTAXES[declaration], MARKS[declaration], text, **options)


@pytest.mark.parametrize(
    ("written", "value"),
    [
        ("'a'", '"a"'),
        ('"it\'s"', '"it\'s"'),
        (r"'it\'s \"so\"'", r'"it' + "'" + r's \"so\""'),
        (r"'\n\t\\\x41\u00e9\U0001F30A\101'", r'"\n\t\\Aé🌊A"'),
        (r"'\ud83c\udf0a \ud83c'", '"🌊 \ufffd"'),
        (r"'C:\dir \N'", r'"C:\\dir \\N"'),
        (r"'\U99999999'", r'"\\U99999999"'),
        ("'one\ntwo'", r'"one\ntwo"'),
        ("'one \\\ntwo'", '"one two"'),
        ("'a' \"b\"\n'c'", '"abc"'),
        ("''", '""'),
        ("'' ", '""'),
        ('"""He said "hi", ""twice""."""', r'"He said \"hi\", \"\"twice\"\"."'),
        ("''''''", '""'),
        ("12", "12"),
        ("-3.50", "-3.50"),
        ("0x1f", "31"),
        ("1_000", "1000"),
        ("+1", "1"),
        (".5", "0.5"),
        ("1.", "1.0"),
        ("1e9", "1e9"),
        ("12345678901234567890123", "12345678901234567890123"),
        ("007", '"007"'),
        ("True", "true"),
        ("false", "false"),
        ("None", "null"),
        ("null", "null"),
        ("attic", '"attic"'),
        ("2031-05-09", '"2031-05-09"'),
        ("[]", "[]"),
        ("[1,2 , 'x',]", '[1, 2, "x"]'),
        ("()", "[]"),
        ("(1,)", "[1]"),
        ("(88, 90.5)", "[88, 90.5]"),
        ("(5)", "5"),
        ("('a'\n 'b')", '"ab"'),
        ("((1, 2), ((3)), [(4,)])", "[[1, 2], 3, [[4]]]"),
        ("{}", "{}"),
        ("{'a': 1, \"b\" 'c': [null], 2: {True: x,},}", '{"a": 1, "bc": [null], "2": {"true": "x"}}'),
        ("{k: (1), 'l': ((), 2)}", '{"k": 1, "l": [[], 2]}'),
    ],
)
def test_values_become_json(written: str, value: str) -> None:
    assert read(BARE, f"[f(a={written}, b=1)]") == ([("f", f'{{"a": {value}, "b": 1}}', True)], "")
    json.loads(value)


def test_a_list_may_hold_many_calls_with_space_anywhere() -> None:
    calls, prose = read(BARE, "[ f( a = 1 ,\n b=2, ) ,\n shop.g-h(), class_( from='x' ),] bye")
    assert calls == [("f", '{"a": 1, "b": 2}', True), ("shop.g-h", "{}", True), ("class_", '{"from": "x"}', True)]
    assert prose == " bye"


@pytest.mark.parametrize(
    "text",
    [
        "[f(x), y]",
        "[1, 2] and [see below]",
        "[Note (x=1)]",
        "[f(x==1)]",
        "[]",
        "[ ]",
        "[f({'a': 1})]",
        "[f(",
        "[f(a",
        "['f(a=1)']",
        "[" + "f" * 600 + "(a=1)]",
        "[f(" + " " * 600 + "a=1)]",
    ],
)
def test_brackets_in_prose_stay_prose(text: str) -> None:
    assert read(BARE, text) == ([], text)
    assert read(WRAPPED, f"So: <|calls|>{text}") == ([], f"So: <|calls|>{text}")


@pytest.mark.parametrize("between", ["", "\n"])
def test_markers_around_a_list_are_consumed_and_the_last_may_be_missing(between: str) -> None:
    calls = [("f", '{"a": 1}', True), ("g", "{}", True)]
    assert read(WRAPPED, f"Hm <|calls|>{between}[f(a=1), g()]{between}<|done|>!") == (calls, "Hm !")
    assert read(WRAPPED, "<|calls|>[f(a=1), g()]") == (calls, "")
    assert read(WRAPPED, "<|calls|>[f(a=1), g()] so") == (calls, " so")
    assert read(WRAPPED, f"<|calls|>[f(a=1), g(){between}<|done|>so") == (calls, "so")


def test_a_marker_inside_a_string_is_text() -> None:
    assert read(WRAPPED, "<|calls|>[f(a='<|done|> <|calls|>')]<|done|>")[0] == [
        ("f", '{"a": "<|done|> <|calls|>"}', True)
    ]


def test_calls_may_stand_on_lines_of_their_own() -> None:
    calls = [("f", '{"a": {"b": null}}', True), ("g", "{}", True)]
    assert read(LINES, '<calls>\nf(a={"b": null})\ng()\n</calls>') == (calls, "")
    assert read(LINES, '<calls>f(a={"b": null}) g()</calls>') == (calls, "")
    assert read(LINES, '<calls>\n[f(a={"b": null}), g()]\n</calls> so') == (calls, " so")
    assert read(LINES, "<calls> are written so: f(x)") == ([], "<calls> are written so: f(x)")


@pytest.mark.parametrize(
    ("text", "arguments", "prose"),
    [
        ("[f(a=1, b=)]", '{"a": 1, "b": ', ")]"),
        ("[f(a=1, 2)]", '{"a": 1', "2)]"),
        ("[f(a=now())]", '{"a": "now"', "())]"),
        ("[f(a=[1, 2)]", '{"a": [1, 2', ")]"),
        ("[f(a={1, 2})]", '{"a": {"1"', ", 2})]"),
        ("[f(a=1 2)]", '{"a": 1', "2)]"),
        ("[f(a=('x' 1))]", '{"a": "x"', "1))]"),
    ],
)
def test_a_broken_call_ends_as_far_as_it_came(text: str, arguments: str, prose: str) -> None:
    assert read(BARE, text) == ([("f", arguments, True)], prose)


@pytest.mark.parametrize(
    ("text", "stopped", "cut"),
    [
        ("[f(a=1", '{"a": 1}', '{"a": 1'),
        ("[f(a=1,", '{"a": 1}', '{"a": 1'),
        ("[f(a='x'", '{"a": "x"}', '{"a": "x"'),
        ("[f(a='x", '{"a": "x', '{"a": "x'),
        ("[f(a='x\\", '{"a": "x', '{"a": "x'),
        ("[f(a='x\\u00", '{"a": "x', '{"a": "x'),
        ("[f(a=1, b", '{"a": 1', '{"a": 1'),
        ("[f(a=1, b=Tru", '{"a": 1, "b": ', '{"a": 1, "b": '),
        ("[f(a=[1, 'x", '{"a": [1, "x', '{"a": [1, "x'),
        ("[f(a=('some text", '{"a": "some text', '{"a": "some text'),
    ],
)
def test_an_output_that_ends_in_a_call_is_closed_only_where_nothing_is_open(text: str, stopped: str, cut: str) -> None:
    assert read(BARE, text)[0] == [("f", stopped, False)]
    assert read(BARE, text, stopped=False)[0] == [("f", cut, False)]


def test_nesting_and_what_is_held_have_bounds() -> None:
    deep = read(BARE, "[f(a=" + "[" * 10_000, limits=MarkupLimits(depth=4))
    assert deep[0] == [("f", '{"a": [[[[', True)]
    held = read(BARE, "[f(a=('" + "x" * 100 + "'))]", limits=MarkupLimits(held=20))
    assert held[0][0][1].startswith('{"a": "xxx')
    assert held[1].endswith("xxx'))]")


def test_what_no_codec_wrote_is_no_state() -> None:
    codec = SYNTAXES[BARE].codec("", None, MarkupLimits())  # type: ignore[arg-type]
    good = codec.dump(MARKS[BARE])
    codec.load(good, MARKS[BARE])
    for place, wrong in ((0, "somewhere"), (3, "?"), (3, "g"), (5, "`")):
        bad = [*good[:place], wrong, *good[place + 1 :]]
        with pytest.raises(ValueError, match="state of a pythonic call"):
            codec.load(bad, MARKS[BARE])


@example("0_E0")
@given(st.from_regex(r"[+-]?[0-9_.]{1,6}([eE][+-]?[0-9]{1,2})?", fullmatch=True))
def test_a_number_is_the_one_that_python_reads(word: str) -> None:
    value = literal(word)
    try:
        expected = ast.literal_eval(word)
    except (SyntaxError, ValueError):
        assert value is None
    else:
        assert value is None or json.loads(value) == expected
        assert value is not None or word.strip("+-").startswith("0")


VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(max_size=12),
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner, max_size=3)
        | st.lists(inner, max_size=3).map(tuple)
    ),
    max_leaves=8,
)  # fmt: skip
NAMES = st.from_regex(r"[a-z_][a-z0-9_]{0,6}", fullmatch=True)
CALLS = st.lists(st.tuples(NAMES, st.dictionaries(NAMES, VALUES, max_size=3)), min_size=1, max_size=3)


@given(CALLS, st.sampled_from([BARE, WRAPPED, LINES]), st.randoms(use_true_random=False))
def test_what_python_writes_reads_as_json_in_any_pieces(
    wanted: list[tuple[str, dict[str, Any]]], declaration: PythonicCalls, splits: random.Random
) -> None:
    written = [f"{name}({', '.join(f'{key}={value!r}' for key, value in kw.items())})" for name, kw in wanted]
    text = "\n".join(written) if declaration.lines else f"[{', '.join(written)}]"
    text = "".join(declaration.open) + text + "".join(declaration.close)
    expected = [(name, json.dumps(arguments, ensure_ascii=False), True) for name, arguments in wanted]
    calls, prose = read(declaration, text, splits=splits)
    assert [(name, json.loads(text), ended) for name, text, ended in calls] == [
        (name, json.loads(text), ended) for name, text, ended in expected
    ]
    assert prose == ""
    assert read(declaration, text) == (calls, prose)


PARTS = [*"()[]{}'\"\\,:=#_ \né", '"""', "'''", "f(", "a=", "b = ", ", ", "12", "0x", "True", "word"]
PARTS += ["\\u00e9", "\\ud83c", "\\udf0a", "<|done|>", "<calls>", "</cal", "</calls>"]


@given(
    st.lists(st.sampled_from(PARTS), max_size=30).map("".join),
    st.sampled_from(["", "f(a=", "f(a=(", "f(a={'k': "]),
    st.sampled_from([BARE, WRAPPED, LINES]),
    st.randoms(use_true_random=False),
)
def test_any_output_reads_the_same_in_any_pieces(
    garbage: str, start: str, declaration: PythonicCalls, splits: random.Random
) -> None:
    text = "".join(declaration.open) + ("" if declaration.lines else "[") + start + garbage
    limits = MarkupLimits(depth=4, held=15)
    assert read(declaration, text, limits=limits, splits=splits) == read(declaration, text, limits=limits)
