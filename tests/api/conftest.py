"""Streams have to be right under every event loop that the proxy may run on; for everything else one is enough."""

import asyncio
from collections.abc import Callable, Mapping

import pytest

try:
    from uvloop import new_event_loop as uvloop
except ImportError:  # not on every platform
    uvloop = None

LoopFactory = Callable[[], asyncio.AbstractEventLoop]


def pytest_asyncio_loop_factories(config: pytest.Config, item: pytest.Item) -> Mapping[str, LoopFactory]:
    loops: dict[str, LoopFactory] = {"asyncio": asyncio.new_event_loop}
    if uvloop is not None and item.path.name == "test_streams.py":
        loops["uvloop"] = uvloop
    return loops
