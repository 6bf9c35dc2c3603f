"""vLLM's `POST /inference/v1/generate`, streamed and whole, over aiohttp's client.

An event is read once, from JSON to `TokenDelta`; whatever is not as the protocol says is an `EngineProtocolError` with
the engine's name in it. `[DONE]` alone does not mean success: an engine sends it after an error as well, so what counts
is that every choice has its finish reason. What came before a failure reaches the sink first. An engine's own words are
repeated, cut and without the keys that it was given.
"""

import asyncio
import io
import os
import re
import ssl
from collections.abc import Mapping, Sequence
from typing import Any

import aiohttp
import orjson

from proxy.generate.engines.base import Flow, Sink, Timeouts
from proxy.generate.errors import (
    EngineDisconnected,
    EngineError,
    EngineFailed,
    EngineProtocolError,
    EngineRefused,
    EngineTimeout,
    EngineUnreachable,
)
from proxy.generate.sse import EventSplitter
from proxy.protocol.errors import ApiError
from proxy.protocol.generate import GenerateRequest, JsonObject, Outcome, TokenDelta, TokenLogprob

WORDS_SHOWN = 2000
ERROR_BODY_READ = 64 << 10
LAST_WORDS_TIMEOUT = 1.0
"""Seconds for what comes after everything that matters: the body of an error, the end of a complete stream."""
HEALTH_TIMEOUT = aiohttp.ClientTimeout(total=2)

ADVICE = {
    "structured": "a --tokens-only vLLM has no grammars; start the engine with --enable-scale-out instead, or leave "
    "response_format, structured_outputs and a forced tool_choice out",
}
"""What to do about refusals that come of how an engine was started, by a word of its message."""


RETRY_AFTER = re.compile(r"[0-9A-Za-z ,:]{1,40}")
"""Seconds or a date; anything else is not repeated."""

MALFORMED = (ValueError, KeyError)


