"""Calls as trees of elements."""

import json
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from proxy.derender.codecs.base import MarkupLimits
from proxy.derender.codecs.elements import ElementSyntax
from proxy.formats.kinds import ElementCalls
from tests.derender.codecs.driver import marks_for, run, tool

NS = "]<]ns[>["
DECLARATION = ElementCalls(
    namespace=NS,
    call=NS + '<invoke name="{name}">',
    call_end=NS + "</invoke>",
    section=(NS + "<tool_call>",),
    section_end=(NS + "</tool_call>",),
)
TOOLS = [
    tool(
        "store",
        shelf={"type": "string"},
        count={"type": "integer"},
        jars={"type": "array", "items": {"type": "string"}},
        sizes={"type": "array", "items": {"type": "integer"}},
        label={"type": "object", "properties": {"year": {"type": "integer"}, "tags": {"type": "array"}}},
    )
]
MARKS = marks_for(DECLARATION)
SYNTAX = ElementSyntax(DECLARATION, MARKS)
AS_TOKEN = marks_for(DECLARATION, [NS])
SYNTAX_OF_TOKENS = ElementSyntax(DECLARATION, AS_TOKEN)


def spelled(short: str) -> str:
    """`~` for the namespace."""
    return short.replace("~", NS)


def call(body: str, name: str = "store") -> str:
    return spelled(f'~<tool_call>\n~<invoke name="{name}">{body}~</invoke>\n~</tool_call>')


@pytest.mark.parametrize(
    ("body", "arguments"),
    [
        ("", {}),
        ("~<shelf>top</shelf>", {"shelf": "top</shelf>"}),
        ("~<shelf>top~</shelf>~<count>4~</count>", {"shelf": "top", "count": 4}),
        ("\n~<shelf> two\nlines ~</shelf>\n", {"shelf": " two\nlines "}),
        ("~<count>many~</count>", {"count": "many"}),
        ("~<jars>~<item>plum~</item>~<item>7~</item>~</jars>", {"jars": ["plum", "7"]}),
        ("~<sizes>~<item>1~</item>~<item>2~</item>~</sizes>", {"sizes": [1, 2]}),
        ("~<sizes>~<size>1~</size>~</sizes>", {"sizes": [1]}),
        ("~<sizes>1~</sizes>~<sizes>2~</sizes>", {"sizes": [1, 2]}),
        ("~<sizes>1~</sizes>", {"sizes": [1]}),
        ("~<sizes>[1, 2]~</sizes>", {"sizes": [1, 2]}),
        ("~<label>~<year>1998~</year>~<tags>~</tags>~</label>", {"label": {"year": 1998, "tags": []}}),
        ("~<jars>~</jars>~<label/>~<shelf>~</shelf>", {"jars": [], "label": {}, "shelf": ""}),
        ("~<label>~<year>1~</year>old~</label>", {"label": {"year": 1, "$text": "old"}}),
        ("~<other>~<item>a~</item>~<item>b~</item>~</other>", {"other": ["a", "b"]}),
        ("~<other>~<x>a~</x>~<x>b~</x>~<y>c~</y>~</other>", {"other": {"x": ["a", "b"], "y": "c"}}),
        ("top~</shelf>~<count>4~</count>", {"shelf": "top", "count": 4}),
        ("~<label>~<year>1~</label>~<count>2", {"label": {"year": 1}, "count": 2}),
    ],
)
def test_elements_become_the_values_that_the_schema_wants(body: str, arguments: dict[str, object]) -> None:
    calls, prose = run(SYNTAX, MARKS, call(body), tools=TOOLS)
    assert [(name, json.loads(text), ended) for name, text, ended in calls] == [("store", arguments, True)]
    assert prose == ""


def test_calls_follow_each_other_and_text_goes_on_behind_them() -> None:
    one = '~<invoke name="a">~<x>1~</x>~</invoke>'
    calls, prose = run(SYNTAX, MARKS, spelled(f"Well: ~<tool_call>{one}\n{one}~</tool_call> done"))
    assert calls == [("a", '{"x": "1"}', True)] * 2
    assert prose == "Well:  done"


def test_quotes_around_the_name_may_be_single_or_missing_and_so_may_the_section() -> None:
    calls, _ = run(SYNTAX, MARKS, spelled("~<invoke name='a'>~</invoke>~<invoke name=b>~</invoke>"))
    assert calls == [("a", "{}", True), ("b", "{}", True)]


def test_a_call_without_an_end_ends_with_the_next() -> None:
    text = '~<tool_call>~<invoke name="a">~<x>1~</x>~<invoke name="b">~<y>2~</y>~</tool_call>'
    calls, prose = run(SYNTAX, MARKS, spelled(text))
    assert calls == [("a", '{"x": "1"}', True), ("b", '{"y": "2"}', True)]
    assert prose == ""


def test_a_call_that_was_cut_has_a_name_and_no_arguments() -> None:
    calls, _ = run(SYNTAX, MARKS, spelled('~<invoke name="store">~<shelf>to'), tools=TOOLS)
    assert calls == [("store", "", False)]


@pytest.mark.parametrize("text", ["Write ~<tool_call> first.", "An ~<invoke> has no name.", "~<invoke name="])
def test_a_marker_in_prose_stays_prose(text: str) -> None:
    assert run(SYNTAX, MARKS, spelled(text)) == ([], spelled(text))


def test_text_between_arguments_is_prose() -> None:
    calls, prose = run(SYNTAX, MARKS, call("Now: ~<count>4~</count> so"), tools=TOOLS)
    assert calls == [("store", '{"count": 4}', True)]
    assert prose == "Now:  so"


def test_a_body_that_is_too_long_is_given_back() -> None:
    calls, prose = run(SYNTAX, MARKS, call("x" * 50), limits=MarkupLimits(held=20))
    assert calls == [("store", "", True)]
    assert prose.startswith("x" * 50)


def test_elements_nest_as_deep_as_allowed_and_deeper_tags_are_text() -> None:
    body = "~<a>" * 5000 + "~</a>" * 5000
    calls, _ = run(SYNTAX, MARKS, call(body), limits=MarkupLimits(depth=3))
    assert json.loads(calls[0][1])["a"]["a"]["a"].startswith(spelled("~<a>~<a>"))


@st.composite
def outputs(draw: st.DrawFn) -> str:
    parts = [
        "~<tool_call>",
        "~</tool_call>",
        '~<invoke name="store">',
        "~</invoke>",
        "~",
        "~<",
        ">",
        "</",
        "\n",
        " ",
        "1",
    ]
    parts += [f"~<{slash}{name}>" for name in ("shelf", "sizes", "item", "label", "year") for slash in ("", "/")]
    return spelled("".join(draw(st.lists(st.sampled_from([*parts, "é", "text"]), max_size=40))))


@given(outputs(), st.randoms(use_true_random=False), st.booleans())
def test_any_output_reads_the_same_in_any_pieces(text: str, splits: random.Random, as_token: bool) -> None:
    syntax, marks = (SYNTAX_OF_TOKENS, AS_TOKEN) if as_token else (SYNTAX, MARKS)
    limits = MarkupLimits(depth=3, held=60)
    whole = run(syntax, marks, text, tools=TOOLS, limits=limits)
    assert run(syntax, marks, text, tools=TOOLS, limits=limits, splits=splits) == whole
    for _, arguments, ended in whole[0]:
        assert not (ended and arguments) or json.loads(arguments) is not None
