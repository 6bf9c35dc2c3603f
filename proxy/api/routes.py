"""Every route, in one table."""

from aiohttp import web

from proxy.api.draining import Draining
from proxy.api.errors import errors_as_json
from proxy.api.generation import Generation
from proxy.api.requests import BODY_LIMIT
from proxy.api.service import Service
from proxy.api.stages import Stages
from proxy.models import Models


def application(
    models: Models, draining: Draining, *, keep_alive_interval: float, max_body_size: int
) -> web.Application:
    """The aiohttp application that serves `models`; seconds and bytes."""
    app = web.Application(client_max_size=max_body_size, middlewares=[errors_as_json, draining.middleware])
    app[BODY_LIMIT] = max_body_size
    generation, service = Generation(models, keep_alive_interval), Service(models)
    stages = Stages(models, keep_alive_interval)
    app.add_routes(
        [
            web.post("/v1/chat/completions", generation.chat),
            web.post("/v1/completions", generation.completion),
            web.post("/v1/chat/completions/render", stages.render_chat),
            web.post("/v1/completions/render", stages.render_completion),
            web.post("/inference/v1/generate", stages.generate),
            web.post("/inference/v1/abort_requests", stages.abort),
            web.post("/abort_requests", stages.abort),
            web.post("/v1/chat/completions/derender", stages.derender_chat),
            web.post("/v1/completions/derender", stages.derender_completion),
            web.get("/v1/models", service.models),
            web.get("/v1/models/{name:.+}", service.model),
            web.post("/tokenize", service.tokenize),
            web.post("/detokenize", service.detokenize),
            web.get("/health", service.health),
            web.get("/ready", service.ready),
            web.get("/version", service.version),
            web.get("/openapi.json", service.openapi),
        ]
    )
    return app
