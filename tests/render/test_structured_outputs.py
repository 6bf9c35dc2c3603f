import json
from typing import Any

import pytest
from pydantic import ValidationError

from proxy.protocol.errors import BadRequest
from proxy.protocol.openai import ChatRequest, CompletionRequest
from proxy.render.structured_outputs import structured_outputs

POINT = {"type": "object", "properties": {"x": {"const": None}, "next": {"$ref": "#/$defs/Point"}}}
SCHEMA = {"type": "object", "properties": {"lamp": {"enum": ["on", None]}}, "required": ["lamp"]}


def chat(**fields: Any) -> ChatRequest:
    return ChatRequest.model_validate({"messages": [{"role": "user", "content": "tide?"}]} | fields)


def tool(name: str, parameters: dict[str, Any] | None = None, **more: Any) -> dict[str, Any]:
    function = {"name": name} | ({} if parameters is None else {"parameters": parameters})
    return {"type": "function", "function": function | more}


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({}, None),
        ({"response_format": {"type": "text"}}, None),
        ({"response_format": None, "structured_outputs": None}, None),
        ({"response_format": {"type": "json_object"}}, {"json_object": True}),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"name": "a", "schema": SCHEMA}}},
            {"json": SCHEMA},
        ),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"name": "a", "schema": {}, "strict": True}}},
            {"json": {}},
        ),
        ({"structured_outputs": {"json": SCHEMA}}, {"json": SCHEMA}),
        ({"structured_outputs": {"json": json.dumps(SCHEMA)}}, {"json": json.dumps(SCHEMA)}),
        ({"structured_outputs": {"regex": "a+"}}, {"regex": "a+"}),
        ({"structured_outputs": {"choice": ["on", "off"]}}, {"choice": ["on", "off"]}),
        ({"structured_outputs": {"grammar": "root ::= 'a'"}}, {"grammar": "root ::= 'a'"}),
        ({"structured_outputs": {"json_object": True}}, {"json_object": True}),
        ({"structured_outputs": {"structural_tag": "{}"}}, {"structural_tag": "{}"}),
        (
            {"structured_outputs": {"regex": "a+", "disable_any_whitespace": True, "whitespace_pattern": None}},
            {"regex": "a+", "disable_any_whitespace": True},
        ),
        (
            {"response_format": {"type": "text"}, "structured_outputs": {"regex": "a+"}},
            {"regex": "a+"},
        ),
    ],
)
def test_a_constraint_is_passed_on_as_the_engine_takes_it(
    fields: dict[str, Any], expected: dict[str, Any] | None
) -> None:
    assert structured_outputs(chat(**fields)) == expected
    assert structured_outputs(CompletionRequest.model_validate({"prompt": "tide"} | fields)) == expected


def test_a_structural_tag_is_sent_whole_as_a_string() -> None:
    form = {
        "type": "structural_tag",
        "structures": [{"begin": "<a>", "schema": SCHEMA, "end": "</a>"}],
        "triggers": ["<"],
    }
    sent = structured_outputs(chat(response_format=form))
    assert sent is not None
    assert json.loads(sent["structural_tag"]) == form


@pytest.mark.parametrize("form", [{"type": "json_object"}, {"type": "json_schema", "json_schema": {"schema": SCHEMA}}])
def test_two_constraints_are_refused(form: dict[str, Any]) -> None:
    with pytest.raises(BadRequest, match="response_format and structured_outputs") as refused:
        structured_outputs(chat(response_format=form, structured_outputs={"regex": "a+"}))
    assert refused.value.param == "structured_outputs"


@pytest.mark.parametrize(
    "fields",
    [
        {"response_format": {"type": "json_schema"}},
        {"response_format": {"type": "json_schema", "json_schema": {"name": "a"}}},
        {"response_format": {"type": "yaml"}},
        {"structured_outputs": {}},
        {"structured_outputs": {"regex": "a", "json_object": True}},
    ],
)
def test_what_is_no_constraint_is_refused(fields: dict[str, Any]) -> None:
    with pytest.raises(ValidationError):
        chat(**fields)


