"""What a rank and an engine hold all the time: weights, gradients, optimizer, staging, KV cache. All of it exact."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from functools import cache
from math import prod

from megarl.config.model import ModelShape
from megarl.config.roles import RolloutRoleConfig
from megarl.config.section import CPU_CACHED_TOKENS, Device, dtype_on
from megarl.weights.algebra.slices import ITEM_BYTES, Holding
from megarl.weights.layouts.megatron import MegatronParallel, megatron_layout
from megarl.weights.layouts.sglang import sglang_layout

PARAM_ALIGNMENT = 64
BUCKET_ALIGNMENT = 128
"""Elements. Megatron starts each parameter at a multiple of the one, and ends a bucket at one of the other."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StageMemory:
    """What the fullest rank of a pipeline stage holds at all times."""

    stage: int
    weight_bytes: int
    gradient_bytes: int
    optimizer_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineMemory:
    weight_bytes: int
    expert_bytes: int
    """Of the weights, those in experts."""
    staging_bytes: int
    """A version beside the one that is served, until it is committed; allocated once."""
    cache_bytes: int
    cache_bytes_per_token: int
    cached_tokens: int
    """Of one engine, all its TP ranks together holding them once."""


@cache
def stage_memory(shape: ModelShape, parallel: MegatronParallel, *, dtype: str) -> tuple[StageMemory, ...]:
    """Per pipeline stage: weights of `dtype`, float32 gradients, and the distributed optimizer's shard of float32
    master weights and two moments."""
    # Float32 weights serve as their own master.
    state_bytes = 8 if dtype == "float32" else 12
    thin = _one_layer_per_chunk(parallel)
    layout = megatron_layout(
        replace(shape, num_layers=parallel.pipeline * parallel.virtual_pipeline),
        thin,
        dtype=dtype,
    )
    stages = []
    for stage in range(parallel.pipeline):
        buffers = max(
            (
                gradient_buffers(layout.by_rank[rank], shape, parallel, stage)
                for rank in (thin.rank(tensor=t, data=0, pipeline=stage) for t in range(parallel.tensor))
            ),
            key=lambda found: found.num_elements,
        )
        sharded = buffers.dense // parallel.data + buffers.expert // parallel.expert_data
        stages.append(
            StageMemory(
                stage=stage,
                weight_bytes=ITEM_BYTES[dtype] * buffers.num_elements,
                gradient_bytes=4 * buffers.num_elements,
                optimizer_bytes=state_bytes * sharded,
            )
        )
    return tuple(stages)


@dataclass(frozen=True, slots=True, kw_only=True)
class BareWeights:
    """Of the fullest rank of a stage, without buffers: of a model that is only asked, or kept in host memory."""

    num_bytes: int
    dense_bytes: int
    """Of these, what is not in experts."""
    largest_bytes: int
    """Of its largest tensor."""


@cache
def bare_weights(shape: ModelShape, parallel: MegatronParallel, *, dtype: str) -> tuple[BareWeights, ...]:
    """Per pipeline stage."""
    thin = _one_layer_per_chunk(parallel)
    layout = megatron_layout(
        replace(shape, num_layers=parallel.pipeline * parallel.virtual_pipeline),
        thin,
        dtype=dtype,
    )
    found = []
    for stage in range(parallel.pipeline):
        layers = {
            f"chunk{chunk}": len(parallel.chunk_layers(shape.num_layers, stage=stage, chunk=chunk))
            for chunk in range(parallel.virtual_pipeline)
        }
        ranks = [thin.rank(tensor=tensor, data=0, pipeline=stage) for tensor in range(parallel.tensor)]
        sizes = [
            {
                name: repeats(name, layers[name.partition(".")[0]]) * spec.num_bytes
                for name, spec in layout.by_rank[rank].tensors.items()
            }
            for rank in ranks
        ]
        fullest = max(sizes, key=lambda each: sum(each.values()))
        found.append(
            BareWeights(
                num_bytes=sum(fullest.values()),
                dense_bytes=sum(size for name, size in fullest.items() if not _is_expert(name)),
                largest_bytes=max(spec.num_bytes for rank in ranks for spec in layout.by_rank[rank].tensors.values()),
            )
        )
    return tuple(found)


def _one_layer_per_chunk(parallel: MegatronParallel) -> MegatronParallel:
    """The same shares of a layer, with as few replicas as hold all of them."""
    of_experts = parallel.expert * parallel.ranks_per_expert
    data = of_experts // math.gcd(of_experts, parallel.tensor)
    return replace(parallel, data=data, first_stage_layers=None, last_stage_layers=None)


