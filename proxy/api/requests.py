"""From an HTTP request to a validated model: the one place where a client's bytes are read."""

import re
import secrets
from typing import TypeVar

import orjson
from aiohttp import web
from pydantic import BaseModel, ValidationError
from pydantic_core import ErrorDetails

from proxy.protocol.errors import BadRequest

Model = TypeVar("Model", bound=BaseModel)

_REQUEST_ID = re.compile(r"[\x21-\x7e]{1,256}")
ERRORS_SHOWN = 5


def client_request_id(request: web.Request) -> str | None:
    """The client's `X-Request-Id`, where it is one that can be used in headers and ids."""
    given = request.headers.get("X-Request-Id", "")
    return given if _REQUEST_ID.fullmatch(given) else None


def new_request_id() -> str:
    return secrets.token_hex(16)


async def read_body(request: web.Request, model: type[Model]) -> Model:
    """Raises `BadRequest` that names the field and what is wrong with it. A 413 comes from aiohttp."""
    body = await request.read()
    try:
        data = orjson.loads(body)
    except orjson.JSONDecodeError as error:
        what = f"the body is not JSON: {error}" if body else "the body is empty; send a JSON object"
        raise BadRequest(what) from None
    if not isinstance(data, dict):
        raise BadRequest("the body must be a JSON object")
    try:
        return model.model_validate(data)
    except ValidationError as error:
        problems = _without_branches(error.errors(include_url=False, include_input=False, include_context=False))
        shown = [f"{_place(problem)}: {_sentence(problem)}" for problem in problems[:ERRORS_SHOWN]]
        raise BadRequest("; ".join(shown), param=_place(problems[0])) from None


def _without_branches(problems: list[ErrorDetails]) -> list[ErrorDetails]:
    """Of a union of types pydantic reports each branch's complaint; the one that got deepest into the value is kept."""
    by_field: dict[str, ErrorDetails] = {}
    for problem in problems:
        field = str(problem["loc"][0]) if problem["loc"] else ""
        kept = by_field.get(field)
        if kept is None or len(problem["loc"]) > len(kept["loc"]):
            by_field[field] = problem
    return list(by_field.values())


def _place(problem: ErrorDetails) -> str:
    """`messages[0].role`; parts that name a branch of a union are left out."""
    place = ""
    for part in problem["loc"]:
        if isinstance(part, int):
            place += f"[{part}]"
        elif re.fullmatch(r"\w+", part):
            place += f".{part}" if place else part
    return place or "body"


def _sentence(problem: ErrorDetails) -> str:
    message = problem["msg"].removeprefix("Value error, ")
    return message[0].lower() + message[1:] if message else message
