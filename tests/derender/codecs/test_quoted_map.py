"""Calls as maps whose strings stand between two equal markers."""

import json
import random
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from proxy.derender.codecs.base import MarkupLimits
from proxy.derender.codecs.quoted_map import QuotedMapSyntax
from proxy.formats.kinds import QuotedMapCalls
from tests.derender.codecs.driver import marks_for, run, tool

TOKENS = QuotedMapCalls(open=("<|call>",), close=("<call|>",), quote='<|"|>')
TEXT = QuotedMapCalls(open=("<start>",), close=("<end>",), quote="<esc>", quoted="schema")
MARKS = {TOKENS: marks_for(TOKENS, ["<|call>", "<call|>", '<|"|>']), TEXT: marks_for(TEXT)}
SYNTAXES = {declaration: QuotedMapSyntax(declaration, marks) for declaration, marks in MARKS.items()}
BOTH = pytest.mark.parametrize("declaration", [TOKENS, TEXT], ids=["tokens", "text"])
TOOLS = [
    tool(
        "lamp",
        room={"type": "string"},
        level={"type": "integer"},
        on={"type": "boolean"},
        note={"type": ["string", "null"]},
        tags={"type": "array"},
    )
]


def read(declaration: QuotedMapCalls, short: str, **options: Any) -> Any:
    """`~` for the quote, `«` and `»` for the markers around a call."""
    text = short.replace("~", declaration.quote).replace("«", declaration.open[0]).replace("»", declaration.close[0])
    return run(SYNTAXES[declaration], MARKS[declaration], text, tools=TOOLS, **options)


@BOTH
@pytest.mark.parametrize(
    ("written", "arguments"),
    [
        ("{}", "{}"),
        ("{room:~attic~,level:4}", '{"room": "attic", "level": 4}'),
        ("(room:~attic~,level:4)", '{"room": "attic", "level": 4}'),
        ("{ room : ~a~ ,\n ~level~ : 4 , }", '{"room": "a", "level": 4}'),
        ('{room:~a}b] {c "q"\nline\\~}', r'{"room": "a}b] {c \"q\"\nline\\"}'),
        ("{room:~~,on:true}", '{"room": "", "on": true}'),
        ("{on:True,note:None,level:many}", '{"on": true, "note": null, "level": "many"}'),
        ("{room:12,other:12}", '{"room": "12", "other": "12"}'),
        ("{room:by the sea: 3 (old),level:1}", '{"room": "by the sea: 3 (old)", "level": 1}'),
        ("{tags:[~a~,1,-2.5,true,None,some word,[],{}]}", '{"tags": ["a", 1, -2.5, true, null, "some word", [], {}]}'),
        ("{tags:[{a:1,~b~:[~,~]},{}]}", '{"tags": [{"a": 1, "b": [","]}, {}]}'),
        ("{first name:~a~}", '{"first name": "a"}'),
    ],
)
def test_maps_become_json(declaration: QuotedMapCalls, written: str, arguments: str) -> None:
    assert read(declaration, f"«call:lamp{written}»") == ([("lamp", arguments, True)], "")
    json.loads(arguments)


def test_a_quoted_argument_is_a_string_or_what_the_schema_says() -> None:
    written = "«call:lamp{level:~4~,on:~false~,note:~null~,tags:~[1]~,room:~7~}»"
    as_text = '{"level": "4", "on": "false", "note": "null", "tags": "[1]", "room": "7"}'
    typed = '{"level": 4, "on": false, "note": null, "tags": [1], "room": "7"}'
    assert read(TOKENS, written)[0] == [("lamp", as_text, True)]
    assert read(TEXT, written)[0] == [("lamp", typed, True)]


@BOTH
def test_values_of_an_unknown_function_are_strings(declaration: QuotedMapCalls) -> None:
    assert read(declaration, "«call:zap{a:~5~,b:6}»")[0] == [("zap", '{"a": "5", "b": "6"}', True)]


@BOTH
def test_calls_stand_in_text_and_the_last_closer_may_be_missing(declaration: QuotedMapCalls) -> None:
    calls = [("lamp", '{"level": 4}', True), ("now", "{}", True)]
    assert read(declaration, "So:«call:lamp{level:4}\n»\n«now{}»(done)") == (calls, "So:\n(done)")
    assert read(declaration, "«call: lamp{level:4}«call:now{}") == (calls, "")
    assert read(declaration, "«call:lamp{level:4}, now") == (calls[:1], ", now")


@BOTH
def test_a_closer_inside_quotes_is_text(declaration: QuotedMapCalls) -> None:
    calls, prose = read(declaration, "«call:lamp{room:~say » or «~}»")
    assert json.loads(calls[0][1]) == {"room": f"say {declaration.close[0]} or {declaration.open[0]}"}
    assert prose == ""


@BOTH
def test_a_missing_bracket_at_the_end_is_forgiven(declaration: QuotedMapCalls) -> None:
    assert read(declaration, "«call:lamp{level:4»!") == ([("lamp", '{"level": 4}', True)], "!")
    assert read(declaration, "«call:lamp{»!") == ([("lamp", "{}", True)], "!")


@BOTH
@pytest.mark.parametrize("text", ["« first", "«later»", "«call:", "«call:lamp", "«see {this}", "«" + "x" * 600 + "{}"])
def test_a_marker_in_prose_stays_prose(declaration: QuotedMapCalls, text: str) -> None:
    written = text.replace("«", declaration.open[0]).replace("»", declaration.close[0])
    assert read(declaration, f"Put {text}") == ([], f"Put {written}")


