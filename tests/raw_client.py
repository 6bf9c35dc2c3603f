"""A client of one connection that reads what is there, byte by byte if need be, and may go away whenever it likes."""

import asyncio
import contextlib
import json
import socket
from collections.abc import AsyncIterator
from typing import Any


class RawClient:
    """Speaks HTTP by hand: `post` writes a request, `head` and `body` read a response and check its framing."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader, self.writer = reader, writer

    async def post(self, path: str, body: Any, *, version: str = "1.1", headers: str = "") -> None:
        data = json.dumps(body).encode()
        head = f"POST {path} HTTP/{version}\r\nhost: x\r\ncontent-length: {len(data)}\r\n{headers}\r\n"
        self.writer.write(head.encode() + data)
        await self.writer.drain()

    async def head(self) -> tuple[int, dict[str, str]]:
        """Status, and headers with their names in lower case."""
        first, *lines = (await self.reader.readuntil(b"\r\n\r\n")).decode().rstrip().split("\r\n")
        headers = {name.lower(): value.strip() for name, _, value in (line.partition(":") for line in lines)}
        return int(first.split(" ")[1]), headers

    async def chunk(self) -> bytes:
        """The next chunk's data, nothing at the end of a chunked body."""
        size = int((await self.reader.readuntil(b"\r\n")).removesuffix(b"\r\n"), 16)
        data = await self.reader.readexactly(size + 2)
        assert data.endswith(b"\r\n")
        return data[:-2]

    async def chunks(self) -> bytes:
        """The rest of a chunked body."""
        body = bytearray()
        while piece := await self.chunk():
            body += piece
        return bytes(body)

    async def response(self) -> tuple[int, dict[str, str], bytes]:
        status, headers = await self.head()
        if headers.get("transfer-encoding") == "chunked":
            return status, headers, await self.chunks()
        length = int(headers.get("content-length", -1))
        return status, headers, await self.reader.read() if length < 0 else await self.reader.readexactly(length)

    def leave(self) -> None:
        """Closes the connection, with whatever was not read."""
        self.writer.transport.abort()


@contextlib.asynccontextmanager
async def raw_client(port: int, *, buffer: int | None = None) -> AsyncIterator[RawClient]:
    """`buffer` in bytes is about what a client takes without reading."""
    with contextlib.ExitStack() as unless_connected:
        sock = unless_connected.enter_context(socket.socket())
        sock.setblocking(False)
        if buffer is not None:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, buffer)
        await asyncio.get_running_loop().sock_connect(sock, ("127.0.0.1", port))
        reader, writer = await asyncio.open_connection(sock=sock, limit=buffer or 1 << 26)
        unless_connected.pop_all()
    try:
        yield RawClient(reader, writer)
    finally:
        writer.transport.abort()
        with contextlib.suppress(ConnectionError):
            await writer.wait_closed()