@dataclass(frozen=True, slots=True, kw_only=True)
class GradientBuffers:
    """Elements of a rank's buffers, with Megatron's padding. Weights lie in equal ones."""

    dense: int
    """Reduced over, and sharded by, the data-parallel ranks."""
    expert: int
    """The same over the replicas of the experts, which are fewer where they are divided."""

    @property
    def num_elements(self) -> int:
        return self.dense + self.expert


def gradient_buffers(holding: Holding, shape: ModelShape, parallel: MegatronParallel, stage: int) -> GradientBuffers:
    """`holding` has one layer per chunk, which stands for all of them.

    A chunk is one bucket, because gradients are reduced after the backward pass; tied embeddings on two stages have a
    bucket of their own, and so have experts that are divided.
    """
    dense, expert = 0, 0
    for chunk in range(parallel.virtual_pipeline):
        layers = len(parallel.chunk_layers(shape.num_layers, stage=stage, chunk=chunk))
        sizes = {
            name: repeats(name, layers) * _round_up(prod(spec.shape), PARAM_ALIGNMENT)
            for name, spec in holding.tensors.items()
            if name.startswith(f"chunk{chunk}.")
        }
        is_tied_apart = shape.has_tied_embeddings and parallel.pipeline > 1
        apart = [size for name, size in sizes.items() if is_tied_apart and _is_vocabulary(name)]
        of_experts = sum(size for name, size in sizes.items() if parallel.expert > 1 and _is_expert(name))
        together = sum(sizes.values()) - sum(apart) - of_experts
        dense += sum(_round_up(size, math.lcm(parallel.data, BUCKET_ALIGNMENT)) for size in (*apart, together))
        expert += _round_up(of_experts, math.lcm(parallel.expert_data, BUCKET_ALIGNMENT))
    return GradientBuffers(dense=dense, expert=expert)


def repeats(name: str, layers: int) -> int:
    """How often a tensor of a model with one layer occurs in one with `layers`: they are all alike."""
    return layers if ".layers." in name else 1


def engine_memory(shape: ModelShape, rollout: RolloutRoleConfig, capacity_bytes: int | None) -> EngineMemory:
    """Of the fullest TP rank. The KV cache has as many tokens as asked for, or what the fraction leaves."""
    device: Device = "cpu" if capacity_bytes is None else "cuda"
    item_bytes = ITEM_BYTES[dtype_on(device)]
    weights = _engine_weights(shape, rollout.tensor, rollout.expert, device)
    per_token = 2 * shape.num_layers * -(-shape.num_kv_heads // rollout.tensor) * shape.head_dim * item_bytes
    if rollout.max_cached_tokens is not None:
        cached_tokens = rollout.max_cached_tokens
    elif capacity_bytes is None:
        cached_tokens = CPU_CACHED_TOKENS
    else:
        cached_tokens = max(0, int(capacity_bytes * rollout.memory_fraction) - weights.held_bytes) // per_token
    return EngineMemory(
        weight_bytes=weights.held_bytes,
        expert_bytes=weights.expert_bytes,
        staging_bytes=weights.staging_bytes,
        cache_bytes=cached_tokens * per_token,
        cache_bytes_per_token=per_token,
        cached_tokens=cached_tokens,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class _EngineWeights:
    held_bytes: int
    expert_bytes: int
    staging_bytes: int


@cache
def _engine_weights(shape: ModelShape, tensor: int, expert: int, device: Device) -> _EngineWeights:
    """Of the fullest TP rank. Remembered: a search for a recipe that fits asks for the same engine again and again."""
    layout = sglang_layout(
        replace(shape, num_layers=1),
        tensor=tensor,
        expert=expert,
        dtype=dtype_on(device),
        is_cpu_engine=device == "cpu",
    )
    layers = shape.num_layers
    return _EngineWeights(
        held_bytes=max(
            sum(repeats(name, layers) * spec.num_bytes for name, spec in holding.tensors.items())
            for holding in layout.holdings
        ),
        expert_bytes=layers
        * sum(spec.num_bytes for name, spec in layout.holdings[0].tensors.items() if _is_expert(name)),
        staging_bytes=ITEM_BYTES[dtype_on(device)]
        * max(
            sum(repeats(piece.slice.name, layers) * piece.slice.num_elements for piece in holding.pieces)
            for holding in layout.holdings
        ),
    )


def _is_vocabulary(local_name: str) -> bool:
    return "word_embeddings" in local_name or "output_layer" in local_name


def _is_expert(local_name: str) -> bool:
    return ".experts." in local_name


def _round_up(count: int, step: int) -> int:
    return -(-count // step) * step
