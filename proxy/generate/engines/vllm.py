"""vLLM's `POST /inference/v1/generate`, streamed and whole, over aiohttp's client.

An event is read once, from JSON to `TokenDelta`; whatever is not as the protocol says is an `EngineProtocolError` with
the engine's name in it. `[DONE]` alone does not mean success: an engine sends it after an error as well, so what counts
is that every choice has its finish reason. What came before a failure reaches the sink first.
"""

import asyncio
from collections.abc import Mapping
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
from proxy.generate.sse import EventSplitter, EventTooLong
from proxy.protocol.generate import GenerateRequest, JsonObject, Outcome, TokenDelta

ERROR_BODY_SHOWN = 2000
HEALTH_TIMEOUT = aiohttp.ClientTimeout(total=2)

ADVICE = {
    "structured": "a --tokens-only vLLM has no grammars; start the engine with --enable-scale-out instead, or leave "
    "response_format, structured_outputs and a forced tool_choice out",
}
"""What to do about refusals that come of how an engine was started, by a word of its message."""


class VllmEngine:
    """One engine at `url`, with the HTTP `headers` that it wants (such as its bearer key)."""

    def __init__(
        self, session: aiohttp.ClientSession, url: str, timeouts: Timeouts, headers: Mapping[str, str] | None = None
    ) -> None:
        self.name = url
        self.in_flight = 0
        self._session, self._timeouts = session, timeouts
        self._headers = {"Content-Type": "application/json", "Accept-Encoding": "identity", **(headers or {})}
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
        self.in_flight += 1
        try:
            async with asyncio.timeout(self._timeouts.total), Patience(self._timeouts, flow) as patience:
                return await self._generate(request, sink, flow, patience)
        except TimeoutError:
            raise EngineTimeout(self.name, patience.complaint(self._timeouts)) from None
        finally:
            self.in_flight -= 1

    async def _generate(self, request: GenerateRequest, sink: Sink, flow: Flow, patience: "Patience") -> Outcome:
        reader = AnswerReader(self.name, request.n)
        response = await self._ask(request)
        try:
            if response.status != 200:
                raise await self._refusal(response)
            if not request.stream:
                sink(reader.whole(await response.read()))
                return reader.outcome
            if response.content_type != "text/event-stream":
                raise EngineProtocolError(
                    self.name, f"answered with {response.content_type} where text/event-stream was expected"
                )
            while piece := await response.content.readany():
                patience.heard()
                if deltas := reader.feed(piece):
                    sink(deltas)
                if reader.failure is not None:
                    raise reader.failure
                if flow.stopped:
                    return reader.outcome
                if reader.done:
                    await self._read_to_end(response)
                    break
                if flow.paused:
                    await flow.until_resumed()
                    patience.heard()
        except (aiohttp.ClientError, ConnectionError) as error:
            raise EngineDisconnected(
                self.name, f"the connection broke in the middle of the answer ({type(error).__name__})"
            ) from error
        finally:
            # A connection whose response was read to its end is kept; any other is closed, which aborts the request.
            response.release()
        reader.check_complete()
        return reader.outcome

    async def _ask(self, request: GenerateRequest) -> aiohttp.ClientResponse:
        """The response, as soon as its headers are there. A kept connection may have been closed by the engine at the
        moment it was used again, so a request that was hung up on is sent once more."""
        body = orjson.dumps(request.wire())
        headers = {**self._headers, "X-Request-Id": request.request_id}
        for last_try in (False, True):
            try:
                return await self._session.post(
                    f"{self.name}/inference/v1/generate",
                    data=body,
                    headers=headers,
                    timeout=self._client_timeout,
                    allow_redirects=False,
                )
            except aiohttp.ClientConnectorError as error:
                raise EngineUnreachable(self.name, f"cannot connect: {error.os_error.strerror or error}") from error
            except aiohttp.ConnectionTimeoutError as error:
                raise EngineUnreachable(self.name, f"no connection within {self._timeouts.connect:g} s") from error
            except (aiohttp.ServerDisconnectedError, ConnectionError) as error:
                if last_try:
                    raise EngineUnreachable(self.name, "closed the connection before it answered") from error
            except aiohttp.ClientError as error:
                raise EngineProtocolError(self.name, f"did not answer with HTTP ({error})") from error
        raise AssertionError("unreachable")

    @staticmethod
    async def _read_to_end(response: aiohttp.ClientResponse) -> None:
        """After `[DONE]` only the end of the body is left; an engine that does not send it loses its connection."""
        try:
            async with asyncio.timeout(1):
                while await response.content.readany():
                    pass
        except (TimeoutError, aiohttp.ClientError):
            pass

    async def _refusal(self, response: aiohttp.ClientResponse) -> Exception:
        """The error that an HTTP error status stands for, with the engine's own words where it has some."""
        text = (await response.content.read(ERROR_BODY_SHOWN)).decode("utf-8", "replace").strip()
        message, param = text, None
        try:
            error = orjson.loads(text)
            error = error.get("error", error)
            message, param = str(error.get("message") or error.get("detail") or text), error.get("param")
        except (orjson.JSONDecodeError, AttributeError):
            pass
        message = message or f"HTTP {response.status} {response.reason or ''} without a body".rstrip()
        if response.status in (400, 413, 422):
            advice = next((f" ({advice})" for word, advice in ADVICE.items() if word in message), "")
            return EngineRefused(self.name, message + advice, param=param if isinstance(param, str) else None)
        status = response.status if response.status in (429, 503) else 502
        failure = EngineFailed(self.name, f"HTTP {response.status}: {message}", status=status)
        if retry_after := response.headers.get("Retry-After"):
            failure.headers["Retry-After"] = retry_after
        return failure


