"""The description of every route, from the same pydantic models that validate the requests.

Of answers it says their type and what they are, not every field: those are the OpenAI API's and vLLM's.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from aiohttp import web
from pydantic import BaseModel
from pydantic.json_schema import models_json_schema

from proxy import __version__
from proxy.protocol.derender import (
    ChatDerenderStep,
    ChatDerenderWhole,
    CompletionDerenderStep,
    CompletionDerenderWhole,
)
from proxy.protocol.generate import JsonObject
from proxy.protocol.openai import ChatRequest, CompletionRequest, DetokenizeRequest, TokenizeRequest
from proxy.protocol.tokens import AbortRequest, GenerateBody

JSON, EVENTS = "application/json", "text/event-stream"


@dataclass(frozen=True, slots=True)
class Operation:
    """One route: what it takes, one of `bodies`, and the media types that it answers with; none for an empty body."""

    summary: str
    bodies: tuple[type[BaseModel], ...] = ()
    answers: tuple[str, ...] = (JSON,)


OPERATIONS = {
    "/v1/chat/completions": Operation("Answer a conversation", (ChatRequest,), (JSON, EVENTS)),
    "/v1/completions": Operation("Continue texts", (CompletionRequest,), (JSON, EVENTS)),
    "/v1/chat/completions/render": Operation("The generate request of a conversation", (ChatRequest,)),
    "/v1/completions/render": Operation("The generate request of each prompt", (CompletionRequest,)),
    "/inference/v1/generate": Operation("Token ids for token ids", (GenerateBody,), (JSON, EVENTS)),
    "/inference/v1/abort_requests": Operation("End running generate requests", (AbortRequest,), ()),
    "/abort_requests": Operation("End running generate requests", (AbortRequest,), ()),
    "/v1/chat/completions/derender": Operation(
        "An engine's answer, or one event of it, as a chat completion", (ChatDerenderWhole, ChatDerenderStep)
    ),
    "/v1/completions/derender": Operation(
        "An engine's answers, or one event of one, as a completion", (CompletionDerenderWhole, CompletionDerenderStep)
    ),
    "/v1/models": Operation("The served models"),
    "/v1/models/{name}": Operation("One served model"),
    "/tokenize": Operation("The ids of a text or of a conversation", (TokenizeRequest,)),
    "/detokenize": Operation("The text of ids", (DetokenizeRequest,)),
    "/health": Operation("200 while the process is alive", answers=()),
    "/ready": Operation("200 while an engine is up"),
    "/version": Operation("The proxy's version"),
    "/openapi.json": Operation("This description"),
}

ERROR: JsonObject = {
    "type": "object",
    "required": ["error"],
    "properties": {
        "error": {
            "type": "object",
            "required": ["message", "type", "param", "code"],
            "properties": {
                "message": {"type": "string"},
                "type": {"type": "string"},
                "param": {"type": ["string", "null"]},
                "code": {"type": ["string", "null"]},
            },
        }
    },
}


def document(routes: Iterable[web.AbstractRoute]) -> JsonObject:
    """The OpenAPI 3.1 document of these routes, each of which `OPERATIONS` has."""
    models = {model for operation in OPERATIONS.values() for model in operation.bodies}
    ordered = sorted(models, key=lambda model: model.__name__)
    references, definitions = models_json_schema(
        [(model, "validation") for model in ordered], ref_template="#/components/schemas/{model}"
    )
    schemas = {model: schema for (model, _), schema in references.items()}
    paths: dict[str, Any] = {}
    for route in routes:
        if route.method != "HEAD" and route.resource is not None:  # aiohttp adds HEAD to every GET
            path = route.resource.canonical
            paths.setdefault(path, {})[route.method.lower()] = _operation(path, schemas)
    return {
        "openapi": "3.1.0",
        "info": {"title": "derender-proxy", "version": __version__},
        "paths": paths,
        "components": {"schemas": {**definitions.get("$defs", {}), "Error": ERROR}},
    }


def _operation(path: str, schemas: dict[Any, JsonObject]) -> JsonObject:
    operation = OPERATIONS[path]
    answer: JsonObject = {"description": operation.summary}
    if operation.answers:
        answer["content"] = {media: {"schema": {}} for media in operation.answers}
    error = {"$ref": "#/components/schemas/Error"}
    failure = {"description": "What was wrong", "content": {JSON: {"schema": error}}}
    described: JsonObject = {"summary": operation.summary, "responses": {"200": answer, "default": failure}}
    if operation.bodies:
        bodies = [schemas[model] for model in operation.bodies]
        schema = bodies[0] if len(bodies) == 1 else {"anyOf": bodies}
        described["requestBody"] = {"required": True, "content": {JSON: {"schema": schema}}}
    if "{name}" in path:
        described["parameters"] = [{"name": "name", "in": "path", "required": True, "schema": {"type": "string"}}]
    return described
