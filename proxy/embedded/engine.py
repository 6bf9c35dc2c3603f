"""The embedded engine without its HTTP face: requests in, events into a sink, at most eight sequences at a time.

Sequences wait for a slot of llama.cpp in the order in which they came. A slot keeps what its last sequence left in the
cache, so the next one gets the slot where it finds most of its own prompt. Long prompts are read in chunks, between
which the other sequences get their tokens.
Cancelling `generate` frees its slots at once; `abort` ends it with the finish reason `abort`.
"""

import asyncio
import secrets
from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

from proxy.embedded.choice import Choice
from proxy.embedded.llama import CHUNK, Llama
from proxy.embedded.sampling import GenerateRequest

Sink = Callable[[dict[str, Any]], Awaitable[None]]


@dataclass(eq=False, slots=True)
class Generation:
    """One request at work."""

    request_id: str
    request: GenerateRequest
    choices: list[Choice]
    aborted: bool = False
    work: asyncio.Task[None] | None = field(default=None, repr=False)

    def usage(self) -> dict[str, Any]:
        prompt = len(self.request.token_ids)
        completion = sum(len(choice.output) for choice in self.choices)
        return {
            "prompt_tokens": prompt,
            "completion_tokens": completion,
            "total_tokens": prompt + completion,
            "prompt_tokens_details": None,
        }


class Slots:
    def __init__(self, count: int) -> None:
        self._turn = asyncio.Semaphore(count)
        self._idle: dict[int, Sequence[int]] = dict.fromkeys(range(count), ())  # the longest idle first

    @asynccontextmanager
    async def hold(self, choice: Choice) -> AsyncIterator[tuple[int, int]]:
        """A slot, the choice's own until the end of the block, and how many tokens of its prompt are there already."""
        prompt = choice.request.token_ids
        async with self._turn:
            slot = pick_slot(self._idle, prompt)
            known = _common_prefix(self._idle.pop(slot), prompt)
            try:
                yield slot, known
            finally:
                self._idle[slot] = (*prompt, *choice.output)


def pick_slot(idle: Mapping[int, Sequence[int]], prompt: Sequence[int]) -> int:
    """The slot that holds most of the prompt's start and loses less than it keeps; else the one idle for longest."""
    shared = {slot: _common_prefix(held, prompt) for slot, held in idle.items()}
    useful = [slot for slot, held in idle.items() if 2 * shared[slot] > len(held)]
    return max(useful, key=shared.__getitem__) if useful else next(iter(idle))


def _common_prefix(one: Sequence[int], other: Sequence[int]) -> int:
    for length, (left, right) in enumerate(zip(one, other, strict=False)):
        if left != right:
            return length
    return min(len(one), len(other))


class Engine:
    def __init__(self, llama: Llama, *, parallel: int, context: int, eos_token_ids: Collection[int]) -> None:
        self._llama = llama
        self._slots = Slots(parallel)
        self._context = context
        self._eos_token_ids = eos_token_ids
        self._running: set[Generation] = set()

    @property
    def load(self) -> int:
        """Requests at work or waiting."""
        return len(self._running)

    def begin(self, request_id: str, request: GenerateRequest) -> Generation:
        params = request.sampling_params
        seed = secrets.randbits(63) if params.seed is None or params.seed == -1 else params.seed
        return Generation(
            request_id,
            request,
            [Choice(request, index, seed, self._eos_token_ids, self._context) for index in range(params.n)],
        )

    async def generate(self, generation: Generation, sink: Sink) -> None:
        """Make all choices of the request; the sink gets each event's choice, interleaved with the others'."""
        generation.work = asyncio.create_task(self._all(generation, sink))
        self._running.add(generation)
        try:
            await generation.work
        except asyncio.CancelledError:
            if not generation.aborted:
                raise
            for choice in generation.choices:
                if choice.finish_reason is None:
                    await sink(choice.abort())
        finally:
            self._running.discard(generation)

    def abort(self, request_ids: Collection[str]) -> None:
        """End these requests; ids that are not running are ignored."""
        for generation in self._running:
            if generation.request_id in request_ids:
                self._abort(generation)

    def abort_all(self) -> None:
        for generation in self._running:
            self._abort(generation)

    @staticmethod
    def _abort(generation: Generation) -> None:
        generation.aborted = True
        if generation.work is not None:
            generation.work.cancel()

    async def _all(self, generation: Generation, sink: Sink) -> None:
        try:
            async with asyncio.TaskGroup() as group:
                for choice in generation.choices:
                    group.create_task(self._one(choice, sink))
        except* Exception as failures:
            raise failures.exceptions[0] from None

    async def _one(self, choice: Choice, sink: Sink) -> None:
        prompt = choice.request.token_ids
        async with self._slots.hold(choice) as (slot, known):
            for end in range(known + CHUNK, len(prompt), CHUNK):
                await self._llama.read(prompt[:end], slot)
            while choice.finish_reason is None:
                token = await self._llama.next_token(
                    [*prompt, *choice.output], slot, choice.next_settings(), choice.ranked
                )
                await sink(choice.feed(token))
