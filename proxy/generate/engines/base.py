"""The interface of an engine client: it pushes what comes back into a sink, a batch per network read.

No queue, task or wake-up stands between the engine's socket and the sink. The sink is synchronous; through `Flow` it
tells the client to wait, to go on, or to stop and abort the request on the engine.
"""

from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Protocol

from proxy.protocol.generate import GenerateRequest, Outcome, TokenDelta

Sink = Callable[[list[TokenDelta]], None]


@dataclass(frozen=True, slots=True)
class Timeouts:
    """Seconds: to connect, to the first event, between events, and for the whole request."""

    connect: float = 5.0
    first_token: float = 300.0
    idle: float = 60.0
    total: float = 3600.0


class Flow:
    """The sink's hold on the engine's stream: it stays paused until what the sink waits for has come."""

    __slots__ = ("_until", "stopped")

    def __init__(self) -> None:
        self._until: Callable[[], Awaitable[None]] | None = None
        self.stopped = False

    @property
    def paused(self) -> bool:
        return self._until is not None

    def pause(self, until: Callable[[], Awaitable[None]]) -> None:
        """The engine is not read any more before `until` is over."""
        self._until = until

    async def until_resumed(self) -> None:
        if self._until is not None:
            await self._until()
            self._until = None

    def stop(self) -> None:
        """No more is needed: the engine's request is aborted and `generate` returns."""
        self.stopped = True


class Engine(Protocol):
    """One engine of a pool. `name` is its URL; `in_flight` counts the requests that it is working on for this proxy."""

    name: str
    in_flight: int

    async def generate(self, request: GenerateRequest, sink: Sink, flow: Flow) -> Outcome:
        """Returns once every choice has finished or the flow was stopped. Cancelling it aborts the request.

        Raises `EngineError` or `EngineRefused`; after an `EngineUnreachable` the sink has seen nothing.
        """

    async def alive(self) -> bool:
        """Whether its health check answers."""

    async def close(self) -> None: ...