class VllmEngine:
    """One engine at `url`, with the HTTP `headers` that it wants, such as its bearer key: the last word of each is a
    secret."""

    def __init__(
        self, session: aiohttp.ClientSession, url: str, timeouts: Timeouts, headers: Mapping[str, str] | None = None
    ) -> None:
        self.name = url
        self.in_flight = 0
        self._session, self._timeouts = session, timeouts
        self._headers = {"Content-Type": "application/json", "Accept-Encoding": "identity", **(headers or {})}
        self._secrets = [value.split()[-1] for value in (headers or {}).values()]
        self._client_timeout = aiohttp.ClientTimeout(sock_connect=timeouts.connect)

    async def alive(self) -> bool:
        try:
            async with self._session.get(
                f"{self.name}/health", headers=self._headers, timeout=HEALTH_TIMEOUT
            ) as response:
                return response.status == 200
        except (aiohttp.ClientError, TimeoutError, OSError):
            return False

    async def close(self) -> None:
        await self._session.close()

    async def generate(self, request: GenerateRequest, sink: Sink, flow: Flow) -> Outcome:
        reader = AnswerReader(self.name, request.n, self._secrets)
        patience = Patience(self._timeouts, flow, listens=request.stream)
        self.in_flight += 1
        try:
            async with asyncio.timeout(self._timeouts.total), patience:
                await self._generate(request, sink, flow, patience, reader)
        except TimeoutError:
            if not reader.complete:
                raise EngineTimeout(self.name, patience.complaint()) from None
        finally:
            self.in_flight -= 1
        return reader.outcome

    async def _generate(
        self, request: GenerateRequest, sink: Sink, flow: Flow, patience: "Patience", reader: "AnswerReader"
    ) -> None:
        response = await self._ask(request)
        try:
            if response.status != 200:
                raise await self._refusal(response)
            if not request.stream:
                sink(reader.whole(await response.read()))
                return
            if response.content_type != "text/event-stream":
                raise EngineProtocolError(
                    self.name, f"answered with {response.content_type} where text/event-stream was expected"
                )
            while piece := await _next_piece(response.content):
                if deltas := reader.feed(piece):
                    patience.heard()
                    sink(deltas)
                if flow.stopped:
                    return
                if reader.failure is not None:
                    raise reader.failure
                if reader.done:
                    await _last_words(response.content)
                    break
                if flow.paused:
                    await flow.until_resumed()
                    patience.heard()
            reader.check_complete()
        except (aiohttp.ClientError, ConnectionError) as error:
            if not reader.complete:
                raise EngineDisconnected(
                    self.name, f"the connection broke in the middle of the answer ({type(error).__name__})"
                ) from error
        finally:
            # A connection whose response was read to its end is kept; any other is closed, which aborts the request.
            response.release()

    async def _ask(self, request: GenerateRequest) -> aiohttp.ClientResponse:
        """The response, as soon as its headers are there. A kept connection may have been closed by the engine at the
        moment it was used again, so a request that was hung up on is sent once more."""
        body = orjson.dumps(request.wire())
        headers = {**self._headers, "X-Request-Id": request.request_id}
        for last_try in (False, True):
            try:
                return await self._session.post(
                    f"{self.name}/inference/v1/generate",
                    data=io.BytesIO(body),
                    headers=headers,
                    timeout=self._client_timeout,
                    allow_redirects=False,
                )
            except aiohttp.ClientConnectorError as error:
                raise EngineUnreachable(self.name, f"cannot connect: {_reason(error.os_error)}") from error
            except aiohttp.ConnectionTimeoutError as error:
                raise EngineUnreachable(self.name, f"no connection within {self._timeouts.connect:g} s") from error
            except (aiohttp.ClientConnectionError, ConnectionError) as error:
                if last_try:
                    raise EngineUnreachable(self.name, "closed the connection before it answered") from error
            except aiohttp.ClientError as error:
                raise EngineProtocolError(self.name, f"did not answer with HTTP ({error})") from error
        raise AssertionError("unreachable")

    async def _refusal(self, response: aiohttp.ClientResponse) -> ApiError:
        """The error that an HTTP error status stands for, with the engine's own words where it has some."""
        text = (await _last_words(response.content)).decode("utf-8", "replace").strip()
        try:
            body = orjson.loads(text)
        except orjson.JSONDecodeError:
            body = text
        words, param = _complaint(body)
        message = _quoted(words, self._secrets) or "no reason given"
        if response.status in (400, 413, 422):
            advice = next((f" ({advice})" for word, advice in ADVICE.items() if word in message), "")
            return EngineRefused(self.name, message + advice, param=param)
        status = response.status if response.status in (429, 503) else 502
        failure = EngineFailed(self.name, f"HTTP {response.status}: {message}", status=status)
        if RETRY_AFTER.fullmatch(retry_after := response.headers.get("Retry-After", "")):
            failure.headers["Retry-After"] = retry_after
        return failure


def _reason(error: OSError) -> str:
    """In the system's own words where the error is the system's; asyncio only says where it tried to connect."""
    if error.errno is not None and error.errno > 0 and not isinstance(error, ssl.SSLError):
        return os.strerror(error.errno)
    return error.strerror or str(error)


async def _next_piece(content: aiohttp.StreamReader) -> bytes:
    """What has come, nothing at the end. That a connection broke aiohttp says before it gives what came before that;
    here it is the other way round."""
    try:
        return await content.readany()
    except aiohttp.ClientError as error:
        content.set_exception(None)  # type: ignore[arg-type]
        rest = content.read_nowait()
        content.set_exception(error)
        if not rest:
            raise
        return rest


async def _last_words(content: aiohttp.StreamReader) -> bytes:
    """The rest of a body, or as much of it as comes soon."""
    words = bytearray()
    try:
        async with asyncio.timeout(LAST_WORDS_TIMEOUT):
            while len(words) < ERROR_BODY_READ and (piece := await content.readany()):
                words += piece
    except (TimeoutError, aiohttp.ClientError):
        pass
    return bytes(words)


def _complaint(body: Any) -> tuple[str, str | None]:
    """What an error says and the parameter it names, from the usual places; all of it where it is none of the usual."""
    error = body.get("error", body) if isinstance(body, dict) else body
    if not isinstance(error, dict):
        return (error if isinstance(error, str) else orjson.dumps(error).decode()), None
    words, param = error.get("message") or error.get("detail"), error.get("param")
    words = words if isinstance(words, str) else orjson.dumps(error).decode()
    return words, param if isinstance(param, str) else None


def _quoted(words: str, secrets: Sequence[str]) -> str:
    for secret in secrets:
        words = words.replace(secret, "***")
    return words if len(words) <= WORDS_SHOWN else words[:WORDS_SHOWN] + "..."


