"""From an HTTP request to a validated model: the one place where a client's bytes are read."""

import re
import secrets
from typing import Any, TypeVar

import orjson
from aiohttp import web
from pydantic import BaseModel, ValidationError
from pydantic_core import ErrorDetails

from proxy.protocol.errors import ApiError, BadRequest
from proxy.protocol.generate import JsonObject
from proxy.protocol.openai import REQUEST_ID

Model = TypeVar("Model", bound=BaseModel)

BODY_LIMIT = web.AppKey("body_limit", int)

ERRORS_SHOWN = 5
MAX_NESTING = 128
"""Levels of objects and lists in a body. Deeper ones could not be written again as JSON, or walked by recursion."""


def client_request_id(request: web.Request) -> str | None:
    """The client's `X-Request-Id`, where it is one that can be used in headers and ids."""
    given = request.headers.get("X-Request-Id", "")
    return given if REQUEST_ID.fullmatch(given) else None


def new_request_id() -> str:
    return secrets.token_hex(16)


async def read_body(request: web.Request, model: type[Model]) -> Model:
    """Raises `BadRequest` that names the field and what is wrong with it, or a 413."""
    return validated(await read_json(request), model)


async def read_json(request: web.Request) -> JsonObject:
    """The JSON object that a request brings; raises `BadRequest` or a 413."""
    limit = request.app[BODY_LIMIT]
    try:
        if (request.content_length or 0) > limit:  # said beforehand, so it need not be read
            raise web.HTTPRequestEntityTooLarge(limit)
        body = await request.read()
    except web.HTTPRequestEntityTooLarge:
        message = f"the body is larger than {limit} bytes (max_body_size)"
        raise ApiError(413, message, type="invalid_request_error") from None
    try:
        data = orjson.loads(body)
    except orjson.JSONDecodeError as error:
        what = f"the body is not JSON: {error}" if body else "the body is empty; send a JSON object"
        raise BadRequest(what) from None
    if not isinstance(data, dict):
        raise BadRequest("the body must be a JSON object")
    if body.count(b"{") + body.count(b"[") > MAX_NESTING:
        _check_nesting(data)
    return data


def validated(data: JsonObject, model: type[Model]) -> Model:
    """Raises `BadRequest` that names the field and what is wrong with it."""
    try:
        return model.model_validate(data)
    except ValidationError as error:
        problems = error.errors(include_url=False, include_input=False, include_context=False)[:ERRORS_SHOWN]
        places = [_place(problem) for problem in problems]
        shown = [f"{p}: {_sentence(q)}" if p else _sentence(q) for p, q in zip(places, problems, strict=True)]
        raise BadRequest("; ".join(shown), param=places[0] or None) from None


def _check_nesting(data: Any) -> None:
    level = [data]
    for _ in range(MAX_NESTING):
        inner = (value.values() if isinstance(value, dict) else value for value in level)
        level = [item for values in inner for item in values if isinstance(item, dict | list)]
        if not level:
            return
    raise BadRequest(f"the body is nested deeper than {MAX_NESTING} levels; flatten it")


def _place(problem: ErrorDetails) -> str:
    """`messages[0].role`; parts that name a branch of a union are left out."""
    place = ""
    for part in problem["loc"]:
        if isinstance(part, int):
            place += f"[{part}]"
        elif re.fullmatch(r"\w+", part):
            place += f".{part}" if place else part
    return place


def _sentence(problem: ErrorDetails) -> str:
    """Of Python's words only those that a client knows as well."""
    if problem["type"] in ("dict_type", "model_type"):
        return "input should be an object"
    message = problem["msg"].removeprefix("Value error, ")
    return message[0].lower() + message[1:]