@pytest.mark.parametrize(
    ("parameters", "expected"),
    [
        (SCHEMA, SCHEMA),
        (None, {"type": "object", "properties": {}}),
        ({}, {"type": "object", "properties": {}}),
        ({"$defs": {"Point": POINT}, "$ref": "#/$defs/Point"}, {"$defs": {"Point": POINT}, "$ref": "#/$defs/Point"}),
    ],
)
def test_a_named_function_is_a_schema_of_its_arguments(
    parameters: dict[str, Any] | None, expected: dict[str, Any]
) -> None:
    tools = [tool("turn", {"type": "object"}), tool("log", parameters)]
    choice = {"type": "function", "function": {"name": "log"}}
    assert structured_outputs(chat(tools=tools, tool_choice=choice)) == {"json": expected}


def call_schema(name: str, parameters: dict[str, Any]) -> dict[str, Any]:
    return {
        "properties": {"name": {"type": "string", "enum": [name]}, "parameters": parameters},
        "required": ["name", "parameters"],
    }


def test_a_required_call_is_a_list_of_calls_of_any_tool() -> None:
    request = chat(tools=[tool("turn", SCHEMA), tool("log")], tool_choice="required")
    calls = [call_schema("turn", SCHEMA), call_schema("log", {"type": "object", "properties": {}})]
    assert structured_outputs(request) == {
        "json": {"type": "array", "minItems": 1, "items": {"type": "object", "anyOf": calls}}
    }


@pytest.mark.parametrize(("parallel", "limit"), [(False, 1), (True, None), (None, None)])
def test_without_parallel_calls_there_is_one(parallel: bool | None, limit: int | None) -> None:
    sent = structured_outputs(chat(tools=[tool("turn")], tool_choice="required", parallel_tool_calls=parallel))
    assert sent is not None
    assert sent["json"].get("maxItems") == limit


@pytest.mark.parametrize("keyword", ["$defs", "definitions"])
def test_definitions_move_to_the_root_where_references_look_for_them(keyword: str) -> None:
    shared, own = {"type": "integer"}, {"type": "string"}
    tools = [
        tool("turn", {"type": "object", keyword: {"Angle": shared}}),
        tool("log", {"type": "object", keyword: {"Angle": shared, "Line": own}}),
    ]
    sent = structured_outputs(chat(tools=tools, tool_choice="required"))
    assert sent is not None
    assert sent["json"][keyword] == {"Angle": shared, "Line": own}
    assert sent["json"]["items"]["anyOf"] == [call_schema(name, {"type": "object"}) for name in ("turn", "log")]
    assert tools[0]["function"]["parameters"] == {"type": "object", keyword: {"Angle": shared}}


def test_two_definitions_of_one_name_are_refused() -> None:
    tools = [
        tool(name, {"$defs": {"Angle": {"type": kind}}}) for name, kind in (("turn", "integer"), ("log", "string"))
    ]
    with pytest.raises(BadRequest, match=r"two tools define \$defs/Angle differently") as refused:
        structured_outputs(chat(tools=tools, tool_choice="required"))
    assert refused.value.param == "tools"


@pytest.mark.parametrize(
    "choice", ["required", {"type": "function", "function": {"name": "turn"}}], ids=["required", "named"]
)
@pytest.mark.parametrize(
    "other", [{"response_format": {"type": "json_object"}}, {"structured_outputs": {"regex": "a+"}}], ids=str
)
def test_a_forced_call_goes_before_other_constraints(choice: Any, other: dict[str, Any]) -> None:
    alone = structured_outputs(chat(tools=[tool("turn", SCHEMA)], tool_choice=choice))
    assert alone is not None
    assert structured_outputs(chat(tools=[tool("turn", SCHEMA)], tool_choice=choice, **other)) == alone


@pytest.mark.parametrize("choice", ["auto", "none", None])
def test_a_call_that_is_not_forced_constrains_nothing(choice: str | None) -> None:
    request = chat(tools=[tool("turn", SCHEMA)], tool_choice=choice)
    assert structured_outputs(request) is None
    request = chat(tools=[tool("turn", SCHEMA)], tool_choice=choice, response_format={"type": "json_object"})
    assert structured_outputs(request) == {"json_object": True}
