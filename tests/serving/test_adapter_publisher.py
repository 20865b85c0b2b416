"""A publish of adapters: what is loaded, when the name is switched, what is unloaded, and what a failure leaves."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path

import httpx
import pytest

from megarl.cluster.stored_adapter import StoredAdapter
from megarl.engine.fleet import Engine, Fleet
from megarl.engine.lifecycle import EngineState, FellBehind
from megarl.errors import WeightSyncError
from megarl.serving.adapter_publisher import AdapterPublisher
from megarl.types import PolicyVersion
from megarl.weights.algebra.slices import TensorSpec
from tests.engine.engines import scripted_fleet
from tests.ranks.local_ranks import LocalRanks

TENSORS = {"a": TensorSpec(shape=(4, 8), dtype="float32"), "b": TensorSpec(shape=(8, 4), dtype="float32")}


@dataclass
class FakeEngines:
    """Engines that know which adapters they have, as SGLang does."""

    calls: list[str] = field(default_factory=list)
    loaded: dict[int, list[str]] = field(default_factory=dict)
    refuses: set[int] = field(default_factory=set)

    def answer(self, request: httpx.Request) -> httpx.Response:
        if request.url.path == "/health":
            return httpx.Response(200)
        index, body = request.url.port - 30000, json.loads(request.content)  # type: ignore[operator]
        name, names = body["lora_name"], self.loaded.setdefault(index, [])
        operation = request.url.path.removeprefix("/").removesuffix("_lora_adapter")
        self.calls.append(f"{operation} {name} at {index}")
        if operation == "load" and index in self.refuses:
            return httpx.Response(400, json={"success": False, "error_message": "out of memory"})
        if operation == "unload" and name not in names:
            return httpx.Response(400, json={"success": False, "error_message": "does not exist"})
        if operation == "load":
            names.append(name)
        else:
            names.remove(name)
        return httpx.Response(200, json={"success": True})

    @asynccontextmanager
    async def placed_adapter(self, index: int, stored: StoredAdapter, timeout_s: float) -> AsyncIterator[Path]:
        yield Path("/placed")


@dataclass
class FakeRanks:
    tensors: Mapping[str, TensorSpec] = field(default_factory=lambda: TENSORS)

    async def store_adapter(self, version: int, source_folder: Path) -> StoredAdapter:
        return StoredAdapter(
            token="t",
            version=version,
            content=None,  # type: ignore[arg-type]  # never read here
            config="{}",
            tensors=self.tensors,
            digests={},
        )


def scene(num_engines: int = 2) -> tuple[FakeEngines, Fleet]:
    engines = FakeEngines()
    fleet = scripted_fleet(*[engines.answer] * num_engines)
    return engines, fleet


def publisher_of(
    engines: FakeEngines, fleet: Fleet, *, ranks: FakeRanks | None = None, num_loaded: int = 3, timeout_s: float = 60
) -> AdapterPublisher:
    return AdapterPublisher(
        ranks=LocalRanks(ranks or FakeRanks()),
        fleet=fleet,
        place=engines.placed_adapter,
        base_folder=Path("/base"),
        tensors=TENSORS,
        num_loaded=num_loaded,
        timeout_s=timeout_s,
    )


def served(fleet: Fleet) -> list[tuple[int, str | None]]:
    return [(engine.version, engine.adapter) for engine in fleet.engines]


async def test_a_version_is_loaded_everywhere_then_served_and_the_one_before_is_unloaded() -> None:
    engines, fleet = scene()
    publisher = publisher_of(engines, fleet)
    for version in (0, 1):
        result = await publisher.publish(PolicyVersion(version))
        assert (result.version, result.num_engines, result.num_bytes) == (version, 2, 512)
        assert (result.num_adapters, result.max_adapters) == (version + 1, 3), "two until the older is unloaded"
    assert served(fleet) == [(1, "policy@1")] * 2
    assert engines.loaded == {0: ["policy@1"], 1: ["policy@1"]}
    assert all(engine.weights_version == 0 for engine in fleet.engines), "the base did not change"


async def test_a_request_keeps_its_adapter_and_counts_until_it_ends() -> None:
    engines, fleet = scene(1)
    publisher = publisher_of(engines, fleet)
    await publisher.publish(PolicyVersion(0))
    async with fleet.lease() as engine:
        for version in (1, 2):
            await publisher.publish(PolicyVersion(version))
        # Nobody used version 1.
        assert engines.loaded == {0: ["policy@0", "policy@2"]}
        assert engine.adapters["policy@0"] == 1
        assert (await publisher.publish(PolicyVersion(2))).num_adapters == 3
    await publisher.publish(PolicyVersion(3))
    assert engines.loaded == {0: ["policy@3"]}


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
    assert engines.loaded == {0: ["policy@2"]}


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
    assert engines.loaded[1] == [second.adapter]


async def test_if_no_engine_takes_a_version_the_one_before_serves_on() -> None:
    engines, fleet = scene()
    publisher = publisher_of(engines, fleet)
    await publisher.publish(PolicyVersion(0))
    engines.refuses = {0, 1}
    with pytest.raises(WeightSyncError, match="version 1 is served nowhere; engines keep the one before"):
        await publisher.publish(PolicyVersion(1))
    assert served(fleet) == [(0, "policy@0")] * 2
    assert all(engine.is_live for engine in fleet.engines)


@pytest.mark.parametrize(
    ("tensors", "message"),
    [
        ({"a": TENSORS["a"]}, "b is missing"),
        ({**TENSORS, "a": replace(TENSORS["a"], shape=(4, 9))}, "a is TensorSpec"),
        ({**TENSORS, "c": TENSORS["a"]}, "c is unexpected"),
    ],
    ids=["half", "misshapen", "foreign"],
)
async def test_a_wrong_adapter_reaches_no_engine(tensors: Mapping[str, TensorSpec], message: str) -> None:
    engines, fleet = scene()
    await publisher_of(engines, fleet).publish(PolicyVersion(0))
    num_calls = len(engines.calls)
    with pytest.raises(WeightSyncError, match=message):
        await publisher_of(engines, fleet, ranks=FakeRanks(tensors=tensors)).publish(PolicyVersion(1))
    assert len(engines.calls) == num_calls
    assert served(fleet) == [(0, "policy@0")] * 2


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
    assert engines.loaded == {0: ["policy@50"], 1: ["policy@50"]}
    for engine in fleet.engines:
        assert dict(engine.adapters) == {"policy@50": 0}


async def test_an_engine_that_restarted_has_no_adapters_until_it_caught_up() -> None:
    engines, fleet = scene(1)
    publisher = publisher_of(engines, fleet)
    await publisher.publish(PolicyVersion(3))
    (engine,) = fleet.engines
    fleet.replace_client(engine, engine.client)
    engines.loaded = {}
    fleet.report(engine, FellBehind(reason="restarted"))
    assert engine.adapter is None
    assert await publisher.catch_up(engine)
    assert served(fleet) == [(3, "policy@3")]
