"""Time of publishing an adapter against publishing the whole model, and what a publish takes from running requests.

This process stands in for the only trainer rank. An adapter goes the way of a run: copied to host memory, digested, put
into Ray's object store, written to the node's memory by another process, and loaded by a real engine.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, contextmanager
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import TypeAlias, TypeVar

import ray
import torch

from bench.figures import Failure, Figure
from bench.one_engine import Server, full_publish, generator_of, random_prompts, random_weights, seconds_of, serving
from megarl.checkpoint.save import boxes_on_host, contribution, gather, plan_gathering, refuse_unfinite
from megarl.cluster.cluster import open_cluster
from megarl.cluster.stored_adapter import StoredAdapter
from megarl.config.lora import LoraConfig
from megarl.config.recipe import RunConfig
from megarl.config.roles import ModelParallelConfig, PoolConfig
from megarl.config.section import Device, dtype_on
from megarl.engine import admin
from megarl.engine.client import GenerateRequest
from megarl.engine.process import EngineAdapters
from megarl.errors import MegarlError
from megarl.ranks.adapters import store_adapter
from megarl.ranks.calls import ActorCalls
from megarl.ranks.ranks import RankGroup
from megarl.serving.adapter_publisher import AdapterPublisher
from megarl.serving.processes import EngineHost
from megarl.system.network import LOOPBACK
from megarl.types import PolicyVersion
from megarl.weights.executors.group import StoreServer, TransferGroup
from megarl.weights.executors.tensors import box_of
from megarl.weights.layouts.canonical import canonical_tensors
from megarl.weights.layouts.lora import LoraShape, adapter_layout, adapter_tensors
from megarl.weights.layouts.megatron import MegatronParallel, megatron_layout

Outcome: TypeAlias = Figure | Failure
Result = TypeVar("Result")

GOAL = 20
"""An adapter should be published this many times as fast as its whole model."""
_NUM_LOADED = 3
_TIMEOUT_S = 120.0
_NUM_TURNS = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class Requests:
    """The requests that run while adapters are published."""

    num: int
    prompt_tokens: int
    response_tokens: int


REQUESTS: Mapping[Device, Requests] = {
    "cuda": Requests(num=128, prompt_tokens=64, response_tokens=256),
    "cpu": Requests(num=8, prompt_tokens=16, response_tokens=48),
}


async def measure_adapter(
    model: str, folder: Path, options: Mapping[str, object], *, device: Device, rank: int
) -> AsyncIterator[Outcome]:
    """Measure an engine without adapters and one with adapters of this rank, one after the other."""
    run = RunConfig(name="adapter", folder=folder, device=device)
    (folder / run.name).mkdir()
    lora = LoraConfig(rank=rank, alpha=2 * rank)
    adapters = EngineAdapters(rank=rank, modules=lora.modules, num_loaded=_NUM_LOADED)
    try:
        with open_cluster(run, {"pool": PoolConfig(gpus_per_node=1)}, address=None):
            async with AsyncExitStack() as stack:
                plain = serving(model, folder / "full", options, device=device)
                adapted = serving(model, folder / "adapted", options, device=device, adapters=adapters)
                # Both start at the same time: that takes longer than everything else.
                server, other = await asyncio.gather(*(stack.enter_async_context(each) for each in (plain, adapted)))
                full = await full_publish(server)
                full_s = await seconds_of(full.send)
                with _published(other, lora, folder) as bench:
                    ours_s = await seconds_of(bench.publish)
                    yield _publish_figure(bench, ours_s=ours_s, full_s=full_s, full_bytes=full.num_bytes)
                    yield await _measure_bare_load(bench, ours_s=ours_s)
                    async for figure in _measure_requests(bench, REQUESTS[device]):
                        yield figure
    except (MegarlError, RuntimeError, TimeoutError) as error:
        yield Failure(part="adapter", reason=f"{type(error).__name__}: {error}"[:500])


@dataclass(slots=True, kw_only=True)
class _Bench:
    server: Server
    publisher: AdapterPublisher
    parts: _Parts
    num_bytes: int
    version: int = 0

    async def publish(self) -> None:
        self.version += 1
        await self.publisher.publish(PolicyVersion(self.version))

    async def touch(self) -> None:
        """Ask for a token with the newest adapter: SGLang copies an adapter to its device at its first use."""
        (engine,) = self.server.fleet.engines
        request = GenerateRequest(
            rid=f"touch-{self.version}", input_ids=(1, 2, 3), max_new_tokens=1, temperature=1.0, adapter=engine.adapter
        )
        await engine.client.generate(request)


@contextmanager
def _published(server: Server, lora: LoraConfig, folder: Path) -> Iterator[_Bench]:
    """Yield a publisher between this process and the engine."""
    parts = _Parts(server, lora)
    tensors = adapter_tensors(canonical_tensors(server.shape), LoraShape.of(lora), dtype=dtype_on(server.device))
    publisher = AdapterPublisher(
        ranks=parts,
        fleet=server.fleet,
        place=parts.placed_adapter,
        base_folder=folder,
        tensors=tensors,
        num_loaded=_NUM_LOADED,
        timeout_s=_TIMEOUT_S,
    )
    num_bytes = sum(spec.num_bytes for spec in tensors.values())
    try:
        yield _Bench(server=server, publisher=publisher, parts=parts, num_bytes=num_bytes)
    finally:
        parts.close()


class _Parts(RankGroup[ActorCalls]):
    """The trainer rank, which is this process, and the node of the engine, each timed."""

    def __init__(self, server: Server, lora: LoraConfig) -> None:
        super().__init__(
            "actor",
            [],
            split=ModelParallelConfig(),
            timeout_s=_TIMEOUT_S,
            run_folder=Path(),
            device_lock=asyncio.Lock(),
        )
        # As in a trainer rank.
        torch.set_num_threads(1)
        dtype = dtype_on(server.device)
        layout = megatron_layout(server.shape, MegatronParallel(), dtype=dtype)
        adapters = adapter_layout(layout, LoraShape.of(lora), dtype=dtype)
        self._lora = lora
        self._tensors = random_weights(adapters.by_rank[0].tensors, server.device)
        self._taken = contribution(adapters, 0)
        self._gathering = plan_gathering(self._taken.layout)
        self._store = StoreServer(LOOPBACK)
        self._group = TransferGroup.join(self._store.address, name="gather", peer=0, num_peers=1, timeout_s=_TIMEOUT_S)
        self._host = ray.remote(EngineHost).options(num_cpus=0).remote()
        self.spent: dict[str, list[float]] = {"gathered": [], "stored": [], "placed": [], "loaded": [], "removed": []}

    async def _call_all(
        self,
        method: Callable[..., Result],
        arguments: Sequence[object],
        named: dict[str, object],
        *,
        waits_for_all: bool = False,
    ) -> list[Result]:
        return [await asyncio.to_thread(getattr(self, method.__name__), *arguments, **named)]

    def store_adapter(self, version: int, source_folder: Path) -> StoredAdapter:
        start = time.perf_counter()
        refuse_unfinite(self._tensors)
        boxes = boxes_on_host(self._taken, 0, lambda name, offsets, shape: box_of(self._tensors[name], offsets, shape))
        gathered = gather(self._gathering, boxes, self._group)
        middle = time.perf_counter()
        fields = self._lora.peft_fields(base=source_folder, modules=self._lora.modules)
        stored = store_adapter(gathered, fields, version=version)
        self.spent["gathered"].append(middle - start)
        self.spent["stored"].append(time.perf_counter() - middle)
        return stored

    @asynccontextmanager
    async def placed_adapter(self, index: int, stored: StoredAdapter, timeout_s: float) -> AsyncIterator[Path]:
        times = [time.perf_counter()]
        async with asyncio.timeout(timeout_s):
            folder = await self._host.place_adapter.remote(self.token, stored, index)
            times.append(time.perf_counter())
            yield folder
            times.append(time.perf_counter())
            await self._host.remove_adapter.remote(self.token, folder)
        times.append(time.perf_counter())
        for name, start, end in zip(("placed", "loaded", "removed"), times[:-1], times[1:], strict=True):
            self.spent[name].append(end - start)

    def close(self) -> None:
        self._group.close()


def _publish_figure(bench: _Bench, *, ours_s: float, full_s: float, full_bytes: int) -> Figure:
    parts = ", ".join(f"{name} {1e3 * median(times):.0f}" for name, times in bench.parts.spent.items())
    return Figure(
        key="adapter publish",
        name=f"publish of an adapter of {bench.num_bytes / 1e6:.0f} MB ({parts}; goal: ratio {GOAL})",
        value=1e3 * ours_s,
        unit="ms",
        against=f"publish of the whole model, {full_bytes / 1e9:.1f} GB in {1e3 * full_s:.0f} ms",
        ratio=full_s / ours_s,
    )


async def _measure_bare_load(bench: _Bench, *, ours_s: float) -> Figure:
    """Time SGLang alone: it loads and unloads an adapter that lies in its node's memory already."""
    client, stored = bench.server.client, bench.parts.store_adapter(0, Path("base"))
    async with bench.parts.placed_adapter(0, stored, _TIMEOUT_S) as folder:

        async def load_and_unload() -> None:
            await admin.load_adapter(client, "bare", folder, timeout_s=_TIMEOUT_S)
            await admin.unload_adapter(client, "bare", timeout_s=_TIMEOUT_S)

        floor_s = await seconds_of(load_and_unload)
    return Figure(
        key="adapter bare load",
        name="the same publish",
        value=1e3 * ours_s,
        unit="ms",
        against=f"SGLang loads and unloads a folder of it alone in {1e3 * floor_s:.0f} ms",
        ratio=floor_s / ours_s,
    )


