"""An event stream to one client: written at once and without waiting, with bounded memory and signs of life.

The response begins with the first bytes, so that whatever fails before them is still an HTTP status, or after
`keep_alive_interval` of silence, with a comment. Once it has begun, events go to the connection's transport directly,
as HTTP chunks of our own making: this is the one place that knows how aiohttp frames a body. More than `HIGH_WATER`
bytes that the client has not taken make `write` say so, and `ready` waits until they are gone.
"""

import asyncio

from aiohttp import web
from aiohttp.abc import AbstractStreamWriter
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
        else:
            self._response.force_close()  # the only end that such a body has
        self._writer: AbstractStreamWriter | None = None  # once the headers are out
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
        self._no_keep_alive()

    @property
    def begun(self) -> bool:
        """Whether the status line is out, or on its way."""
        return self._opening is not None

    def write(self, data: bytes) -> bool:
        """Returns whether `ready` should be awaited before more is written."""
        if self._writer is None:
            self._unsent += data
            return True
        transport = self._request.transport
        if transport is None:
            return True
        self._written_at = self._loop.time()
        transport.write(b"%x\r\n%b\r\n" % (len(data), data) if self._chunked else data)
        return transport.get_write_buffer_size() > HIGH_WATER

    async def ready(self) -> None:
        """Begins the response if need be, and waits until the client has taken enough; raises `ClientGone`."""
        try:
            await asyncio.shield(self._open())
            assert self._writer is not None
            await self._writer.drain()
        except ConnectionError:
            raise ClientGone from None
        if self._request.transport is None:
            raise ClientGone

    async def finish(self, last: bytes) -> web.StreamResponse:
        """Writes the last events, ends the body, and waits until the system has taken all of it: what is left in the
        process when it stops is lost."""
        self._no_keep_alive()
        self.write(last)
        await self.ready()
        assert self._writer is not None
        try:
            await self._response.write_eof()
            if (transport := self._request.transport) is not None:
                transport.set_write_buffer_limits(0)
                await self._writer.drain()
            if (transport := self._request.transport) is not None:
                transport.set_write_buffer_limits()
        except ConnectionError:
            raise ClientGone from None
        return self._response

    def cut(self, last: bytes) -> None:
        """Ends a body that has begun, without waiting for anything."""
        if self._writer is not None:
            self.write(last)
            if self._chunked and self._request.transport is not None:
                self._request.transport.write(b"0\r\n\r\n")

    def _open(self) -> asyncio.Task[None]:
        if self._opening is None:
            self._opening = asyncio.ensure_future(self._begin())
            # That the client has gone is no news where nobody waits for it.
            self._opening.add_done_callback(lambda opening: opening.cancelled() or opening.exception())
        return self._opening

    async def _begin(self) -> None:
        self._writer = await self._response.prepare(self._request)
        unsent, self._unsent = self._unsent, b""
        if unsent:
            self.write(unsent)

    def _keep_alive_later(self) -> None:
        if self._interval:
            self._timer = self._loop.call_at(self._written_at + self._interval, self._keep_alive)

    def _no_keep_alive(self) -> None:
        if self._timer is not None:
            self._timer.cancel()

    def _keep_alive(self) -> None:
        now = self._loop.time()
        if now - self._written_at >= self._interval:
            self._written_at = now
            transport = self._request.transport
            if transport is not None and not transport.get_write_buffer_size():  # else it is the client who is silent
                self.write(COMMENT)
                self._open()
        self._keep_alive_later()
