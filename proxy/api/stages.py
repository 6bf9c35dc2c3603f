"""The stages over HTTP, each by itself: wire compatible with vLLM's, so that its clients work unchanged."""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial

import orjson
from aiohttp import web

from proxy.api.errors import REQUEST_ID
from proxy.api.generation import respond
from proxy.api.requests import client_request_id, new_request_id, read_body, read_json, validated
from proxy.derender.answer import Head
from proxy.models import Models, ServedModel
from proxy.pipeline import off_loop
from proxy.protocol.derender import (
    ChatDerenderStep,
    ChatDerenderWhole,
    CompletionDerenderStep,
    CompletionDerenderWhole,
)
from proxy.protocol.errors import ApiError
from proxy.protocol.generate import JsonObject
from proxy.protocol.openai import ChatRequest, CompletionRequest
from proxy.protocol.tokens import AbortRequest, GenerateBody
from proxy.stages.derender import (
    derender_chat,
    derender_chat_step,
    derender_completion,
    derender_completion_step,
)
from proxy.stages.generate import ID_PREFIX, Running, token_answer, token_request
from proxy.stages.render import rendered_chat, rendered_completion

HEAVY_BYTES = 32 << 10
"""A request larger than that is worked on in a thread: it takes milliseconds, in which streams would stand still."""

HEAVY_CALLS = 64
"""How many of those may run or wait at a time."""


class Stages:
    """The handlers, for one set of models."""

    def __init__(self, models: Models, keep_alive_interval: float) -> None:
        self._models, self._keep_alive_interval = models, keep_alive_interval
        self._running = Running()
        self._heavy_calls = 0

    async def render_chat(self, request: web.Request) -> web.Response:
        body = await read_body(request, ChatRequest)
        model = self._models.get(body.model)
        size = len(await request.read())
        with self._heavy(size):
            made = await rendered_chat(model, body, f"chatcmpl-{_id(request, body.request_id)}", size)
        return _json(orjson.dumps(made))

    async def render_completion(self, request: web.Request) -> web.Response:
        body = await read_body(request, CompletionRequest)
        model = self._models.get(body.model)
        with self._heavy(len(await request.read())):
            made = await rendered_completion(model, body, f"cmpl-{_id(request, body.request_id)}")
        return _json(orjson.dumps(made))

    async def generate(self, request: web.Request) -> web.StreamResponse:
        sent = await read_json(request)
        body = validated(sent, GenerateBody)
        model = self._models.get(body.model)
        request_id = ID_PREFIX + _id(request, body.request_id)
        # A client may use an id of its own twice, which an engine would take for the same request.
        engine_request = token_request(model, body, sent, f"{request_id}-{new_request_id()[:8]}")
        answer = token_answer(model, body, request_id)
        run = partial(self._running.run, request_id, model, engine_request, answer)
        return await respond(request, run, self._keep_alive_interval if body.stream else None)

    async def abort(self, request: web.Request) -> web.Response:
        self._running.abort((await read_body(request, AbortRequest)).request_ids)
        return web.Response()

    async def derender_chat(self, request: web.Request) -> web.Response:
        return await self._derendered(request, self._chat_step, self._chat_whole)

    async def derender_completion(self, request: web.Request) -> web.Response:
        return await self._derendered(request, self._completion_step, self._completion_whole)

    async def _derendered(
        self,
        request: web.Request,
        step: Callable[[JsonObject, str], bytes],
        whole: Callable[[JsonObject, str], bytes],
    ) -> web.Response:
        data = await read_json(request)
        made = partial(step if data.get("stream") is True else whole, data, request[REQUEST_ID])
        size = len(await request.read())
        if size <= HEAVY_BYTES:
            return _json(made())
        with self._heavy(size):
            return _json(await off_loop(size, made))

    def _chat_step(self, data: JsonObject, request_id: str) -> bytes:
        body = validated(data, ChatDerenderStep)
        model = self._models.get(body.model)
        return derender_chat_step(model, body, _head(body.generate_chunk.request_id, f"chatcmpl-{request_id}", model))

    def _chat_whole(self, data: JsonObject, request_id: str) -> bytes:
        body = validated(data, ChatDerenderWhole)
        model = self._models.get(body.model)
        return derender_chat(model, body, _head(body.generate_response.request_id, f"chatcmpl-{request_id}", model))

    def _completion_step(self, data: JsonObject, request_id: str) -> bytes:
        body = validated(data, CompletionDerenderStep)
        model = self._models.get(body.model)
        return derender_completion_step(model, body, _head(body.generate_chunk.request_id, f"cmpl-{request_id}", model))

    def _completion_whole(self, data: JsonObject, request_id: str) -> bytes:
        body = validated(data, CompletionDerenderWhole)
        model = self._models.get(body.model)
        head = _head(body.generate_responses[0].request_id, f"cmpl-{request_id}", model)
        return derender_completion(model, body, head)

    @contextmanager
    def _heavy(self, size: int) -> Iterator[None]:
        """Raises a 429 where too many requests as heavy as this one are being worked on."""
        if size <= HEAVY_BYTES:
            yield
            return
        if self._heavy_calls >= HEAVY_CALLS:
            message = f"{HEAVY_CALLS} large requests are being worked on already; try again soon"
            raise ApiError(429, message, type="rate_limit_error", code="busy", headers={"Retry-After": "1"})
        self._heavy_calls += 1
        try:
            yield
        finally:
            self._heavy_calls -= 1


def _id(request: web.Request, given: str | None) -> str:
    return client_request_id(request) or given or str(request[REQUEST_ID])


def _head(given: str | None, otherwise: str, model: ServedModel) -> Head:
    """A response bears the id of the engine's answer."""
    return Head(given or otherwise, int(time.time()), model.name)


def _json(body: bytes) -> web.Response:
    return web.Response(body=body, content_type="application/json")
