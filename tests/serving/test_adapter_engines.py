"""Adapters on real engines of one and two TP ranks: published under load, kept by requests, refused if broken."""

from __future__ import annotations

import asyncio
import shutil
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import psutil
import pytest
import torch
from safetensors.torch import load_file

from megarl.cluster.stored_adapter import Content, StoredAdapter
from megarl.config.lora import ADAPTER_FILE, LoraConfig, served_name
from megarl.engine import admin
from megarl.engine.client import EngineClient, GenerateRequest
from megarl.engine.fleet import Fleet
from megarl.engine.process import EngineAdapters, EngineProcess
from megarl.errors import EngineError, WeightSyncError
from megarl.families.shape import ModelShape
from megarl.ranks.adapters import store_adapter
from megarl.serving.adapter_publisher import AdapterPublisher
from megarl.serving.processes import EngineHost
from megarl.types import FloatArray, PolicyVersion, Rollout
from megarl.weights.algebra.slices import TensorSpec
from megarl.weights.layouts.canonical import canonical_tensors
from megarl.weights.layouts.lora import LoraShape, served_tensors
from tests.engine.engines import REQUEST_TIMEOUT_S, engine_spec, generator_of, prompt_of
from tests.ranks.local_ranks import LocalRanks
from tests.tiny_models import load_adapted, write_random_adapter, write_tiny_model

RANK = 16
LORA = LoraConfig(rank=RANK, alpha=6)
PROMPT = (5, 17, 40, 8)


@dataclass(frozen=True, kw_only=True)
class AdaptedEngine:
    process: EngineProcess
    host: EngineHost
    """Brings adapters to the engine."""
    shape: ModelShape
    model: Path
    adapters: Path
    """Has adapters in folders with numbers."""

    @property
    def tensors(self) -> dict[str, TensorSpec]:
        return served_tensors(canonical_tensors(self.shape), LoraShape.of(LORA), dtype="float32")

    @property
    def resident_bytes(self) -> int:
        """Memory of the engine's processes."""
        guard = psutil.Process(self.process.pid)
        return sum(int(each.memory_info().rss) for each in guard.children(recursive=True))

    def adapter(self, version: int) -> Path:
        """Return the folder of a version; there are four contents."""
        folder = self.adapters / str(version % 4)
        if not folder.exists():
            write_random_adapter(folder, self.model, LORA.peft_modules(self.shape), rank=RANK, seed=version % 4)
        return folder

    async def store_adapter(self, version: int, source_folder: Path) -> StoredAdapter:
        folder = self.adapter(version)
        tensors = {served_name(name): tensor for name, tensor in load_file(folder / ADAPTER_FILE).items()}
        fields = LORA.peft_fields(base=source_folder, modules=LORA.served_modules(self.shape))
        # There is no object store here.
        content: asyncio.Future[Content] = asyncio.get_running_loop().create_future()
        stored = store_adapter(tensors, fields, version=version, put=content.set_result)
        return replace(stored, content=content)  # type: ignore[arg-type]

    @asynccontextmanager
    async def placed_adapter(self, index: int, stored: StoredAdapter, timeout_s: float) -> AsyncIterator[Path]:
        folder = await self.host.place_adapter(1, stored, index)
        yield folder
        await self.host.remove_adapter(1, folder)

    def publisher(self, fleet: Fleet, *, ranks: object | None = None) -> AdapterPublisher:
        return AdapterPublisher(
            ranks=LocalRanks(ranks or self),
            fleet=fleet,
            place=self.placed_adapter,
            base_folder=self.model,
            tensors=self.tensors,
            num_loaded=3,
            timeout_s=300,
        )

    @asynccontextmanager
    async def published(self) -> AsyncIterator[tuple[Fleet, AdapterPublisher]]:
        """Yield a fleet of this engine, which serves version 0."""
        fleet = Fleet(
            [EngineClient(self.process.endpoint, request_timeout_s=REQUEST_TIMEOUT_S)],
            max_outstanding=128,
            publish_timeout_s=300,
        )
        publisher = self.publisher(fleet)
        await publisher.publish(PolicyVersion(0))
        try:
            yield fleet, publisher
        finally:
            (engine,) = fleet.engines
            for name in engine.adapters:
                await admin.unload_adapter(engine.client, str(name), timeout_s=300)
            await fleet.close()

    def logprobs(self, rollout: Rollout, version: int) -> FloatArray:
        """Return the log-probabilities that peft computes."""
        model = load_adapted(self.model, self.adapter(version))
        ids = torch.tensor([*PROMPT, *rollout.token_ids.tolist()])
        with torch.no_grad():
            logits = model(ids[None]).logits[0, len(PROMPT) - 1 : -1].log_softmax(-1)
        found: FloatArray = logits.gather(1, ids[len(PROMPT) :, None])[:, 0].numpy()
        return found


