"""Times of publishing to and generating with one engine on one GPU, next to SGLang's own ways on the same server.

This process stands in for the trainer: one buffer holds all weights, as in Megatron.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from math import prod
from pathlib import Path
from statistics import median
from typing import TypeVar

import aiohttp
import numpy as np
import torch

from bench.figures import Failure, Figure
from megarl.config.model import ModelShape, read_model_shape
from megarl.config.public_models import PUBLIC_MODELS
from megarl.config.roles import RolloutRoleConfig
from megarl.config.section import Device, dtype_on
from megarl.errors import MegarlError
from megarl.rollout.client import EngineClient, EngineKeys, GenerateRequest
from megarl.rollout.commands import Rendezvous
from megarl.rollout.control import EngineControl
from megarl.rollout.fleet import Fleet
from megarl.rollout.generator import FleetGenerator, Sampling, Vocabulary, sampling_seed
from megarl.rollout.process import EngineAdapters, EngineProcess, EngineSpec
from megarl.tools.quickstart.tiny_model import TinyShape, write_config
from megarl.types import PolicyVersion, Prompt
from megarl.weights.algebra.buckets import DEFAULT_BUCKET_BYTES
from megarl.weights.algebra.slices import TensorSpec
from megarl.weights.executors.digest import fastest_digest
from megarl.weights.executors.digest_sums import check_digests
from megarl.weights.executors.group import Backend, TransferGroup
from megarl.weights.executors.tensors import torch_dtype
from megarl.weights.executors.transfer import Sender
from megarl.weights.layouts.canonical import canonical_tensors
from megarl.weights.layouts.megatron import MegatronParallel
from megarl.weights.layouts.transfer_spec import TransferSpec

Result = TypeVar("Result")

_TIMEOUT_S = 60.0
_PART_TIMEOUT_S = 120.0
_NUM_WARMUPS = 2
_NUM_REPEATS = 5
_ALIGNMENT = 64
"""Elements; Megatron starts a parameter at a multiple of it."""
_FLATTENED_BYTES = (512 << 20, 2 << 30)
_NUM_PROMPTS = 32
_NUM_ROLLOUTS = 8
_PROMPT_TOKENS = 64
_RESPONSE_TOKENS = 256
_CACHED_TOKENS: Mapping[Device, int] = {
    "cuda": 2 * _NUM_PROMPTS * _NUM_ROLLOUTS * (_PROMPT_TOKENS + _RESPONSE_TOKENS),
    "cpu": 16_384,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Server:
    """A fleet of one engine."""

    fleet: Fleet
    shape: ModelShape
    device: Device

    @property
    def client(self) -> EngineClient:
        return self.fleet.engines[0].client


async def measure_engine(model: str, folder: Path, options: Mapping[str, object]) -> AsyncIterator[Figure | Failure]:
    """Measure an engine that starts with dummy weights; `options` are SGLang's.

    A part that fails or times out yields a Failure; the others are still measured.
    """
    parts = {"publish": _measure_publish, "sleep": _measure_sleep, "rollouts": _measure_generation}
    async with serving(model, folder, options) as server:
        for name, part in parts.items():
            try:
                async with asyncio.timeout(_PART_TIMEOUT_S):
                    async for figure in part(server):
                        yield figure
            except TimeoutError:
                yield Failure(part=name, reason=f"not done within {_PART_TIMEOUT_S:.0f} s")
            except (MegarlError, RuntimeError, aiohttp.ClientError) as error:
                yield Failure(part=name, reason=f"{type(error).__name__}: {error}"[:500])


@asynccontextmanager
async def serving(
    model: str,
    folder: Path,
    options: Mapping[str, object],
    *,
    device: Device = "cuda",
    adapters: EngineAdapters | None = None,
) -> AsyncIterator[Server]:
    """Start an engine with random weights and stop it when the block ends; with `adapters` the weights stay."""
    write_config(folder / "model", TinyShape.like(PUBLIC_MODELS[model]))
    has_base = adapters is not None
    config = RolloutRoleConfig(
        pool="pool",
        max_running_requests=_NUM_PROMPTS * _NUM_ROLLOUTS,
        max_cached_tokens=_CACHED_TOKENS[device],
        memory_fraction=0.5,
        is_deterministic=False,
        sglang={**options, "load_format": "dummy"} if has_base else dict(options),
    )
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
        shares_devices=device == "cuda" and not has_base,
    )
    process = EngineProcess(spec)
    process.start()
    try:
        await process.wait_ready()
        client = EngineClient(process.endpoint, request_timeout_s=_TIMEOUT_S)
        fleet = Fleet([client], max_outstanding=config.max_running_requests, publish_timeout_s=_TIMEOUT_S)
        try:
            yield Server(fleet=fleet, shape=read_model_shape(folder / "model"), device=device)
        finally:
            await fleet.close()
    finally:
        await asyncio.to_thread(process.stop)


@dataclass(frozen=True, slots=True, kw_only=True)
class FullPublish:
    """Publishes of a whole model, from this process as the only trainer rank."""

    send: Callable[[], Awaitable[None]]
    num_bytes: int
    spent: Mapping[str, list[float]]
    """Seconds of the parts of every publish so far."""


async def full_publish(server: Server) -> FullPublish:
    """Join this process and the engine; on a CPU they stand for different nodes, on a GPU they share it."""
    dtype, is_cpu = dtype_on(server.device), server.device == "cpu"
    transfer = TransferSpec(
        shape=server.shape,
        parallel=MegatronParallel(),
        trainer_dtype=dtype,
        num_engines=1,
        tensor=1,
        engine_dtype=dtype,
        is_cpu_engine=is_cpu,
        shares_devices=not is_cpu,
    )
    plan = transfer.plan()
    control = EngineControl(server.fleet, timeout_s=_TIMEOUT_S)
    backend: Backend | None = "gloo" if is_cpu else None
    rendezvous = Rendezvous(
        address=control.address,
        name="publish",
        timeout_s=_TIMEOUT_S,
        backend=backend,
        bucket_bytes=DEFAULT_BUCKET_BYTES,
    )
    weights = random_weights(plan.source.by_rank[0].tensors, server.device)

    def join() -> Sender:
        group = TransferGroup.join(
            rendezvous.address, name=rendezvous.name, peer=0, num_peers=2, timeout_s=_TIMEOUT_S, backend=backend
        )
        digest = fastest_digest(is_on_host=is_cpu)
        return Sender(plan, 0, weights, group, digest=digest, direct=transfer.direct)

    sender, _ = await asyncio.gather(
        asyncio.to_thread(join), control.join(transfer, plan_hash=plan.hash, rendezvous=rendezvous)
    )
    versions = iter(range(1, 1000))
    spent: dict[str, list[float]] = {"sent": [], "received": [], "confirmed": []}

    async def publish() -> None:
        version = PolicyVersion(next(versions))
        sent, arrived = await asyncio.gather(
            _noted(asyncio.to_thread(sender.send, version), spent["sent"]),
            _noted(control.receive(version), spent["received"]),
        )
        check_digests([sent], arrived)
        await _noted(control.confirm(version), spent["confirmed"])

    return FullPublish(send=publish, num_bytes=sum(plan.traffic.received_bytes.values()), spent=spent)


async def _measure_publish(server: Server) -> AsyncIterator[Figure]:
    full = await full_publish(server)
    num_bytes, spent = full.num_bytes, full.spent
    ours_s = await seconds_of(full.send)
    floor_s = _copy_seconds(num_bytes)
    parts = ", ".join(f"{name} in {1e3 * median(times[_NUM_WARMUPS:]):.1f}" for name, times in spent.items())
    label = f"publish of {num_bytes / 1e9:.1f} GB on one GPU, digests included"
    yield Figure(
        key="publish, copy",
        name=f"{label} ({parts})",
        value=1e3 * ours_s,
        unit="ms",
        against=f"one copy on the device, {1e3 * floor_s:.1f} ms",
        ratio=floor_s / ours_s,
    )
    peers = {size: await _measure_flattened(server, size) for size in _FLATTENED_BYTES}
    times = ", ".join(f"{1e3 * seconds:.1f} ms in buckets of {size >> 20} MiB" for size, seconds in peers.items())
    yield Figure(
        key="publish",
        name=label,
        value=1e3 * ours_s,
        unit="ms",
        against=f"SGLang's flattened buckets without digests, {times}",
        ratio=min(peers.values()) / ours_s,
    )


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


async def _measure_flattened(server: Server, bucket_bytes: int) -> float:
    """Time sending as many bytes in SGLang's flattened buckets, under the names and shapes of its loader."""
    from sglang.srt.utils.common import MultiprocessingSerializer
    from sglang.srt.utils.patch_torch import monkey_patch_torch_reductions
    from sglang.srt.weight_sync.tensor_bucket import FlattenedTensorBucket

    monkey_patch_torch_reductions()
    tensors = list(random_weights(canonical_tensors(server.shape), "cuda").items())

    async def send() -> None:
        bucket: list[tuple[str, torch.Tensor]] = []
        size = 0
        for index, (name, tensor) in enumerate(tensors):
            bucket.append((name, tensor))
            size += tensor.nbytes
            if size < bucket_bytes and index < len(tensors) - 1:
                continue
            flat = FlattenedTensorBucket(named_tensors=bucket)
            payload = {"flattened_tensor": flat.get_flattened_tensor(), "metadata": flat.get_metadata()}
            torch.cuda.synchronize()
            text = MultiprocessingSerializer.serialize(payload, output_str=True)
            await server.client.load_weights([text], load_format="flattened_bucket", timeout_s=_TIMEOUT_S)
            bucket, size = [], 0

    return await seconds_of(send)


