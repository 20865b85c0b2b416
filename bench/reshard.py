"""Time of a publish on this machine, next to its floor and the two schemes that it replaces, with one engine.

Four trainer ranks (TP2, PP2) publish to a real engine of two TP ranks. Every scheme delivers the same weights to the
same engine; its fingerprints afterwards must be the same each time.
"""

from __future__ import annotations

import asyncio
import socket
import threading
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import cast

import aiohttp
import torch

from bench.reshard_ranks import SGLANG_GROUP, BenchRanks, Parameter, Sent, canonical_names, parameters_of
from megarl.config.model import read_model_shape
from megarl.config.roles import RolloutRoleConfig
from megarl.engine.client import EngineClient, EngineEndpoint, EngineKeys
from megarl.engine.commands import Rendezvous
from megarl.engine.fleet import Fleet
from megarl.engine.process import EngineProcess, EngineSpec
from megarl.engine.tool_commands import ToolControl
from megarl.errors import WeightSyncError
from megarl.families.shape import ModelShape
from megarl.system.network import LOOPBACK
from megarl.tools.quickstart.tiny_model import TinyShape, write_config
from megarl.types import PolicyVersion
from megarl.weights.algebra.buckets import DEFAULT_BUCKET_BYTES
from megarl.weights.algebra.plan import Plan
from megarl.weights.executors.digest import check_digests
from megarl.weights.layouts.megatron import MegatronParallel
from megarl.weights.layouts.transfer_spec import TransferSpec

GATHER_BUCKET_BYTES = 512 << 20
_TIMEOUT_S = 120.0
_TENSOR = 2
_SPLIT = MegatronParallel(tensor=2, pipeline=2)
_LAYER_BYTES = 60_300_000
_CHUNK_BYTES = 4 << 20
_NUM_STREAMS = 2
"""Threads that move bytes concurrently when a rate is measured: one per engine rank."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PublishTimes:
    """Times of one scheme."""

    name: str
    seconds: tuple[float, ...]
    group_bytes: int
    """Bytes that crossed between processes in one publish."""

    @property
    def best_s(self) -> float:
        return min(self.seconds)

    @property
    def median_s(self) -> float:
        return median(self.seconds)


@dataclass(frozen=True, slots=True, kw_only=True)
class Floor:
    """Time to move the plan's bytes at this machine's rates: once over loopback, once into the parameters."""

    loopback_bytes_s: float
    copy_bytes_s: float
    num_bytes: int

    @property
    def seconds(self) -> float:
        return self.num_bytes / self.loopback_bytes_s + self.num_bytes / self.copy_bytes_s


@dataclass(frozen=True, slots=True, kw_only=True)
class ReshardReport:
    plan_bytes: int
    model_bytes: int
    bytes_by_link: Mapping[str, int]
    floor: Floor
    ours: PublishTimes
    gather: PublishTimes
    flattened: PublishTimes
    is_equal: bool
    """Whether the engine served the same bytes after each scheme."""


def measure_reshard(folder: Path, *, gigabytes: float, repeats: int, on_news: Callable[[str], None]) -> ReshardReport:
    """Start ranks and engine, measure, and stop them; `folder` gets the engine's log."""
    return asyncio.run(_measure(folder, gigabytes=gigabytes, repeats=repeats, on_news=on_news))


async def _measure(folder: Path, *, gigabytes: float, repeats: int, on_news: Callable[[str], None]) -> ReshardReport:
    shape = _write_model(folder / "model", gigabytes)
    transfer = TransferSpec(
        shape=shape,
        parallel=_SPLIT,
        trainer_dtype="float32",
        num_engines=1,
        tensor=_TENSOR,
        engine_dtype="float32",
        is_cpu_engine=True,
    )
    floor_rates = _loopback_rate(), _copy_rate()
    on_news(f"starting {_SPLIT.world_size} trainer ranks and an engine of {_TENSOR} TP ranks")
    async with _serving(folder) as (fleet, endpoint):
        bench = _Bench(transfer, fleet, endpoint)
        try:
            await bench.connect()
            schemes = {"publish": bench.publish, "gather": bench.gather, "flattened": bench.feed}
            seconds, served = await _alternate(schemes, bench, repeats=repeats, on_news=on_news)
        finally:
            bench.stop()
    moved = sum(bench.plan.traffic.received_bytes.values())
    whole = sum(parameter.num_bytes for bucket in bench.buckets for parameter in bucket)
    return ReshardReport(
        plan_bytes=moved,
        model_bytes=sum(spec.num_bytes for spec in bench.plan.source.canonical.values()),
        bytes_by_link={link.name.lower(): size for link, size in bench.plan.traffic.bytes_by_link.items()},
        floor=Floor(loopback_bytes_s=floor_rates[0], copy_bytes_s=floor_rates[1], num_bytes=moved),
        ours=PublishTimes(name="publish", seconds=seconds["publish"], group_bytes=bench.sent_bytes),
        gather=PublishTimes(
            name="gather", seconds=seconds["gather"], group_bytes=_gathered_bytes(bench.plan, whole) + _TENSOR * whole
        ),
        flattened=PublishTimes(name="flattened", seconds=seconds["flattened"], group_bytes=_TENSOR * whole),
        is_equal=all(fingerprints == served["publish"] for fingerprints in served.values()),
    )


