from __future__ import annotations

import asyncio
from typing import Literal

import httpx
import pytest

from megarl.errors import EngineError
from megarl.rollout.fleet import Engine, Fleet
from megarl.rollout.hedging import Hedging
from megarl.rollout.lifecycle import Ended
from tests.rollout.engines import scripted_fleet


def silent(request: httpx.Request) -> httpx.Response:
    return httpx.Response(200, json={})


class Counts:
    def __init__(self) -> None:
        self.winners: list[str] = []

    def request_retried(self, cause: str) -> None: ...

    def request_hedged(self, winner: Literal["first", "second"]) -> None:
        self.winners.append(winner)


class Engines:
    """How long each engine takes to answer with its number, or to fail."""

    def __init__(self, *seconds: float, failing: frozenset[int] = frozenset()) -> None:
        self.seconds = list(seconds)
        self.failing = failing
        self.asked: list[int] = []
        self.cancelled: list[int] = []

    async def respond(self, engine: Engine) -> int:
        self.asked.append(engine.index)
        try:
            await asyncio.sleep(self.seconds[engine.index])
        except asyncio.CancelledError:
            self.cancelled.append(engine.index)
            raise
        if engine.index in self.failing:
            raise EngineError(f"engine {engine.index}: status 500")
        return engine.index


async def experienced(engines: Engines, *, quantile: float | None = 0.9) -> tuple[Fleet, Hedging, Counts]:
    """A hedging that has seen requests of a hundredth of a second."""
    fleet = scripted_fleet(silent, silent, max_outstanding=64)
    counts = Counts()
    fleet.requests = counts
    hedging = Hedging(fleet, quantile=quantile)
    quick = Engines(0.01, 0.01)

    async def ask() -> None:
        async with fleet.lease() as engine:
            await hedging.first(engine, quick.respond)

    await asyncio.gather(*(ask() for _ in range(20)))
    counts.winners.clear()
    return fleet, hedging, counts


async def ask(fleet: Fleet, hedging: Hedging, engines: Engines) -> int:
    async with fleet.lease() as engine:
        return await hedging.first(engine, engines.respond)


def test_a_straggler_is_answered_by_an_idle_engine_and_given_up_where_it_was() -> None:
    async def scenario() -> None:
        engines = Engines(5, 0.01)
        fleet, hedging, counts = await experienced(engines)
        assert await asyncio.wait_for(ask(fleet, hedging, engines), 2) == 1
        await asyncio.sleep(0)
        assert (engines.asked, engines.cancelled, counts.winners) == ([0, 1], [0], ["second"])
        assert [engine.num_outstanding for engine in fleet.engines] == [0, 0]

    asyncio.run(scenario())


def test_the_first_engine_may_still_win() -> None:
    async def scenario() -> None:
        engines = Engines(0.2, 5)
        fleet, hedging, counts = await experienced(engines)
        assert await ask(fleet, hedging, engines) == 0
        await asyncio.sleep(0)
        assert (engines.cancelled, counts.winners) == ([1], ["first"])

    asyncio.run(scenario())


@pytest.mark.parametrize("failing", [0, 1])
def test_where_one_fails_the_other_counts(failing: int) -> None:
    async def scenario() -> None:
        engines = Engines(0.2, 0.2, failing=frozenset({failing}))
        engines.seconds[failing] = 0.1
        fleet, hedging, _ = await experienced(engines)
        assert await ask(fleet, hedging, engines) == 1 - failing

    asyncio.run(scenario())


def test_a_second_engine_that_dies_takes_nothing_along() -> None:
    async def scenario() -> None:
        engines = Engines(0.5, 5)
        fleet, hedging, _ = await experienced(engines)
        asking = asyncio.create_task(ask(fleet, hedging, engines))
        while engines.asked != [0, 1]:
            await asyncio.sleep(0.01)
        fleet.report(fleet.engines[1], Ended(reason="killed"))
        assert await asking == 0

    asyncio.run(scenario())


def test_nothing_is_hedged_while_all_engines_are_equally_busy_nor_without_a_quantile() -> None:
    async def scenario() -> None:
        engines = Engines(0.2, 0.2)
        fleet, hedging, _ = await experienced(engines)
        await asyncio.gather(ask(fleet, hedging, engines), ask(fleet, hedging, engines))
        assert sorted(engines.asked) == [0, 1]
        alone = Engines(0.2, 0.01)
        fleet, hedging, _ = await experienced(alone, quantile=None)
        assert await ask(fleet, hedging, alone) == 0

    asyncio.run(scenario())
