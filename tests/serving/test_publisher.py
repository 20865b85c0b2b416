"""The order of a publish: nothing is served that did not arrive as it was sent."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

import httpx
import pytest

from megarl.engine.commands import Rendezvous
from megarl.engine.control import EngineControl
from megarl.engine.fleet import Engine, Fleet
from megarl.engine.lifecycle import Ended, EngineState, RestartPolicy, Started, Ticked
from megarl.errors import FleetError, WeightSyncError, WorkerError
from megarl.families.shape import ModelShape
from megarl.serving.publisher import TransferPublisher
from megarl.system.network import LOOPBACK
from megarl.types import PolicyVersion
from megarl.weights.algebra.slices import Link
from megarl.weights.executors.shared_memory import UNREADABLE
from megarl.weights.layouts.megatron import MegatronParallel
from megarl.weights.layouts.transfer_spec import TransferSpec
from tests.engine.engines import scripted_fleet
from tests.ranks.local_ranks import LocalRanks

TRANSFER = TransferSpec(
    shape=ModelShape(
        family="qwen2",
        num_layers=2,
        hidden=8,
        ffn_hidden=16,
        num_heads=2,
        num_kv_heads=2,
        head_dim=4,
        vocab=32,
        max_context_tokens=64,
        norm_eps=1e-6,
        rope_theta=1e4,
        rope_scaling=None,
        has_tied_embeddings=False,
        has_qkv_bias=True,
        has_qk_norm=False,
        dtype="float32",
    ),
    parallel=MegatronParallel(tensor=2),
    trainer_dtype="float32",
    num_engines=2,
    tensor=1,
    engine_dtype="float32",
    is_cpu_engine=True,
)


ONE_NODE = replace(TRANSFER, trainer_gpus=((0, 0), (0, 1)), engine_gpus=((0, 2), (0, 3)))


class FakeRanks:
    """Two ranks that hold version 4; each sends its half of one tensor to every engine."""

    def __init__(self, calls: list[str], *, dies: bool = False) -> None:
        self._calls = calls
        self._dies = dies
        self._num_engines = 0
        self.held = 4
        self.direct: list[Link] = []
        self.backends: list[str | None] = []

    async def version(self) -> int:
        return self.held

    async def join(self, transfer: TransferSpec, rendezvous: Rendezvous) -> None:
        self._num_engines = transfer.num_engines
        self.direct.append(transfer.direct)
        self.backends.append(rendezvous.backend)

    async def send(self, version: int) -> list[dict[tuple[int, str], int]]:
        self._calls.append("send")
        if self._dies:
            raise WorkerError("actor rank 1: died during send")
        return [{(rank, "w"): half for rank in range(self._num_engines)} for half in (5, 7)]


class FakeControl(EngineControl):
    """Commands to some engines; `mischief` is done when they receive."""

    def __init__(self, fleet: Fleet, calls: list[str], mischief: Mischief) -> None:
        super().__init__(fleet, timeout_s=5)
        self._calls = calls
        self._mischief = mischief

    @property
    def _names(self) -> str:
        return " ".join(str(engine.index) for engine in self._engines)

    async def join(self, transfer: TransferSpec, *, plan_hash: str, rendezvous: Rendezvous) -> None:
        assert transfer.num_engines == len(self._engines)
        assert plan_hash == transfer.plan().hash
        self._calls.append(f"join {self._names}")

    async def receive(self, version: PolicyVersion, *, adapter: str | None = None) -> dict[int, Mapping[str, int]]:
        self._calls.append(f"receive {self._names}")
        digest = self._mischief(self._engines)
        return {rank: {"w": digest} for rank in range(len(self._engines))}

    async def confirm(self, version: PolicyVersion, *, is_catching_up: bool = False) -> int:
        self._calls.append(f"confirm {version}: {self._names}")
        if is_catching_up:
            for engine in self._engines:
                await self._fleet.joined(engine)
        else:
            await self._fleet.committed(version, self._engines)
        return len(self._engines)


Mischief = Callable[[Sequence[Engine]], int]
"""Gives the digest of what arrives, or raises."""


def arrives(_engines: Sequence[Engine]) -> int:
    return 12


class Scene:
    """Two engines that are there until `gone` says otherwise, and a publisher."""

    def __init__(self, mischief: Mischief = arrives, *, dies: bool = False, transfer: TransferSpec = TRANSFER) -> None:
        self.calls: list[str] = []
        self.gone: set[int] = set()
        self.fleet = scripted_fleet(self._answer(0), self._answer(1))
        self.ranks = FakeRanks(self.calls, dies=dies)
        self.publisher = TransferPublisher(
            ranks=LocalRanks(self.ranks),
            fleet=self.fleet,
            control=FakeControl(self.fleet, self.calls, mischief),
            transfer=lambda: transfer,
            timeout_s=5,
            host=LOOPBACK,
        )

    def _answer(self, index: int) -> Callable[[httpx.Request], httpx.Response]:
        def answer(request: httpx.Request) -> httpx.Response:
            if index in self.gone:
                raise httpx.ConnectError("refused")
            return httpx.Response(200)

        return answer

    @property
    def states(self) -> list[EngineState]:
        return [engine.state for engine in self.fleet.engines]


async def test_a_version_that_arrived_whole_is_served_and_the_group_stays() -> None:
    scene = Scene()
    result = await scene.publisher.publish(PolicyVersion(4))
    assert (result.version, result.num_engines) == (4, 2)
    assert result.num_bytes == sum(TRANSFER.plan().traffic.received_bytes.values())
    await scene.publisher.publish(PolicyVersion(5))
    again = ["send", "receive 0 1", "confirm 5: 0 1"]
    assert scene.calls == ["join 0 1", "send", "receive 0 1", "confirm 4: 0 1", *again]


async def test_an_engine_that_dies_on_the_way_is_left_out_and_the_rest_get_the_version() -> None:
    def die(engines: Sequence[Engine]) -> int:
        if len(engines) == 2:
            scene.gone.add(1)
            raise WeightSyncError("engine 1: load weights: disconnected")
        return 12

    scene = Scene(die)
    result = await scene.publisher.publish(PolicyVersion(4))
    assert result.num_engines == 1
    assert scene.states == [EngineState.HEALTHY, EngineState.DEAD]
    lost = ["join 0 1", "send", "receive 0 1"]
    assert scene.calls == [*lost, "join 0", "send", "receive 0", "confirm 4: 0"]


async def test_when_all_engines_die_on_the_way_the_publish_ends() -> None:
    def die(engines: Sequence[Engine]) -> int:
        for engine in engines:
            scene.fleet.report(engine, Ended(reason="killed"))
        raise WeightSyncError("engines 0, 1: load weights: disconnected")

    scene = Scene(die)
    scene.fleet.policy = RestartPolicy(max_restarts=0)
    with pytest.raises(FleetError, match="no engine"):
        await scene.publisher.publish(PolicyVersion(4))
    assert scene.calls == ["join 0 1", "send", "receive 0 1"]


async def test_an_engine_at_fault_is_found_by_asking_each_alone_and_is_stale() -> None:
    scene = Scene(lambda engines: 13 if engines[0].index == 0 else 12)
    await scene.publisher.publish(PolicyVersion(4))
    assert scene.states == [EngineState.STALE, EngineState.HEALTHY]
    assert [call for call in scene.calls if call.startswith("receive")] == [
        "receive 0 1",
        "receive 0 1",
        "receive 0",
        "receive 1",
    ]
    assert scene.fleet.committed_version() == 4


async def test_digests_that_differ_everywhere_are_an_error_that_names_the_tensor_and_nothing_is_served() -> None:
    scene = Scene(lambda _engines: 13)
    with pytest.raises(WeightSyncError, match=r"version 4 was not published.* w "):
        await scene.publisher.publish(PolicyVersion(4))
    assert not [call for call in scene.calls if call.startswith("confirm")]
    assert scene.states == [EngineState.STALE, EngineState.STALE]
    assert scene.fleet.committed_version() == 0


async def test_a_sender_that_dies_stays_the_trainers_error_and_its_engines_serve_nothing() -> None:
    scene = Scene(dies=True)
    with pytest.raises(WorkerError, match="actor rank 1: died during send"):
        await scene.publisher.publish(PolicyVersion(4))
    assert scene.calls == ["join 0 1", "send", "receive 0 1"]
    assert scene.states == [EngineState.STALE, EngineState.STALE]
    assert "received a part of version 4" in scene.fleet.engines[0].reason


@pytest.mark.parametrize(
    ("transfer", "direct", "backends"),
    [
        (replace(ONE_NODE, is_cpu_engine=False), [Link.NODE, Link.DEVICE], [None, "nccl"]),
        (
            replace(ONE_NODE, shares_devices=True, engine_gpus=ONE_NODE.trainer_gpus),
            [Link.DEVICE, Link.PROCESS],
            ["gloo", "gloo"],  # half of each engine's weights is on the other device
        ),
    ],
)
async def test_memory_that_engines_cannot_open_is_sent_to_them_from_then_on(
    transfer: TransferSpec, direct: list[Link], backends: list[str | None]
) -> None:
    def refuse(_engines: Sequence[Engine]) -> int:
        if scene.ranks.direct == direct[:1]:
            raise WeightSyncError(f"engine 0: TP rank 0: receive: {UNREADABLE}: invalid device ordinal")
        return 12

    scene = Scene(refuse, transfer=transfer)
    assert (await scene.publisher.publish(PolicyVersion(4))).num_engines == 2
    await scene.publisher.publish(PolicyVersion(5))
    assert scene.ranks.direct == direct
    assert scene.ranks.backends == backends
    assert scene.states == [EngineState.HEALTHY, EngineState.HEALTHY]


async def test_a_stale_engine_catches_up_alone_while_the_other_serves() -> None:
    scene = Scene()
    stale = scene.fleet.engines[1]
    await scene.publisher.publish(PolicyVersion(4))
    await scene.fleet.mark_stale(stale, "half a version")
    scene.calls.clear()
    assert await scene.publisher.catch_up(stale)
    assert scene.calls == ["join 1", "send", "receive 1", "confirm 4: 1"]
    assert scene.states == [EngineState.HEALTHY, EngineState.HEALTHY]
    assert stale.version == 4
    assert not await scene.publisher.catch_up(stale), "it has caught up"


async def test_nobody_catches_up_with_a_version_the_ranks_do_not_hold() -> None:
    scene = Scene()
    stale = scene.fleet.engines[1]
    await scene.fleet.mark_stale(stale, "just started")
    assert not await scene.publisher.catch_up(stale), "nothing is published yet"
    await scene.publisher.publish(PolicyVersion(4))
    await scene.fleet.mark_stale(stale, "half a version")
    scene.ranks.held = 5
    assert not await scene.publisher.catch_up(stale)
    assert stale.state is EngineState.STALE


async def test_a_publish_waits_for_an_engine_that_is_restarted() -> None:
    scene = Scene()
    scene.fleet.policy = RestartPolicy(max_restarts=1)
    for engine in scene.fleet.engines:
        scene.fleet.report(engine, Ended(reason="killed"))
    publishing = asyncio.create_task(scene.publisher.publish(PolicyVersion(4)))
    await asyncio.sleep(0.05)
    assert not publishing.done()
    first = scene.fleet.engines[0]
    first.status = replace(first.status, restart_at=0)
    for event in (Ticked(), Started()):
        scene.fleet.report(first, event)
    assert (await publishing).num_engines == 1
    assert first.state is EngineState.HEALTHY
