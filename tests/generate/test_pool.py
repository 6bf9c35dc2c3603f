"""Which engine takes a request, and when another one may."""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Iterator

import pytest

from proxy.app import build_pool
from proxy.config import PoolConfig
from proxy.generate.engines.base import Flow
from proxy.generate.errors import EngineDisconnected, EngineError, EngineFailed, EngineUnreachable
from proxy.generate.pool import Policy, Pool, choose
from proxy.protocol.errors import ApiError
from proxy.protocol.generate import GenerateRequest, TokenDelta
from tests.engines.scripted import Exchange, Script, ScriptedEngine, choice, says, scripted
from tests.losses import nothing_is_lost


@pytest.fixture(autouse=True, scope="module")
def all_is_cleaned_up() -> Iterator[None]:
    with nothing_is_lost():
        yield


ROUND_ROBIN: Policy = "round_robin"
LEAST: Policy = "least_requests"


@pytest.mark.parametrize(
    ("policy", "in_flight", "tried", "turn", "chosen"),
    [
        (ROUND_ROBIN, [0], [], 0, 0),
        (ROUND_ROBIN, [0], [], 7, 0),
        (ROUND_ROBIN, [0, 0, 0], [], 0, 0),
        (ROUND_ROBIN, [0, 0, 0], [], 1, 1),
        (ROUND_ROBIN, [0, 0, 0], [], 5, 2),
        (ROUND_ROBIN, [9, 9, 0], [], 0, 0),
        (ROUND_ROBIN, [0, 0, 0], [0], 0, 1),
        (ROUND_ROBIN, [0, 0, 0], [2], 2, 0),
        (ROUND_ROBIN, [0, 0, 0], [0, 1], 0, 2),
        (ROUND_ROBIN, [0, 0, 0], [0, 1, 2], 0, None),
        (LEAST, [2, 1, 3], [], 0, 1),
        (LEAST, [2, 1, 1], [], 2, 2),
        (LEAST, [1, 1, 1], [], 0, 0),
        (LEAST, [1, 1, 1], [], 1, 1),
        (LEAST, [2, 0, 1], [1], 0, 2),
        (LEAST, [2, 0, 1], [1, 2], 0, 0),
        (LEAST, [2, 0, 1], [0, 1, 2], 0, None),
    ],
)
def test_the_next_engine_follows_from_the_situation(
    policy: Policy, in_flight: list[int], tried: list[int], turn: int, chosen: int | None
) -> None:
    assert choose(policy, in_flight, frozenset(tried), turn) == chosen


class Engines:
    """A pool over scripted engines; those that are `down` have an address that nobody listens at."""

    def __init__(self, engines: list[ScriptedEngine], pool: Pool) -> None:
        self.engines, self.pool = engines, pool

    @property
    def asked(self) -> list[int]:
        return [len(engine.exchanges) for engine in self.engines]

    @property
    def in_flight(self) -> list[int]:
        return [engine.in_flight for engine in self.pool.engines]


@contextlib.asynccontextmanager
async def pool_of(*scripts: Script, down: tuple[int, ...] = (), policy: Policy = ROUND_ROBIN) -> AsyncIterator[Engines]:
    async with contextlib.AsyncExitStack() as stack:
        engines = [await stack.enter_async_context(scripted(script)) for script in scripts]
        config = PoolConfig.model_validate({"engines": [engine.url for engine in engines], "policy": policy})
        pool = build_pool("p", config)
        stack.push_async_callback(pool.close)
        for number in down:
            await engines[number].stop()
        await stack.enter_async_context(asyncio.timeout(10))
        yield Engines(engines, pool)


def request() -> GenerateRequest:
    return GenerateRequest("id", [1, 2], {})


async def ids_from(pool: Pool) -> list[int]:
    deltas: list[TokenDelta] = []
    await pool.generate(request(), deltas.extend, Flow())
    return [token_id for delta in deltas for token_id in delta.token_ids]


async def waits(exchange: Exchange) -> None:
    await exchange.begin()
    await exchange.event(choice([1]))
    await exchange.gone.wait()


async def fails_after_a_token(exchange: Exchange) -> None:
    await exchange.begin()
    await exchange.event(choice([1]))
    exchange.reset()


async def fails_before_a_token(exchange: Exchange) -> None:
    await exchange.begin()
    await exchange.end()


async def hangs_up(exchange: Exchange) -> None:
    exchange.close()


async def is_busy(exchange: Exchange) -> None:
    await exchange.status("503 Service Unavailable", b'{"error": {"message": "busy"}}')


