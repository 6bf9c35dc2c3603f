"""`response_format`, `structured_outputs` and a forced `tool_choice`, as the engine's constraint on the output.

A forced call goes before the other two, strict tools, which the model may leave alone, come last. Calls are
constrained in the model's own syntax; a forced one whose syntax has no tag is a JSON schema: a list of calls for
`required`, the arguments alone for a named function.
"""

from collections.abc import Sequence

import orjson

from proxy.formats.kinds import Calls
from proxy.protocol.errors import BadRequest
from proxy.protocol.generate import JsonObject
from proxy.protocol.openai import ChatRequest, GenerationRequest, NamedToolChoice
from proxy.render.structural_tags import NOTHING, Function, Surroundings, structural_tag

ANY_OBJECT: JsonObject = {"type": "object"}
NO_ARGUMENTS: JsonObject = {"type": "object", "properties": {}}

_DEFINITIONS = ("$defs", "definitions")
"""Where a JSON schema keeps parts that it refers to: today's keyword and the one of older drafts."""


def structured_outputs(
    request: GenerationRequest, calls: Sequence[Calls] = (), around: Surroundings = NOTHING
) -> JsonObject | None:
    """The value of `sampling_params.structured_outputs`, None for free text. `calls` are how the model writes calls,
    and `around` what may surround them."""
    if isinstance(request, ChatRequest) and constrains_calls(request):
        return _calls(request, calls, around)
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


def constrains_calls(request: ChatRequest) -> bool:
    """Whether calls are what is constrained: one that is forced, or those of strict tools where nothing else is."""
    form = request.response_format
    if request.tool_choice == "required" or isinstance(request.tool_choice, NamedToolChoice):
        return True
    if request.tool_choice == "none" or request.structured_outputs is not None:
        return False
    return (form is None or form.type == "text") and any(f.get("strict") for f in _functions(request))


def _from_response_format(form: JsonObject) -> JsonObject:
    match form["type"]:
        case "json_object":
            return {"json_object": True}
        case "json_schema":
            return {"json": form["json_schema"]["schema"]}
        case _:
            return _tag(form)


def _tag(tag: JsonObject) -> JsonObject:
    return {"structural_tag": orjson.dumps(tag).decode()}


def _functions(request: ChatRequest) -> list[JsonObject]:
    return [tool["function"] for tool in request.tools or ()]


def _calls(request: ChatRequest, calls: Sequence[Calls], around: Surroundings) -> JsonObject | None:
    """Where a call is not forced, only strict tools have their arguments constrained, the others just their syntax."""
    choice, functions = request.tool_choice, _functions(request)
    forced = choice not in (None, "auto")
    if isinstance(choice, NamedToolChoice):
        functions = [function for function in functions if function["name"] == choice.function.name]
    single = isinstance(choice, NamedToolChoice) or request.parallel_tool_calls is False
    wanted = [Function(f["name"], _arguments(f) if forced or f.get("strict") else ANY_OBJECT) for f in functions]
    tag = structural_tag(calls, wanted, forced=forced, single=single, around=around)
    if tag is not None:
        return _tag(tag)
    if not forced:
        return None
    return {"json": _arguments(functions[0]) if choice != "required" else _list_of_calls(functions, single)}


def _arguments(function: JsonObject) -> JsonObject:
    schema: JsonObject = function.get("parameters") or NO_ARGUMENTS
    return schema


def _list_of_calls(functions: Sequence[JsonObject], single: bool) -> JsonObject:
    schema: JsonObject = {"type": "array", "minItems": 1, "items": {"type": "object", "anyOf": []}}
    if single:
        schema["maxItems"] = 1
    for function in functions:
        parameters = dict(_arguments(function))
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
