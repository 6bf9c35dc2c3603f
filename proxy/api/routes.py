"""Every route, in one table."""

import asyncio

from aiohttp import web

from proxy.api.errors import BODY_LIMIT, Handler, errors_as_json
from proxy.api.generation import Generation
from proxy.api.service import Service
from proxy.models import Models

LAST_WORDS_TIMEOUT = 1.0


def application(
    models: Models, *, keep_alive_interval: float, max_body_size: int, shutdown_timeout: float = 0
) -> web.Application:
    """The aiohttp application that serves `models`; seconds and bytes.

    On shutdown running requests have `shutdown_timeout` to finish; those that do not are cancelled.
    """
    running: set[asyncio.Task[object]] = set()

    @web.middleware
    async def tracked(request: web.Request, handler: Handler) -> web.StreamResponse:
        task = asyncio.current_task()
        assert task is not None
        running.add(task)
        task.add_done_callback(running.discard)
        return await handler(request)

    async def finish_running(_: web.Application) -> None:
        if running:
            await asyncio.wait(running, timeout=shutdown_timeout)
        for task in running:
            task.cancel()
        if running:
            await asyncio.wait(running, timeout=LAST_WORDS_TIMEOUT)

    app = web.Application(client_max_size=max_body_size, middlewares=[tracked, errors_as_json])
    app.on_shutdown.append(finish_running)
    app[BODY_LIMIT] = max_body_size
    generation, service = Generation(models, keep_alive_interval), Service(models)
    app.add_routes(
        [
            web.post("/v1/chat/completions", generation.chat),
            web.post("/v1/completions", generation.completion),
            web.get("/v1/models", service.models),
            web.get("/v1/models/{name:.+}", service.model),
            web.post("/tokenize", service.tokenize),
            web.post("/detokenize", service.detokenize),
            web.get("/health", service.health),
            web.get("/ready", service.ready),
            web.get("/version", service.version),
        ]
    )
    return app