async def _measure_requests(bench: _Bench, requests: Requests) -> AsyncIterator[Figure]:
    """Compare the rate of the same requests without publishes, with one, and with one after the other, in turn."""
    prompts = random_prompts(requests.num, requests.prompt_tokens)
    generator = generator_of(bench.server, num_rollouts=1, max_response_tokens=requests.response_tokens)
    max_publishes = {"quiet": 0, "one": 1, "many": 1000}
    num_tokens, seconds, num_publishes = (dict.fromkeys(max_publishes, 0.0) for _ in range(3))

    async def generate() -> int:
        groups = await asyncio.gather(*(generator.generate(prompt) for prompt in prompts))
        return sum(len(rollout.token_ids) for group in groups for rollout in group.rollouts)

    await generate()
    for kind in tuple(max_publishes) * _NUM_TURNS:
        await bench.publish()
        await bench.touch()
        start = time.perf_counter()
        generated = asyncio.create_task(generate())
        await asyncio.sleep(0)
        for _ in range(max_publishes[kind]):
            if generated.done():
                break
            await bench.publish()
            await bench.touch()
            num_publishes[kind] += 1
        num_tokens[kind] += await generated
        seconds[kind] += time.perf_counter() - start
    quiet = num_tokens["quiet"] / seconds["quiet"]
    for kind, words in (("one", "one adapter is published"), ("many", "adapters are published one after the other")):
        lost_s = (seconds[kind] - num_tokens[kind] / quiet) / max(num_publishes[kind], 1)
        yield Figure(
            key=f"adapter requests, {kind}",
            name=f"{requests.num} requests of {seconds[kind] / _NUM_TURNS:.1f} s, while {words} "
            f"({num_publishes[kind]:.0f} in all; each takes {1e3 * lost_s:.0f} ms from them)",
            value=num_tokens[kind] / seconds[kind],
            unit="tokens/s",
            against=f"without publishes, {quiet:.0f} tokens/s",
            ratio=num_tokens[kind] * seconds["quiet"] / (seconds[kind] * num_tokens["quiet"]),
        )
