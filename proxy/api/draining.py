"""How requests come to an end when the server is told to stop.

From then on nothing new is taken: connections that wait for a request are closed, a request that comes all the same is
told so. What runs may finish until a deadline. After it, an event stream ends with an error event (`generation.py`),
and whatever has not said anything yet gets a 503.
"""

import asyncio
from collections.abc import Iterable

from aiohttp import web
from aiohttp.typedefs import Middleware
from aiohttp.web_protocol import RequestHandler

from proxy.api.errors import STOPPING, Handler, json_error

LAST_WORDS_TIMEOUT = 1.0


class Draining:
    """Knows the requests that run, by its `middleware`, which comes next after `errors_as_json`."""

    def __init__(self) -> None:
        self._running: dict[asyncio.Task[object], web.Request] = {}
        self._begun = self._over = False

    @property
    def middleware(self) -> Middleware:
        @web.middleware
        async def tracked(request: web.Request, handler: Handler) -> web.StreamResponse:
            if self._begun:
                return _goodbye()
            task = asyncio.current_task()
            assert task is not None
            self._running[task] = request
            task.add_done_callback(lambda _: self._running.pop(task))
            try:
                return await handler(request)
            except asyncio.CancelledError:
                if not self._over or request.transport is None or request.writer.output_size:
                    raise
                task.uncancel()
                return _goodbye()

        return tracked

    async def finish(self, connections: Iterable[RequestHandler], seconds: float) -> None:
        """Returns once nothing runs any more, or has been told so after so many seconds."""
        self._begun = True
        busy = {request.transport for request in self._running.values()}
        for connection in connections:
            if connection.transport is not None and connection.transport not in busy:
                connection.transport.close()
        if self._running:
            await asyncio.wait(self._running, timeout=seconds)
        self._over = True
        for task in self._running:
            task.cancel()
        if self._running:
            await asyncio.wait(self._running, timeout=LAST_WORDS_TIMEOUT)


def _goodbye() -> web.Response:
    response = json_error(STOPPING)
    response.force_close()
    return response
