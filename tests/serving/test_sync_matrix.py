"""Every split of the trainer to every split of the engines, with real Megatron ranks and real SGLang engines.

What an engine has after a publish must be, byte for byte, what SGLang's own loading of the same folder leaves there.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from pathlib import Path

import pytest

from megarl.config.roles import ModelParallelConfig
from megarl.engine.client import EngineClient
from megarl.engine.fleet import Fleet
from megarl.engine.process import EngineProcess
from megarl.types import PolicyVersion
from megarl.weights.executors.digest import check_digests
from megarl.weights.layouts.megatron import MegatronParallel
from megarl.weights.layouts.transfer_spec import TransferSpec
from tests.engine.engines import REQUEST_TIMEOUT_S, control_of, engine_spec, fingerprints_from_disk
from tests.engine.trainers import BUCKET_BYTES, rendezvous_at
from tests.serving.publish_jobs import load_and_send
from tests.tiny_models import write_tiny_model
from tests.train.cluster import Cluster

pytestmark = pytest.mark.slow


@dataclass(frozen=True, slots=True, kw_only=True)
class Split:
    model: ModelParallelConfig
    data: int = 1
    has_experts: bool = False

    @property
    def world(self) -> int:
        return self.model.model_parallel * self.data


TRAINERS = {
    "TP1": Split(model=ModelParallelConfig()),
    "TP2": Split(model=ModelParallelConfig(tensor=2, is_sequence_parallel=True)),
    "PP2": Split(model=ModelParallelConfig(pipeline=2)),
    "VPP2": Split(model=ModelParallelConfig(pipeline=2, virtual_pipeline=2)),
    "TP2xPP2": Split(model=ModelParallelConfig(tensor=2, pipeline=2, is_sequence_parallel=True)),
    "DP2": Split(model=ModelParallelConfig(), data=2),
    "EP2": Split(model=ModelParallelConfig(expert=2), data=2, has_experts=True),
    "TP2xEP2": Split(
        model=ModelParallelConfig(tensor=2, expert=2, is_sequence_parallel=True), data=2, has_experts=True
    ),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineKind:
    num_engines: int = 1
    tensor: int = 1
    expert: int = 1


ENGINES = {
    "TP1": EngineKind(),
    "TP2": EngineKind(tensor=2),
    "2xTP1": EngineKind(num_engines=2),
    "EP2": EngineKind(tensor=2, expert=2),
}

TARGETS = [
    (family, kind) for family in ("qwen3_moe", "qwen2") for kind in ENGINES if family == "qwen3_moe" or kind != "EP2"
]


@dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    """Engines that serve one folder of tiny weights, and another folder of the same shape."""

    family: str
    kind: EngineKind
    folder: Path
    processes: tuple[EngineProcess, ...]

    @asynccontextmanager
    async def fleet(self) -> AsyncIterator[Fleet]:
        clients = [EngineClient(process.endpoint, request_timeout_s=REQUEST_TIMEOUT_S) for process in self.processes]
        fleet = Fleet(clients, max_outstanding=8, publish_timeout_s=10)
        try:
            yield fleet
        finally:
            await fleet.close()


@pytest.fixture(scope="module", params=TARGETS, ids=[f"{family}-{kind}" for family, kind in TARGETS])
def target(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Target]:
    family, name = request.param
    kind = ENGINES[name]
    folder = tmp_path_factory.mktemp(f"{family}-{name}")
    for weights, seed in (("served", 1), ("published", 2)):
        write_tiny_model(folder / weights, family, layers=4, seed=seed)
    processes = []
    for index in range(kind.num_engines):
        spec = engine_spec(folder / "served", folder / "run", tensor=kind.tensor, expert=kind.expert)
        processes.append(EngineProcess(replace(spec, index=index)))
        processes[-1].start()
    try:
        for process in processes:
            asyncio.run(process.wait_ready())
        yield Target(family=family, kind=kind, folder=folder, processes=tuple(processes))
    finally:
        for process in processes:
            process.stop()


@pytest.mark.parametrize("name", TRAINERS)
async def test_published_parameters_are_those_sglang_loads_itself(target: Target, name: str, cluster: Cluster) -> None:
    split = TRAINERS[name]
    if split.has_experts and target.family != "qwen3_moe":
        pytest.skip("a dense model has no experts to split")
    shape = write_tiny_model(target.folder / "published", target.family, layers=4, seed=2)
    transfer = TransferSpec(
        shape=shape,
        parallel=MegatronParallel.of(split.model, data=split.data),
        trainer_dtype="float32",
        num_engines=target.kind.num_engines,
        tensor=target.kind.tensor,
        engine_dtype="float32",
        is_cpu_engine=True,
        expert=target.kind.expert,
    )

    async with target.fleet() as fleet:
        control = control_of(fleet)
        expected = await fingerprints_from_disk(control, fleet, target.folder / "published")
        before = await fingerprints_from_disk(control, fleet, target.folder / "served")
        assert all(old[key] != new[key] for old, new in zip(before, expected, strict=True) for key in old)
        rendezvous = replace(rendezvous_at(control), timeout_s=60.0, bucket_bytes=4 * BUCKET_BYTES)
        ranks = asyncio.create_task(
            asyncio.to_thread(
                cluster.run,
                split.world,
                load_and_send,
                split.model,
                shape,
                target.folder / "published",
                transfer,
                rendezvous,
                1,
            )
        )
        await control.join(transfer, plan_hash=transfer.plan().hash, rendezvous=rendezvous)
        arrived = await control.receive(PolicyVersion(1))
        check_digests(await ranks, arrived)
        assert await control.confirm(PolicyVersion(1)) == target.kind.num_engines
        assert await control.fingerprints() == expected
