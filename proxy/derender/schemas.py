"""What a request's tools say of their parameters, and a value that a model wrote as text, as JSON of the right type.

The order of preference is vLLM's (`tool_parsers/utils.py`): null, integer, number, boolean, object, array, string. A
value that fits none of its types, and a parameter that no schema knows, is a string.
"""

import math
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import orjson

from proxy.derender.codecs.json_text import quoted

STRING = frozenset({"string"})
_DEFAULTS = (("properties", "object"), ("items", "array"), ("enum", "string"))
_NUMBER = re.compile(r"-?(0|[1-9]\d*)(\.\d+)?([eE][+-]?\d+)?")


class ToolSchemas:
    """By function and parameter. `strings` makes every parameter without a schema one; where a tool is not known at
    all, so is nothing of its parameters."""

    def __init__(self, tools: Sequence[Mapping[str, Any]] = ()) -> None:
        self._parameters: dict[str, Mapping[str, Any]] = {}
        self._types: dict[tuple[str, str], frozenset[str]] = {}
        for tool in tools:
            function = tool.get("function") or {}
            properties = (function.get("parameters") or {}).get("properties")
            self._parameters[function.get("name", "")] = properties if isinstance(properties, dict) else {}

    def parameter(self, function: str, key: str) -> Mapping[str, Any] | None:
        schema = self._parameters.get(function, {}).get(key)
        return schema if isinstance(schema, dict) else None

    def declares(self, function: str) -> bool:
        return function in self._parameters

    def knows(self, function: str, key: str) -> bool:
        return key in self._parameters.get(function, {})

    def types(self, function: str, key: str) -> frozenset[str]:
        """Of JSON schema; {"string"} where nothing is known."""
        found = self._types.get((function, key))
        if found is None:
            found = types_of(self.parameter(function, key))
            if self.knows(function, key):
                self._types[function, key] = found
        return found


def types_of(schema: Mapping[str, Any] | None) -> frozenset[str]:
    """Every type that a schema allows at its top; of an enumeration, the types of its values."""
    return frozenset(_types(schema, 0)) or STRING


def _types(schema: Any, depth: int) -> Iterator[str]:
    if not isinstance(schema, dict) or depth > 8:
        return
    declared = schema.get("type")
    if isinstance(declared, str):
        yield declared
    elif isinstance(declared, list):
        yield from (name for name in declared if isinstance(name, str))
    else:
        values = (
            schema["enum"] if isinstance(schema.get("enum"), list) else [schema["const"]] if "const" in schema else []
        )
        yield from (_type_of(value) for value in values)
        if "properties" in schema or "additionalProperties" in schema:
            yield "object"
        if "items" in schema or "prefixItems" in schema:
            yield "array"
    for keyword in ("anyOf", "oneOf", "allOf"):
        branches = schema.get(keyword)
        for branch in branches if isinstance(branches, list) else ():
            yield from _types(branch, depth + 1)


def _type_of(value: Any) -> str:
    match value:
        case None:
            return "null"
        case bool():
            return "boolean"
        case int():
            return "integer"
        case float():
            return "number"
        case dict():
            return "object"
        case list():
            return "array"
    return "string"


def typed(text: str, types: frozenset[str]) -> str:
    """`text`, without marks, as JSON of the first of `types` that it can be."""
    if types == STRING:
        return f'"{quoted(text)}"'
    bare = text.strip()
    if "null" in types and bare.lower() == "null":
        return "null"
    if ("integer" in types or "number" in types) and (number := json_number(bare, whole="number" not in types)):
        return number
    if "boolean" in types and bare.lower() in ("true", "false", "1", "0"):
        return "true" if bare.lower() in ("true", "1") else "false"
    if ("object" in types and bare.startswith("{")) or ("array" in types and bare.startswith("[")):
        try:
            orjson.loads(bare)
        except orjson.JSONDecodeError:
            return f'"{quoted(text)}"'
        return bare
    return f'"{quoted(text)}"'


def json_number(text: str, *, whole: bool = False) -> str | None:
    """A number that Python or JSON would read, as JSON writes it; None where it is none. `whole`: an integer."""
    if _NUMBER.fullmatch(text) and not (whole and not _is_whole(text)):
        return text
    try:
        value = float(text)
    except ValueError:
        return None
    if not math.isfinite(value) or (whole and not value.is_integer()) or "_" in text or not text.isascii():
        return None
    return str(int(value)) if value.is_integer() and abs(value) < 2**53 else orjson.dumps(value).decode()


def _is_whole(text: str) -> bool:
    return not set(text) & set(".eE") or float(text).is_integer()


def json_or_string(text: str) -> str:
    """`text` as it is where it is JSON, as a string where not."""
    bare = text.strip()
    try:
        orjson.loads(bare)
    except orjson.JSONDecodeError:
        return f'"{quoted(text)}"'
    return bare