async def test_round_robin_takes_each_in_turn() -> None:
    async with pool_of(says([[10]]), says([[20]]), says([[30]])) as pool_and_engines:
        pool = pool_and_engines.pool
        assert [await ids_from(pool) for _ in range(7)] == [[10], [20], [30], [10], [20], [30], [10]]


async def test_least_requests_avoids_the_busy_ones() -> None:
    async with pool_of(waits, says([[20]]), says([[30]]), policy=LEAST) as those:
        running = asyncio.create_task(ids_from(those.pool))
        await those.engines[0].exchange()
        assert those.in_flight == [1, 0, 0]

        answers = [await ids_from(those.pool) for _ in range(6)]
        assert [20] in answers
        assert [30] in answers
        assert those.asked[0] == 1
        running.cancel()
        await asyncio.wait({running})
        assert those.in_flight == [0, 0, 0]


async def test_requests_at_the_same_time_are_spread() -> None:
    async with pool_of(waits, waits, waits, policy=LEAST) as those:
        running = [asyncio.create_task(ids_from(those.pool)) for _ in range(9)]
        for engine in those.engines:
            await engine.exchange(2)
        assert those.in_flight == [3, 3, 3]
        for task in running:
            task.cancel()
        await asyncio.wait(running)


@pytest.mark.parametrize("policy", [ROUND_ROBIN, LEAST])
async def test_an_engine_that_is_down_is_passed_over_unseen(policy: Policy) -> None:
    async with pool_of(says([[10]]), says([[20]]), says([[30]]), down=(0, 1), policy=policy) as those:
        assert [await ids_from(those.pool) for _ in range(4)] == [[30]] * 4
        assert those.in_flight == [0, 0, 0]


async def test_an_engine_that_hangs_up_before_it_answers_is_passed_over_unseen() -> None:
    async with pool_of(hangs_up, says([[20]])) as those:
        assert await ids_from(those.pool) == [20]
        assert those.in_flight == [0, 0]


async def dies_before_a_token(exchange: Exchange) -> None:
    await exchange.begin()
    exchange.reset()


@pytest.mark.parametrize("script", [dies_before_a_token, fails_before_a_token])
async def test_an_engine_that_ends_before_its_first_token_is_passed_over_unseen(script: Script) -> None:
    async with pool_of(script, says([[20]])) as those:
        assert await ids_from(those.pool) == [20]


async def test_with_every_engine_down_the_last_ones_error_is_raised() -> None:
    async with pool_of(says([[1]]), says([[2]]), down=(0, 1)) as those:
        with pytest.raises(EngineUnreachable, match="cannot connect: Connection refused") as caught:
            await ids_from(those.pool)
        assert caught.value.engine == those.pool.engines[1].name
        assert those.in_flight == [0, 0]


@pytest.mark.parametrize(
    ("script", "error"),
    [
        (fails_after_a_token, EngineDisconnected),
        (is_busy, EngineFailed),
    ],
)
async def test_an_engine_that_fails_once_it_has_answered_is_not_replaced(
    script: Script, error: type[EngineError]
) -> None:
    async with pool_of(script, says([[20]])) as those:
        with pytest.raises(error):
            await ids_from(those.pool)
        assert those.asked == [1, 0]
        assert those.in_flight == [0, 0]


@pytest.mark.parametrize(
    "script",
    [
        says([[1]]),
        fails_before_a_token,
        fails_after_a_token,
        hangs_up,
        is_busy,
        waits,
    ],
)
async def test_nothing_is_in_flight_after_any_end(script: Script) -> None:
    async with pool_of(script, policy=LEAST) as those:
        running = asyncio.create_task(ids_from(those.pool))
        await those.engines[0].exchange()
        assert those.in_flight == [1]
        if script is waits:
            running.cancel()
        with contextlib.suppress(ApiError, asyncio.CancelledError):
            await running
        assert those.in_flight == [0]


async def test_nothing_is_in_flight_after_the_sink_stopped_the_flow() -> None:
    async with pool_of(waits) as those:
        flow = Flow()
        await those.pool.generate(request(), lambda deltas: flow.stop(), flow)
        assert those.in_flight == [0]


@pytest.mark.parametrize(
    ("down", "unhealthy", "ready"),
    [((), (), True), ((0,), (), True), ((), (0,), True), ((0,), (1,), False), ((0, 1), (), False), ((), (0, 1), False)],
)
async def test_a_pool_is_ready_while_one_engine_is_up(
    down: tuple[int, ...], unhealthy: tuple[int, ...], ready: bool
) -> None:
    async with pool_of(says([[1]]), says([[2]]), down=down) as those:
        for number in unhealthy:
            those.engines[number].healthy = False
        assert await those.pool.ready() is ready
