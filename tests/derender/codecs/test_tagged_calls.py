"""Calls with a tag per parameter."""

import json
from typing import Any

import pytest

from proxy.derender.codecs.tagged_calls import TaggedSyntax
from proxy.formats.kinds import TaggedCalls
from tests.derender.codecs.driver import marks_for, run, tool

XML = TaggedCalls(
    section=("<calls>",),
    section_end=("</calls>",),
    call="<function={name}>",
    call_end="</function>",
    parameter="<parameter={key}>",
    parameter_end="</parameter>",
    trim=True,
)
ATTRIBUTES = TaggedCalls(
    section=("<calls>",),
    section_end=("</calls>",),
    call='<invoke name="{name}">',
    call_end="</invoke>",
    parameter='<parameter name="{key}">',
    parameter_end="</parameter>",
)
WIRE = TaggedCalls(
    call='<invoke name="{name}">',
    call_end="</invoke>",
    parameter='<parameter name="{key}" string="{string}">',
    parameter_end="</parameter>",
    types="wire",
    unwraps=("arguments",),
)
PAIRS = TaggedCalls(
    call="<call>{name}", call_end="</call>", parameter="<k>{key}</k>", value="<v>", parameter_end="</v>"
)
TOOLS = [
    tool(
        "lamp",
        room={"type": "string"},
        level={"type": "integer"},
        on={"type": "boolean"},
        tags={"type": "array"},
        note={"type": ["string", "null"]},
    ),
    tool("now"),
]


def read(declaration: TaggedCalls, text: str, **options: Any) -> Any:
    marks = marks_for(declaration)
    return run(TaggedSyntax(declaration, marks), marks, text, tools=TOOLS, **options)


def value_of(declaration: TaggedCalls, key: str, written: str) -> Any:
    before = {
        XML: f"<calls><function=lamp><parameter={key}>",
        ATTRIBUTES: f'<calls><invoke name="lamp"><parameter name="{key}">',
        PAIRS: f"<call>lamp\n<k>{key}</k>\n<v>",
    }
    after = {
        XML: "</parameter></function></calls>",
        ATTRIBUTES: "</parameter></invoke></calls>",
        PAIRS: "</v></call>",
    }
    ((name, arguments, ended),), prose = read(declaration, before[declaration] + written + after[declaration])
    assert (name, ended, prose) == ("lamp", True, "")
    ((read_key, value),) = json.loads(arguments).items()
    assert read_key == key
    return value


@pytest.mark.parametrize(
    ("written", "value"),
    [
        ("attic", "attic"),
        ("\nattic\n", "attic"),
        ("\n\nattic\n\n", "\nattic\n"),
        ("\n", ""),
        ("\n\n", ""),
        ("", ""),
        (" attic ", " attic "),
        ("\nattic", "attic"),
        ("attic\n", "attic"),
        ('a "b" \\ \t <c> & 灯台', 'a "b" \\ \t <c> & 灯台'),
        ("4", "4"),
    ],
)
def test_one_newline_at_each_end_of_a_value_is_the_templates(written: str, value: str) -> None:
    assert value_of(XML, "room", written) == value


@pytest.mark.parametrize("declaration", [ATTRIBUTES, PAIRS], ids=["attributes", "pairs"])
@pytest.mark.parametrize("value", ["attic", "\nattic\n", " a ", "", "\n"])
def test_elsewhere_a_string_is_verbatim(declaration: TaggedCalls, value: str) -> None:
    assert value_of(declaration, "room", value) == value


@pytest.mark.parametrize("declaration", [XML, ATTRIBUTES, PAIRS], ids=["xml", "attributes", "pairs"])
@pytest.mark.parametrize(
    ("key", "written", "value"),
    [
        ("level", "4", 4),
        ("level", " 4 ", 4),
        ("level", "many", "many"),
        ("on", "True", True),
        ("on", "false", False),
        ("tags", '["a", 1]', ["a", 1]),
        ("tags", "a, b", "a, b"),
        ("note", "null", None),
        ("note", "high", "high"),
        ("unknown", "4", "4"),
    ],
)
def test_a_schema_types_a_value(declaration: TaggedCalls, key: str, written: str, value: Any) -> None:
    assert value_of(declaration, key, written) == value


@pytest.mark.parametrize(
    ("attributes", "written", "value"),
    [
        ('name="level" string="true"', "4", "4"),
        ('name="level" string="false"', "4", 4),
        ('string="false" name="level"', "4", 4),
        ('name="level"', "4", 4),
        ("name='level' string='true'", "4", "4"),
        ("name=level string=true", "4", "4"),
        ('name="level" string="false"', "not JSON", "not JSON"),
        ('name="level" string="false"', '{"a": [1]}', {"a": [1]}),
    ],
)
def test_a_tag_types_a_value(attributes: str, written: str, value: Any) -> None:
    text = f'<invoke name="lamp"><parameter {attributes}>{written}</parameter></invoke>'
    ((_, arguments, _),), prose = read(WIRE, text)
    assert (json.loads(arguments), prose) == ({"level": value}, "")


def test_attributes_are_unescaped() -> None:
    text = '<invoke name="lamp"><parameter name="rise &amp; &quot;fall&quot;" string="true">&amp;</parameter></invoke>'
    ((_, arguments, _),), _ = read(WIRE, text)
    assert json.loads(arguments) == {'rise & "fall"': "&amp;"}


