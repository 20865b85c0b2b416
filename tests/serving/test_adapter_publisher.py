"""A publish of adapters: what is loaded, when the name is switched, what is unloaded, and what a failure leaves."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

import httpx
import pytest

from megarl.engine.commands import Rendezvous
from megarl.engine.control import EngineControl
from megarl.engine.fleet import Engine, Fleet
from megarl.engine.lifecycle import EngineState, FellBehind
from megarl.errors import EngineError, MegarlError, NumericsError, WeightSyncError, WorkerError
from megarl.serving.adapter_publisher import AdapterPublisher, ServedAdapters
from megarl.system.network import LOOPBACK
from megarl.types import ONE_POLICY, PolicyVersion
from megarl.weights.layouts.lora import LoraShape
from megarl.weights.layouts.transfer_spec import TransferSpec
from tests.engine.engines import scripted_fleet
from tests.ranks.local_ranks import LocalRanks
from tests.serving.test_publisher import TRANSFER

ADAPTERS = replace(TRANSFER, lora=LoraShape(rank=2, modules=frozenset({"o_proj"})))


@dataclass
class FakeEngines:
    """Engines that know which adapters they have, as SGLang does."""

    calls: list[str] = field(default_factory=list)
    loaded: dict[int, list[str]] = field(default_factory=dict)
    refuses: set[int] = field(default_factory=set)
    cannot_receive: bool = False

    def answer(self, request: httpx.Request) -> httpx.Response:
        path, index = request.url.path.removeprefix("/"), request.url.port - 30000  # type: ignore[operator]
        if path == "health":
            return httpx.Response(200)
        body = json.loads(request.content)
        name, names = body["lora_name"], self.loaded.setdefault(index, [])
        operation = path.partition("_")[0]
        self.calls.append(f"{operation} {name} at {index}")
        if operation == "load" and index in self.refuses:
            return httpx.Response(400, json={"success": False, "error_message": "out of memory"})
        if operation == "unload" and name not in names:
            return httpx.Response(400, json={"success": False, "error_message": "does not exist"})
        if operation == "load":
            assert body["pinned"]
            names.append(name)
        else:
            names.remove(name)
        return httpx.Response(200, json={"success": True})


class FakeControl(EngineControl):
    """Commands to some engines; those of `damages` get other bytes than were sent."""

    def __init__(self, fleet: Fleet, engines: FakeEngines, damages: set[int]) -> None:
        super().__init__(fleet, timeout_s=60)
        self._fakes = engines
        self._damages = damages

    async def join(self, transfer: TransferSpec, *, plan_hash: str, rendezvous: Rendezvous) -> None:
        assert transfer.lora is not None
        assert transfer.num_engines == len(self._engines)

    async def receive(self, version: PolicyVersion, *, adapter: str | None = None) -> dict[int, Mapping[str, int]]:
        indices = [engine.index for engine in self._engines]
        self._fakes.calls.append(f"receive at {indices}")
        if self._fakes.cannot_receive:
            raise EngineError("load weights: no answer")
        assert all(adapter in self._fakes.loaded[index] for index in indices)
        return {rank: {"a": 5 + (index in self._damages)} for rank, index in enumerate(indices)}


@dataclass
class FakeRanks:
    """One rank, which holds whatever version is asked for; it may fail to send it."""

    num_engines: int = 0
    failure: MegarlError | None = None
    held: int = 0

    async def join(self, transfer: TransferSpec, rendezvous: Rendezvous) -> None:
        self.num_engines = transfer.num_engines

    async def version(self) -> int:
        return self.held

    async def send(self, version: int) -> list[dict[tuple[int, str], int]]:
        if self.failure is not None:
            raise self.failure
        self.held = version
        return [{(rank, "a"): 5 for rank in range(self.num_engines)}]


def scene(num_engines: int = 2) -> tuple[FakeEngines, Fleet]:
    engines = FakeEngines()
    fleet = scripted_fleet(*[engines.answer] * num_engines)
    return engines, fleet


def publisher_of(
    engines: FakeEngines,
    fleet: Fleet,
    *,
    ranks: FakeRanks | None = None,
    num_loaded: int = 3,
    timeout_s: float = 60,
    damages: set[int] | None = None,
    policy: str = ONE_POLICY,
) -> AdapterPublisher:
    return AdapterPublisher(
        ranks=LocalRanks(ranks or FakeRanks()),
        fleet=fleet,
        policy=policy,
        control=FakeControl(fleet, engines, set() if damages is None else damages),
        transfer=lambda: replace(ADAPTERS, num_engines=len(fleet.engines)),
        timeout_s=timeout_s,
        host=LOOPBACK,
        adapters=ServedAdapters(fields={}, num_loaded=num_loaded),
    )


def served(fleet: Fleet) -> list[tuple[int, str | None]]:
    return [(engine.version, engine.serves().adapter) for engine in fleet.engines]


async def test_a_version_is_loaded_everywhere_then_served_and_the_one_before_is_unloaded() -> None:
    engines, fleet = scene()
    publisher = publisher_of(engines, fleet)
    for version in (0, 1):
        result = await publisher.publish(PolicyVersion(version))
        num_bytes = sum(ADAPTERS.plan().traffic.received_bytes.values())
        assert (result.version, result.num_engines, result.num_bytes) == (version, 2, num_bytes)
        assert (result.num_adapters, result.max_adapters) == (version + 1, 3), "two until the older is unloaded"
        await publisher.prepared()
    assert served(fleet) == [(1, "policy@1")] * 2
    assert engines.loaded == {0: ["policy@1", "policy@2"], 1: ["policy@1", "policy@2"]}, "the next one is there"
    assert all(engine.weights_version == 0 for engine in fleet.engines), "the base did not change"


async def test_a_request_keeps_its_adapter_and_counts_until_it_ends() -> None:
    engines, fleet = scene(1)
    publisher = publisher_of(engines, fleet)
    await publisher.publish(PolicyVersion(0))
    async with fleet.lease() as engine:
        for version in (1, 2):
            await publisher.publish(PolicyVersion(version))
        await publisher.prepared()
        # Nobody used version 1.
        assert engines.loaded == {0: ["policy@0", "policy@2", "policy@3"]}
        assert engine.adapters["policy@0"] == 1
        assert (await publisher.publish(PolicyVersion(3))).num_adapters == 3
    await publisher.prepared()
    assert engines.loaded == {0: ["policy@3", "policy@4"]}


async def test_no_version_is_loaded_beyond_the_limit_before_a_request_has_ended() -> None:
    engines, fleet = scene(1)
    publisher = publisher_of(engines, fleet, num_loaded=2)
    await publisher.publish(PolicyVersion(0))
    async with fleet.lease():
        await publisher.publish(PolicyVersion(1))
        waiting = asyncio.create_task(publisher.publish(PolicyVersion(2)))
        await asyncio.sleep(0.3)
        assert not waiting.done()
        assert engines.loaded == {0: ["policy@0", "policy@1"]}
    await waiting
    await publisher.prepared()
    assert engines.loaded == {0: ["policy@2", "policy@3"]}


async def test_without_room_in_time_the_version_before_serves_on() -> None:
    engines, fleet = scene(1)
    publisher = publisher_of(engines, fleet, num_loaded=1, timeout_s=0.1)
    await publisher.publish(PolicyVersion(0))
    async with fleet.lease():
        with pytest.raises(WeightSyncError, match=r"no room for another adapter within 0\.1 s"):
            await publisher.publish(PolicyVersion(1))
    assert served(fleet) == [(0, "policy@0")]


async def test_an_engine_that_refuses_a_version_is_stale_and_catches_up() -> None:
    engines, fleet = scene()
    publisher = publisher_of(engines, fleet)
    await publisher.publish(PolicyVersion(0))
    engines.refuses = {1}
    assert (await publisher.publish(PolicyVersion(1))).num_engines == 1
    first, second = fleet.engines
    assert first.is_live
    assert second.state is EngineState.STALE
    with pytest.raises(WeightSyncError, match="out of memory"):
        await publisher.catch_up(second)
    engines.refuses = set()
    assert await publisher.catch_up(second)
    assert second.is_live
    assert second.version == 1
    await publisher.prepared()
    assert engines.loaded[1] == [second.serves().adapter, "policy@2"]


async def test_if_no_engine_takes_a_version_the_one_before_serves_on() -> None:
    engines, fleet = scene()
    publisher = publisher_of(engines, fleet)
    await publisher.publish(PolicyVersion(0))
    engines.refuses = {0, 1}
    with pytest.raises(WeightSyncError, match="version 1 is served nowhere; engines keep the one before"):
        await publisher.publish(PolicyVersion(1))
    assert served(fleet) == [(0, "policy@0")] * 2
    assert all(engine.is_live for engine in fleet.engines)


async def test_a_damaged_adapter_is_not_served_and_the_one_before_serves_on() -> None:
    engines, fleet = scene()
    damages: set[int] = set()
    publisher = publisher_of(engines, fleet, damages=damages)
    await publisher.publish(PolicyVersion(0))
    damages |= {0, 1}
    with pytest.raises(WeightSyncError, match="version 1 was not published; engines keep the one before"):
        await publisher.publish(PolicyVersion(1))
    assert served(fleet) == [(0, "policy@0")] * 2
    assert engines.loaded == {0: ["policy@0"], 1: ["policy@0"]}
    assert all(engine.is_live for engine in fleet.engines)
    damages.remove(0)
    assert (await publisher.publish(PolicyVersion(2))).num_engines == 1, "each is tried alone in the end"
    assert served(fleet) == [(2, "policy@2"), (0, "policy@0")]
    assert fleet.engines[1].state is EngineState.STALE


@pytest.mark.parametrize(
    ("failure", "message"),
    [
        (WorkerError("actor rank 0: died during send"), "engines keep the one before: actor rank 0: died"),
        (NumericsError("actor rank 0: 2 of 8 values of a are NaN"), "^actor rank 0: 2 of 8 values of a are NaN$"),
    ],
)
async def test_a_rank_that_is_lost_or_refuses_leaves_the_version_before(failure: MegarlError, message: str) -> None:
    engines, fleet = scene()
    ranks = FakeRanks()
    publisher = publisher_of(engines, fleet, ranks=ranks)
    await publisher.publish(PolicyVersion(0))
    ranks.failure = failure
    with pytest.raises(type(failure), match=message):
        await publisher.publish(PolicyVersion(1))
    assert served(fleet) == [(0, "policy@0")] * 2
    assert engines.loaded[0] == ["policy@0"]


async def test_engines_that_differ_from_the_trainer_are_found_before_the_switch() -> None:
    engines, fleet = scene()
    publisher = publisher_of(engines, fleet)
    await publisher.publish(PolicyVersion(0))
    differing = {1}

    async def compare(asked: Sequence[Engine], version: PolicyVersion, name: str) -> dict[int, str]:
        assert served(fleet)[0] == (version - 1, f"policy@{version - 1}"), "it is served already"
        assert all(name in engines.loaded[engine.index] for engine in asked)
        return {engine.index: "differs" for engine in asked if engine.index in differing}

    publisher.compare_with(compare, every=1)
    assert (await publisher.publish(PolicyVersion(1))).num_engines == 1
    assert fleet.engines[1].state is EngineState.STALE
    differing.add(0)
    with pytest.raises(WeightSyncError, match="served nowhere"):
        await publisher.publish(PolicyVersion(2))
    assert served(fleet)[0] == (1, "policy@1")
    assert "policy@2" not in engines.loaded[0]


async def test_a_version_that_is_published_again_gets_a_name_of_its_own() -> None:
    engines, fleet = scene(1)
    await publisher_of(engines, fleet).publish(PolicyVersion(5))
    # New ranks that resumed from a checkpoint.
    async with fleet.lease():
        await publisher_of(engines, fleet).publish(PolicyVersion(5))
        assert engines.loaded == {0: ["policy@5", "policy@5.2"]}
        assert served(fleet) == [(5, "policy@5.2")]


async def test_a_publish_loads_nothing_that_was_loaded_ahead_and_unloads_afterwards() -> None:
    engines, fleet = scene(1)
    publisher = publisher_of(engines, fleet)
    await publisher.publish(PolicyVersion(0))
    await publisher.prepared()
    del engines.calls[:]
    await publisher.publish(PolicyVersion(1))
    assert engines.calls == ["receive at [0]"]
    await publisher.prepared()
    assert engines.calls[1:] == ["unload policy@0 at 0", "load policy@2 at 0"]


async def test_what_could_not_be_loaded_ahead_is_loaded_by_the_publish() -> None:
    engines, fleet = scene()
    publisher = publisher_of(engines, fleet)
    await publisher.publish(PolicyVersion(0))
    await publisher.prepared()
    engines.refuses = {1}
    await publisher.publish(PolicyVersion(1))
    await publisher.prepared()
    assert engines.loaded == {0: ["policy@1", "policy@2"], 1: ["policy@1"]}
    engines.refuses = set()
    await publisher.publish(PolicyVersion(2))
    assert served(fleet) == [(2, "policy@2")] * 2


async def test_another_version_than_the_next_takes_no_name_that_was_loaded_ahead() -> None:
    engines, fleet = scene(1)
    publisher = publisher_of(engines, fleet, num_loaded=2)
    for version in (5, 3):
        await publisher.publish(PolicyVersion(version))
        await publisher.prepared()
    assert served(fleet) == [(3, "policy@3")]
    assert engines.loaded == {0: ["policy@3", "policy@4"]}


async def test_an_engine_that_restarted_loads_what_the_others_have_ahead() -> None:
    engines, fleet = scene()
    publisher = publisher_of(engines, fleet)
    await publisher.publish(PolicyVersion(0))
    await publisher.prepared()
    second = fleet.engines[1]
    fleet.replace_client(second, second.client)
    engines.loaded[1] = []
    assert (await publisher.publish(PolicyVersion(1))).num_engines == 2
    assert served(fleet) == [(1, "policy@1")] * 2


async def test_room_for_the_next_version_is_waited_for_beside_requests() -> None:
    engines, fleet = scene(1)
    publisher = publisher_of(engines, fleet, num_loaded=2)
    await publisher.publish(PolicyVersion(0))
    async with fleet.lease():
        await publisher.publish(PolicyVersion(1))
        await asyncio.sleep(0.1)
        assert engines.loaded == {0: ["policy@0", "policy@1"]}
    await publisher.prepared()
    assert engines.loaded == {0: ["policy@1", "policy@2"]}


@pytest.mark.parametrize("catches_up", [False, True])
async def test_neither_a_catch_up_nor_the_end_of_a_run_waits_for_room(*, catches_up: bool) -> None:
    engines, fleet = scene(1)
    publisher = publisher_of(engines, fleet, num_loaded=2)
    await publisher.publish(PolicyVersion(0))
    async with fleet.lease() as engine:
        await publisher.publish(PolicyVersion(1))
        if catches_up:
            fleet.report(engine, FellBehind(reason="a request was cut off"))
            with pytest.raises(WeightSyncError, match="no room for another adapter within 0 s"):
                await publisher.catch_up(engine)
        else:
            await publisher.close()
        assert asyncio.all_tasks() == {asyncio.current_task()}


async def test_an_engine_that_takes_no_command_leaves_the_version_before() -> None:
    engines, fleet = scene(1)
    publisher = publisher_of(engines, fleet)
    await publisher.publish(PolicyVersion(0))
    engines.cannot_receive = True
    with pytest.raises(WeightSyncError, match=r"version 1 was not published; engines keep the one before: .*no answer"):
        await publisher.publish(PolicyVersion(1))
    assert served(fleet) == [(0, "policy@0")]
    engines.cannot_receive = False
    await publisher.publish(PolicyVersion(1))
    assert served(fleet) == [(1, "policy@1")]


async def test_fifty_publishes_beside_requests_leave_nothing_behind() -> None:
    engines, fleet = scene()
    publisher = publisher_of(engines, fleet, num_loaded=4)
    held: list[asyncio.Task[None]] = []

    async def hold() -> None:
        async with fleet.lease():
            await asyncio.sleep(0.01)

    for version in range(50):
        await publisher.publish(PolicyVersion(version))
        held += [asyncio.create_task(hold()) for _ in range(3)]
        assert max(len(names) for names in engines.loaded.values()) <= 4
    await asyncio.gather(*held)
    await publisher.publish(PolicyVersion(50))
    await publisher.prepared()
    assert engines.loaded == {0: ["policy@50", "policy@51"], 1: ["policy@50", "policy@51"]}
    for engine in fleet.engines:
        assert dict(engine.adapters) == {"policy@50": 0, "policy@51": 0}


async def test_policies_have_versions_names_and_room_of_their_own() -> None:
    engines = FakeEngines()
    fleet = scripted_fleet(engines.answer, policies=("a", "b"))
    (engine,) = fleet.engines
    fleet.report(engine, FellBehind(reason="new"))
    first, second = (publisher_of(engines, fleet, policy=name, num_loaded=2) for name in ("a", "b"))
    await first.publish(PolicyVersion(4))
    assert not engine.is_live, "it lacks the other policy"
    await second.publish(PolicyVersion(0))
    assert engine.is_live
    assert (engine.serves("a").adapter, engine.serves("b").adapter) == ("a@4", "b@0")
    async with fleet.lease(policy="a"):
        await first.publish(PolicyVersion(5))
        for version in (1, 2):
            await second.publish(PolicyVersion(version))
        await second.prepared()
        assert engines.loaded == {0: ["a@4", "a@5", "b@2", "b@3"]}, "a request of one policy holds none of another's"
        assert (fleet.committed_version("a"), fleet.committed_version("b")) == (5, 2)
    await first.publish(PolicyVersion(6))
    await first.prepared()
    assert engines.loaded == {0: ["b@2", "b@3", "a@6", "a@7"]}


async def test_an_engine_that_restarted_is_live_when_it_has_all_policies() -> None:
    engines = FakeEngines()
    fleet = scripted_fleet(engines.answer, policies=("a", "b"))
    (engine,) = fleet.engines
    fleet.report(engine, FellBehind(reason="new"))
    ranks = {name: FakeRanks() for name in ("a", "b")}
    publishers = {name: publisher_of(engines, fleet, policy=name, ranks=ranks[name]) for name in ranks}
    for name, version in (("a", 3), ("b", 7)):
        await publishers[name].publish(PolicyVersion(version))
    fleet.report(engine, FellBehind(reason="restarted"))
    fleet.replace_client(engine, engine.client)
    engines.loaded = {}
    ranks["b"].held = 8  # trained since; its next publish reaches the engine
    assert await publishers["a"].catch_up(engine)
    assert not await publishers["a"].catch_up(engine), "it has this one"
    assert not await publishers["b"].catch_up(engine)
    assert not engine.is_live
    await publishers["b"].publish(PolicyVersion(8))
    assert engine.is_live
    for publisher in publishers.values():
        await publisher.prepared()
    assert sorted(engines.loaded[0]) == ["a@3", "a@4", "b@8", "b@9"]


async def test_requests_wait_for_no_update_of_another_policy() -> None:
    engines, fleet = scene(1)
    publisher = publisher_of(engines, fleet)
    async with publisher.ranks.device_lock:
        waiting = asyncio.create_task(publisher.publish(PolicyVersion(1)))
        await asyncio.sleep(0.05)
        assert engines.loaded == {0: ["policy@1"]}
        assert engines.calls == ["load policy@1 at 0"], "requests go on while the ranks compute"
    await waiting


async def test_an_engine_that_restarted_has_no_adapters_until_it_caught_up() -> None:
    engines, fleet = scene(1)
    publisher = publisher_of(engines, fleet)
    await publisher.publish(PolicyVersion(3))
    (engine,) = fleet.engines
    fleet.replace_client(engine, engine.client)
    engines.loaded = {}
    fleet.report(engine, FellBehind(reason="restarted"))
    assert engine.serves().adapter is None
    assert await publisher.catch_up(engine)
    assert served(fleet) == [(3, "policy@3")]
