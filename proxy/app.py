"""Builds everything from a configuration, starts it, drains it, stops it. Nothing else turns keys into objects."""

import asyncio
import contextlib
import logging
import resource
import signal
import time
from collections.abc import AsyncIterator, Callable

import aiohttp
from aiohttp import web

from proxy import CannotStart
from proxy.api.routes import application
from proxy.config import Config, EngineConfig, ModelConfig, PoolConfig
from proxy.generate.engines.base import Timeouts
from proxy.generate.engines.vllm import VllmEngine
from proxy.generate.pool import Pool
from proxy.model_files import ModelFiles, load_model_files
from proxy.models import Models, ServedModel, TokenizerParts
from proxy.render.chat_template import ChatTemplates
from proxy.render.sampling import Limits, SamplingDefaults

logger = logging.getLogger("proxy")

ENGINE_KEEP_ALIVE = 4.0
"""Seconds that an idle connection to an engine is kept: less than the five after which uvicorn closes it."""

OPEN_FILES = 65536

LAST_BYTES_TIMEOUT = 1.0
"""Seconds for connections to close once no request is running any more."""


def build_pool(name: str, config: PoolConfig) -> Pool:
    """Must be called in a running event loop. Raises `ConfigError` for an unreadable key file."""
    timeouts = Timeouts(config.connect_timeout, config.first_token_timeout, config.idle_timeout, config.total_timeout)
    return Pool(name, [build_engine(engine, timeouts) for engine in config.engines], config.policy)


def build_engine(config: EngineConfig, timeouts: Timeouts) -> VllmEngine:
    key = config.read_api_key()
    headers = {"Authorization": f"Bearer {key.get_secret_value()}"} if key is not None else {}
    connector = aiohttp.TCPConnector(limit=0, keepalive_timeout=ENGINE_KEEP_ALIVE)
    session = aiohttp.ClientSession(connector=connector, cookie_jar=aiohttp.DummyCookieJar())
    return VllmEngine(session, config.url, timeouts, headers)


class ModelLoader:
    """Reads files and builds tokenizers once, however many models name them. Blocking."""

    def __init__(self) -> None:
        self._files: dict[tuple[str | None, ...], ModelFiles] = {}
        self._tokenizers: dict[str, TokenizerParts] = {}

    def load(self, config: ModelConfig, pool: Pool) -> ServedModel:
        """Raises `CannotStart`."""
        place = (config.model, config.revision, config.chat_template, config.tokenizer)
        files = self._files.get(place)
        if files is None:
            files = self._files[place] = load_model_files(
                config.model,
                revision=config.revision,
                chat_template=config.chat_template,
                tokenizer=config.tokenizer,
            )
        if config.tool_call_parser or config.reasoning_parser:
            logger.warning("model %s: parsers are not applied yet, so all of its output is content", config.name)
        parts = self._tokenizers.get(files.tokenizer_json)
        if parts is None:
            parts = self._tokenizers[files.tokenizer_json] = TokenizerParts.of(files)
        try:
            templates = ChatTemplates(
                files.chat_templates, files.special_tokens, trusted=config.trust_request_chat_template
            )
        except ValueError as error:
            raise CannotStart(f"model {config.name}: {error}") from error
        model_defaults = files.generation_config if config.generation_config == "auto" else {}
        return ServedModel(
            names=config.served_model_name,
            root=config.model,
            created=int(time.time()),
            pool=pool,
            tokenizer=parts,
            templates=templates,
            has_chat_template=bool(files.chat_templates),
            default_chat_template_kwargs=config.default_chat_template_kwargs,
            split_special_tokens=config.split_special_tokens,
            eos_token_ids=files.eos_token_ids,
            limits=Limits(parts.vocabulary.size, config.max_model_len or files.max_model_len, config.max_logprobs),
            defaults=SamplingDefaults.of(model_defaults, config.override_generation_config),
            return_tokens_as_token_ids=config.return_tokens_as_token_ids,
        )


