"""Builds everything from a configuration, starts it, drains it, stops it. Nothing else turns keys into objects."""

import asyncio
import contextlib
import logging
import resource
import signal
import time
from collections.abc import AsyncIterator, Callable, Mapping

import aiohttp
from aiohttp import web
from aiohttp.http_exceptions import HttpProcessingError
from pydantic import SecretStr

from proxy import CannotStart
from proxy.api.draining import Draining
from proxy.api.routes import application
from proxy.config import Config, ModelConfig, PoolConfig
from proxy.derender.codecs.base import MarkupLimits
from proxy.derender.output_format import OutputFormat
from proxy.formats.auto import Evidence
from proxy.formats.kinds import Channels, Reasoning
from proxy.formats.reasoning import REASONING
from proxy.formats.table import FormatPair, Formats, UnknownFormat
from proxy.formats.tools import TOOLS
from proxy.generate.engines.base import Timeouts
from proxy.generate.engines.vllm import VllmEngine
from proxy.generate.pool import Pool
from proxy.model_files import ModelFiles, load_model_files
from proxy.models import Models, ServedModel, TokenizerParts
from proxy.record import Recorder
from proxy.recorder import FileRecorder
from proxy.render.chat_template import RESERVED_VARIABLES
from proxy.render.renderer import ChatSettings
from proxy.render.sampling import Limits, SamplingDefaults
from proxy.replay import Options, replay

logger = logging.getLogger("proxy")

ENGINE_KEEP_ALIVE = 4.0
"""Seconds that an idle connection to an engine is kept: less than the five after which uvicorn closes it."""

OPEN_FILES = 65536

LAST_BYTES_TIMEOUT = 1.0
"""Seconds for connections to close once no request is running any more."""


def build_pool(name: str, config: PoolConfig) -> Pool:
    """Must be called in a running event loop. Raises `ConfigError` for an unreadable key file."""
    timeouts = Timeouts(config.connect_timeout, config.first_token_timeout, config.idle_timeout, config.total_timeout)
    keys = [engine.read_api_key() for engine in config.engines]
    engines = [build_engine(e.url, key, timeouts) for e, key in zip(config.engines, keys, strict=True)]
    return Pool(name, engines, config.policy)


def build_engine(url: str, key: SecretStr | None, timeouts: Timeouts) -> VllmEngine:
    headers = {"Authorization": f"Bearer {key.get_secret_value()}"} if key is not None else {}
    connector = aiohttp.TCPConnector(limit=0, keepalive_timeout=ENGINE_KEEP_ALIVE)
    session = aiohttp.ClientSession(connector=connector, cookie_jar=aiohttp.DummyCookieJar())
    return VllmEngine(session, url, timeouts, headers)


