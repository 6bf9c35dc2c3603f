"""An event stream to one client: written at once and without waiting, with bounded memory and signs of life.

The response begins with the first bytes, so that whatever fails before them is still an HTTP status, or after
`keep_alive_interval` of silence, with a comment. Once it has begun, events go to the connection's transport directly,
as HTTP chunks of our own making: this is the one place that knows how aiohttp frames a body. More than `HIGH_WATER`
bytes that the client has not taken make `write` say so, and `ready` waits until they are gone.
"""

import asyncio

from aiohttp import web
from aiohttp.http import HttpVersion11

HIGH_WATER = 64 << 10
COMMENT = b": keep-alive\n\n"

HEADERS = {
    "Content-Type": "text/event-stream; charset=utf-8",
    "Cache-Control": "no-cache",
    "X-Accel-Buffering": "no",
}


class ClientGone(Exception):
    """Nobody is there to read the rest. Usually the handler is cancelled first."""


class EventStream:
    """`keep_alive_interval` in seconds, 0 for none. Use as a context manager, which stops the signs of life."""

    def __init__(self, request: web.Request, headers: dict[str, str], keep_alive_interval: float) -> None:
        self._request = request
        self._response = web.StreamResponse(headers={**HEADERS, **headers})
        self._chunked = request.version >= HttpVersion11
        if self._chunked:
            self._response.enable_chunked_encoding()
        self._begun = False
        self._unsent = b""
        self._loop = asyncio.get_running_loop()
        self._interval = keep_alive_interval
        self._written_at = self._loop.time()
        self._timer: asyncio.TimerHandle | None = None
        self._opening: asyncio.Task[None] | None = None

    def __enter__(self) -> "EventStream":
        self._keep_alive_later()
        return self

    def __exit__(self, *_: object) -> None:
        if self._timer is not None:
            self._timer.cancel()

    @property
    def begun(self) -> bool:
        """Whether the status line is out, or on its way."""
        return self._begun or self._opening is not None

    def write(self, data: bytes) -> bool:
        """Returns whether `ready` should be awaited before more is written."""
        transport = self._request.transport
        if not self._begun or transport is None:
            self._unsent += data
            return True
        self._written_at = self._loop.time()
        transport.write(b"%x\r\n%b\r\n" % (len(data), data) if self._chunked else data)
        return transport.get_write_buffer_size() > HIGH_WATER

    async def ready(self) -> None:
        """Begins the response if need be, and waits until the client has taken enough; raises `ClientGone`."""
        if self._opening is None:
            self._opening = asyncio.ensure_future(self._begin())
        try:
            await asyncio.shield(self._opening)
            await self._response.drain()
        except ConnectionError:
            raise ClientGone from None

    async def _begin(self) -> None:
        await self._response.prepare(self._request)
        self._begun = True
        if self._unsent:
            unsent, self._unsent = self._unsent, b""
            self.write(unsent)

    async def finish(self, last: bytes) -> web.StreamResponse:
        """Writes the last events and ends the body."""
        self.write(last)
        await self.ready()
        try:
            await self._response.write_eof()
        except ConnectionError:
            raise ClientGone from None
        return self._response

    def _keep_alive_later(self) -> None:
        if self._interval:
            self._timer = self._loop.call_at(self._written_at + self._interval, self._keep_alive)

    def _keep_alive(self) -> None:
        now = self._loop.time()
        if now - self._written_at >= self._interval:
            self._written_at = now
            if self.write(COMMENT) and self._opening is None:
                self._opening = asyncio.ensure_future(self._begin())
        self._keep_alive_later()
