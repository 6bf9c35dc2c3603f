"""A server that is told to stop: what runs may finish, nothing new begins, and it ends in time. The server is a real
process, under uvloop as in production."""

import asyncio
import contextlib
import re
import signal
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.engines.scripted import Exchange, choice, says, scripted
from tests.raw_client import raw_client
from tests.tokenizers import byte_level, model_folder

CHAT = "/v1/chat/completions"
STREAMED = {"model": "m", "messages": [{"role": "user", "content": "Hello"}], "stream": True}
IDS: list[int] = byte_level().encode("The harbour lamp turns twice a minute.").ids


class Server:
    def __init__(self, process: asyncio.subprocess.Process, port: int) -> None:
        self.process, self.port = process, port

    async def stop(self, *, within: float, how: signal.Signals = signal.SIGTERM) -> int:
        """Its exit code."""
        self.process.send_signal(how)
        return await self.ended(within=within)

    async def ended(self, *, within: float) -> int:
        async with asyncio.timeout(within):
            return await self.process.wait()

    async def until_refusing(self) -> None:
        with contextlib.suppress(ConnectionError):
            while True:
                async with raw_client(self.port):
                    await asyncio.sleep(0.01)


@contextlib.asynccontextmanager
async def served(tmp_path: Path, engine_url: str, **server: Any) -> AsyncIterator[Server]:
    config = tmp_path / "config.yaml"
    model = {"served_model_name": "m", "model": str(model_folder(tmp_path / "m")), "pool": "p"}
    sections = {"server": {"port": 0, **server}, "models": [model], "pools": {"p": {"engines": [engine_url]}}}
    config.write_text(yaml.safe_dump(sections), encoding="utf-8")
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "proxy", "serve", "--config", str(config), stderr=asyncio.subprocess.PIPE
    )
    try:
        assert process.stderr is not None
        async with asyncio.timeout(30):
            while not (
                serving := re.search(rb"serving m on http://127\.0\.0\.1:(\d+)", await process.stderr.readline())
            ):
                pass
        yield Server(process, int(serving[1]))
    finally:
        with contextlib.suppress(ProcessLookupError):
            process.kill()
        _, said = await process.communicate()
        assert b"Traceback" not in said, said.decode()


@pytest.mark.parametrize("how", [signal.SIGTERM, signal.SIGINT])
async def test_a_running_stream_finishes_and_no_connection_is_taken_any_more(
    tmp_path: Path, how: signal.Signals
) -> None:
    go_on = asyncio.Event()

    async def script(exchange: Exchange) -> None:
        await exchange.begin()
        await exchange.event(choice(IDS[:5]))
        await go_on.wait()
        await exchange.event(choice(IDS[5:], finish="stop"))
        await exchange.end()

    async with scripted(script) as engine, served(tmp_path, engine.url) as server, raw_client(server.port) as client:
        await client.post(CHAT, STREAMED)
        assert (await client.head())[0] == 200
        await client.chunk()
        server.process.send_signal(how)
        await server.until_refusing()
        assert server.process.returncode is None

        go_on.set()
        rest = await client.chunks()
        assert b"minute" in rest
        assert rest.endswith(b"data: [DONE]\n\n")
        assert await client.reader.read() == b""  # the connection is closed
        assert await server.ended(within=5) == 0


async def test_an_idle_server_stops_at_once(tmp_path: Path) -> None:
    async with (
        scripted(says([IDS])) as engine,
        served(tmp_path, engine.url) as server,
        raw_client(server.port) as used,
        raw_client(server.port) as unused,
    ):
        await used.post(CHAT, STREAMED)
        await used.response()
        assert await server.stop(within=5) == 0
        assert await used.reader.read() == await unused.reader.read() == b""


@pytest.mark.parametrize("shutdown_timeout", [1, 0])
async def test_a_stream_that_does_not_end_in_time_is_cut_with_an_error_event_and_its_engine_freed(
    tmp_path: Path, shutdown_timeout: float
) -> None:
    async def script(exchange: Exchange) -> None:
        await exchange.begin()
        await exchange.event(choice(IDS))
        await exchange.gone.wait()

    async with (
        scripted(script) as engine,
        served(tmp_path, engine.url, shutdown_timeout=shutdown_timeout) as server,
        raw_client(server.port) as client,
    ):
        await client.post(CHAT, STREAMED)
        await client.head()
        await client.chunk()
        server.process.send_signal(signal.SIGTERM)
        last = await client.chunks()
        assert b'"type":"service_unavailable"' in last
        assert b"[DONE]" not in last
        assert await server.ended(within=10) == 0
        await engine.exchanges[0].gone.wait()


async def test_a_client_that_is_behind_still_gets_everything(tmp_path: Path) -> None:
    async with (
        scripted(says([IDS * 20] * 10_000)) as engine,
        served(tmp_path, engine.url) as server,
        raw_client(server.port, buffer=4096) as client,
    ):
        await client.post(CHAT, STREAMED)
        await client.head()
        body = await client.chunk()
        server.process.send_signal(signal.SIGTERM)
        await server.until_refusing()
        body += await client.chunks()
        assert body.count(b"minute") == 20 * 10_000
        assert body.endswith(b"data: [DONE]\n\n")
        assert await server.ended(within=5) == 0


async def test_a_second_signal_ends_it_at_once(tmp_path: Path) -> None:
    async def script(exchange: Exchange) -> None:
        await exchange.gone.wait()

    async with (
        scripted(script) as engine,
        served(tmp_path, engine.url) as server,
        raw_client(server.port) as client,
    ):
        await client.post(CHAT, STREAMED)
        await engine.exchange()
        server.process.send_signal(signal.SIGTERM)
        await server.until_refusing()
        assert await server.stop(within=5) == -signal.SIGTERM


async def test_a_connection_that_waits_for_a_request_is_closed_though_others_are_busy(tmp_path: Path) -> None:
    go_on = asyncio.Event()

    async def script(exchange: Exchange) -> None:
        await exchange.begin()
        await exchange.event(choice(IDS))
        await go_on.wait()
        await exchange.event(choice([], finish="stop"))
        await exchange.end()

    async with (
        scripted(script) as engine,
        served(tmp_path, engine.url) as server,
        raw_client(server.port) as busy,
        raw_client(server.port) as idle,
    ):
        await busy.post(CHAT, STREAMED)
        await busy.head()
        await busy.chunk()
        server.process.send_signal(signal.SIGTERM)
        assert await idle.reader.read() == b""
        assert server.process.returncode is None

        go_on.set()
        assert (await busy.chunks()).endswith(b"data: [DONE]\n\n")
        assert await server.ended(within=5) == 0


@pytest.mark.parametrize("body", [STREAMED, {**STREAMED, "stream": False}], ids=["streamed", "whole"])
async def test_a_request_that_has_heard_nothing_at_the_deadline_gets_a_503(
    tmp_path: Path, body: dict[str, Any]
) -> None:
    async def script(exchange: Exchange) -> None:
        await exchange.gone.wait()

    async with (
        scripted(script) as engine,
        served(tmp_path, engine.url, shutdown_timeout=0) as server,
        raw_client(server.port) as client,
    ):
        await client.post(CHAT, body)
        await engine.exchange()
        server.process.send_signal(signal.SIGTERM)
        status, _ = await client.head()
        assert status == 503
        assert b"the server is stopping" in await client.reader.read()
        assert await server.ended(within=10) == 0