@pytest.mark.parametrize(
    ("parameters", "arguments"),
    [
        ([("arguments", '{"a": 1}')], '{"a": 1}'),
        ([("arguments", "[1]")], '{"arguments": [1]}'),
        ([("arguments", '{"a": 1}'), ("b", "2")], '{"arguments": {"a": 1}, "b": 2}'),
        ([("b", "2"), ("arguments", '{"a": 1}')], '{"b": 2, "arguments": {"a": 1}}'),
    ],
)
def test_a_sole_parameter_may_hold_all_arguments(parameters: list[tuple[str, str]], arguments: str) -> None:
    tags = "".join(f'<parameter name="{key}" string="false">{value}</parameter>' for key, value in parameters)
    assert read(WIRE, f'<invoke name="lamp">{tags}</invoke>') == ([("lamp", arguments, True)], "")


ROOM = '{"room": "attic"}'


@pytest.mark.parametrize(
    ("declaration", "text", "calls", "prose"),
    [
        pytest.param(
            XML, "<function=lamp><parameter=room>attic</parameter></function>", [("lamp", ROOM)], "", id="no section"
        ),
        pytest.param(
            XML,
            "<calls><function=lamp><parameter=room>\nattic\n<parameter=level>\n4\n</function></calls>",
            [("lamp", '{"room": "attic", "level": 4}')],
            "",
            id="no closers of parameters",
        ),
        pytest.param(
            XML,
            "<calls><function=lamp><parameter=room>attic</parameter><function=now></function></calls>",
            [("lamp", ROOM), ("now", "{}")],
            "",
            id="no closer of a call",
        ),
        pytest.param(
            XML,
            "<calls>\n<function=now>\n</function>\n<function=lamp>\n<parameter=room>\nattic\n</parameter>\n</function>\n</calls>",
            [("now", "{}"), ("lamp", ROOM)],
            "",
            id="several in a section",
        ),
        pytest.param(XML, "<function=now></function></calls></calls> so", [("now", "{}")], " so", id="extra closer"),
        pytest.param(
            XML,
            "<calls><function=lamp>hm<parameter=room>attic</parameter>yes</function></calls>",
            [("lamp", ROOM)],
            "hmyes",
            id="text between parameters",
        ),
        pytest.param(ATTRIBUTES, "<calls><invoke name='now'></invoke></calls>", [("now", "{}")], "", id="a quote"),
        pytest.param(ATTRIBUTES, "<calls><invoke name=now></invoke></calls>", [("now", "{}")], "", id="no quotes"),
        pytest.param(PAIRS, "<call>now</call>", [("now", "{}")], "", id="a call without parameters"),
        pytest.param(PAIRS, "<call>now\n</call>", [("now", "{}")], "", id="and a line for its name"),
        pytest.param(
            PAIRS, "<call>lamp<k>room</k><v>attic</v></call>", [("lamp", ROOM)], "", id="pairs on one line"
        ),
        pytest.param(
            PAIRS, "<call>lamp\n<k>room</k>\n<v>attic</v>\n</call>", [("lamp", ROOM)], "", id="pairs on lines"
        ),
        pytest.param(PAIRS, "<call>lamp<k>room</k>attic</v></call>", [("lamp", ROOM)], "", id="no tag of a value"),
        pytest.param(PAIRS, "<call>f<k>a</k><v>b</v></call>", [("f", '{"a": "b"}')], "", id="a tool nobody declared"),
    ],
)  # fmt: skip
def test_what_is_read_as_calls(declaration: TaggedCalls, text: str, calls: list[tuple[str, str]], prose: str) -> None:
    assert read(declaration, text) == ([(*call, True) for call in calls], prose)


@pytest.mark.parametrize(
    ("declaration", "text"),
    [
        (XML, "<calls> are tags"),
        (XML, "<function=two words>"),
        (XML, "<function=>"),
        (XML, "<function=" + "f" * 600 + ">"),
        (ATTRIBUTES, "<invoke> is a tag"),
        (ATTRIBUTES, '<invoke title="f">'),
        (PAIRS, "<call> is a tag"),
        (PAIRS, "<call>unheard-of</call>"),
        (PAIRS, "<call>now\nand then"),
        (XML, "<function=lamp> is how a call begins"),
    ],
)
def test_what_has_no_name_is_no_call(declaration: TaggedCalls, text: str) -> None:
    assert read(declaration, text) == ([], text)


@pytest.mark.parametrize(
    ("text", "cut", "stopped"),
    [
        ("<function=lamp><parameter=room>att", '{"room": "att', '{"room": "att'),
        ("<function=lamp><parameter=level>4", '{"level": ', '{"level": '),
        ("<function=lamp><parameter=room>attic</parameter>", '{"room": "attic"', '{"room": "attic"}'),
        ("<calls><function=lamp>", "", "{}"),
    ],
)
def test_how_an_unfinished_call_ends(text: str, cut: str, stopped: str) -> None:
    assert read(XML, text, stopped=False)[0][0][:2] == ("lamp", cut)
    assert read(XML, text, stopped=True)[0][0][:2] == ("lamp", stopped)