@contextlib.asynccontextmanager
async def built(config: Config) -> AsyncIterator[Models]:
    """All models and pools of a configuration; the pools are closed at the end."""
    pools: dict[str, Pool] = {}
    try:
        for name, pool in config.pools.items():
            pools[name] = build_pool(name, pool)
        loader = ModelLoader()
        yield Models([await asyncio.to_thread(loader.load, model, pools[model.pool]) for model in config.models])
    finally:
        for built_pool in pools.values():
            await built_pool.close()


async def check(config: Config) -> list[str]:
    """Loads everything as `serve` would, without listening; a line for each thing that would run."""
    async with built(config) as models:
        lines = [f"listen on {_address(config)}"]
        for model, its in zip(models.all, config.models, strict=True):
            aliases = f" (also {', '.join(model.names[1:])})" if len(model.names) > 1 else ""
            length = model.limits.max_model_len
            context = f"{length} tokens of context" if length else "context length unknown, the engine decides"
            chat = "chat template" if model.has_chat_template else "no chat template, completions only"
            lines.append(f"model {model.name}{aliases}: {model.root}, pool {its.pool}")
            lines.append(f"  vocabulary of {model.limits.vocabulary_size}, {context}, {chat}")
        for name, pool in config.pools.items():
            lines.append(f"pool {name}: {pool.policy}")
            lines.extend(f"  {engine.protocol} engine {engine.url}" for engine in pool.engines)
        return lines


def serve(config: Config, *, on_ready: Callable[[], None] | None = None) -> None:
    """Serves until SIGINT or SIGTERM, then lets running requests finish within `shutdown_timeout`.

    Raises `CannotStart` where it cannot start. `on_ready` is called once clients can connect.
    """
    logging.basicConfig(level=config.server.log_level.upper(), format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    _raise_file_limit()
    try:
        import uvloop
    except ImportError:
        asyncio.run(_serve(config, on_ready))
    else:
        uvloop.run(_serve(config, on_ready))


def _raise_file_limit() -> None:
    """Each stream takes two descriptors, and the usual limit of 1024 is meant for programs that use select()."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = OPEN_FILES if hard == resource.RLIM_INFINITY else min(OPEN_FILES, hard)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))


async def _serve(config: Config, on_ready: Callable[[], None] | None) -> None:
    server = config.server
    async with built(config) as models:
        app = application(
            models,
            keep_alive_interval=server.keep_alive_interval,
            max_body_size=server.max_body_size,
            shutdown_timeout=server.shutdown_timeout,
        )
        # A client that goes away cancels its handler, which aborts the engine's request.
        runner = web.AppRunner(app, handler_cancellation=True, access_log=None, shutdown_timeout=LAST_BYTES_TIMEOUT)
        await runner.setup()
        try:
            try:
                await web.TCPSite(runner, server.host, server.port, backlog=1024).start()
            except OSError as error:
                reason = str(error.strerror or error).rpartition(": ")[2]  # asyncio puts the address before it
                advice = "choose another address with --host and --port, or in the file"
                raise CannotStart(f"cannot listen on {_address(config)}: {reason}; {advice}") from error
            names = ", ".join(model.name for model in models.all)
            logger.info("serving %s on %s", names, _address(config, runner.addresses[0][1]))
            if on_ready is not None:
                on_ready()
            await _until_told_to_stop()
            logger.info("stopping: running requests have %g s to finish", server.shutdown_timeout)
        finally:
            await runner.cleanup()


async def _until_told_to_stop() -> None:
    told = asyncio.Event()
    loop = asyncio.get_running_loop()
    signals = (signal.SIGINT, signal.SIGTERM)
    for number in signals:
        loop.add_signal_handler(number, told.set)
    await told.wait()
    for number in signals:  # a second one ends the process at once
        loop.remove_signal_handler(number)


def _address(config: Config, port: int | None = None) -> str:
    """`port` is the one that was taken, where the configuration leaves it open."""
    host = f"[{config.server.host}]" if ":" in config.server.host else config.server.host
    return f"http://{host}:{port or config.server.port}"
