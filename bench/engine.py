"""Times of publishing to and generating with one engine on one GPU, next to SGLang's own ways on the same server.

This process stands in for the trainer: one buffer holds all weights, as in Megatron.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Mapping
from pathlib import Path
from statistics import median
from typing import Literal

import aiohttp
import torch

from bench.figures import Failure, Figure
from bench.one_engine import (
    NUM_REPEATS,
    NUM_WARMUPS,
    TIMEOUT_S,
    FullPublish,
    Server,
    full_publish,
    generator_of,
    random_prompts,
    random_weights,
    seconds_of,
    serving,
)
from megarl.engine.client import GenerateRequest
from megarl.errors import MegarlError
from megarl.rollout.generator import sampling_seed
from megarl.serving.phases import SleepingFleet
from megarl.types import Prompt
from megarl.weights.layouts.canonical import canonical_tensors

_PART_TIMEOUT_S = 120.0
_PRECISIONS: tuple[Literal["bf16", "fp8"], ...] = ("bf16", "fp8")
_FLATTENED_BYTES = (512 << 20, 2 << 30)
_NUM_PROMPTS = 32
_NUM_ROLLOUTS = 8
_PROMPT_TOKENS = 64
_RESPONSE_TOKENS = 256


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


async def measure_fp8_publish(
    model: str, folder: Path, options: Mapping[str, object]
) -> AsyncIterator[Figure | Failure]:
    """Measure publishes in bfloat16 and in FP8, to one engine after the other."""
    seconds, num_bytes, parts = [], [], ""
    for precision in _PRECISIONS:
        place = folder / precision
        place.mkdir()
        async with serving(model, place, options, precision=precision) as server:
            full = await full_publish(server)
            seconds.append(await seconds_of(full.send))
            num_bytes.append(full.num_bytes)
            parts = _parts_of(full)
    wide_s, narrow_s = seconds
    yield Figure(
        key="publish fp8",
        name=f"publish in FP8, quantised and with digests, {num_bytes[1] / 1e9:.1f} GB ({parts})",
        value=1e3 * narrow_s,
        unit="ms",
        against=f"in bfloat16, {num_bytes[0] / 1e9:.1f} GB, {1e3 * wide_s:.1f} ms",
        ratio=wide_s / narrow_s,
    )


def _parts_of(full: FullPublish) -> str:
    return ", ".join(f"{name} in {1e3 * median(times[NUM_WARMUPS:]):.1f}" for name, times in full.spent.items())


async def _measure_publish(server: Server) -> AsyncIterator[Figure]:
    full = await full_publish(server)
    num_bytes = full.num_bytes
    ours_s = await seconds_of(full.send)
    floor_s = _copy_seconds(num_bytes)
    label = f"publish of {num_bytes / 1e9:.1f} GB on one GPU, digests included"
    yield Figure(
        key="publish, copy",
        name=f"{label} ({_parts_of(full)})",
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
            await server.client.load_weights([text], load_format="flattened_bucket", timeout_s=TIMEOUT_S)
            bucket, size = [], 0

    return await seconds_of(send)


async def _measure_sleep(server: Server) -> AsyncIterator[Figure]:
    """Time releasing and allocating an engine's cache."""
    sleeps, wakes = [], []
    for _ in range(NUM_REPEATS):
        start = time.perf_counter()
        await SleepingFleet(server.fleet).sleep()
        middle = time.perf_counter()
        await SleepingFleet(server.fleet).wake()
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


def _copy_seconds(num_bytes: int) -> float:
    source = torch.empty(num_bytes, dtype=torch.uint8, device="cuda").random_()
    target = torch.empty_like(source)
    times = []
    for _ in range(NUM_REPEATS):
        torch.cuda.synchronize()
        start = time.perf_counter()
        target.copy_(source)
        torch.cuda.synchronize()
        times.append(time.perf_counter() - start)
    return median(times)
