"""One engine with random weights, and this process as its only trainer rank: for benchmarks of publishing."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from math import prod
from pathlib import Path
from statistics import median
from typing import Literal, TypeVar

import numpy as np
import torch

from megarl.checkpoint.manifest import make_header
from megarl.config.draft import DraftConfig
from megarl.config.model import read_model_shape
from megarl.config.roles import RolloutRoleConfig
from megarl.config.section import Device, dtype_on
from megarl.engine.client import EngineClient, EngineKeys
from megarl.engine.commands import Rendezvous
from megarl.engine.control import EngineControl
from megarl.engine.fleet import Fleet
from megarl.engine.process import EngineAdapters, EngineProcess, EngineSpec
from megarl.families import PUBLIC_MODELS
from megarl.families.shape import ModelShape
from megarl.rollout.generator import FleetGenerator
from megarl.rollout.task import Sampling, Vocabulary
from megarl.tools.quickstart.tiny_model import TinyShape, write_config
from megarl.types import PolicyVersion, Prompt
from megarl.weights.algebra.buckets import DEFAULT_BUCKET_BYTES
from megarl.weights.algebra.slices import TensorSpec, header_dtype
from megarl.weights.executors.digest import check_digests, fastest_digest
from megarl.weights.executors.fp8 import Fp8Tensors
from megarl.weights.executors.group import TransferGroup
from megarl.weights.executors.meeting import Backend
from megarl.weights.executors.tensors import bytes_of, torch_dtype
from megarl.weights.executors.transfer import Sender
from megarl.weights.layouts.canonical import canonical_tensors
from megarl.weights.layouts.fp8 import quantization_config
from megarl.weights.layouts.megatron import MegatronParallel, megatron_layout
from megarl.weights.layouts.transfer_spec import TransferSpec

Result = TypeVar("Result")

TIMEOUT_S = 240.0
NUM_WARMUPS = 2
NUM_REPEATS = 5
_ALIGNMENT = 64
"""Elements; Megatron starts a parameter at a multiple of it."""
_RANDOM_VALUES = 1 << 19
_MAX_REQUESTS = 256
_CACHED_TOKENS: Mapping[Device, int] = {"cuda": 163_840, "cpu": 16_384}


@dataclass(frozen=True, slots=True, kw_only=True)
class Server:
    """A fleet of one engine."""

    fleet: Fleet
    shape: ModelShape
    device: Device
    role: RolloutRoleConfig

    @property
    def client(self) -> EngineClient:
        return self.fleet.engines[0].client


@asynccontextmanager
async def serving(
    model: str,
    folder: Path,
    options: Mapping[str, object],
    *,
    device: Device = "cuda",
    precision: Literal["bf16", "fp8"] = "bf16",
    adapters: EngineAdapters | None = None,
    role_of: Callable[[Path], RolloutRoleConfig] | None = None,
    draft: DraftConfig | None = None,
    max_requests: int = _MAX_REQUESTS,
) -> AsyncIterator[Server]:
    """Start an engine with random weights and stop it when the block ends; with `adapters` they come from a file.

    `role_of` returns another role than that of publishes, from the folder of the model.
    """
    write_config(folder / "model", TinyShape.like(PUBLIC_MODELS[model]))
    shape = read_model_shape(folder / "model")
    has_base = adapters is not None
    if has_base:
        _write_weights(folder / "model" / "model.safetensors", canonical_tensors(shape), dtype_on(device))
    config = (
        role_of(folder / "model") if role_of is not None else _publish_role(device, options, precision, max_requests)
    )
    if draft is not None:
        config = config.model_copy(update={"draft": draft})
    spec = EngineSpec(
        index=0,
        model_folder=folder / "model",
        config=config,
        device=device,
        seed=1,
        run_folder=folder,
        keys=EngineKeys.fresh(),
        loads_weights=has_base,
        adapters=adapters,
        shares_devices=device == "cuda",
        quantization=quantization_config(shape, config.fp8_keep),
    )
    process = EngineProcess(spec)
    process.start()
    try:
        await process.wait_ready()
        client = EngineClient(process.endpoint, request_timeout_s=TIMEOUT_S)
        fleet = Fleet([client], max_outstanding=config.outstanding_requests, publish_timeout_s=TIMEOUT_S)
        try:
            yield Server(fleet=fleet, shape=shape, device=device, role=config)
        finally:
            await fleet.close()
    finally:
        await asyncio.to_thread(process.stop)


def _publish_role(
    device: Device, options: Mapping[str, object], precision: Literal["bf16", "fp8"], max_requests: int
) -> RolloutRoleConfig:
    return RolloutRoleConfig(
        pool="pool",
        precision=precision,
        max_running_requests=max_requests,
        max_cached_tokens=_CACHED_TOKENS[device],
        memory_fraction=0.5,
        is_deterministic=False,
        sglang=dict(options),
    )


def _write_weights(path: Path, specs: Mapping[str, TensorSpec], dtype: str) -> None:
    """Write a file of weights whose tensors begin with random values; the rest is a hole, which is read as zeros."""
    block = bytes_of(torch.empty(_RANDOM_VALUES, dtype=torch_dtype(dtype)).normal_(0.0, 0.02))
    header, text = make_header({name: (header_dtype(dtype), spec.shape) for name, spec in specs.items()})
    with path.open("wb") as file:
        file.write(text)
        for entry in header.entries:
            file.seek(entry.start)
            file.write(block[: entry.num_bytes])
        file.truncate(header.num_file_bytes)


@dataclass(frozen=True, slots=True, kw_only=True)
class FullPublish:
    """Publishes of a whole model, from this process as the only trainer rank."""

    send: Callable[[], Awaitable[None]]
    num_bytes: int
    spent: Mapping[str, list[float]]
    """Seconds of the parts of every publish so far."""


def transfer_to(server: Server) -> TransferSpec:
    """Return the transfer from this process to the engine; on a CPU they stand for different nodes, on a GPU they
    share it."""
    dtype, is_cpu = dtype_on(server.device), server.device == "cpu"
    return TransferSpec(
        shape=server.shape,
        parallel=MegatronParallel(),
        trainer_dtype=dtype,
        num_engines=1,
        tensor=1,
        engine_dtype=dtype,
        is_cpu_engine=is_cpu,
        shares_devices=not is_cpu,
        fp8_keep=server.role.fp8_keep,
    )


async def full_publish(
    server: Server, *, fill: Callable[[Mapping[str, torch.Tensor]], None] = lambda _: None
) -> FullPublish:
    """Join this process and the engine; `fill` changes the random weights."""
    is_cpu, transfer = server.device == "cpu", transfer_to(server)
    plan = transfer.plan()
    control = EngineControl(server.fleet, timeout_s=TIMEOUT_S)
    backend: Backend | None = "gloo" if is_cpu else None
    rendezvous = Rendezvous(
        address=control.address,
        name="publish",
        timeout_s=TIMEOUT_S,
        backend=backend,
        bucket_bytes=DEFAULT_BUCKET_BYTES,
    )
    holding = megatron_layout(server.shape, transfer.parallel, dtype=transfer.trainer_dtype).by_rank[0]
    weights = random_weights(holding.tensors, server.device)
    fill(weights)
    derived = None if transfer.fp8_keep is None else Fp8Tensors(plan, 0, holding, weights)

    def join() -> Sender:
        group = TransferGroup.join(
            rendezvous.address, name=rendezvous.name, peer=0, num_peers=2, timeout_s=TIMEOUT_S, backend=backend
        )
        digest = fastest_digest(is_on_host=is_cpu)
        tensors = weights if derived is None else derived.tensors
        return Sender(plan, 0, tensors, group, digest=digest, direct=transfer.direct)

    sender, _ = await asyncio.gather(
        asyncio.to_thread(join), control.join(transfer, plan_hash=plan.hash, rendezvous=rendezvous)
    )
    versions = iter(range(1, 1000))
    spent: dict[str, list[float]] = {"sent": [], "received": [], "confirmed": []}

    def send(version: int) -> dict[tuple[int, str], int]:
        # As in a rank, while the engine gets its command.
        if derived is not None:
            derived.fill()
        return sender.send(version)

    async def publish() -> None:
        version = PolicyVersion(next(versions))
        sent, arrived = await asyncio.gather(
            _noted(asyncio.to_thread(send, version), spent["sent"]),
            _noted(control.receive(version), spent["received"]),
        )
        check_digests([sent], arrived)
        await _noted(control.confirm(version), spent["confirmed"])

    return FullPublish(send=publish, num_bytes=sum(plan.traffic.received_bytes.values()), spent=spent)


async def _noted(call: Awaitable[Result], seconds: list[float]) -> Result:
    start = time.perf_counter()
    result = await call
    seconds.append(time.perf_counter() - start)
    return result


def random_weights(specs: Mapping[str, TensorSpec], device: Device) -> dict[str, torch.Tensor]:
    """Return random tensors that are views of one buffer."""
    dtype = torch_dtype(dtype_on(device))
    starts, end = {}, 0
    for name, spec in specs.items():
        starts[name] = end
        end += -(-prod(spec.shape) // _ALIGNMENT) * _ALIGNMENT
    buffer = torch.empty(end, dtype=dtype, device=device)
    for part in torch.split(buffer, 1 << 28):
        part.normal_(0.0, 0.02)
    return {
        name: buffer[starts[name] : starts[name] + prod(spec.shape)].view(spec.shape) for name, spec in specs.items()
    }


def random_prompts(num: int, num_tokens: int, *, vocab: int = 100_000) -> list[Prompt]:
    random = np.random.default_rng(0)
    return [
        Prompt(
            uid=f"row-{index}",
            position=index,
            epoch=0,
            token_ids=random.integers(1000, vocab, num_tokens, dtype=np.int32),
            data_source="bench",
            ground_truth="",
            extra_info={},
        )
        for index in range(num)
    ]


def generator_of(server: Server, *, num_rollouts: int, max_response_tokens: int) -> FleetGenerator:
    return FleetGenerator(
        server.fleet,
        sampling=Sampling(
            num_rollouts=num_rollouts, temperature=1.0, top_p=1.0, top_k=None, max_response_tokens=max_response_tokens
        ),
        vocabulary=Vocabulary(
            size=server.shape.vocab,
            eos_ids=(),
            max_context_tokens=server.shape.max_context_tokens,
            decode=lambda _: "",
        ),
        seed=1,
        max_attempts=1,
    )


async def seconds_of(call: Callable[[], Awaitable[object]]) -> float:
    """Return the median of some calls after some others."""
    for _ in range(NUM_WARMUPS):
        await call()
    times = []
    for _ in range(NUM_REPEATS):
        start = time.perf_counter()
        await call()
        times.append(time.perf_counter() - start)
    return median(times)
