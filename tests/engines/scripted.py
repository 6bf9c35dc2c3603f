"""A token engine that does what a test tells it to, over real sockets.

It speaks `/inference/v1/generate` on the raw connection, so that a test can also send what no HTTP library would: half
an event, an event in single bytes, a reset. A test gives it `script`, a coroutine that is handed each `Exchange`.
"""

import asyncio
import contextlib
import json
import socket
import struct
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Mapping, Sequence
from types import MappingProxyType
from typing import Any

HEADERS = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream; charset=utf-8\r\ntransfer-encoding: chunked\r\n\r\n"

Script = Callable[["Exchange"], Awaitable[None]]


def choice(
    token_ids: Sequence[int],
    *,
    index: int = 0,
    finish: str | None = None,
    stop: int | None = None,
    logprobs: Any = None,
) -> dict[str, Any]:
    return {
        "index": index,
        "finish_reason": finish,
        "stop_reason": stop,
        "token_ids": list(token_ids),
        "logprobs": logprobs,
    }


class Exchange:
    """One request, and the means to answer it. `headers` have their names in lower case; `sent` counts bytes that the
    connection has taken."""

    def __init__(
        self,
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
        path: str,
        body: Any,
        headers: Mapping[str, str] = MappingProxyType({}),
    ) -> None:
        self._reader, self._writer = reader, writer
        self.path, self.body, self.headers = path, body, headers
        self.gone = asyncio.Event()
        """Set when the proxy closes the connection."""
        self.sent = 0

    async def raw(self, data: bytes) -> None:
        self._writer.write(data)
        await self._writer.drain()
        self.sent += len(data)

    async def status(self, status: str, body: bytes = b"", headers: str = "") -> None:
        """A whole response, such as `503 Service Unavailable`."""
        head = f"HTTP/1.1 {status}\r\ncontent-length: {len(body)}\r\n{headers}\r\n"
        await self.raw(head.encode() + body)

    async def begin(self) -> None:
        await self.raw(HEADERS)

    async def data(self, data: bytes) -> None:
        """One HTTP chunk of the event stream."""
        await self.raw(b"%x\r\n%b\r\n" % (len(data), data))

    async def event(self, *choices: dict[str, Any], **more: Any) -> None:
        await self.data(event(*choices, **more))

    async def end(self, done: bool = True) -> None:
        await self.raw((b"e\r\ndata: [DONE]\n\n\r\n" if done else b"") + b"0\r\n\r\n")

    def reset(self) -> None:
        """Closes the connection with RST instead of FIN."""
        sock = self._writer.get_extra_info("socket")
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        self._writer.transport.abort()

    def close(self) -> None:
        self._writer.close()


def event(*choices: dict[str, Any], **more: Any) -> bytes:
    body = {"request_id": "generate-tokens-x", "usage": None, "output_mode": "tokens", "choices": list(choices), **more}
    return b"data: " + json.dumps(body).encode() + b"\n\n"


class ScriptedEngine:
    """`exchanges` are all requests so far; `connections` counts those that came, `open` those that stand."""

    def __init__(self, script: Script) -> None:
        self.script = script
        self.exchanges: list[Exchange] = []
        self.connections = 0
        self.open = 0
        self.healthy = True
        self.url = ""
        self._changed = asyncio.Event()
        self._server: asyncio.Server | None = None
        self._tasks: set[asyncio.Task[Any]] = set()

    async def start(self) -> None:
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", 0, limit=2**26)
        self.url = f"http://127.0.0.1:{self._server.sockets[0].getsockname()[1]}"

    async def stop(self) -> None:
        assert self._server is not None
        self._server.close()
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def exchange(self, number: int = 0) -> Exchange:
        """The request with that number, once it is there."""
        await self.until(lambda: len(self.exchanges) > number)
        return self.exchanges[number]

    async def until(self, condition: Callable[[], bool]) -> None:
        """Waits until requests and connections are as `condition` says."""
        while not condition():
            await self._changed.wait()

    def _change(self) -> None:
        changed, self._changed = self._changed, asyncio.Event()
        changed.set()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._tasks.add(task)
        self.connections += 1
        self.open += 1
        self._change()
        try:
            with contextlib.suppress(ConnectionError, asyncio.IncompleteReadError, asyncio.CancelledError):
                while True:
                    await self._answer(reader, writer)
        finally:
            self.open -= 1
            self._change()
            self._tasks.discard(task)
            writer.close()

    async def _answer(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = (await reader.readuntil(b"\r\n\r\n")).decode()
        request_line, *lines = head.rstrip().split("\r\n")
        path = request_line.split(" ")[1]
        headers = {name.lower(): value.strip() for name, _, value in (line.partition(":") for line in lines)}
        body = await reader.readexactly(int(headers.get("content-length", 0)))
        if path == "/health":
            await Exchange(reader, writer, path, None).status("200 OK" if self.healthy else "503 Service Unavailable")
            return
        exchange = Exchange(reader, writer, path, json.loads(body), headers)
        self.exchanges.append(exchange)
        self._change()
        script = asyncio.ensure_future(self.script(exchange))
        watch = asyncio.ensure_future(reader.read(1))
        try:
            await asyncio.wait({script, watch}, return_when=asyncio.FIRST_COMPLETED)
            if watch.done():
                exchange.gone.set()
                with contextlib.suppress(ConnectionError):
                    await script
                raise ConnectionResetError
            script.result()
        finally:
            watch.cancel()
            script.cancel()
            await asyncio.gather(watch, script, return_exceptions=True)


@contextlib.asynccontextmanager
async def scripted(script: Script) -> AsyncIterator[ScriptedEngine]:
    engine = ScriptedEngine(script)
    await engine.start()
    try:
        yield engine
    finally:
        await engine.stop()


async def silent(exchange: Exchange) -> None:
    """The script of an engine that never answers."""
    await exchange.gone.wait()


async def silent_after_headers(exchange: Exchange) -> None:
    await exchange.begin()
    await exchange.gone.wait()


def says(batches: Iterable[Sequence[int]], *, stop: int | None = None, usage: Any = None) -> Script:
    """The script of a healthy engine: each choice gets each batch as an event, and then its finish reason."""
    batches = [list(batch) for batch in batches]

    async def script(exchange: Exchange) -> None:
        n = exchange.body["sampling_params"].get("n", 1)
        finish = "length" if stop is None else "stop"
        if not exchange.body.get("stream"):
            ids = [i for batch in batches for i in batch]
            choices = [choice(ids, index=index, finish=finish, stop=stop) for index in range(n)]
            body = {"request_id": "generate-tokens-x", "choices": choices, "usage": usage, "prompt_logprobs": None}
            await exchange.status("200 OK", json.dumps(body).encode(), "content-type: application/json\r\n")
            return
        await exchange.begin()
        for number, batch in enumerate(batches):
            for index in range(n):
                last = number == len(batches) - 1
                await exchange.event(
                    choice(batch, index=index, finish=finish if last else None, stop=stop if last else None)
                )
        if usage is not None:
            await exchange.event(usage=usage)
        await exchange.end()

    return script
