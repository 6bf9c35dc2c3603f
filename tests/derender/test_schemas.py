"""What the request's schemas make of a value that a model wrote as text."""

from typing import Any

import pytest

from proxy.derender.schemas import STRING, ToolSchemas, json_number, json_or_string, typed, types_of
from tests.derender.readings import LAMP


@pytest.mark.parametrize(
    ("schema", "types"),
    [
        (None, {"string"}),
        ({}, {"string"}),
        ({"type": "integer"}, {"integer"}),
        ({"type": ["string", "null"]}, {"string", "null"}),
        ({"enum": [1, 2.5, "a", None, True]}, {"integer", "number", "string", "null", "boolean"}),
        ({"const": {"a": 1}}, {"object"}),
        ({"properties": {}}, {"object"}),
        ({"items": {}}, {"array"}),
        ({"anyOf": [{"type": "integer"}, {"type": "null"}]}, {"integer", "null"}),
        ({"oneOf": [{"anyOf": [{"type": "array"}]}, {"enum": ["a"]}]}, {"array", "string"}),
        ({"type": {"odd": 1}}, {"string"}),
        ({"anyOf": "odd"}, {"string"}),
    ],
)
def test_the_types_that_a_schema_allows(schema: Any, types: set[str]) -> None:
    assert types_of(schema) == types


def test_a_schema_that_refers_to_itself_ends() -> None:
    schema: dict[str, Any] = {"type": "integer"}
    for _ in range(5000):
        schema = {"anyOf": [schema]}
    assert types_of(schema) == STRING


@pytest.mark.parametrize(
    ("text", "types", "value"),
    [
        ("4", "string", '"4"'),
        ("null", "string", '"null"'),
        ('a "b"\n', "string", '"a \\"b\\"\\n"'),
        ("4", "integer", "4"),
        (" 4\n", "integer", "4"),
        ("4.0", "integer", "4.0"),
        ("4.5", "integer", '"4.5"'),
        ("4.5", "number", "4.5"),
        ("+4", "integer", "4"),
        ("1e3", "number", "1e3"),
        ("nan", "number", '"nan"'),
        ("1_000", "number", '"1_000"'),
        ("四", "number", '"四"'),
        ("12345678901234567890", "integer", "12345678901234567890"),
        ("True", "boolean", "true"),
        ("0", "boolean", "false"),
        ("yes", "boolean", '"yes"'),
        ("NULL", "null string", "null"),
        ("null and void", "null string", '"null and void"'),
        ("4", "string integer", "4"),
        ("x", "string integer", '"x"'),
        ('{"a": 1}', "object", '{"a": 1}'),
        ("{'a': 1}", "object", "\"{'a': 1}\""),
        ("[1, 2]", "array", "[1, 2]"),
        ("[1, 2]", "object", '"[1, 2]"'),
        ("1", "integer boolean", "1"),
        ("true", "integer boolean", "true"),
        ("", "integer", '""'),
    ],
)
def test_text_becomes_the_first_type_that_it_can_be(text: str, types: str, value: str) -> None:
    assert typed(text, frozenset(types.split())) == value


@pytest.mark.parametrize(
    ("text", "value"), [("4", "4"), (" [1] ", "[1]"), ("attic", '"attic"'), ("", '""'), ('"a"', '"a"')]
)
def test_json_or_a_string(text: str, value: str) -> None:
    assert json_or_string(text) == value


def test_a_number_keeps_its_digits_where_json_allows_them() -> None:
    assert json_number("1.2300") == "1.2300"
    assert json_number("007") == "7"
    assert json_number("attic") is None
    assert json_number("1e999") == "1e999"


def test_what_tools_say_by_function_and_parameter() -> None:
    schemas = ToolSchemas([LAMP, {"type": "function", "function": {"name": "bare"}}, {"type": "function"}])
    assert schemas.types("set_lamp", "level") == {"integer"}
    assert schemas.types("set_lamp", "unknown") == schemas.types("unknown", "level") == STRING
    assert schemas.knows("set_lamp", "level") and not schemas.knows("set_lamp", "unknown")
    assert schemas.declares("bare") and not schemas.declares("unknown")