class Patience:
    """Ends a request that its engine is silent about. Hearing something costs one assignment; a timer, set when the
    request begins and again only when it fires, looks how long the silence lasts. A paused flow is not silence."""

    def __init__(self, timeouts: Timeouts, flow: Flow) -> None:
        self._loop = asyncio.get_running_loop()
        self._flow, self._timeouts = flow, timeouts
        self._heard_at = self._loop.time()
        self._heard_any = False
        self._expiry = asyncio.timeout(None)
        self._timer: asyncio.TimerHandle | None = None
        self.expired = False

    def heard(self) -> None:
        self._heard_at = self._loop.time()
        self._heard_any = True

    def complaint(self, timeouts: Timeouts) -> str:
        if not self.expired:
            return f"not finished within {timeouts.total:g} s (total_timeout)"
        if self._heard_any:
            return f"silent for {timeouts.idle:g} s between tokens (idle_timeout)"
        return f"no token within {timeouts.first_token:g} s (first_token_timeout)"

    async def __aenter__(self) -> "Patience":
        await self._expiry.__aenter__()
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
            self.expired = True
            self._expiry.reschedule(now)
        else:
            # The limit may become the shorter one before this timer fires; looking that often costs nothing.
            self._timer = self._loop.call_at(min(self._heard_at + limit, now + self._timeouts.idle), self._look)


class AnswerReader:
    """An engine's answer as `TokenDelta`s: the protocol without its sockets. `n` is the number of choices asked for."""

    def __init__(self, engine: str, n: int) -> None:
        self._engine = engine
        self._splitter = EventSplitter()
        self._unfinished = set(range(n))
        self.done = False
        self.failure: EngineError | None = None
        self.outcome = Outcome()

    def feed(self, piece: bytes) -> list[TokenDelta]:
        """What the events that `piece` completes say, up to the first that makes a `failure`."""
        deltas: list[TokenDelta] = []
        try:
            for data in self._splitter.feed(piece):
                if data == b"[DONE]":
                    self.done = True
                    break
                event = orjson.loads(data)
                if event.get("error") is not None:
                    self.failure = self._failure_of(event["error"])
                    break
                self._read(event, deltas)
        except (EventTooLong, ValueError, AttributeError, KeyError, TypeError) as error:
            self.failure = self._not_protocol("an event", error)
        return deltas

    def whole(self, body: bytes) -> list[TokenDelta]:
        """The answer to a request with `stream: false`; raises what is wrong with it."""
        deltas: list[TokenDelta] = []
        try:
            answer = orjson.loads(body)
            self._read(answer, deltas)
            self.outcome.prompt_logprobs = answer.get("prompt_logprobs")
            self.outcome.kv_transfer_params = answer.get("kv_transfer_params")
        except (ValueError, AttributeError, KeyError, TypeError) as error:
            raise self._not_protocol("the answer", error) from None
        if self.failure is not None:
            raise self.failure
        self.check_complete()
        return deltas

    def _read(self, event: JsonObject, deltas: list[TokenDelta]) -> None:
        for choice in event["choices"]:
            index, ids, finish = choice["index"], choice["token_ids"] or [], choice.get("finish_reason")
            if index not in self._unfinished:
                raise ValueError(f"choice {index!r} was not asked for or has finished")
            if type(ids) is not list or not all(type(i) is int and i >= 0 for i in ids):
                raise TypeError("token_ids is not a list of token ids")
            logprobs = choice.get("logprobs")
            if finish is not None:
                if not isinstance(finish, str):
                    raise TypeError("finish_reason is not a string")
                if finish == "error":
                    self.failure = self._failure_of("finish_reason error")
                    finish = None
                else:
                    self._unfinished.discard(index)
            entries = logprobs["content"] if logprobs is not None else None
            if entries is not None and not all(_is_logprob(entry) for entry in entries):
                raise TypeError("logprobs.content has an entry without token_id and logprob")
            deltas.append(TokenDelta(index, ids, entries, finish, choice.get("stop_reason")))
        if (usage := event.get("usage")) is not None:
            if not isinstance(usage.get("prompt_tokens", 0), int):
                raise TypeError("usage.prompt_tokens is not a number")
            self.outcome.usage = usage

    def _failure_of(self, error: Any) -> EngineFailed:
        message = error.get("message") if isinstance(error, dict) else error
        return EngineFailed(self._engine, f"failed while it generated: {message}")

    def _not_protocol(self, what: str, error: Exception) -> EngineProtocolError:
        if isinstance(error, orjson.JSONDecodeError):
            return EngineProtocolError(self._engine, f"{what} is not JSON: {error}")
        detail = f"{error.args[0]!r} is missing" if isinstance(error, KeyError) else str(error)
        return EngineProtocolError(self._engine, f"{what} is not of the generate protocol: {detail}")

    def check_complete(self) -> None:
        """Raises `EngineDisconnected` unless every choice has finished."""
        if self._unfinished:
            how = "sent [DONE]" if self.done else "ended the stream"
            if self._splitter.pending:
                how = "ended the stream inside an event"
            left = ", ".join(map(str, sorted(self._unfinished)))
            raise EngineDisconnected(self._engine, f"{how} before choice {left} had a finish_reason")


def _is_logprob(entry: Any) -> bool:
    numbers = isinstance(entry["token_id"], int) and isinstance(entry["logprob"], int | float)
    return numbers and all(
        isinstance(top["token_id"], int) and isinstance(top["logprob"], int | float)
        for top in entry.get("top_logprobs") or ()
    )
