"""What clients, sidecars and load balancers ask besides generation: models, tokens, health, version."""

import asyncio

import orjson
from aiohttp import web

from proxy import __version__, pipeline
from proxy.api.openapi import document
from proxy.api.requests import read_body
from proxy.models import Models, ServedModel
from proxy.protocol.errors import ApiError
from proxy.protocol.generate import JsonObject
from proxy.protocol.openai import ChatRequest, DetokenizeRequest, TokenizeRequest
from proxy.render.sampling import check_token_ids


def _json(body: JsonObject) -> web.Response:
    return web.Response(body=orjson.dumps(body), content_type="application/json")


class Service:
    """The handlers, for one set of models."""

    def __init__(self, models: Models) -> None:
        self._models = models
        self._openapi: JsonObject | None = None  # made when it is first asked for

    async def health(self, _: web.Request) -> web.Response:
        """200 while the process is alive."""
        return web.Response()

    async def ready(self, _: web.Request) -> web.Response:
        """200 while an engine is up, with which pools have one; 503 while none is."""
        pools = list({model.pool.name: model.pool for model in self._models.all}.values())
        ready = await asyncio.gather(*(pool.ready() for pool in pools))
        if not any(ready):
            message = f"no engine is up in {', '.join(pool.name for pool in pools)}"
            raise ApiError(503, message, type="service_unavailable", code="not_ready", headers={"Retry-After": "1"})
        return _json({"pools": {pool.name: up for pool, up in zip(pools, ready, strict=True)}})

    async def version(self, _: web.Request) -> web.Response:
        return _json({"version": __version__})

    async def openapi(self, request: web.Request) -> web.Response:
        if self._openapi is None:
            self._openapi = document(request.app.router.routes())
        return _json(self._openapi)

    async def models(self, _: web.Request) -> web.Response:
        cards = [_card(model, name) for model in self._models.all for name in model.names]
        return _json({"object": "list", "data": cards})

    async def model(self, request: web.Request) -> web.Response:
        name = request.match_info["name"]
        return _json(_card(self._models.get(name), name))

    async def tokenize(self, request: web.Request) -> web.Response:
        """vLLM's route: the ids of a text, or of messages as they would be rendered."""
        body = await read_body(request, TokenizeRequest)
        model = self._models.get(body.model)
        if body.prompt is not None:
            special = body.add_special_tokens is not False
            ids = await pipeline.encode(model, body.prompt, len(body.prompt), special=special, limited=False)
        else:
            chat = ChatRequest.model_validate(body.model_dump(exclude_unset=True))
            chat.check()
            ids = (await pipeline.render_messages(model, chat, len(await request.read()))).token_ids
        strings = model.tokenizer.prompt.token_strings(ids) if body.return_token_strs else None
        return _json(
            {
                "count": len(ids),
                "max_model_len": model.limits.max_model_len,
                "tokens": ids,
                "token_strs": strings,
            }
        )

    async def detokenize(self, request: web.Request) -> web.Response:
        body = await read_body(request, DetokenizeRequest)
        model = self._models.get(body.model)
        check_token_ids(body.tokens, model.limits.vocabulary_size, "tokens")
        return _json({"prompt": await pipeline.decode(model, body.tokens)})


def _card(model: ServedModel, name: str) -> JsonObject:
    """OpenAI's model object with vLLM's additions."""
    return {
        "id": name,
        "object": "model",
        "created": model.created,
        "owned_by": "derender-proxy",
        "root": model.root,
        "parent": None if name == model.name else model.name,
        "max_model_len": model.limits.max_model_len,
    }
