"""vLLM's `POST /inference/v1/generate`, streamed and whole, over aiohttp's client.

Here are the sockets, and what can go wrong with them; what the bytes say is in `vllm_answer.py`. `[DONE]` alone does
not mean success, since an engine sends it after an error as well: what counts is that every choice has finished.
"""

import asyncio
import io
import os
import re
import ssl
from collections.abc import Mapping

import aiohttp
import orjson

from proxy.generate.engines.base import Flow, Sink, Timeouts
from proxy.generate.engines.vllm_answer import AnswerReader, complaint, quoted
from proxy.generate.errors import (
    EngineDisconnected,
    EngineFailed,
    EngineProtocolError,
    EngineRefused,
    EngineTimeout,
    EngineUnreachable,
)
from proxy.generate.patience import Patience
from proxy.protocol.errors import ApiError
from proxy.protocol.generate import GenerateRequest, Outcome

ERROR_BODY_READ = 64 << 10
LAST_WORDS_TIMEOUT = 1.0
"""Seconds for what comes after everything that matters: the body of an error, the end of a complete stream."""
HEALTH_TIMEOUT = aiohttp.ClientTimeout(total=2)

ADVICE = {
    "structured": "a --tokens-only vLLM has no grammars; start the engine with --enable-scale-out instead, or leave "
    "response_format, structured_outputs, a forced tool_choice and strict tools out",
}
"""What to do about refusals that come of how an engine was started, by a word of its message."""

RETRY_AFTER = re.compile(r"[0-9A-Za-z ,:]{1,40}")
"""Seconds or a date; anything else is not repeated."""


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
        reader = AnswerReader(self.name, request.n, request.vocabulary_size, self._secrets)
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
        self, request: GenerateRequest, sink: Sink, flow: Flow, patience: Patience, reader: AnswerReader
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
                if reader.complete:
                    patience.hurry(LAST_WORDS_TIMEOUT)
            if not (patience.heard_any or reader.complete):
                raise EngineUnreachable(self.name, "ended the answer before its first token")
            reader.check_complete()
        except (aiohttp.ClientError, ConnectionError) as error:
            if not patience.heard_any:  # of a whole answer nothing is heard before its end
                raise EngineUnreachable(self.name, "the connection broke before the first token") from error
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
        words, param = complaint(body)
        message = quoted(words, self._secrets) or "no reason given"
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
