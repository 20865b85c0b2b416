"""Adapters on real engines of one and two TP ranks: received in their slots under load, and kept by requests."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
import torch
from peft import PeftModel
from safetensors.torch import load_file

from megarl.config.lora import ADAPTER_FILE, LoraConfig
from megarl.engine import admin
from megarl.engine.client import EngineClient, GenerateRequest
from megarl.engine.commands import Rendezvous
from megarl.engine.control import EngineControl
from megarl.engine.fleet import Fleet
from megarl.engine.process import EngineAdapters, EngineProcess
from megarl.engine.tool_commands import dump_file
from megarl.errors import EngineError, WeightSyncError
from megarl.families.shape import ModelShape
from megarl.serving.adapter_publisher import AdapterPublisher, ServedAdapters
from megarl.system.network import LOOPBACK
from megarl.types import FloatArray, JsonValue, PolicyVersion, Rollout
from megarl.weights.algebra.plan import Plan
from megarl.weights.executors.digest import fastest_digest
from megarl.weights.executors.group import TransferGroup
from megarl.weights.executors.transfer import Sender
from megarl.weights.layouts.lora import LoraShape
from megarl.weights.layouts.megatron import MegatronParallel
from megarl.weights.layouts.transfer_spec import TransferSpec
from tests.engine.engines import COMMAND_TIMEOUT_S, REQUEST_TIMEOUT_S, control_of, engine_spec, generator_of, prompt_of
from tests.engine.trainers import FlippingGroup
from tests.ranks.local_ranks import LocalRanks
from tests.tiny_models import load_adapted, write_random_adapter, write_tiny_model
from tests.weights.transfer_peers import Tensors, cut

RANK = 16
LORA = LoraConfig(rank=RANK, alpha=6)
PROMPT = (5, 17, 40, 8)
NUM_LOADED = 3


@dataclass(frozen=True, kw_only=True)
class AdaptedEngine:
    process: EngineProcess
    shape: ModelShape
    model: Path
    adapters: Path
    """Has adapters in folders with numbers."""

    @property
    def transfer(self) -> TransferSpec:
        config = self.process.spec.config
        return TransferSpec(
            shape=self.shape,
            parallel=MegatronParallel(tensor=2, pipeline=2),
            trainer_dtype="float32",
            num_engines=1,
            tensor=config.tensor,
            engine_dtype="float32",
            is_cpu_engine=True,
            expert=config.expert,
            lora=LoraShape.of(LORA),
        )

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

    def publisher(self, fleet: Fleet, *, group_type: type[TransferGroup] = TransferGroup) -> AdapterPublisher:
        fields = LORA.peft_fields(base=self.model, modules=LORA.served_modules(self.shape))
        return AdapterPublisher(
            ranks=LocalRanks(AdapterRanks(engine=self, group_type=group_type)),
            fleet=fleet,
            control=EngineControl(fleet, timeout_s=COMMAND_TIMEOUT_S, holds_requests=True),
            transfer=lambda: self.transfer,
            timeout_s=COMMAND_TIMEOUT_S,
            host=LOOPBACK,
            adapters=ServedAdapters(fields=fields, num_loaded=NUM_LOADED),
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
            await publisher.close()
            (engine,) = fleet.engines
            for name in engine.adapters:
                await admin.unload_adapter(engine.client, str(name), timeout_s=300)
            await fleet.close()

    def logprobs(self, rollout: Rollout, version: int) -> FloatArray:
        """Return the log-probabilities that peft computes."""
        return logprobs_of(load_adapted(self.model, self.adapter(version)), rollout)


def logprobs_of(model: PeftModel, rollout: Rollout) -> FloatArray:
    ids = torch.tensor([*PROMPT, *rollout.token_ids.tolist()])
    with torch.no_grad():
        logits = model(ids[None]).logits[0, len(PROMPT) - 1 : -1].log_softmax(-1)
    found: FloatArray = logits.gather(1, ids[len(PROMPT) :, None])[:, 0].numpy()
    return found


@dataclass(kw_only=True)
class AdapterRanks:
    """The trainer's ranks, threads of this process that hold the adapter of the version that they are asked for."""

    engine: AdaptedEngine
    group_type: type[TransferGroup]
    _plan: Plan | None = field(default=None, init=False)
    _tensors: list[Tensors] = field(default_factory=list, init=False)
    _senders: list[Sender] = field(default_factory=list, init=False)

    async def join(self, transfer: TransferSpec, rendezvous: Rendezvous) -> None:
        plan = self._plan = transfer.plan()
        self._tensors = [self._cut(rank, 0) for rank in range(transfer.parallel.world_size)]

        def join_rank(rank: int) -> Sender:
            group = self.group_type.join(
                rendezvous.address,
                name=rendezvous.name,
                peer=rank,
                num_peers=transfer.num_peers,
                timeout_s=rendezvous.timeout_s,
                backend=rendezvous.backend,
            )
            digest = fastest_digest(is_on_host=True)
            return Sender(plan, rank, self._tensors[rank], group, digest=digest, direct=transfer.direct)

        self._senders = list(
            await asyncio.gather(*(asyncio.to_thread(join_rank, n) for n in range(len(self._tensors))))
        )

    async def send(self, version: int) -> list[dict[tuple[int, str], int]]:
        for rank, tensors in enumerate(self._tensors):
            for name, values in self._cut(rank, version).items():
                tensors[name].copy_(values)
        return list(await asyncio.gather(*(asyncio.to_thread(sender.send, version) for sender in self._senders)))

    def _cut(self, rank: int, version: int) -> Tensors:
        assert self._plan is not None
        return cut(self._plan.source.by_rank[rank], load_file(self.engine.adapter(version) / ADAPTER_FILE))


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
        adapters=EngineAdapters(rank=RANK, modules=LORA.served_modules(shape), num_loaded=NUM_LOADED),
    )
    process = EngineProcess(spec)
    try:
        process.start()
        asyncio.run(process.wait_ready())
        yield AdaptedEngine(process=process, shape=shape, model=folder / "model", adapters=folder)
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
        await publisher.prepared()
        # Nobody asked for version 1, and version 0 is still held.
        assert set(engine.adapters) == {"policy@0", "policy@2", "policy@3"}
        late = await generator_of(fleet, num_rollouts=4).generate(prompt_of(*PROMPT, uid="row-1"))
        before = await early
        await publisher.publish(PolicyVersion(3))
        await publisher.prepared()
        assert dict(engine.adapters) == {"policy@3": 0, "policy@4": 0}
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


