"""`response_format`, `structured_outputs` and a forced `tool_choice`, as the engine's constraint on the output.

A forced call goes before a response format. It is a JSON schema here: a list of calls for `required`, the arguments
alone for a named function.
"""

from typing import Any

import orjson

from proxy.protocol.errors import BadRequest
from proxy.protocol.generate import JsonObject
from proxy.protocol.openai import ChatRequest, GenerationRequest, NamedToolChoice

ANY_OBJECT: JsonObject = {"type": "object", "properties": {}}

_DEFINITIONS = ("$defs", "definitions")
"""Where a JSON schema keeps parts that it refers to: today's keyword and the one of older drafts."""


def structured_outputs(request: GenerationRequest) -> JsonObject | None:
    """The value of `sampling_params.structured_outputs`, None for free text."""
    forced = _forced_call(request) if isinstance(request, ChatRequest) else None
    if forced is not None:
        return {"json": forced}
    wanted = request.structured_outputs
    form = request.response_format
    if form is not None and form.type != "text":
        if wanted is not None:
            raise BadRequest(
                "response_format and structured_outputs both constrain the output; give one of them",
                param="structured_outputs",
            )
        return _from_response_format(form.model_dump(by_alias=True, exclude_unset=True))
    return wanted.model_dump(by_alias=True, exclude_none=True) if wanted is not None else None


def _from_response_format(form: JsonObject) -> JsonObject:
    match form["type"]:
        case "json_object":
            return {"json_object": True}
        case "json_schema":
            return {"json": form["json_schema"]["schema"]}
        case _:
            return {"structural_tag": orjson.dumps(form).decode()}


def _forced_call(request: ChatRequest) -> JsonObject | None:
    functions: list[dict[str, Any]] = [tool["function"] for tool in request.tools or ()]
    if isinstance(request.tool_choice, NamedToolChoice):
        name = request.tool_choice.function.name
        return next(f.get("parameters") or ANY_OBJECT for f in functions if f["name"] == name)
    if request.tool_choice != "required":
        return None
    schema: JsonObject = {"type": "array", "minItems": 1, "items": {"type": "object", "anyOf": []}}
    if request.parallel_tool_calls is False:
        schema["maxItems"] = 1
    for function in functions:
        parameters = dict(function.get("parameters") or ANY_OBJECT)
        for keyword in _DEFINITIONS:
            _lift_definitions(keyword, parameters, schema)
        schema["items"]["anyOf"].append(
            {
                "properties": {"name": {"type": "string", "enum": [function["name"]]}, "parameters": parameters},
                "required": ["name", "parameters"],
            }
        )
    return schema


def _lift_definitions(keyword: str, parameters: JsonObject, schema: JsonObject) -> None:
    """Moves what references such as `#/$defs/Point` mean to the root of the schema, which they start from."""
    definitions = parameters.get(keyword)
    if not isinstance(definitions, dict):
        return
    del parameters[keyword]
    for name, definition in definitions.items():
        if schema.setdefault(keyword, {}).setdefault(name, definition) != definition:
            raise BadRequest(f"two tools define {keyword}/{name} differently; rename one of them", param="tools")
