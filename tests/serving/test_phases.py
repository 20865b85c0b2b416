"""Who has which memory of a shared pool, and when: engines are scripted at their wire, trainers record their calls."""

from __future__ import annotations

import asyncio
import json

import httpx
import pytest

from megarl.config.roles import ActorConfig, CriticConfig, RolesConfig, RolloutRoleConfig
from megarl.engine.client import EngineClient, EngineEndpoint, EngineKeys
from megarl.engine.fleet import Engine, Fleet
from megarl.engine.lifecycle import EngineState, RestartPolicy
from megarl.errors import WeightSyncError
from megarl.ranks.start import Trainers
from megarl.results import PublishResult
from megarl.serving.phases import SharedPhases, SleepingFleet
from megarl.serving.publisher import EnginePublisher
from megarl.types import PolicyVersion
from tests.engine.engines import scripted
from tests.ranks.local_ranks import LocalRanks

STEP = {
    "/pause_generation": "pause",
    "/continue_generation": "continue",
    "/release_memory_occupation": "release",
    "/resume_memory_occupation": "take",
}


class Offloaded:
    """A model on ranks that records when it leaves its devices."""

    def __init__(self, calls: list[str]) -> None:
        self._calls = calls

    def trim(self) -> None:
        self._calls.append("trainers trim")

    def release(self) -> None:
        self._calls.append("trainers leave")

    def reload(self) -> None:
        self._calls.append("trainers return")


class Pool:
    """Two GPU engines, an actor and a publisher on one pool; `calls` has what each did, in order."""

    def __init__(self, *, releases_weights: bool, can_send_away: bool = True) -> None:
        self.calls: list[str] = []
        self.fails = False
        self.version = PolicyVersion(0)
        clients = [self._client(index) for index in range(2)]
        self.fleet = Fleet(
            clients, max_outstanding=8, publish_timeout_s=5, policy=RestartPolicy(max_restarts=2, back_off_s=0.0)
        )
        self.phases = SharedPhases(SleepingFleet(self.fleet), releases_weights=releases_weights)
        self.publisher = EnginePublisher(transport=self, fleet=self.fleet, phases=self.phases)
        self._can_send_away = can_send_away

    def _client(self, index: int) -> EngineClient:
        def answer(request: httpx.Request) -> httpx.Response:
            if index == 0 and request.url.path in STEP:
                tags = json.loads(request.content).get("tags", [])
                self.calls.append(" ".join([STEP[request.url.path], *tags]))
            return httpx.Response(200, json={})

        endpoint = EngineEndpoint(
            index=index, host="127.0.0.1", port=30000, tensor=1, device="cuda", keys=EngineKeys(api="a", admin="b")
        )
        return EngineClient(endpoint, request_timeout_s=5, send=scripted(answer))

    async def start_trainers(self) -> None:
        await self.phases.make_room()
        self.calls.append("trainers start")

        async def refill() -> None:
            await self.publisher.publish(self.version)

        self.phases.alternate_with(
            [LocalRanks(Offloaded(self.calls))], refill=refill, can_send_away=self._can_send_away
        )
        await self.phases.take_weights()

    async def publish(self, version: PolicyVersion) -> PublishResult:
        self.calls.append(f"publish {version}")
        if self.fails:
            raise WeightSyncError("a digest differs")
        await self.fleet.committed(version, self.fleet.reachable)
        return PublishResult(version=version, num_bytes=0, seconds=0.0, num_engines=2)

    async def catch_up(self, engine: Engine) -> bool:
        self.calls.append(f"catch up {engine.index}")
        await self.fleet.joined(engine)
        return True

    async def step(self, *, has_update: bool = True) -> None:
        """One step of the loop."""
        async with self.phases.generating():
            self.calls.append("generate")
        async with self.phases.training():
            self.calls.append("train")
        if has_update:
            self.version = PolicyVersion(self.version + 1)
            await self.publisher.publish(self.version)

    def taken(self) -> list[str]:
        calls = list(self.calls)
        self.calls.clear()
        return calls


async def test_engines_that_release_everything_are_refilled_before_they_wake() -> None:
    pool = Pool(releases_weights=True)
    await pool.start_trainers()
    assert pool.taken() == ["pause", "release kv_cache weights", "trainers start", "trainers trim", "take weights"]
    assert all(engine.state is EngineState.STALE for engine in pool.fleet.engines)
    await pool.publisher.publish(pool.version)
    assert pool.taken() == ["trainers trim", "publish 0"]
    await pool.step()
    expected = [
        *("trainers leave", "take kv_cache", "continue", "generate"),
        *("pause", "release kv_cache weights", "trainers return", "train"),
        *("trainers trim", "take weights", "publish 1"),
    ]
    assert pool.taken() == expected
    await pool.step()
    assert pool.taken() == [call.replace("publish 1", "publish 2") for call in expected]


async def test_engines_that_release_their_cache_keep_their_weights() -> None:
    pool = Pool(releases_weights=False)
    await pool.start_trainers()
    await pool.publisher.publish(pool.version)
    pool.taken()
    await pool.step()
    assert pool.taken() == [
        *("trainers leave", "take kv_cache", "continue", "generate"),
        *("pause", "release kv_cache", "trainers return", "train"),
        *("trainers trim", "publish 1"),
    ]
    assert all(engine.is_live for engine in pool.fleet.engines)


