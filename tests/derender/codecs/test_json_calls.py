"""Calls that are JSON objects."""

from typing import Any

import pytest

from proxy.derender.codecs.json_calls import ArgumentsSyntax, JsonSyntax
from proxy.formats.kinds import JsonCalls
from tests.derender.codecs.driver import marks_for, run

OBJECT = JsonCalls(open=("<call>",), close=("</call>",))
ARRAY = JsonCalls(open=("<calls>",), close=("</calls>",), array=True)
KEYED = JsonCalls(open=("<calls>",), array=True, name=None)
BARE = JsonCalls(separator=";")
ARGS = JsonCalls(open=("<call>",), arguments=("args",))


def read(declaration: JsonCalls, text: str, **options: Any) -> Any:
    marks = marks_for(declaration)
    return run(JsonSyntax(declaration, marks), marks, text, **options)


@pytest.mark.parametrize(
    ("inside", "arguments"),
    [
        ('{"name": "f", "arguments": {"a": 1}}', '{"a": 1}'),
        ('{"arguments": {"a": 1}, "name": "f"}', '{"a": 1}'),
        ('{"name": "f", "parameters": {"a": 1}}', '{"a": 1}'),
        ('{"id": "x", "name": "f", "type": "function", "arguments": {}}', "{}"),
        ('{"name": "f"}', "{}"),
        ('{"name": "f", "arguments": null}', "{}"),
        ('{"name": "f", "arguments": ""}', "{}"),
        ('{"name": "f", "arguments": "{\\"a\\": \\"b\\"}"}', '{"a": "b"}'),
        ('{"arguments": "{\\"a\\": 1}", "name": "f"}', '{"a": 1}'),
        ('{"name": "f", "arguments": {"a": "} ] \\" </call> {"}}', '{"a": "} ] \\" </call> {"}'),
        ('{"name": "f", "arguments": {"a":   [1,\n{}]}}', '{"a":   [1,\n{}]}'),
        ('{"name": "\\u0066", "arguments": {}}', "{}"),
        ('\n{ "name" : "f" , "arguments" : { } }\n', "{ }"),
        ('{"name": "f", "arguments": {a: 01}}', "{a: 01}"),
        ('{"name": "f", "arguments": {}, "arguments": {"a": 1}}', "{}"),
    ],
)
def test_arguments_are_passed_on_as_they_were_written(inside: str, arguments: str) -> None:
    assert read(OBJECT, f"<call>{inside}</call>") == ([("f", arguments, True)], "")


@pytest.mark.parametrize(
    ("declaration", "text", "names", "prose"),
    [
        (ARRAY, '<calls>[{"name": "f"}, {"name": "g"}]</calls> so', ["f", "g"], " so"),
        (ARRAY, '<calls>[\n{"name": "f"}\n,\n{"name": "g"}\n]\n</calls>', ["f", "g"], ""),
        (ARRAY, '<calls>[{"name": "f"}] so', ["f"], " so"),
        (ARRAY, "<calls>[]</calls>", [], ""),
        (OBJECT, '<call>[{"name": "f"}, {"name": "g"}]</call>', ["f", "g"], ""),
        (OBJECT, '<call>{"name": "f"}<call>{"name": "g"}', ["f", "g"], ""),
        (KEYED, '<calls>[{"f": {"a": 1}}, {"g": {}}]', ["f", "g"], ""),
        (BARE, '{"name": "f"}; {"name": "g"}', ["f", "g"], ""),
        (BARE, '{"name": "f"}\n{"name": "g"} so', ["f", "g"], " so"),
        (ARGS, '<call>{"name": "f", "args": {}}', ["f"], ""),
    ],
)
def test_several_calls(declaration: JsonCalls, text: str, names: list[str], prose: str) -> None:
    calls, shown = read(declaration, text)
    assert ([name for name, _, ended in calls if ended], shown) == (names, prose)


@pytest.mark.parametrize(
    "inside", ["so", '{"name": 4}', '{"name": ""}', '{"arguments": {}}', "{4: 5}", '{"name": "f', "[1]", '"f"']
)
def test_what_has_no_name_is_no_call(inside: str) -> None:
    assert read(OBJECT, f"<call>{inside}") == ([], f"<call>{inside}")


@pytest.mark.parametrize("text", ['{"tide": "low"}', '{"f": 1}', "[1]"])
def test_an_answer_in_json_is_not_taken_for_a_call(text: str) -> None:
    assert read(BARE, text) == ([], text)


@pytest.mark.parametrize(
    "text", ['{"name": "f", "arguments": {"a": "b', '{"name": "f", "arguments": "{', '{"name": "f"']
)
def test_a_call_that_was_cut_is_open(text: str) -> None:
    calls, prose = read(OBJECT, f"<call>{text}", stopped=False)
    assert [(name, ended) for name, _, ended in calls] == [("f", False)]
    assert prose == ""


def test_the_one_function_that_may_be_called_needs_no_name() -> None:
    marks = marks_for(OBJECT)
    assert run(ArgumentsSyntax("f"), marks, '{"a": {"b": 1}}') == ([("f", '{"a": {"b": 1}}', True)], "")


def test_no_other_function_than_the_one_that_may_be_called() -> None:
    marks = marks_for(OBJECT)
    syntax = JsonSyntax(BARE, marks, "f")
    assert run(syntax, marks, '{"name": "f"}')[0] == [("f", "{}", True)]
    assert run(syntax, marks, '{"name": "g"}') == ([], '{"name": "g"}')
