"""`/v1/chat/completions` and `/v1/completions`, streamed and whole.

A handler validates, lets the pipeline render, and gives it a place to write. An error before the first event is an HTTP
status; after it, one `data: {"error": ...}` event and the end of the body, without `[DONE]`.
"""

import asyncio
import time
from collections.abc import Awaitable, Callable, Sequence

from aiohttp import web

from proxy import pipeline
from proxy.api.errors import REQUEST_ID, STOPPING, reported
from proxy.api.requests import client_request_id, new_request_id, read_body
from proxy.api.sse import ClientGone, EventStream
from proxy.derender.answer import Answer, Head, sse
from proxy.models import Models, ServedModel
from proxy.pipeline import Job, Writer
from proxy.protocol.openai import ChatRequest, CompletionRequest, GenerationRequest

CLIENT_CLOSED_REQUEST = 499


class Generation:
    """The handlers, for one set of models."""

    def __init__(self, models: Models, keep_alive_interval: float) -> None:
        self._models, self._keep_alive_interval = models, keep_alive_interval

    async def chat(self, request: web.Request) -> web.StreamResponse:
        body = await read_body(request, ChatRequest)
        model = self._models.get(body.model)
        head, engine_request_id = _ids("chatcmpl", request, body, model)
        job = await pipeline.render_chat(model, body, engine_request_id, len(await request.read()))
        return await self._respond(request, body, model, [job], pipeline.chat_answer(model, body, job, head))

    async def completion(self, request: web.Request) -> web.StreamResponse:
        body = await read_body(request, CompletionRequest)
        model = self._models.get(body.model)
        head, engine_request_id = _ids("cmpl", request, body, model)
        jobs = await pipeline.render_completion(model, body, engine_request_id)
        return await self._respond(request, body, model, jobs, pipeline.completion_answer(model, body, jobs, head))

    async def _respond(
        self, request: web.Request, body: GenerationRequest, model: ServedModel, jobs: Sequence[Job], answer: Answer
    ) -> web.StreamResponse:
        def run(writer: Writer) -> Awaitable[bytes]:
            return pipeline.run(model, jobs, answer, writer)

        return await respond(request, run, self._keep_alive_interval if body.stream else None)


async def respond(
    request: web.Request, run: Callable[[Writer], Awaitable[bytes]], keep_alive_interval: float | None
) -> web.StreamResponse:
    """The response that `run` makes, which writes as it goes and returns the bytes that come last; streamed unless
    `keep_alive_interval` is None."""
    if keep_alive_interval is None:
        return web.Response(body=await run(_Nowhere()), content_type="application/json")
    headers = {"x-request-id": request[REQUEST_ID]}
    with EventStream(request, headers, keep_alive_interval) as events:
        try:
            return await _streamed(events, lambda: run(events), request[REQUEST_ID])
        except ClientGone:
            return web.Response(status=CLIENT_CLOSED_REQUEST)
        except asyncio.CancelledError:
            # The client has gone and hears nothing of this, or the server stops and cannot wait any longer.
            events.cut(sse(STOPPING.body()))
            raise


async def _streamed(events: EventStream, run: Callable[[], Awaitable[bytes]], request_id: str) -> web.StreamResponse:
    try:
        last = await run()
    except ClientGone:
        raise
    except Exception as error:
        if not events.begun:
            raise
        last = sse(reported(error, request_id).body())
    return await events.finish(last)


class _Nowhere:
    """The writer of a whole answer, which has nothing to write before its end."""

    def write(self, data: bytes) -> bool:
        raise AssertionError("a whole answer writes nothing before its end")

    async def ready(self) -> None: ...


def _ids(prefix: str, request: web.Request, body: GenerationRequest, model: ServedModel) -> tuple[Head, str]:
    """The response's head, and the id that the engine knows the request by. A client may use an id of its own twice,
    which an engine would take for the same request, so the engine's has a suffix then."""
    given = client_request_id(request) or body.request_id
    id = f"{prefix}-{given or request[REQUEST_ID]}"
    engine_id = f"{id}-{new_request_id()[:8]}" if given else id
    return Head(id, int(time.time()), model.name), engine_id
