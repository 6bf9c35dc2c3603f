"""The HTTP face of the embedded engine: vLLM's tokens-only protocol, `/inference/v1/generate`.

It validates, calls the engine and writes. Every error has vLLM's body; a failure after a stream began is an event in
that stream.
"""

import asyncio
import os
import signal
import socket
import threading
import time
import uuid
from collections.abc import Awaitable, Callable
from mmap import ACCESS_READ, mmap
from pathlib import Path
from typing import Any, Final

import orjson
from aiohttp import web

from proxy import CannotStart
from proxy.embedded import MODEL_NAME, model_path
from proxy.embedded.engine import Engine, Generation
from proxy.embedded.llama import CONTEXT, PARALLEL, Llama, LlamaError
from proxy.embedded.sampling import bad_request, parse_request
from proxy.protocol.errors import ApiError
from proxy.render.gguf import GgufError, GgufModel, read_gguf

_LARGEST_BODY: Final = 1 << 22
_GRACE: Final = 5.0  # seconds for a clean stop after the parent has gone

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


def create_app(engine: Engine, *, vocab_size: int, context: int) -> web.Application:
    started = int(time.time())

    async def generate(http: web.Request) -> web.StreamResponse:
        request = parse_request(await http.read(), vocab_size=vocab_size, context=context)
        if request.model not in (None, MODEL_NAME):
            raise ApiError(404, f"The model `{request.model}` does not exist.", type="NotFoundError", param="model")
        request_id = http.headers.get("X-Request-Id") or request.request_id or uuid.uuid4().hex
        generation = engine.begin(f"generate-tokens-{request_id}", request)
        return await (_stream if request.stream else _answer)(http, engine, generation)

    async def abort(http: web.Request) -> web.Response:
        try:
            request_ids = orjson.loads(await http.read())["request_ids"]
        except (orjson.JSONDecodeError, KeyError, TypeError):
            request_ids = None
        if not isinstance(request_ids, list) or not all(isinstance(item, str) for item in request_ids):
            raise bad_request("request_ids: expected a list of the ids of running requests", "request_ids")
        engine.abort(request_ids)
        return web.Response()

    async def health(_: web.Request) -> web.Response:
        return web.Response()

    async def load(_: web.Request) -> web.Response:
        return _json({"server_load": engine.load})

    async def models(_: web.Request) -> web.Response:
        model = {
            "id": MODEL_NAME,
            "object": "model",
            "created": started,
            "owned_by": "derender-proxy",
            "root": MODEL_NAME,
            "parent": None,
            "max_model_len": context,
        }
        return _json({"object": "list", "data": [model]})

    async def stop_running(_: web.Application) -> None:
        engine.abort_all()

    app = web.Application(middlewares=[_errors_as_json], client_max_size=_LARGEST_BODY)
    app.add_routes(
        [
            web.post("/inference/v1/generate", generate),
            web.post("/inference/v1/abort_requests", abort),
            web.post("/abort_requests", abort),
            web.get("/health", health),
            web.get("/load", load),
            web.get("/v1/models", models),
        ]
    )
    app.on_shutdown.append(stop_running)
    return app


async def _answer(_: web.Request, engine: Engine, generation: Generation) -> web.Response:
    request = generation.request
    whole: list[dict[str, Any]] = [{} for _ in generation.choices]

    async def collect(part: dict[str, Any]) -> None:
        choice = whole[part["index"]]
        if not choice:
            choice.update(part)
            return
        choice["token_ids"] += part["token_ids"]
        choice["finish_reason"], choice["stop_reason"] = part["finish_reason"], part["stop_reason"]
        if part["logprobs"] is not None:
            choice["logprobs"]["content"] += part["logprobs"]["content"]

    await engine.generate(generation, collect)
    return _json(
        {
            "request_id": generation.request_id,
            "model": MODEL_NAME,
            "created": int(time.time()),
            "usage": generation.usage(),
            "choices": whole,
            "prompt_logprobs": None,
            "prompt_token_ids": request.token_ids if request.return_token_ids else None,
            "kv_transfer_params": None,
            "ec_transfer_params": None,
            "output_mode": "tokens",
        }
    )


