"""How long an engine may be silent."""

import asyncio
from typing import Any

from proxy.generate.engines.base import Flow, Timeouts


class Patience:
    """Ends a request that its engine is silent about. Hearing something costs one assignment; a timer, set when the
    request begins and again only when it fires, looks how long the silence lasts. A paused flow is not silence; and
    a whole answer, of which nothing can be heard before its end, is not listened to."""

    def __init__(self, timeouts: Timeouts, flow: Flow, *, listens: bool) -> None:
        self._loop = asyncio.get_running_loop()
        self._flow, self._timeouts = flow, timeouts
        self._heard_at = self._loop.time()
        self.heard_any = False
        self._expiry = asyncio.timeout(None)
        self._timer: asyncio.TimerHandle | None = None
        self._expired = False
        self._listens = listens
        self._hurry: float | None = None

    def heard(self) -> None:
        self._heard_at = self._loop.time()
        self.heard_any = True

    def hurry(self, seconds: float) -> None:
        """From now on the silence may last only so long."""
        self._hurry = seconds
        if self._timer is not None:
            self._timer.cancel()
        self._look()

    def complaint(self) -> str:
        limits = self._timeouts
        if not self._expired:
            return f"not finished within {limits.total:g} s (total_timeout)"
        if self.heard_any:
            return f"silent for {limits.idle:g} s between tokens (idle_timeout)"
        return f"no token within {limits.first_token:g} s (first_token_timeout)"

    async def __aenter__(self) -> "Patience":
        await self._expiry.__aenter__()
        if self._listens:
            self._look()
        return self

    async def __aexit__(self, *exc: Any) -> None:
        if self._timer is not None:
            self._timer.cancel()
        await self._expiry.__aexit__(*exc)

    def _look(self) -> None:
        now = self._loop.time()
        limit = self._timeouts.idle if self.heard_any else self._timeouts.first_token
        limit = limit if self._hurry is None else self._hurry
        if self._flow.paused:
            self._heard_at = now
        if now >= self._heard_at + limit:
            self._expired = True
            self._expiry.reschedule(now)
        else:
            # The limit may become the shorter one before this timer fires; looking that often costs nothing.
            self._timer = self._loop.call_at(min(self._heard_at + limit, now + self._timeouts.idle), self._look)
