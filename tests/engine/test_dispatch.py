from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Sequence, Set
from dataclasses import dataclass

import pytest

from megarl.engine.dispatch import Dispatcher
from megarl.errors import FleetError


@dataclass(eq=False)
class FakeEngine:
    index: int
    num_outstanding: int = 0
    is_live: bool = True


def obvious_choice(engines: Sequence[FakeEngine], avoid: Set[int], max_outstanding: int) -> FakeEngine | None:
    """Look at every engine: the choice that the dispatcher must make without looking at all of them."""
    live = [engine for engine in engines if engine.is_live]
    candidates = [engine for engine in live if engine.index not in avoid] or live
    free = [engine for engine in candidates if engine.num_outstanding < max_outstanding]
    return min(free, key=lambda engine: (engine.num_outstanding, engine.index)) if free else None


@pytest.mark.parametrize("seed", range(20))
def test_the_choice_is_that_of_looking_at_every_engine(seed: int) -> None:
    rng = random.Random(seed)
    engines = [FakeEngine(index) for index in range(rng.randrange(1, 9))]
    dispatcher = Dispatcher(engines, max_outstanding=3)
    taken: list[FakeEngine] = []
    for _ in range(500):
        action = rng.randrange(4)
        if action == 0 and taken:
            dispatcher.release(taken.pop(rng.randrange(len(taken))))
        elif action == 1:
            engine = rng.choice(engines)
            engine.is_live = not engine.is_live
            dispatcher.changed(engine)
        else:
            avoid = set(rng.sample(range(len(engines)), rng.randrange(len(engines) + 1))) if action == 2 else set()
            expected = obvious_choice(engines, avoid, 3)
            got = dispatcher.take(avoid, ())
            assert got is expected
            taken += [] if got is None else [got]


async def test_a_waiting_request_that_avoids_the_free_engine_lets_others_pass() -> None:
    engines = [FakeEngine(0), FakeEngine(1)]
    dispatcher = Dispatcher(engines, max_outstanding=1)
    assert [dispatcher.take(set(), ()), dispatcher.take(set(), ())] == engines
    picky = asyncio.create_task(dispatcher.wait({0}, ()))
    easy = asyncio.create_task(dispatcher.wait(set(), ()))
    await asyncio.sleep(0)
    dispatcher.release(engines[0])
    assert (await easy) is engines[0]
    assert not picky.done()
    dispatcher.release(engines[1])
    assert (await picky) is engines[1]


async def test_a_request_that_is_cancelled_with_its_turn_gives_it_back() -> None:
    engine = FakeEngine(0)
    dispatcher = Dispatcher([engine], max_outstanding=1)
    dispatcher.take(set(), ())
    waiting = [asyncio.create_task(dispatcher.wait(set(), ())) for _ in range(2)]
    await asyncio.sleep(0)
    dispatcher.release(engine)
    waiting[0].cancel()
    assert (await waiting[1]) is engine
    dispatcher.release(engine)
    assert engine.num_outstanding == 0


async def test_waiting_requests_can_be_refused() -> None:
    dispatcher = Dispatcher([FakeEngine(0, is_live=False)], max_outstanding=1)
    waiting = [asyncio.create_task(dispatcher.wait(set(), ())) for _ in range(3)]
    await asyncio.sleep(0)
    dispatcher.refuse(lambda: FleetError("none"))
    outcomes = await asyncio.gather(*waiting, return_exceptions=True)
    assert [str(outcome) for outcome in outcomes] == ["none"] * 3
    assert not dispatcher.has_waiting


def seconds_per_turn(*, num_engines: int, num_waiting: int) -> float:
    """Return the time of giving back and getting an engine while `num_waiting` requests wait."""

    async def scenario() -> float:
        engines = [FakeEngine(index) for index in range(num_engines)]
        dispatcher = Dispatcher(engines, max_outstanding=4)
        while dispatcher.take(set(), ()) is not None:
            pass
        waiting = [asyncio.create_task(dispatcher.wait(set(), f"prompt {i // 16}")) for i in range(num_waiting)]
        await asyncio.sleep(0)
        began = time.process_time()
        for turn in range(num_waiting):
            dispatcher.release(engines[turn % num_engines])
        seconds = time.process_time() - began
        await asyncio.gather(*waiting)
        return seconds / num_waiting

    return min(asyncio.run(scenario()) for _ in range(3))


def test_a_turn_costs_the_same_with_a_thousand_engines_and_many_waiting() -> None:
    few = seconds_per_turn(num_engines=10, num_waiting=1000)
    many = seconds_per_turn(num_engines=1000, num_waiting=3000)
    # Looking at each engine once would cost eight times as much.
    assert many < 4 * few


async def test_an_episode_stays_at_its_engine_and_its_siblings_share_their_prompt() -> None:
    engines = [FakeEngine(index) for index in range(4)]
    dispatcher = Dispatcher(engines, max_outstanding=64)
    first = dispatcher.take(set(), ["prompt#0", "prompt"])
    sibling = dispatcher.take(set(), ["prompt#1", "prompt"])
    assert first is sibling
    assert first is not None
    dispatcher.release(first)
    other = dispatcher.take({first.index}, ["prompt#1", "prompt"])
    assert other is not first  # it is avoided, and remembered from now on
    assert dispatcher.take(set(), ["prompt#1", "prompt"]) is other
