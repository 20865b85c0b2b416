"""Times of the linear layers that a recipe can choose: forward and backward into gradient buffers, on one GPU.

Each variant has the same random weights and tokens; its log-probabilities are compared with those of the first. A
variant that fails loses its own figure.
"""

from __future__ import annotations

import traceback
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import median

import numpy as np
import torch
from megatron.core.distributed import DistributedDataParallel
from torch import Tensor

from bench.figures import Failure, Figure
from bench.training import PEAK_TFLOPS, STD, WORKLOADS, TrainWorkload, alone, clear_device, micro_batch
from megarl.config.roles import ActorConfig
from megarl.families import PUBLIC_MODELS
from megarl.planner.activations import ModelWork, activation_bytes, fp8_weight_bytes, scoring_bytes
from megarl.train.build import accumulate_in_products, build_chunks
from megarl.train.model import DeviceMicroBatch, named_weights
from megarl.train.optimizer import buffer_config

_NUM_MICRO_BATCHES = 4
_NUM_REPEATS = 2
_SHORTEST, _LONGEST = 300, 3000

Variants = Mapping[str, Mapping[str, object]]
"""Keys of roles.actor by the name of the variant; the first is what the others are compared with."""

_LOCAL: Variants = {"local bf16": {"kernels": "local"}}
_FP8: Variants = {
    f"fp8 {scaling}": {"precision": "fp8", "fp8_scaling": scaling} for scaling in ("tensorwise", "blockwise", "delayed")
}
_DENSE: Variants = {**_LOCAL, "te bf16": {"kernels": "te"}, **_FP8}
_MIXED: Variants = {**_LOCAL, "fp8 tensorwise": _FP8["fp8 tensorwise"]}
_EXPERTS: Variants = {
    **_LOCAL,
    "te bf16": {"kernels": "te"},
    "te bf16, fused permutation": {"kernels": "te", "megatron": {"moe_permute_fusion": True}},
    "fp8 tensorwise": _FP8["fp8 tensorwise"],
}
_MIXTURE = TrainWorkload(
    key="linear 30B-A3B",
    name="30B-A3B, 4 layers",
    model="qwen3-30b-a3b",
    num_layers=4,
    num_sequences=2,
    sequence_tokens=4096,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Measured:
    seconds: float
    """The time of one micro-batch."""
    peak_bytes: int
    kept_bytes: int
    """Weights and gradient buffers."""
    logprobs: Tensor  # [N]


def measure_linear_layers(index: int) -> Iterator[Figure | Failure]:
    """Yield the variants of a dense model of `bench.training.WORKLOADS`, also with sequences of mixed lengths."""
    workload = WORKLOADS[index]
    # All layers: the first and the last compute in bfloat16, and count for more in a model that is cut.
    num_layers = PUBLIC_MODELS[workload.model].num_layers
    key, name = workload.key.replace("step", "linear"), workload.name.partition(",")[0]
    workload = replace(workload, key=key, name=name, num_layers=num_layers)
    yield from _compare(workload, _DENSE, lengths=None)
    yield from _compare(workload, _MIXED, lengths=_mixed_lengths(workload.num_tokens))


def measure_experts() -> Iterator[Figure | Failure]:
    """Yield the variants of a mixture: experts one after the other, or together."""
    yield from _compare(_MIXTURE, _EXPERTS, lengths=None)


def _compare(
    workload: TrainWorkload, variants: Variants, *, lengths: Sequence[int] | None
) -> Iterator[Figure | Failure]:
    first: _Measured | None = None
    kind = "" if lengths is None else f", {len(lengths)} sequences of {min(lengths)} to {max(lengths)}"
    for name, keys in variants.items():
        clear_device()
        split = ActorConfig.model_validate({"pool": "gpu", **keys})
        try:
            found = _measure(workload, split, lengths)
        except Exception:  # noqa: BLE001 - the other variants have figures of their own
            traceback.print_exc()
            yield Failure(part=f"{workload.key}, {name}{kind}", reason=traceback.format_exc()[-600:])
            continue
        first = first or found
        tflops = _flops(workload, lengths) / found.seconds / 1e12
        distance = (found.logprobs - first.logprobs).abs()
        work = ModelWork.of(workload.shape, split, tokens_per_micro_batch=workload.num_tokens, device="cuda")
        passing = activation_bytes(work, 0) + scoring_bytes(work, has_gradients=True)
        planned = passing + fp8_weight_bytes(work, 0)
        yield Figure(
            key=f"{workload.key}, {name}{', mixed' if lengths else ''}",
            name=f"{workload.name}, {name}{kind}: {1e3 * found.seconds:.1f} ms, {first.seconds / found.seconds:.2f} x; "
            f"peak {found.peak_bytes / 1e9:.1f} GB, beyond weights and buffers "
            f"{(found.peak_bytes - found.kept_bytes) / 1e9:.1f} (planned {planned / 1e9:.1f}); "
            f"|dlogp| mean {distance.mean():.4f}, max {distance.max():.3f}",
            value=tflops,
            unit="TFLOP/s",
            against=f"{PEAK_TFLOPS:.0f} TFLOP/s",
            ratio=tflops / PEAK_TFLOPS,
        )


def _measure(workload: TrainWorkload, split: ActorConfig, lengths: Sequence[int] | None) -> _Measured:
    with alone() as topology:
        (model,) = build_chunks(workload.shape, topology, split, device="cuda")
        _randomise(model)
        chunk = DistributedDataParallel(model.config, buffer_config({}), model)
        accumulate_in_products(model)
        batch = micro_batch(workload, topology, lengths=lengths)
        kept_bytes = torch.cuda.memory_allocated()
        with torch.no_grad():
            logprobs = chunk(batch).logprobs.float().cpu()
        _accumulate(chunk, batch)
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        times = []
        for _ in range(_NUM_REPEATS):
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
            start.record()
            _accumulate(chunk, batch)
            end.record()
            end.synchronize()
            times.append(start.elapsed_time(end) / 1e3 / _NUM_MICRO_BATCHES)
        return _Measured(
            seconds=median(times),
            peak_bytes=torch.cuda.max_memory_allocated(),
            kept_bytes=kept_bytes,
            logprobs=logprobs,
        )


def _accumulate(chunk: DistributedDataParallel, batch: DeviceMicroBatch) -> None:
    chunk.zero_grad_buffer()
    # As Megatron's schedules do: FP8 copies of weights are made once for all micro-batches.
    chunk.set_is_first_microbatch()
    for _ in range(_NUM_MICRO_BATCHES):
        (-chunk(batch).logprobs.mean()).backward()


def _mixed_lengths(num_tokens: int) -> list[int]:
    """Return lengths that fill a micro-batch; those of the last two may be cut."""
    random = np.random.default_rng(0)
    lengths: list[int] = []
    while (rest := num_tokens - sum(lengths)) > 0:
        lengths.append(min(rest, int(random.integers(_SHORTEST, _LONGEST))))
    return lengths


def _flops(workload: TrainWorkload, lengths: Sequence[int] | None) -> float:
    """Return the operations of forward and backward of one micro-batch, of the experts that a token is sent to."""
    shape = workload.shape
    query, kv = shape.num_heads * shape.head_dim, shape.num_kv_heads * shape.head_dim
    copies = shape.experts.per_token if shape.experts else 1
    router = shape.experts.num if shape.experts else 0
    layer = shape.hidden * (2 * query + 2 * kv + 3 * copies * shape.ffn_hidden + router)
    weights = shape.num_layers * layer + shape.vocab * shape.hidden
    squares = sum(length * length for length in lengths or [workload.sequence_tokens] * workload.num_sequences)
    return 6.0 * (workload.num_tokens * weights + shape.num_layers * query * squares)


@torch.no_grad()
def _randomise(model: torch.nn.Module) -> None:
    """Give every variant the same weights, whatever the order of its parameters."""
    generator = torch.Generator("cuda").manual_seed(0)
    for name, parameter in sorted(named_weights([model]).items()):
        if "norm" in name:
            parameter.fill_(1.0)
        else:
            parameter.normal_(0.0, STD, generator=generator)