class _Bench:
    """One engine, all ranks, and the three schemes that send weights from the ranks to the engine."""

    def __init__(self, transfer: TransferSpec, fleet: Fleet, endpoint: EngineEndpoint) -> None:
        self.plan: Plan = transfer.plan()
        self.sent_bytes = 0
        self.buckets = _buckets(parameters_of(self.plan.source, transfer))
        self._transfer = transfer
        self._endpoint = endpoint
        self._control = ToolControl(fleet, timeout_s=_TIMEOUT_S)
        self._ranks = BenchRanks(transfer, self._control.address, timeout_s=_TIMEOUT_S)
        self._version = 0

    async def connect(self) -> None:
        await asyncio.to_thread(self._ranks.wait_ready)
        rendezvous = Rendezvous(
            address=self._control.address,
            name="publish",
            timeout_s=_TIMEOUT_S,
            backend="gloo",
            bucket_bytes=DEFAULT_BUCKET_BYTES,
        )
        await asyncio.gather(
            asyncio.to_thread(self._ranks.call, "join", rendezvous),
            self._control.join(self._transfer, plan_hash=self.plan.hash, rendezvous=rendezvous),
        )
        port = _free_port()
        group = {
            "master_address": LOOPBACK,
            "master_port": port,
            "rank_offset": 1,
            "world_size": 1 + self._transfer.tensor,
            "group_name": SGLANG_GROUP,
            "backend": "gloo",
        }
        await asyncio.gather(
            asyncio.to_thread(self._ranks.call, "connect", port), self._post("/init_weights_update_group", group)
        )

    async def publish(self) -> None:
        """Publish as a run does: receive, compare digests, confirm."""
        self._version += 1
        version = PolicyVersion(self._version)
        answers, arrived = await asyncio.gather(
            asyncio.to_thread(self._ranks.call, "send", version), self._control.receive(version)
        )
        sent = cast("list[Sent]", answers)
        check_digests([part.digests for part in sent], arrived)
        await self._control.confirm(version)
        self.sent_bytes = sum(part.num_bytes for part in sent)

    async def gather(self) -> None:
        await self._broadcast("gather")

    async def feed(self) -> None:
        await self._broadcast("feed")

    async def fingerprints(self) -> list[Mapping[str, int]]:
        return await self._control.fingerprints()

    async def negate(self) -> None:
        """Change the sign of every weight of the trainer."""
        await asyncio.to_thread(self._ranks.call, "negate")

    def stop(self) -> None:
        self._ranks.stop()

    async def _broadcast(self, method: str) -> None:
        await self._post("/begin_weight_update", {})
        for bucket in self.buckets:
            names = [name for each in bucket for name in canonical_names(self.plan.source, self._transfer, each)]
            specs = [self.plan.source.canonical[name] for name in names]
            body = {
                "names": names,
                "dtypes": [spec.dtype for spec in specs],
                "shapes": [list(spec.shape) for spec in specs],
                "group_name": SGLANG_GROUP,
                "load_format": "flattened_bucket",
                "flush_cache": False,
            }
            await asyncio.gather(
                asyncio.to_thread(self._ranks.call, method, bucket),
                self._post("/update_weights_from_distributed", body),
            )
        await self._post("/end_weight_update", {})
        await self._post("/flush_cache", {})

    async def _post(self, path: str, body: Mapping[str, object]) -> None:
        headers = {"Authorization": f"Bearer {self._endpoint.keys.admin}"}
        timeout = aiohttp.ClientTimeout(total=_TIMEOUT_S)
        async with (
            aiohttp.ClientSession(headers=headers, timeout=timeout) as session,
            session.post(f"{self._endpoint.url}{path}", json=body) as response,
        ):
            if response.status != 200:
                raise WeightSyncError(f"{self._endpoint}: {path}: status {response.status}: {await response.text()}")


