"""Times of publishing to and generating with one engine on one GPU, next to SGLang's own ways on the same server.

This process stands in for the trainer: one buffer holds all weights, as in Megatron.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
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
from megarl.errors import MegarlError
from megarl.rollout.client import EngineClient, EngineKeys, GenerateRequest
from megarl.rollout.commands import Rendezvous
from megarl.rollout.control import EngineControl
from megarl.rollout.fleet import Fleet
from megarl.rollout.generator import FleetGenerator, Sampling, Vocabulary, sampling_seed
from megarl.rollout.process import EngineProcess, EngineSpec
from megarl.tools.quickstart.tiny_model import TinyShape, write_config
from megarl.types import PolicyVersion, Prompt
from megarl.weights.algebra.buckets import DEFAULT_BUCKET_BYTES
from megarl.weights.algebra.slices import TensorSpec
from megarl.weights.executors.digest_sums import check_digests
from megarl.weights.executors.group import TransferGroup
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


@dataclass(frozen=True, slots=True, kw_only=True)
class _Server:
    fleet: Fleet
    shape: ModelShape

    @property
    def client(self) -> EngineClient:
        return self.fleet.engines[0].client


async def measure_engine(model: str, folder: Path, options: Mapping[str, object]) -> AsyncIterator[Figure | Failure]:
    """Measure an engine that starts with dummy weights; `options` are SGLang's.

    A part that fails or times out yields a Failure; the others are still measured.
    """
    parts = {"publish": _measure_publish, "sleep": _measure_sleep, "rollouts": _measure_generation}
    async with _serving(model, folder, options) as server:
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
async def _serving(model: str, folder: Path, options: Mapping[str, object]) -> AsyncIterator[_Server]:
    write_config(folder / "model", TinyShape.like(PUBLIC_MODELS[model]))
    config = RolloutRoleConfig(
        pool="gpu",
        max_running_requests=_NUM_PROMPTS * _NUM_ROLLOUTS,
        max_cached_tokens=2 * _NUM_PROMPTS * _NUM_ROLLOUTS * (_PROMPT_TOKENS + _RESPONSE_TOKENS),
        memory_fraction=0.5,
        is_deterministic=False,
        sglang=dict(options),
    )
    spec = EngineSpec(
        index=0,
        model_folder=folder / "model",
        config=config,
        device="cuda",
        seed=1,
        run_folder=folder,
        keys=EngineKeys.fresh(),
        loads_weights=False,
        shares_devices=True,
    )
    process = EngineProcess(spec)
    process.start()
    try:
        await process.wait_ready()
        client = EngineClient(process.endpoint, request_timeout_s=_TIMEOUT_S)
        fleet = Fleet([client], max_outstanding=config.max_running_requests, publish_timeout_s=_TIMEOUT_S)
        try:
            yield _Server(fleet=fleet, shape=read_model_shape(folder / "model"))
        finally:
            await fleet.close()
    finally:
        await asyncio.to_thread(process.stop)


async def _measure_publish(server: _Server) -> AsyncIterator[Figure]:
    transfer = TransferSpec(
        shape=server.shape,
        parallel=MegatronParallel(),
        trainer_dtype="bfloat16",
        num_engines=1,
        tensor=1,
        engine_dtype="bfloat16",
        is_cpu_engine=False,
        shares_devices=True,
    )
    plan = transfer.plan()
    control = EngineControl(server.fleet, timeout_s=_TIMEOUT_S)
    rendezvous = Rendezvous(
        address=control.address,
        name="publish",
        timeout_s=_TIMEOUT_S,
        backend=None,
        bucket_bytes=DEFAULT_BUCKET_BYTES,
    )
    weights = _random_weights(plan.source.by_rank[0].tensors)

    def join() -> Sender:
        group = TransferGroup.join(
            rendezvous.address, name=rendezvous.name, peer=0, num_peers=2, timeout_s=_TIMEOUT_S, backend=None
        )
        return Sender(plan, 0, weights, group, direct=transfer.direct)

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

    num_bytes = sum(plan.traffic.received_bytes.values())
    ours_s = await _seconds(publish)
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


def _random_weights(specs: Mapping[str, TensorSpec]) -> dict[str, torch.Tensor]:
    """Return random tensors that are views of one buffer."""
    dtype = torch_dtype("bfloat16")
    starts, end = {}, 0
    for name, spec in specs.items():
        starts[name] = end
        end += -(-spec.num_bytes // 2 // _ALIGNMENT) * _ALIGNMENT
    buffer = torch.empty(end, dtype=dtype, device="cuda")
    for part in torch.split(buffer, 1 << 28):
        part.normal_(0.0, 0.02)
    return {
        name: buffer[starts[name] : starts[name] + spec.num_bytes // 2].view(spec.shape) for name, spec in specs.items()
    }


async def _measure_flattened(server: _Server, bucket_bytes: int) -> float:
    """Time sending as many bytes in SGLang's flattened buckets, under the names and shapes of its loader."""
    from sglang.srt.utils.common import MultiprocessingSerializer
    from sglang.srt.utils.patch_torch import monkey_patch_torch_reductions
    from sglang.srt.weight_sync.tensor_bucket import FlattenedTensorBucket

    monkey_patch_torch_reductions()
    tensors = list(_random_weights(canonical_tensors(server.shape)).items())

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

    return await _seconds(send)


async def _measure_sleep(server: _Server) -> AsyncIterator[Figure]:
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


async def _measure_generation(server: _Server) -> AsyncIterator[Figure]:
    """Time the same requests through the generator and directly to the server; each twice, the better counts."""
    random = np.random.default_rng(0)
    prompts = [
        Prompt(
            uid=f"row-{index}",
            position=index,
            epoch=0,
            token_ids=random.integers(1000, 100_000, _PROMPT_TOKENS, dtype=np.int32),
            data_source="bench",
            ground_truth="",
            extra_info={},
        )
        for index in range(_NUM_PROMPTS)
    ]
    generator = FleetGenerator(
        server.fleet,
        sampling=Sampling(
            num_rollouts=_NUM_ROLLOUTS, temperature=1.0, top_p=1.0, top_k=None, max_response_tokens=_RESPONSE_TOKENS
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


async def _seconds(call: Callable[[], Awaitable[None]]) -> float:
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