SLOW = pytest.mark.slow


@pytest.fixture(scope="module", params=[pytest.param(("qwen2", 1), marks=SLOW), ("qwen3", 2)], ids=["tp1", "tp2"])
def adapted(
    request: pytest.FixtureRequest, real_engines: None, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[AdaptedEngine]:
    family, tensor = request.param
    with adapted_engine(tmp_path_factory.mktemp(f"adapted_{family}"), family, tensor=tensor) as engine:
        yield engine


@contextmanager
def adapted_engine(folder: Path, family: str, *, tensor: int, expert: int = 1) -> Iterator[AdaptedEngine]:
    shape = write_tiny_model(folder / "model", family, tied=False, layers=2, seed=1)
    spec = replace(
        engine_spec(folder / "model", folder / "run", tensor=tensor, expert=expert),
        adapters=EngineAdapters(rank=RANK, modules=LORA.served_modules(shape), num_loaded=3),
    )
    process = EngineProcess(spec)
    try:
        process.start()
        asyncio.run(process.wait_ready())
        host = EngineHost()
        yield AdaptedEngine(process=process, host=host, shape=shape, model=folder / "model", adapters=folder)
        asyncio.run(host.stop(1))
    finally:
        process.stop()


async def test_requests_keep_their_version_through_publishes(adapted: AdaptedEngine) -> None:
    async with adapted.published() as (fleet, publisher):
        (engine,) = fleet.engines
        long = generator_of(fleet, num_rollouts=12, max_response_tokens=250)
        early = asyncio.create_task(long.generate(prompt_of(*PROMPT)))
        while engine.adapters["policy@0"] < 12:
            await asyncio.sleep(0.01)
        for version in (1, 2):
            await publisher.publish(PolicyVersion(version))
            assert not early.done(), "nothing ran during the publish"
        # Nobody asked for version 1, and version 0 is still held.
        assert set(engine.adapters) == {"policy@0", "policy@2"}
        late = await generator_of(fleet, num_rollouts=4).generate(prompt_of(*PROMPT, uid="row-1"))
        before = await early
        await publisher.publish(PolicyVersion(3))
        assert dict(engine.adapters) == {"policy@3": 0}
        # SGLang would load an adapter of an earlier name again from its folder.
        await adapted.host.stop(1)
        for name in ("policy@0", "policy@2"):
            with pytest.raises(EngineError, match="400"):
                await engine.client.generate(ask(name))
    for version, group in ((0, before), (2, late)):
        for rollout in group.rollouts:
            assert set(rollout.versions.tolist()) == {version}
            difference = np.abs(rollout.logprobs - adapted.logprobs(rollout, version)).max()
            assert difference < 1e-4, f"version {version}: off by {difference:.2e}"


@pytest.mark.usefixtures("real_engines")
@pytest.mark.parametrize(("tensor", "expert"), [pytest.param(1, 1, marks=SLOW), pytest.param(2, 1, marks=SLOW), (2, 2)])
def test_a_shared_expert_is_served_with_its_adapter(tensor: int, expert: int, tmp_path: Path) -> None:
    async def run() -> list[Rollout]:
        async with engine.published() as (fleet, publisher):
            await publisher.publish(PolicyVersion(1))
            group = await generator_of(fleet, num_rollouts=4, max_response_tokens=32).generate(prompt_of(*PROMPT))
            return list(group.rollouts)

    with adapted_engine(tmp_path, "qwen2_moe", tensor=tensor, expert=expert) as engine:
        rollouts = asyncio.run(run())
        for rollout in rollouts:
            difference = np.abs(rollout.logprobs - engine.logprobs(rollout, 1)).max()
            assert difference < 1e-4, f"off by {difference:.2e}"
        assert np.abs(rollouts[0].logprobs - engine.logprobs(rollouts[0], 2)).max() > 1e-2, "adapters are alike"


def ask(adapter: str | None) -> GenerateRequest:
    return GenerateRequest(rid=f"ask-{adapter}", input_ids=PROMPT, max_new_tokens=4, temperature=1.0, adapter=adapter)


async def test_a_broken_folder_is_refused_and_the_version_before_serves_on(
    adapted: AdaptedEngine, tmp_path: Path
) -> None:
    broken, empty = tmp_path / "broken", tmp_path / "empty"
    shutil.copytree(adapted.adapter(1), broken)
    (broken / ADAPTER_FILE).write_bytes(b"\x00" * 64)
    empty.mkdir()

    async with adapted.published() as (fleet, publisher):
        (engine,) = fleet.engines
        for folder in (broken, empty):
            with pytest.raises(EngineError, match="load adapter: status"):
                await admin.load_adapter(engine.client, folder.name, folder, timeout_s=300)
        group = await generator_of(fleet, num_rollouts=2).generate(prompt_of(*PROMPT, uid="row-2"))
        assert {version for rollout in group.rollouts for version in rollout.versions} == {0}
        await publisher.publish(PolicyVersion(1))
        assert engine.adapter == "policy@1"


@pytest.mark.parametrize("kind", ["half", "misshapen", "damaged"])
async def test_a_wrong_adapter_reaches_no_engine_and_the_version_before_serves_on(
    adapted: AdaptedEngine, kind: str
) -> None:
    class WrongRanks:
        async def store_adapter(self, version: int, source_folder: Path) -> StoredAdapter:
            stored = await adapted.store_adapter(version, source_folder)
            name, *_ = stored.tensors
            match kind:
                case "half":
                    return replace(stored, tensors={name: stored.tensors[name]})
                case "misshapen":
                    return replace(stored, tensors={**stored.tensors, name: replace(stored.tensors[name], shape=(1,))})
                case _:
                    return replace(stored, digests={**stored.digests, name: "0"})

    async with adapted.published() as (fleet, _):
        (engine,) = fleet.engines
        wrong = adapted.publisher(fleet, ranks=WrongRanks())
        with pytest.raises(WeightSyncError, match="damaged on its way" if kind == "damaged" else "is not sent"):
            await wrong.publish(PolicyVersion(1))
        assert (engine.adapter, engine.is_live) == ("policy@0", True)
        group = await generator_of(fleet, num_rollouts=2).generate(prompt_of(*PROMPT, uid=f"row-{kind}"))
        assert {version for rollout in group.rollouts for version in rollout.versions} == {0}


@pytest.mark.slow
async def test_two_hundred_publishes_under_load_leave_nothing_behind(adapted: AdaptedEngine) -> None:
    """A leak of every adapter would be 180 of them after the first twenty publishes."""

    async with adapted.published() as (fleet, publisher):
        (engine,) = fleet.engines
        generator = generator_of(fleet, num_rollouts=2, max_response_tokens=8)
        settled = 0
        for version in range(1, 201):
            asking = asyncio.create_task(generator.generate(prompt_of(*PROMPT, uid=f"row-{version}")))
            await publisher.publish(PolicyVersion(version))
            assert len(engine.adapters) <= 3
            await asking
            if version == 20:
                settled = adapted.resident_bytes
        await publisher.publish(PolicyVersion(201))
        assert dict(engine.adapters) == {"policy@201": 0}
        last = adapted.resident_bytes
    size = sum(spec.num_bytes for spec in adapted.tensors.values())
    assert last - settled < 90 * size, f"{(last - settled) / 1e6:.1f} MB more after 180 adapters of {size / 1e6:.2f} MB"