async def test_after_a_failed_publish_an_engine_without_its_weights_gets_no_request() -> None:
    pool = Pool(releases_weights=True)
    await pool.start_trainers()
    await pool.publisher.publish(pool.version)
    pool.fails = True
    with pytest.raises(WeightSyncError):
        await pool.step()
    assert [engine.state for engine in pool.fleet.engines] == [EngineState.STALE] * 2
    with pytest.raises(WeightSyncError):
        async with pool.phases.generating():
            pytest.fail("engines without weights generate")
    assert "continue" not in pool.taken()[-3:]
    # The next trainers start beside engines that have given everything up, and fill them.
    pool.fails = False
    await pool.start_trainers()
    await pool.publisher.publish(pool.version)
    assert pool.taken()[-5:] == [
        *("trainers start", "trainers trim", "take weights"),
        *("trainers trim", f"publish {pool.version}"),
    ]
    assert all(engine.is_live for engine in pool.fleet.engines)


async def test_a_step_that_changed_no_weights_publishes_the_old_ones_again() -> None:
    pool = Pool(releases_weights=True)
    await pool.start_trainers()
    await pool.publisher.publish(pool.version)
    await pool.step(has_update=False)
    pool.taken()
    async with pool.phases.generating():
        pass
    assert pool.taken() == [
        *("trainers trim", "take weights", "publish 0"),
        *("trainers leave", "take kv_cache", "continue"),
    ]
    assert all(engine.is_live for engine in pool.fleet.engines)


async def test_trainers_and_engines_are_compared_with_the_weights_of_both_on_the_device() -> None:
    pool = Pool(releases_weights=True)
    await pool.start_trainers()
    await pool.publisher.publish(pool.version)
    async with pool.phases.generating():
        pool.taken()
    async with pool.phases.comparing():
        assert pool.taken() == ["pause", "release kv_cache", "trainers return"]
    async with pool.phases.generating():
        assert pool.taken() == ["trainers leave", "take kv_cache", "continue"]
    assert all(engine.is_live for engine in pool.fleet.engines)


@pytest.mark.parametrize(("can_send_away", "is_sent"), [(True, True), (False, False)])
async def test_one_engine_catches_up_while_both_sides_have_weights(can_send_away: bool, is_sent: bool) -> None:
    pool = Pool(releases_weights=True, can_send_away=can_send_away)
    await pool.start_trainers()
    await pool.publisher.publish(pool.version)
    engine = pool.fleet.engines[1]
    async with pool.phases.generating():
        assert await pool.phases.send_to_one(pool.catch_up, engine) is is_sent
    async with pool.phases.training():
        assert await pool.phases.send_to_one(pool.catch_up, engine) is False, "it has given up its weights"


async def test_engines_keep_their_memory_until_one_of_them_has_caught_up() -> None:
    pool = Pool(releases_weights=True)
    await pool.start_trainers()
    await pool.publisher.publish(pool.version)
    async with pool.phases.generating():
        pass
    training: list[asyncio.Task[None]] = []

    async def send(_: Engine) -> bool:
        training.append(asyncio.create_task(_enter(pool.phases)))
        await asyncio.sleep(0.05)
        assert "release kv_cache weights" not in pool.taken()[-2:]
        return True

    assert await pool.phases.send_to_one(send, pool.fleet.engines[1])
    await training[0]
    assert "release kv_cache weights" in pool.taken()


async def _enter(phases: SharedPhases) -> None:
    async with phases.training():
        pass


class LostEngines:
    """Engines of which none is left until they may start again."""

    def __init__(self) -> None:
        self.calls: list[str] = []
        self.reachable: list[object] = []

    async def any_reachable(self) -> list[object]:
        assert self.calls == ["trainers leave", "wake"], "an engine starts only while trainers are away"
        self.reachable.append("engine 0")
        return self.reachable

    async def sleep(self, *, releases_weights: bool) -> None:
        assert not releases_weights
        self.calls.append("sleep")

    async def take_weights(self) -> None:
        self.calls.append("take weights")

    async def wake(self) -> None:
        self.calls.append("wake")


async def test_when_all_engines_are_lost_in_training_trainers_leave_until_one_has_started() -> None:
    engines = LostEngines()
    phases = SharedPhases(engines)
    phases.alternate_with([LocalRanks(Offloaded(engines.calls))])
    async with phases.publishing():
        assert engines.calls == [
            *("trainers leave", "wake", "sleep", "trainers return"),
            *("trainers trim", "take weights"),
        ]


def test_the_models_of_a_shared_pool_are_those_beside_its_engines_whatever_they_offload() -> None:
    actor = LocalRanks(None)
    roles = RolesConfig(
        actor=ActorConfig(pool="all", offload="nothing"),
        critic=CriticConfig(pool="critic"),
        rollout=RolloutRoleConfig(pool="all"),
    )
    trainers = Trainers(actor=actor, critic=LocalRanks(None, role="critic"), reference=None)
    assert trainers.among(roles.beside_engines) == [actor]