async def _alternate(
    schemes: Mapping[str, Callable[[], Awaitable[None]]],
    bench: _Bench,
    *,
    repeats: int,
    on_news: Callable[[str], None],
) -> tuple[dict[str, tuple[float, ...]], dict[str, list[Mapping[str, int]]]]:
    """Run each scheme twice to warm up and to check that it delivers, then all of them alternating."""
    served = {}
    for (_, other), (name, scheme) in pairwise([*schemes.items(), next(iter(schemes.items()))]):
        # Another scheme sends other weights first, so that the fingerprints afterwards are due to this scheme.
        await bench.negate()
        await other()
        before = await bench.fingerprints()
        await bench.negate()
        await scheme()
        served[name] = await bench.fingerprints()
        if any(old[tensor] == new[tensor] for old, new in zip(before, served[name], strict=True) for tensor in old):
            raise WeightSyncError(f"{name} did not change a parameter of the engine")
    seconds: dict[str, list[float]] = {name: [] for name in schemes}
    for turn in range(repeats):
        for name, scheme in schemes.items():
            start = time.perf_counter()
            await scheme()
            seconds[name].append(time.perf_counter() - start)
        took = ", ".join(f"{name} {times[-1]:.2f} s" for name, times in seconds.items())
        on_news(f"turn {turn + 1} of {repeats}: {took}")
    return {name: tuple(times) for name, times in seconds.items()}, served


def _buckets(parameters: Sequence[Parameter]) -> list[list[Parameter]]:
    buckets: list[list[Parameter]] = [[]]
    size = 0
    for parameter in parameters:
        if buckets[-1] and size + parameter.num_bytes > GATHER_BUCKET_BYTES:
            buckets.append([])
            size = 0
        buckets[-1].append(parameter)
        size += parameter.num_bytes
    return buckets


def _gathered_bytes(plan: Plan, whole: int) -> int:
    """Return the bytes that all ranks receive when each gathers what it does not hold."""
    return sum(whole - holding.num_bytes for holding in plan.source.holdings)


def _write_model(folder: Path, gigabytes: float) -> ModelShape:
    """Write a Qwen2 configuration of about this size in fp32; the ranks make up its weights."""
    num_layers = 2 * max(1, round(gigabytes * 1e9 / _LAYER_BYTES / 2))
    shape = TinyShape(
        num_layers=num_layers, hidden=1024, ffn_hidden=4096, num_heads=16, num_kv_heads=4, vocab=2048, weight_std=0.02
    )
    write_config(folder, shape)
    return read_model_shape(folder)


@asynccontextmanager
async def _serving(folder: Path) -> AsyncIterator[tuple[Fleet, EngineEndpoint]]:
    config = RolloutRoleConfig(pool="cpu", tensor=_TENSOR)
    spec = EngineSpec(
        index=0,
        model_folder=folder / "model",
        config=config,
        device="cpu",
        seed=1,
        run_folder=folder,
        keys=EngineKeys.fresh(),
        loads_weights=False,
    )
    process = EngineProcess(spec)
    process.start()
    try:
        await process.wait_ready()
        client = EngineClient(process.endpoint, request_timeout_s=_TIMEOUT_S)
        fleet = Fleet([client], max_outstanding=8, publish_timeout_s=_TIMEOUT_S)
        try:
            yield fleet, process.endpoint
        finally:
            await fleet.close()
    finally:
        await asyncio.to_thread(process.stop)


def _loopback_rate(num_bytes: int = 1 << 30) -> float:
    """Return the bytes per second over loopback TCP, of all streams together."""

    def send(stream: socket.socket) -> None:
        chunk = memoryview(bytearray(_CHUNK_BYTES))
        for _ in range(num_bytes // _CHUNK_BYTES):
            stream.sendall(chunk)

    def receive(stream: socket.socket) -> None:
        chunk = memoryview(bytearray(_CHUNK_BYTES))
        left = num_bytes
        while left:
            left -= stream.recv_into(chunk)

    with socket.create_server((LOOPBACK, 0)) as listener:
        pairs = [(socket.create_connection(listener.getsockname()), listener.accept()[0]) for _ in range(_NUM_STREAMS)]
    calls = [call for sender, receiver in pairs for call in ((send, sender), (receive, receiver))]
    seconds = _seconds_of_threads(calls)
    for pair in pairs:
        for stream in pair:
            stream.close()
    return _NUM_STREAMS * num_bytes / seconds


def _copy_rate(num_bytes: int = 1 << 28, repeats: int = 4) -> float:
    """Return the bytes per second from memory to memory, of all streams together."""

    def copy(pair: tuple[torch.Tensor, torch.Tensor]) -> None:
        for _ in range(repeats):
            pair[0].copy_(pair[1])

    pairs = [(torch.zeros(num_bytes, dtype=torch.uint8), torch.ones(num_bytes, dtype=torch.uint8)) for _ in range(2)]
    return len(pairs) * repeats * num_bytes / _seconds_of_threads([(copy, pair) for pair in pairs])


def _seconds_of_threads(calls: Sequence[tuple[Callable[..., None], object]]) -> float:
    threads = [threading.Thread(target=call, args=(argument,)) for call, argument in calls]
    start = time.perf_counter()
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return time.perf_counter() - start


def _free_port() -> int:
    with socket.create_server((LOOPBACK, 0)) as listener:
        port: int = listener.getsockname()[1]
    return port