async def test_slots_have_what_sglang_loads_itself(adapted: AdaptedEngine, tmp_path: Path) -> None:
    def dumped() -> list[Tensors]:
        num_ranks = adapted.process.spec.config.tensor
        return [load_file(tmp_path / dump_file(engine=0, tp_rank=rank)) for rank in range(num_ranks)]

    async with adapted.published() as (fleet, publisher):
        control, (engine,) = control_of(fleet), fleet.engines
        body: dict[str, JsonValue] = {"lora_name": "folder", "lora_path": str(adapted.adapter(1)), "pinned": True}
        await engine.client.control("load", "/load_lora_adapter", body)
        await control.dump(tmp_path, adapter="folder")
        expected = dumped()
        await engine.client.control("unload", "/unload_lora_adapter", {"lora_name": "folder"})
        for version, is_same in ((1, True), (2, False), (5, True)):
            await publisher.publish(PolicyVersion(version))
            await control.dump(tmp_path, adapter=engine.serves().adapter)
            for found, of_sglang in zip(dumped(), expected, strict=True):
                assert found.keys() == of_sglang.keys()
                same = {torch.equal(tensor, of_sglang[name]) for name, tensor in found.items()}
                assert same == {is_same}
                assert all(tensor.abs().sum() for tensor in found.values())


async def test_a_damaged_adapter_is_not_served_and_the_version_before_serves_on(adapted: AdaptedEngine) -> None:
    class LyingGroup(FlippingGroup):
        """A group whose every exchange delivers damaged bytes."""

        def exchange(self, *arguments: Any, **named: Any) -> None:
            self.is_honest = False
            super().exchange(*arguments, **named)

    async with adapted.published() as (fleet, _):
        (engine,) = fleet.engines
        with pytest.raises(WeightSyncError, match="engines keep the one before"):
            await adapted.publisher(fleet, group_type=LyingGroup).publish(PolicyVersion(1))
        assert (engine.serves().adapter, engine.is_live, set(engine.adapters)) == ("policy@0", True, {"policy@0"})
        (rollout,) = (await generator_of(fleet).generate(prompt_of(*PROMPT, uid="row-2"))).rollouts
        assert np.abs(rollout.logprobs - adapted.logprobs(rollout, 0)).max() < 1e-4


async def test_an_adapter_that_is_not_loaded_is_named(adapted: AdaptedEngine) -> None:
    async with adapted.published() as (fleet, _):
        with pytest.raises(WeightSyncError, match="adapter unheard is not loaded"):
            await control_of(fleet).dump(adapted.adapters, adapter="unheard")


@pytest.mark.parametrize("num_publishes", [6, pytest.param(200, marks=SLOW)])
async def test_publishes_under_load_are_exact_and_leave_nothing_behind(
    adapted: AdaptedEngine, num_publishes: int
) -> None:
    """A leak of every adapter would be 180 of them after the first twenty publishes."""
    models = [load_adapted(adapted.model, adapted.adapter(version)) for version in range(4)]
    async with adapted.published() as (fleet, publisher):
        (engine,) = fleet.engines
        generator = generator_of(fleet, num_rollouts=2, max_response_tokens=8)
        settled, worst = 0, 0.0
        for version in range(1, num_publishes + 1):
            asking = asyncio.create_task(generator.generate(prompt_of(*PROMPT, uid=f"row-{version}")))
            await asyncio.sleep(0)
            await publisher.publish(PolicyVersion(version))
            assert len(engine.adapters) <= NUM_LOADED
            for rollout in (await asking).rollouts:
                (served,) = set(rollout.versions.tolist())
                worst = max(worst, np.abs(rollout.logprobs - logprobs_of(models[served % 4], rollout)).max())
            if version == 20:
                settled = adapted.resident_bytes
        await publisher.publish(PolicyVersion(num_publishes + 1))
        await publisher.prepared()
        assert dict(engine.adapters) == {f"policy@{num_publishes + 1}": 0, f"policy@{num_publishes + 2}": 0}
        last = adapted.resident_bytes
    assert worst < 1e-4, f"off by {worst:.2e}"
    if settled:
        size = sum(adapted.transfer.plan().traffic.received_bytes.values())
        assert last - settled < 90 * size, f"{(last - settled) / 1e6:.1f} MB more; an adapter has {size / 1e6:.2f} MB"
