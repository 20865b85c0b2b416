"""Engines that are looked after: their processes and their wire are scripted here."""

from __future__ import annotations

import asyncio

import pytest

from megarl.engine.dispatch import Throughput
from megarl.engine.fleet import Engine
from megarl.engine.lifecycle import MAX_FAILED_SYNCS, EngineState
from megarl.errors import FleetError, QuarantineError, WeightSyncError
from megarl.serving.phases import SleepingFleet
from megarl.serving.supervisor import probe_interval_s
from megarl.types import PolicyVersion
from tests.engine.engines import generator_of, prompt_of
from tests.serving.supervised import supervised, until


async def test_an_engine_that_is_added_is_started_synced_and_given_requests_and_can_be_retired() -> None:
    async with supervised() as (scripted, fleet, supervisor):
        joined: list[int] = []
        fleet.join_listeners.append(lambda engines: joined.extend(engine.index for engine in engines))
        fleet.add([scripted.client(2)], "was added by the operator")
        assert joined == [2]
        assert [engine.state for engine in fleet.engines] == ["healthy", "healthy", "restarting"]
        await until(lambda: fleet.engines[2].is_live)
        assert [call for call in scripted.calls if call.endswith("2")] == ["start 2", "sync 2"]
        async with fleet.lease(avoid={0, 1}) as engine:
            assert engine.index == 2
        supervisor.retire(2)
        await until(lambda: "end 2" in scripted.calls)
        assert [engine.state for engine in fleet.engines] == ["healthy", "healthy", "retired"]


async def test_an_engine_that_is_killed_is_started_again_and_synced_before_it_serves() -> None:
    async with supervised() as (scripted, fleet, _):
        seen: list[EngineState] = []
        fleet.listen(lambda engine, _before: seen.append(engine.state))
        scripted.kill(1)
        await until(lambda: bool(seen) and seen[-1] is EngineState.HEALTHY)
        states = ["dead", "restarting", "stale", "healthy"]
        assert seen == states
        assert [call for call in scripted.calls if not call.startswith("end")] == ["start 1", "sync 1"]
        assert fleet.engines[1].version == 7
        assert fleet.engines[0].is_live


@pytest.mark.patient
async def test_a_frozen_engine_is_ended_and_its_requests_come_back() -> None:
    async with supervised() as (scripted, fleet, _):
        scripted.frozen.add(0)
        with pytest.raises(FleetError, match=r"engine 0 .*lost: has not answered for 3 s"):
            async with fleet.lease():
                await asyncio.sleep(30)
        await until(lambda: fleet.engines[0].is_live)
        assert "end 0" in scripted.calls


@pytest.mark.fault("a prompt that ends every engine it reaches", "dropped after two engines; the others go on")
async def test_a_poison_prompt_costs_two_engines_and_its_group() -> None:
    async with supervised(num_engines=8) as (scripted, fleet, _):
        scripted.poison = 13
        generator = generator_of(fleet, num_rollouts=4)
        with pytest.raises(QuarantineError, match=r"^prompt .*, rollout \d: 2 engines were lost: engine "):
            await generator.generate(prompt_of(5, 13))
        assert len(scripted.killed) <= 4, "four rollouts, which prefer one engine"
        assert sum(engine.is_live for engine in fleet.engines) >= 4
        group = await generator.generate(prompt_of(5, 6))
        assert len(group.rollouts) == 4


async def test_a_failure_of_one_engines_supervision_costs_that_engine_alone() -> None:
    async with supervised() as (scripted, fleet, _):
        scripted.is_mad.add(0)
        await until(lambda: "end 0" in scripted.calls)
        scripted.is_mad.clear()
        await until(lambda: fleet.engines[0].is_live)
        assert any("its supervision failed: KeyError" in reason for reason in scripted.reasons)
        scripted.kill(1)
        await until(lambda: not fleet.engines[1].is_live)
        await until(lambda: fleet.engines[1].is_live)


async def test_an_engine_that_serves_another_version_than_it_should_catches_up() -> None:
    async with supervised() as (scripted, fleet, _):
        scripted.served[0] = PolicyVersion(0)
        await until(lambda: "sync 0" in scripted.calls)
        assert fleet.engines[0].is_live


def test_when_the_budget_is_spent_whoever_waits_is_told_why() -> None:
    async def scenario() -> None:
        async with supervised(num_engines=1) as (scripted, fleet, _):
            scripted.cannot_start.add(0)
            scripted.kill(0)
            await until(lambda: not fleet.engines[0].is_live)
            async with fleet.lease():
                pass

    with pytest.raises(FleetError, match=r"no engine is left and 2 restarts each are spent: .*did not start: .*memory"):
        asyncio.run(asyncio.wait_for(scenario(), 60))


@pytest.mark.patient
async def test_an_engine_that_cannot_be_synced_is_started_again() -> None:
    async with supervised() as (scripted, fleet, supervisor):
        num_failures = 0

        async def catch_up(engine: Engine) -> bool:
            nonlocal num_failures
            num_failures += 1
            if num_failures > MAX_FAILED_SYNCS:
                return await scripted.catch_up(engine)
            raise WeightSyncError("digests differ")

        supervisor.attach(catch_up)
        await fleet.mark_stale(fleet.engines[1], "half a commit")
        await until(lambda: fleet.engines[1].is_live)
        assert scripted.calls.count("start 1") == 1


async def test_a_retired_engine_answers_what_it_has_and_ends_and_can_be_added_again() -> None:
    async with supervised() as (scripted, fleet, supervisor):
        async with fleet.lease() as engine:
            supervisor.retire(engine.index)
            await asyncio.sleep(0.5)
            assert "end 0" not in scripted.calls
            assert "/abort_request" in scripted.asked, "its requests end with the tokens they have"
            async with fleet.lease() as other:
                assert other.index == 1
        await until(lambda: "end 0" in scripted.calls)
        supervisor.add(0)
        await until(lambda: fleet.engines[0].is_live)
        with pytest.raises(FleetError, match="there is no engine 5; there are 2, counted from 0"):
            supervisor.retire(5)


async def test_in_a_shared_pool_an_engine_is_started_only_while_engines_may_generate() -> None:
    async with supervised() as (scripted, fleet, _):
        await SleepingFleet(fleet).sleep()
        scripted.kill(1)
        await asyncio.sleep(1)
        assert fleet.engines[1].state is EngineState.DEAD
        assert fleet.engines[0].is_live, "an engine that sleeps is not dead"
        await SleepingFleet(fleet).wake()
        await until(lambda: fleet.engines[1].is_live)


@pytest.mark.patient
async def test_an_engine_that_answers_requests_is_not_probed() -> None:

    async with supervised(num_engines=1) as (scripted, fleet, _):
        await until(lambda: len(scripted.asked) >= 2)
        scripted.asked.clear()
        for _ in range(8):
            fleet.answered(fleet.engines[0], Throughput(num_requests=1))
            await asyncio.sleep(0.2)
        busy = list(scripted.asked)
        await until(lambda: len(scripted.asked) >= 2)
        # The server's own process is asked only while weights are being sent to it.
        assert set(scripted.asked) == {"/server_info", "/model_info"}
        assert busy == []


@pytest.mark.parametrize(("num_engines", "seconds"), [(1, 1.0), (100, 1.0), (300, 3.0), (1000, 5.0)])
def test_a_large_fleet_is_probed_less_often_but_long_before_an_engine_is_suspect(
    num_engines: int, seconds: float
) -> None:
    assert probe_interval_s(num_engines, 30.0) == seconds