async def _stream(http: web.Request, engine: Engine, generation: Generation) -> web.StreamResponse:
    request = generation.request
    options = request.stream_options
    with_usage = options is not None and options.include_usage
    usage_everywhere = with_usage and options is not None and options.continuous_usage_stats
    first = {"prompt_token_ids": request.token_ids} if request.return_token_ids else {}
    response = web.StreamResponse(
        headers={"content-type": "text/event-stream; charset=utf-8", "cache-control": "no-cache"}
    )
    await response.prepare(http)

    async def write(choices: list[dict[str, Any]], usage: dict[str, Any] | None) -> None:
        head = {"request_id": generation.request_id, "usage": usage, "output_mode": "tokens", **first}
        first.clear()
        await response.write(_event({**head, "choices": choices}))

    async def write_part(part: dict[str, Any]) -> None:
        await write([part], generation.usage() if usage_everywhere else None)

    try:
        await engine.generate(generation, write_part)
        if with_usage:
            await write([], generation.usage())
    except LlamaError as error:
        await response.write(_event(_error_body(_failed(error))))
    except ConnectionError:
        return response  # the client has gone
    await response.write(b"data: [DONE]\n\n")
    return response


@web.middleware
async def _errors_as_json(request: web.Request, handler: Handler) -> web.StreamResponse:
    try:
        return await handler(request)
    except ApiError as error:
        return _json(_error_body(error), error.status)
    except LlamaError as error:
        return _json(_error_body(_failed(error)), 500)
    except web.HTTPException as error:
        kind = "NotFoundError" if error.status == 404 else "BadRequestError"
        message = f"{request.method} {request.path}: {error.text or error.reason}"
        return _json(_error_body(ApiError(error.status, message, type=kind)), error.status)


def _failed(error: LlamaError) -> ApiError:
    return ApiError(500, str(error), type="InternalServerError")


def _error_body(error: ApiError) -> dict[str, Any]:
    return {
        "error": {"message": error.message, "type": error.type, "param": error.param, "code": error.status},
    }


def _event(data: dict[str, Any]) -> bytes:
    return b"data: " + orjson.dumps(data) + b"\n\n"


def _json(data: dict[str, Any], status: int = 200) -> web.Response:
    return web.Response(body=orjson.dumps(data), status=status, content_type="application/json")


def _read_model(path: Path) -> GgufModel:
    with path.open("rb") as file, mmap(file.fileno(), 0, access=ACCESS_READ) as data:
        try:
            return read_gguf(data)
        except GgufError as error:
            raise CannotStart(f"{path}: {error}") from None


async def serve_engine(host: str, port: int, *, until_stdin_closes: bool = False) -> None:
    """Serve until SIGINT or SIGTERM or, if told so, until standard input ends, as it does when the parent dies.

    A port of 0 takes a free one; the line on standard output names it once the engine is ready.
    Raises `CannotStart`, without runtime or model an `EmbeddedMissing`.
    """
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, stop.set)
    if until_stdin_closes:
        threading.Thread(target=_watch_stdin, args=(loop, stop), daemon=True).start()
    path = model_path()
    with listen(host, port) as listener:
        model = _read_model(path)
        eos_token_ids = [token_id for token_id in (model.eos_token_id, model.eot_token_id) if token_id is not None]
        llama = await Llama.start(path, eos_token_id=eos_token_ids[0], vocab_size=model.vocab_size)
        engine = Engine(llama, parallel=PARALLEL, context=CONTEXT, eos_token_ids=eos_token_ids)
        app = create_app(engine, vocab_size=model.vocab_size, context=CONTEXT)
        runner = web.AppRunner(app, handler_cancellation=True, access_log=None, shutdown_timeout=2.0)
        await runner.setup()
        try:
            await web.SockSite(runner, listener).start()
            print(f"embedded engine: {MODEL_NAME} on http://{host}:{listener.getsockname()[1]}", flush=True)
            await stop.wait()
        finally:
            await runner.cleanup()
            await llama.close()


def run(host: str, port: int, *, until_stdin_closes: bool = False) -> None:
    """`serve_engine` as a program of its own."""
    asyncio.run(serve_engine(host, port, until_stdin_closes=until_stdin_closes))


def listen(host: str, port: int) -> socket.socket:
    """A listening socket; a port of 0 takes a free one. Raises `CannotStart`."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        return socket.create_server((host, port), family=family, backlog=128)
    except OSError as error:
        reason = (error.strerror or str(error)).rpartition(": ")[2]
        raise CannotStart(f"cannot listen on {host}:{port}: {reason}; choose another with --host and --port") from None


def _watch_stdin(loop: asyncio.AbstractEventLoop, stop: asyncio.Event) -> None:
    """Stop when standard input ends; end the process by force if that is not enough, since nobody is left to do it."""
    while os.read(0, 4096):
        pass
    loop.call_soon_threadsafe(stop.set)
    time.sleep(_GRACE)
    os._exit(1)