@BOTH
@pytest.mark.parametrize(
    ("text", "arguments", "prose"),
    [
        ("«call:lamp{level:4,[}", '{"level": 4', "[}"),
        ("«call:lamp{level:}", '{"level": ', "}"),
        ("«call:lamp{tags:[1,2}", '{"tags": [1, 2', "}"),
        ("«call:lamp{tags:[1[", '{"tags": [1', "["),
        ("«call:lamp{~room~ 4}", '{"room": ', "4}"),
        ("«call:lamp{" + "k" * 600, "", "k" * 600),
    ],
)
def test_a_broken_call_ends_as_far_as_it_came(
    declaration: QuotedMapCalls, text: str, arguments: str, prose: str
) -> None:
    assert read(declaration, text) == ([("lamp", arguments, True)], prose)


@BOTH
@pytest.mark.parametrize(
    ("text", "stopped", "cut"),
    [
        ("«call:lamp{", "{}", ""),
        ("«call:lamp{level:4", '{"level": 4}', '{"level": 4'),
        ("«call:lamp{level:4,", '{"level": 4}', '{"level": 4'),
        ("«call:lamp{level:4, ro", '{"level": 4', '{"level": 4'),
        ("«call:lamp{room:~at", '{"room": "at', '{"room": "at'),
        ("«call:lamp{room:~at~", '{"room": "at"}', '{"room": "at"'),
        ("«call:lamp{room:at", '{"room": ', '{"room": '),
        ("«call:lamp{tags:[1", '{"tags": [1', '{"tags": [1'),
    ],
)
def test_an_output_that_ends_in_a_call_is_closed_only_where_nothing_is_open(
    declaration: QuotedMapCalls, text: str, stopped: str, cut: str
) -> None:
    assert read(declaration, text)[0] == [("lamp", stopped, False)]
    assert read(declaration, text, stopped=False)[0] == [("lamp", cut, False)]


@BOTH
def test_nesting_and_what_is_held_have_bounds(declaration: QuotedMapCalls) -> None:
    deep = read(declaration, "«call:lamp{tags:" + "[" * 9000, limits=MarkupLimits(depth=3))
    assert deep[0] == [("lamp", '{"tags": [[[', True)]
    held = read(declaration, "«call:lamp{level:" + "4" * 90 + "}»", limits=MarkupLimits(held=20))
    assert held[0] == [("lamp", '{"level": ', True)]


@BOTH
def test_what_no_codec_wrote_is_no_state(declaration: QuotedMapCalls) -> None:
    codec = SYNTAXES[declaration].codec(declaration.open[0], None, MarkupLimits())  # type: ignore[arg-type]
    good = codec.dump(MARKS[declaration])
    codec.load(good, MARKS[declaration])
    for place, wrong in ((0, "somewhere"), (0, "value"), (1, "<")):
        with pytest.raises(ValueError, match="state of a call in a map"):
            codec.load([*good[:place], wrong, *good[place + 1 :]], MARKS[declaration])


LEAVES = st.booleans() | st.none() | st.integers() | st.text('ab,:{}[]()"\\\n <é', max_size=8)
VALUES = st.recursive(
    LEAVES,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text("abc d", min_size=1, max_size=3), inner),
    max_leaves=8,
)


def spelled(value: Any) -> str:
    match value:
        case str():
            return f"~{value}~"
        case list():
            return f"[{','.join(map(spelled, value))}]"
        case dict():
            return "{" + ",".join(f"~{key}~:{spelled(inner)}" for key, inner in value.items()) + "}"
    return json.dumps(value)


@given(VALUES, st.text("ab,:{}\n <", max_size=9), st.sampled_from([TOKENS, TEXT]), st.randoms(use_true_random=False))
def test_what_is_written_is_read_in_any_pieces(
    value: Any, room: str, declaration: QuotedMapCalls, splits: random.Random
) -> None:
    text = f"«call:lamp{{tags:[{spelled(value)}],room:{spelled(room)}}}»«call:now{{}}» so"
    calls, prose = read(declaration, text, splits=splits)
    assert [(name, json.loads(arguments), ended) for name, arguments, ended in calls] == [
        ("lamp", {"tags": [value], "room": room}, True),
        ("now", {}, True),
    ]
    assert prose == " so"
    assert read(declaration, text) == (calls, prose)


PARTS = [*"«»~{}()[],: \n<é", "call:", "lamp", "room:", "level:", "tags:", "4", "true", "word", "<e", "<esc", "sc>"]


@given(
    st.sampled_from(["", "«", "«call:lamp{", "«call:lamp(tags:[", "«call:lamp{level:~"]),
    st.lists(st.sampled_from(PARTS), max_size=30).map("".join),
    st.sampled_from([TOKENS, TEXT]),
    st.randoms(use_true_random=False),
)
def test_any_output_reads_the_same_in_any_pieces(
    start: str, garbage: str, declaration: QuotedMapCalls, splits: random.Random
) -> None:
    limits = MarkupLimits(depth=3, held=15)
    whole = read(declaration, start + garbage, limits=limits)
    assert read(declaration, start + garbage, limits=limits, splits=splits) == whole