async def _measure_sleep(server: Server) -> AsyncIterator[Figure]:
    """Time releasing and allocating an engine's cache."""
    sleeps, wakes = [], []
    for _ in range(_NUM_REPEATS):
        start = time.perf_counter()
        await server.fleet.sleep()
        middle = time.perf_counter()
        await server.fleet.wake()
        sleeps.append(middle - start)
        wakes.append(time.perf_counter() - middle)
    for name, times in (("engine releases its cache", sleeps), ("engine allocates its cache again", wakes)):
        yield Figure(key=name, name=name, value=1e3 * median(times), unit="ms", against="nothing", ratio=1.0)


async def _measure_generation(server: Server) -> AsyncIterator[Figure]:
    """Time the same requests through the generator and directly to the server; each twice, the better counts."""
    prompts = random_prompts(_NUM_PROMPTS, _PROMPT_TOKENS)
    generator = generator_of(server, num_rollouts=_NUM_ROLLOUTS, max_response_tokens=_RESPONSE_TOKENS)

    async def through() -> int:
        groups = await asyncio.gather(*(generator.generate(prompt) for prompt in prompts))
        return sum(len(rollout.token_ids) for group in groups for rollout in group.rollouts)

    async def straight() -> int:
        endpoint = server.client.endpoint
        headers = {"Authorization": f"Bearer {endpoint.keys.api}"}
        async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0), headers=headers) as session:

            async def one(prompt: Prompt, index: int) -> int:
                request = GenerateRequest(
                    rid=f"{prompt.uid}-{index}",
                    input_ids=tuple(prompt.token_ids.tolist()),
                    max_new_tokens=_RESPONSE_TOKENS,
                    temperature=1.0,
                    sampling_seed=sampling_seed(1, prompt.uid, epoch=0, index=index),
                )
                async with session.post(f"{endpoint.url}/generate", json=request.to_json()) as response:
                    return len((await response.json())["output_ids"])

            return sum(
                await asyncio.gather(*(one(prompt, index) for prompt in prompts for index in range(_NUM_ROLLOUTS)))
            )

    rates: dict[str, float] = {}
    for name, call in (("through", through), ("straight", straight)) * 2:
        await server.client.flush_cache()
        start = time.perf_counter()
        num_tokens = await call()
        rates[name] = max(rates.get(name, 0.0), num_tokens / (time.perf_counter() - start))
    yield Figure(
        key="rollouts",
        name=f"rollouts, {_NUM_PROMPTS * _NUM_ROLLOUTS} requests of {_PROMPT_TOKENS} + {_RESPONSE_TOKENS} tokens",
        value=rates["through"],
        unit="tokens/s",
        against=f"the same server asked directly, {rates['straight']:.0f} tokens/s",
        ratio=rates["through"] / rates["straight"],
    )


def random_prompts(num: int, num_tokens: int) -> list[Prompt]:
    random = np.random.default_rng(0)
    return [
        Prompt(
            uid=f"row-{index}",
            position=index,
            epoch=0,
            token_ids=random.integers(1000, 100_000, num_tokens, dtype=np.int32),
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
    for _ in range(_NUM_WARMUPS):
        await call()
    times = []
    for _ in range(_NUM_REPEATS):
        start = time.perf_counter()
        await call()
        times.append(time.perf_counter() - start)
    return median(times)


def _copy_seconds(num_bytes: int) -> float:
    source = torch.empty(num_bytes, dtype=torch.uint8, device="cuda").random_()
    target = torch.empty_like(source)
    times = []
    for _ in range(_NUM_REPEATS):
        torch.cuda.synchronize()
        start = time.perf_counter()
        target.copy_(source)
        torch.cuda.synchronize()
        times.append(time.perf_counter() - start)
    return median(times)
