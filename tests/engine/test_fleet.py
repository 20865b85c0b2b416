from __future__ import annotations

import asyncio
from contextlib import AsyncExitStack

import httpx
import pytest

from megarl.engine.fleet import Fleet
from megarl.engine.lifecycle import Ended, EngineState
from megarl.errors import EngineLostError, FleetError
from megarl.types import PolicyVersion
from tests.engine.engines import scripted_fleet


def silent(request: httpx.Request) -> httpx.Response:
    return httpx.Response(200, json={})


async def lease_many(fleet: Fleet, stack: AsyncExitStack, count: int) -> list[int]:
    return [(await stack.enter_async_context(fleet.lease())).index for _ in range(count)]


async def test_the_engine_with_fewest_outstanding_requests_is_next() -> None:
    fleet = scripted_fleet(silent, silent, silent)
    async with AsyncExitStack() as stack:
        assert await lease_many(fleet, stack, 6) == [0, 1, 2, 0, 1, 2]
        async with fleet.lease() as engine:
            assert engine.index == 0
        assert await lease_many(fleet, stack, 2) == [0, 1]
    assert [engine.num_outstanding for engine in fleet.engines] == [0, 0, 0]


async def test_an_engine_not_at_the_committed_version_gets_no_request() -> None:
    fleet = scripted_fleet(silent, silent)
    await fleet.committed(PolicyVersion(1), [fleet.engines[1]])
    assert [engine.state for engine in fleet.engines] == [EngineState.STALE, EngineState.HEALTHY]
    async with AsyncExitStack() as stack:
        assert await lease_many(fleet, stack, 4) == [1, 1, 1, 1]
    await fleet.committed(PolicyVersion(2), fleet.engines)
    async with AsyncExitStack() as stack:
        assert await lease_many(fleet, stack, 2) == [0, 1]


async def test_requests_beyond_the_bound_wait_for_their_turn() -> None:
    fleet = scripted_fleet(silent, max_outstanding=2)
    async with AsyncExitStack() as stack:
        async with fleet.lease(), fleet.lease():
            third = asyncio.create_task(stack.enter_async_context(fleet.lease()))
            await asyncio.sleep(0.05)
            assert not third.done()
        assert (await asyncio.wait_for(third, 60)).index == 0


async def test_a_request_waits_for_a_publish_while_every_engine_is_stale() -> None:
    fleet = scripted_fleet(silent)
    await fleet.mark_stale(fleet.engines[0], "half a commit")
    async with AsyncExitStack() as stack:
        waiting = asyncio.create_task(stack.enter_async_context(fleet.lease()))
        await asyncio.sleep(0.05)
        await fleet.committed(PolicyVersion(1), fleet.engines)
        assert (await waiting).version == 1


def test_no_publish_in_time_is_an_error_that_says_why() -> None:
    async def scenario() -> None:
        fleet = scripted_fleet(silent)
        await fleet.mark_stale(fleet.engines[0], "half a commit")
        async with fleet.lease():
            pass

    with pytest.raises(FleetError, match=r"no engine has served version 0 .* is stale: half a commit"):
        asyncio.run(scenario())


async def test_a_request_ends_with_the_engine_it_was_given_to_and_the_others_go_on() -> None:
    fleet = scripted_fleet(silent, silent)
    outcomes: list[str] = []

    async def request() -> None:
        try:
            async with fleet.lease() as engine:
                await asyncio.sleep(0.3)
                outcomes.append(f"answered by {engine.index}")
        except EngineLostError as error:
            outcomes.append(str(error))

    async with asyncio.TaskGroup() as tasks:
        for _ in range(2):
            tasks.create_task(request())
        await asyncio.sleep(0.05)
        fleet.report(fleet.engines[0], Ended(reason="killed"))
    assert [engine.num_outstanding for engine in fleet.engines] == [0, 0]
    assert outcomes == ["engine 0 (127.0.0.1:30000): lost: killed", "answered by 1"]


async def test_rollouts_of_one_prompt_share_an_engine_within_bounds() -> None:
    fleet = scripted_fleet(silent, silent, max_outstanding=16)

    async def lease(prefix: str) -> int:
        return (await stack.enter_async_context(fleet.lease(prefixes=[prefix]))).index

    async with AsyncExitStack() as stack:
        assert [await lease("first") for _ in range(3)] == [0, 0, 0]
        assert [await lease("second") for _ in range(3)] == [1, 1, 1]
        # Two more than the other has are worth a cached prompt, three are not.
        assert [await lease("first") for _ in range(4)] == [0, 0, 0, 1]
        fleet.report(fleet.engines[1], Ended(reason="killed"))
        assert await lease("second") == 0


@pytest.mark.parametrize(
    ("num_engines", "message"),
    [(2, r"engine 0 .*: out of memory; engine 1 .*: out of memory$"), (100, r"engine 0 .*; and 92 more$")],
)
def test_no_engine_left_is_an_error_at_once_that_names_some(num_engines: int, message: str) -> None:
    async def scenario() -> None:
        fleet = scripted_fleet(*[silent] * num_engines)
        for engine in fleet.engines:
            fleet.report(engine, Ended(reason="out of memory"))
        async with fleet.lease():
            pass

    with pytest.raises(FleetError, match=rf"no engine is left: {message}"):
        asyncio.run(scenario())
