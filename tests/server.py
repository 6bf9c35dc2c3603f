"""The proxy in the test's own event loop, on a real socket, in front of whatever engines a test has."""

import contextlib
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

from aiohttp import web
from aiohttp.test_utils import TestClient, TestServer

from proxy.api.draining import Draining
from proxy.api.routes import application
from proxy.app import built
from proxy.config import Config
from proxy.generate.pool import Pool
from tests.tokenizers import model_folder


def config(
    folder: Path,
    *engine_urls: str,
    pool: dict[str, Any] | None = None,
    server: dict[str, Any] | None = None,
    **model: Any,
) -> Config:
    """One model `m` on one pool; `pool`, `server` and `model` add keys to their sections."""
    return Config.model_validate(
        {
            "server": server or {},
            "models": [{"served_model_name": "m", "model": str(folder), "pool": "p", **model}],
            "pools": {"p": {"engines": [{"url": url} for url in engine_urls], **(pool or {})}},
        }
    )


class Running:
    """A running proxy: a `client` of it, its only `pool`, and what it holds."""

    def __init__(self, client: TestClient, pool: Pool) -> None:
        self.client, self.pool = client, pool

    @property
    def in_flight(self) -> int:
        return sum(engine.in_flight for engine in self.pool.engines)

    @property
    def connections(self) -> int:
        """Of clients, whether or not they have a request running."""
        return len(self._server.connections)

    @property
    def unsent(self) -> int:
        """Bytes that clients have not taken."""
        transports = [connection.transport for connection in self._server.connections]
        return sum(transport.get_write_buffer_size() for transport in transports if transport is not None)

    @property
    def _server(self) -> web.Server:
        server = self.client.server.runner.server
        assert server is not None
        return server


@contextlib.asynccontextmanager
async def running(
    tmp_path: Path,
    *engine_urls: str,
    pool: dict[str, Any] | None = None,
    server: dict[str, Any] | None = None,
    keep_alive_interval: float = 15,
    max_body_size: int = 64 << 20,
    **model: Any,
) -> AsyncIterator[Running]:
    """A running proxy, whose model is a folder that the test made, or a small one."""
    made = (tmp_path / "tokenizer.json").exists() or (tmp_path / "tekken.json").exists()
    folder = tmp_path if made else model_folder(tmp_path)
    async with built(config(folder, *engine_urls, pool=pool, server=server, **model)) as models:
        app = application(models, Draining(), keep_alive_interval=keep_alive_interval, max_body_size=max_body_size)
        async with TestClient(TestServer(app, handler_cancellation=True)) as client:
            yield Running(client, models.all[0].pool)


@contextlib.asynccontextmanager
async def proxy(tmp_path: Path, *engine_urls: str, **settings: Any) -> AsyncIterator[TestClient]:
    """A client of a running proxy; see `running`."""
    async with running(tmp_path, *engine_urls, **settings) as those:
        yield those.client