class Patience:
    """Ends a request that its engine is silent about. Hearing something costs one assignment; a timer, set when the
    request begins and again only when it fires, looks how long the silence lasts. A paused flow is not silence; and
    a whole answer, of which nothing can be heard before its end, is not listened to."""

    def __init__(self, timeouts: Timeouts, flow: Flow, *, listens: bool) -> None:
        self._loop = asyncio.get_running_loop()
        self._flow, self._timeouts = flow, timeouts
        self._heard_at = self._loop.time()
        self._heard_any = False
        self._expiry = asyncio.timeout(None)
        self._timer: asyncio.TimerHandle | None = None
        self._expired = False
        self._listens = listens

    def heard(self) -> None:
        self._heard_at = self._loop.time()
        self._heard_any = True

    def complaint(self) -> str:
        limits = self._timeouts
        if not self._expired:
            return f"not finished within {limits.total:g} s (total_timeout)"
        if self._heard_any:
            return f"silent for {limits.idle:g} s between tokens (idle_timeout)"
        return f"no token within {limits.first_token:g} s (first_token_timeout)"

    async def __aenter__(self) -> "Patience":
        await self._expiry.__aenter__()
        if self._listens:
            self._look()
        return self

    async def __aexit__(self, *exc: Any) -> None:
        if self._timer is not None:
            self._timer.cancel()
        await self._expiry.__aexit__(*exc)

    def _look(self) -> None:
        now = self._loop.time()
        limit = self._timeouts.idle if self._heard_any else self._timeouts.first_token
        if self._flow.paused:
            self._heard_at = now
        if now >= self._heard_at + limit:
            self._expired = True
            self._expiry.reschedule(now)
        else:
            # The limit may become the shorter one before this timer fires; looking that often costs nothing.
            self._timer = self._loop.call_at(min(self._heard_at + limit, now + self._timeouts.idle), self._look)


class AnswerReader:
    """An engine's answer as `TokenDelta`s: the protocol without its sockets. `n` is the number of choices asked for."""

    def __init__(self, engine: str, n: int, secrets: Sequence[str] = ()) -> None:
        self._engine, self._secrets = engine, secrets
        self._splitter = EventSplitter()
        self._unfinished = set(range(n))
        self.done = False
        self.failure: EngineError | None = None
        self.outcome = Outcome()

    @property
    def complete(self) -> bool:
        """Whether every choice has its finish reason."""
        return not self._unfinished

    def feed(self, piece: bytes) -> list[TokenDelta]:
        """What the events that `piece` completes say, up to the first that makes a `failure`."""
        deltas: list[TokenDelta] = []
        try:
            for data in self._splitter.feed(piece):
                if data == b"[DONE]":
                    self.done = True
                    break
                self._read(orjson.loads(data), deltas)
        except EngineError as error:
            self.failure = error
        except MALFORMED as error:
            self.failure = self._not_protocol("an event", error)
        return deltas

    def whole(self, body: bytes) -> list[TokenDelta]:
        """The answer to a request with `stream: false`; raises what is wrong with it."""
        deltas: list[TokenDelta] = []
        try:
            answer = orjson.loads(body)
            self._read(answer, deltas)
            self.outcome.prompt_logprobs = _prompt_logprobs(answer.get("prompt_logprobs"))
            self.outcome.kv_transfer_params = answer.get("kv_transfer_params")
            if self._unfinished:
                raise ValueError(f"choice {self._left()} has no finish_reason")
        except MALFORMED as error:
            raise self._not_protocol("the answer", error) from None
        return deltas

    def check_complete(self) -> None:
        """Raises `EngineDisconnected` for a stream that ended before every choice had finished."""
        if self._unfinished:
            how = "sent [DONE]" if self.done else "ended the stream"
            if self._splitter.pending:
                how = "ended the stream inside an event"
            raise EngineDisconnected(self._engine, f"{how} before choice {self._left()} had a finish_reason")

    def _read(self, event: Any, deltas: list[TokenDelta]) -> None:
        if type(event) is not dict:
            raise ValueError("a JSON object was expected")
        if event.get("error") is not None:
            raise self._failed(_complaint(event)[0])
        choices = event["choices"]
        if type(choices) is not list:
            raise ValueError("choices is not a list")
        for choice in choices:
            if type(choice) is not dict:
                raise ValueError("a choice is not an object")
            index, ids, finish = choice["index"], choice["token_ids"] or [], choice.get("finish_reason")
            if type(index) is not int or index not in self._unfinished:
                raise ValueError(f"choice {index!r:.20} was not asked for or has finished")
            if type(ids) is not list or not all(type(i) is int and i >= 0 for i in ids):
                raise ValueError("token_ids is not a list of token ids")
            stop, logprobs = choice.get("stop_reason"), choice.get("logprobs")
            if stop is not None and type(stop) not in (int, str):
                raise ValueError("stop_reason is neither a token id nor a string")
            entries = None if logprobs is None else _logprobs(logprobs, len(ids))
            if finish == "error":
                deltas.append(TokenDelta(index, ids, entries))
                raise self._failed("finish_reason error")
            if finish is not None:
                if type(finish) is not str:
                    raise ValueError("finish_reason is not a string")
                self._unfinished.discard(index)
            deltas.append(TokenDelta(index, ids, entries, finish, stop))
        if (usage := event.get("usage")) is not None:
            self.outcome.usage = _usage(usage)

    def _failed(self, words: str) -> EngineFailed:
        return EngineFailed(self._engine, f"failed while it generated: {_quoted(words, self._secrets)}")

    def _not_protocol(self, what: str, error: Exception) -> EngineProtocolError:
        if isinstance(error, orjson.JSONDecodeError):
            return EngineProtocolError(self._engine, f"{what} is not JSON: {error}")
        detail = f"{error.args[0]!r} is missing" if isinstance(error, KeyError) else str(error)
        return EngineProtocolError(self._engine, f"{what} is not of the generate protocol: {detail}")

    def _left(self) -> str:
        return ", ".join(map(str, sorted(self._unfinished)))