class ModelLoader:
    """Reads files and builds tokenizers once, however many models name them. Blocking."""

    def __init__(self, formats: Formats | None = None, recorder: Recorder | None = None) -> None:
        self._formats, self._recorder = formats or Formats(), recorder
        self._files: dict[tuple[str | None, ...], ModelFiles] = {}
        self._tokenizers: dict[object, TokenizerParts] = {}

    def load(self, config: ModelConfig, pool: Pool) -> ServedModel:
        """Raises `CannotStart`."""
        files = self._read(config)
        source = files.tokenizer_json or files.tekken
        parts = self._tokenizers.get(source)
        if parts is None:
            parts = self._tokenizers[source] = TokenizerParts.of(files)
        if reserved := RESERVED_VARIABLES & config.default_chat_template_kwargs.keys():
            raise CannotStart(f"default_chat_template_kwargs may not set {', '.join(sorted(reserved))}")
        try:
            chats = parts.renderer(
                ChatSettings(
                    files.chat_templates,
                    files.special_tokens,
                    config.default_chat_template_kwargs,
                    trust_request_chat_template=config.trust_request_chat_template,
                    split_special_tokens=config.split_special_tokens,
                )
            )
            defaults = SamplingDefaults.of(
                files.generation_config if config.generation_config == "auto" else {}, config.override_generation_config
            )
        except ValueError as error:
            raise CannotStart(str(error)) from error
        pair = self._format_pair(config, files, parts)
        output_format = self._output_format(config, pair, parts)
        size = parts.vocabulary.size
        ids = range(max(size, files.vocab_size or 0))
        self._warn(config, files, ids)
        return ServedModel(
            names=config.served_model_name,
            root=config.model,
            created=int(time.time()),
            pool=pool,
            tokenizer=parts,
            chats=chats,
            eos_token_ids=(files.eos_token_ids | parts.eos_token_ids).intersection(ids),
            limits=Limits(
                vocabulary_size=size,
                engine_vocabulary_size=None if files.vocab_size is None else len(ids),
                longest_token=parts.vocabulary.longest,
                max_model_len=config.max_model_len or files.max_model_len,
                max_logprobs=config.max_logprobs,
            ),
            defaults=defaults,
            return_tokens_as_token_ids=config.return_tokens_as_token_ids,
            output_format=output_format,
            parsers=(pair.tool_call_parser, pair.reasoning_parser),
            enable_auto_tool_choice=config.enable_auto_tool_choice,
            default_chat_template_kwargs=config.default_chat_template_kwargs,
            reasoning_field=config.reasoning_field,
            recorder=self._recorder,
        )

    def _read(self, config: ModelConfig) -> ModelFiles:
        place = (config.model, config.revision, config.chat_template, config.tokenizer, config.tokenizer_mode)
        if place not in self._files:
            try:
                self._files[place] = load_model_files(
                    config.model,
                    revision=config.revision,
                    chat_template=config.chat_template,
                    tokenizer=config.tokenizer,
                    tokenizer_mode=config.tokenizer_mode,
                )
            except (TypeError, ValueError, ArithmeticError, AttributeError, LookupError, RecursionError) as error:
                raise CannotStart(f"{config.model}: its files are not as expected: {error}") from error
        return self._files[place]

    def _format_pair(self, config: ModelConfig, files: ModelFiles, parts: TokenizerParts) -> FormatPair:
        evidence = Evidence(tuple(files.chat_templates.values()), frozenset(parts.vocabulary.added_texts.values()))
        try:
            pair = self._formats.pair(config.tool_call_parser, config.reasoning_parser, evidence)
        except UnknownFormat as error:
            raise CannotStart(str(error)) from error
        for note in pair.notes:
            logger.info("model %s: %s", config.name, note)
        return pair

    @staticmethod
    def _output_format(config: ModelConfig, pair: FormatPair, parts: TokenizerParts) -> OutputFormat | None:
        if pair.reasoning is None and not pair.calls:
            return None
        limits = MarkupLimits(config.max_tool_call_depth, config.max_tool_call_held)
        return OutputFormat(pair.reasoning, pair.calls, parts.vocabulary, limits)

    @staticmethod
    def _warn(config: ModelConfig, files: ModelFiles, ids: range) -> None:
        """Of what works, but hardly as it was meant."""
        if unknown := sorted(token_id for token_id in files.eos_token_ids if token_id not in ids):
            logger.warning("model %s: EOS ids %s are not in the vocabulary and are left out", config.name, unknown)
        own, wanted = files.max_model_len, config.max_model_len
        if own and wanted and wanted > own:
            logger.warning("model %s: max_model_len is %d, but the model's files say %d", config.name, wanted, own)


def declared_formats(config: Config) -> Formats:
    """The project's formats and those of the configuration."""
    tools, reasoning = dict(TOOLS), dict(REASONING)
    for name, declarations in config.formats.items():
        if calls := tuple(d for d in declarations if not isinstance(d, Reasoning)):
            tools[name] = calls
        if spans := [d for d in declarations if isinstance(d, Reasoning | Channels)]:
            reasoning[name] = spans[0]
    return Formats(tools, reasoning)


def load_models(config: Config, pools: Mapping[str, Pool], recorder: Recorder | None = None) -> list[ServedModel]:
    """Raises `CannotStart` with a line for each model that cannot be loaded."""
    loader, models, problems = ModelLoader(declared_formats(config), recorder), [], []
    for index, model in enumerate(config.models):
        try:
            models.append(loader.load(model, pools[model.pool]))
        except CannotStart as error:
            problems.append(f"models[{index}] ({model.name}): {error}")
    if problems:
        raise CannotStart("\n".join(problems))
    return models


