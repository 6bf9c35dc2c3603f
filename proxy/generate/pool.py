"""The engines that serve a model, and which of them takes the next request.

The decision is a pure function of the situation, `choose`; the coroutine around it only waits and acts. Until a token
has come, the request may go to another one and the client sees nothing of it; after that it may not.
"""

import asyncio
from collections.abc import Sequence
from typing import Literal

from proxy.generate.engines.base import Engine, Flow, Sink
from proxy.generate.errors import EngineUnreachable
from proxy.protocol.generate import GenerateRequest, Outcome

Policy = Literal["round_robin", "least_requests"]


def choose(policy: Policy, in_flight: Sequence[int], tried: frozenset[int], turn: int) -> int | None:
    """The index of the engine to ask, None where all were tried.

    `in_flight` has one count per engine; `turn` counts the requests, and decides between engines that are equally good.
    """
    order = [i for k in range(len(in_flight)) if (i := (turn + k) % len(in_flight)) not in tried]
    if policy == "least_requests":
        return min(order, key=in_flight.__getitem__, default=None)
    return order[0] if order else None


class Pool:
    """`name` is the pool's in the configuration; it has at least one engine."""

    def __init__(self, name: str, engines: Sequence[Engine], policy: Policy) -> None:
        self.name, self.engines, self._policy = name, engines, policy
        self._turn = -1

    async def generate(self, request: GenerateRequest, sink: Sink, flow: Flow) -> Outcome:
        """As `Engine.generate`; raises what the engine raised that was asked last."""
        self._turn += 1
        turn, tried = self._turn, frozenset[int]()
        while True:
            index = choose(self._policy, [engine.in_flight for engine in self.engines], tried, turn)
            assert index is not None
            tried |= {index}
            try:
                return await self.engines[index].generate(request, sink, flow)
            except EngineUnreachable:
                if len(tried) == len(self.engines):
                    raise

    async def ready(self) -> bool:
        """Whether one engine at least is up."""
        checks = [asyncio.ensure_future(engine.alive()) for engine in self.engines]
        try:
            for check in asyncio.as_completed(checks):
                if await check:
                    return True
            return False
        finally:
            for check in checks:
                check.cancel()

    async def close(self) -> None:
        for engine in self.engines:
            await engine.close()