def _expect(condition: bool, otherwise: str) -> None:
    if not condition:
        raise ValueError(otherwise)


def _is_count(value: Any) -> bool:
    return type(value) is int and value >= 0


def _logprobs(logprobs: Any, ids: int) -> list[TokenLogprob] | None:
    _expect(type(logprobs) is dict, "logprobs is not an object")
    entries = logprobs["content"]
    if entries is None:
        return None
    _expect(type(entries) is list, "logprobs.content is not a list")
    _expect(len(entries) == ids, f"logprobs.content has {len(entries)} entries for {ids} token ids")
    for entry in entries:
        _expect(_is_logprob(entry), "logprobs.content has an entry without token_id and logprob")
        others = entry.get("top_logprobs")
        are_logprobs = others is None or (type(others) is list and all(map(_is_logprob, others)))
        _expect(are_logprobs, "logprobs.content has top_logprobs without token_id and logprob")
    return entries  # type: ignore[no-any-return]


def _is_logprob(entry: Any) -> bool:
    return type(entry) is dict and _is_count(entry.get("token_id")) and type(entry.get("logprob")) in (float, int)


def _prompt_logprobs(prompt_logprobs: Any) -> list[JsonObject | None] | None:
    """Per prompt token null or `{id: {logprob, ...}}`."""
    if prompt_logprobs is None:
        return None
    _expect(type(prompt_logprobs) is list, "prompt_logprobs is not a list")
    for entry in prompt_logprobs:
        _expect(entry is None or type(entry) is dict, "prompt_logprobs has an entry that is neither null nor an object")
        for token, facts in (entry or {}).items():
            is_logprob = token.isdecimal() and type(facts) is dict and type(facts.get("logprob")) in (float, int)
            _expect(is_logprob, "prompt_logprobs has an entry without a token id and its logprob")
    return prompt_logprobs  # type: ignore[no-any-return]


def _usage(usage: Any) -> JsonObject:
    _expect(type(usage) is dict, "usage is not an object")
    prompt, details = usage.get("prompt_tokens"), usage.get("prompt_tokens_details")
    _expect(prompt is None or _is_count(prompt), "usage.prompt_tokens is not a number")
    if details is not None:
        _expect(type(details) is dict, "usage.prompt_tokens_details is not an object")
        cached = details.get("cached_tokens")
        _expect(cached is None or _is_count(cached), "usage.prompt_tokens_details.cached_tokens is not a number")
    return usage  # type: ignore[no-any-return]
