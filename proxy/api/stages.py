"""The stages over HTTP, each by itself: wire compatible with vLLM's, so that its clients work unchanged."""

import time

from aiohttp import web

from proxy import stages
from proxy.api.errors import REQUEST_ID
from proxy.api.requests import read_json, validated
from proxy.derender.answer import Head
from proxy.models import Models, ServedModel
from proxy.protocol.derender import ChatDerenderStep, ChatDerenderWhole


class Stages:
    """The handlers, for one set of models."""

    def __init__(self, models: Models) -> None:
        self._models = models

    async def derender_chat(self, request: web.Request) -> web.Response:
        data = await read_json(request)
        if data.get("stream") is True:
            step = validated(data, ChatDerenderStep)
            model = self._models.get(step.model)
            head = _head(request, "chatcmpl", step.generate_chunk.request_id, model)
            return _json(stages.derender_chat_step(model, step, head))
        whole = validated(data, ChatDerenderWhole)
        model = self._models.get(whole.model)
        head = _head(request, "chatcmpl", whole.generate_response.request_id, model)
        return _json(stages.derender_chat(model, whole, head))


def _head(request: web.Request, prefix: str, given: str | None, model: ServedModel) -> Head:
    """A response bears the id of the engine's answer."""
    return Head(given or f"{prefix}-{request[REQUEST_ID]}", int(time.time()), model.name)


def _json(body: bytes) -> web.Response:
    return web.Response(body=body, content_type="application/json")