@contextlib.asynccontextmanager
async def built(config: Config) -> AsyncIterator[Models]:
    """All models and pools of a configuration; the pools are closed at the end."""
    pools: dict[str, Pool] = {}
    server, recorder = config.server, None
    if server.record_dir is not None:
        recorder = FileRecorder(server.record_dir, server.record_last, with_prompts=server.record_prompts)
    try:
        for name, pool in config.pools.items():
            pools[name] = build_pool(name, pool)
        yield Models(await asyncio.to_thread(load_models, config, pools, recorder))
    finally:
        for built_pool in pools.values():
            await built_pool.close()
        if recorder is not None:
            await asyncio.to_thread(recorder.close)


async def replayed(config: Config, text: str, options: Options, *, as_json: bool) -> list[str]:
    """The lines of `replay`, for the only model of a configuration. Raises `CannotStart`."""
    async with built(config) as models:
        return list(replay(models.all[0], text, options, as_json=as_json))


async def check(config: Config) -> list[str]:
    """Loads everything as `serve` would, without listening; a line for each thing that would run."""
    async with built(config) as models:
        lines = [f"listen on {_address(config)}"]
        for model, its in zip(models.all, config.models, strict=True):
            aliases = f" (also {', '.join(model.names[1:])})" if len(model.names) > 1 else ""
            length = model.limits.max_model_len
            context = f"{length} tokens of context" if length else "context length unknown, the engine decides"
            lines.append(f"model {model.name}{aliases}: {model.root}, pool {its.pool}")
            tools, reasoning = (name or "none" for name in model.parsers)
            lines.append(f"  tool calls: {tools}, reasoning: {reasoning}")
            lines.append(f"  vocabulary of {model.limits.vocabulary_size}, {context}, {model.chats.description}")
        for name, pool in config.pools.items():
            lines.append(f"pool {name}: {pool.policy}")
            lines.extend(f"  {engine.protocol} engine {engine.url}" for engine in pool.engines)
        return lines


def serve(config: Config, *, on_ready: Callable[[], None] | None = None) -> None:
    """Serves until SIGINT or SIGTERM, then lets running requests finish within `shutdown_timeout`.

    Raises `CannotStart` where it cannot start. `on_ready` is called once clients can connect.
    """
    logging.basicConfig(level=config.server.log_level.upper(), format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    logging.getLogger("aiohttp.server").addFilter(_client_noise)
    _raise_file_limit()
    try:
        import uvloop
    except ImportError:
        asyncio.run(_serve(config, on_ready))
    else:
        uvloop.run(_serve(config, on_ready))


def _client_noise(record: logging.LogRecord) -> bool:
    """Says in a line, and only where somebody listens for it, that a client sent what is not HTTP."""
    error = record.exc_info[1] if record.exc_info else None
    if isinstance(error, HttpProcessingError | aiohttp.ClientPayloadError | web.RequestPayloadError):
        logger.debug("a client sent no valid HTTP: %s", error)
        return False
    return True


def _raise_file_limit() -> None:
    """Each stream takes two descriptors, and the usual limit of 1024 is meant for programs that use select()."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = OPEN_FILES if hard == resource.RLIM_INFINITY else min(OPEN_FILES, hard)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))


async def _serve(config: Config, on_ready: Callable[[], None] | None) -> None:
    server = config.server
    async with built(config) as models:
        draining = Draining()
        app = application(
            models, draining, keep_alive_interval=server.keep_alive_interval, max_body_size=server.max_body_size
        )
        # A client that goes away cancels its handler, which aborts the engine's request.
        runner = web.AppRunner(app, handler_cancellation=True, access_log=None, shutdown_timeout=LAST_BYTES_TIMEOUT)
        await runner.setup()
        site = web.TCPSite(runner, server.host, server.port, backlog=1024)
        try:
            try:
                await site.start()
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
            await site.stop()
            if runner.server is not None:
                await draining.finish(runner.server.connections, server.shutdown_timeout)
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
        signal.signal(number, signal.SIG_DFL)


def _address(config: Config, port: int | None = None) -> str:
    """`port` is the one that was taken, where the configuration leaves it open."""
    host = f"[{config.server.host}]" if ":" in config.server.host else config.server.host
    return f"http://{host}:{port or config.server.port}"
