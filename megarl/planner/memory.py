"""Memory that ranks and engines hold at all times: weights, gradients, optimizer, KV cache. All exact."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from functools import cache
from math import prod

from megarl.config.lora import LoraConfig
from megarl.config.roles import EngineRoleConfig
from megarl.config.section import CPU_CACHED_TOKENS, Device, dtype_on, round_up
from megarl.families.shape import ModelShape
from megarl.planner.hardware import GpuModel
from megarl.weights.algebra.slices import ITEM_BYTES, Holding, Layout
from megarl.weights.layouts.fp8 import fp8_engine_layout
from megarl.weights.layouts.lora import LoraShape, adapter_layout
from megarl.weights.layouts.megatron import MegatronParallel, megatron_layout
from megarl.weights.layouts.sglang import sglang_layout

PARAM_ALIGNMENT = 64
BUCKET_ALIGNMENT = 128
"""Elements. Megatron starts a parameter at a multiple of the first, and ends a bucket at a multiple of the second."""

ENGINE_CONTEXT_BYTES = 1 << 30
"""Allowance for CUDA context, loaded kernels and workspaces of an engine, without its graphs."""

COMMUNICATOR_BYTES = 225 << 20
"""GPU memory of one NCCL communicator in one process; measured for two ranks over sockets on an H200."""

PUBLISH_COMMUNICATOR_BYTES = 434 << 20
"""The same for the communicator of a publish; measured for eight peers that exchange with each other."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StageMemory:
    """Memory of the fullest rank of a pipeline stage."""

    stage: int
    weight_bytes: int
    gradient_bytes: int
    optimizer_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineMemory:
    weight_bytes: int
    adapter_bytes: int
    """Memory that is reserved for the adapters of all versions that are loaded at a time."""
    expert_bytes: int
    """Weights in experts; part of `weight_bytes`."""
    cache_bytes: int
    cache_bytes_per_token: int
    cached_tokens: int
    """Tokens that one engine caches; its TP ranks share each token's cache."""


@cache
def stage_memory(
    shape: ModelShape, parallel: MegatronParallel, *, dtype: str, lora: LoraConfig | None = None
) -> tuple[StageMemory, ...]:
    """Return per pipeline stage the weights in `dtype`, float32 gradients, and the distributed optimizer's shard of
    float32 master weights and two moments. Under an adapter the model has weights alone."""
    # Float32 weights are their own master weights.
    state_bytes = 8 if dtype == "float32" else 12
    layout, ranks_of = _one_layer_per_chunk(shape, parallel, dtype=dtype)
    frozen_bytes = [0] * parallel.pipeline
    if lora is not None:
        layout = adapter_layout(layout, LoraShape.of(lora))
        frozen_bytes = [stage.num_bytes for stage in bare_weights(shape, parallel, dtype=dtype)]
        if shape.has_value_head:
            # It is trained as a whole, and counted with the adapter.
            frozen_bytes[-1] -= shape.hidden * ITEM_BYTES[dtype]
    stages = []
    for stage in range(parallel.pipeline):
        buffers = max(
            (gradient_buffers(layout.by_rank[rank], shape, parallel, stage) for rank in ranks_of[stage]),
            key=lambda each: each.num_elements,
        )
        sharded = buffers.dense // parallel.replicas + buffers.expert // parallel.expert_data
        stages.append(
            StageMemory(
                stage=stage,
                weight_bytes=frozen_bytes[stage] + ITEM_BYTES[dtype] * buffers.num_elements,
                gradient_bytes=4 * buffers.num_elements,
                optimizer_bytes=state_bytes * sharded,
            )
        )
    return tuple(stages)


@dataclass(frozen=True, slots=True, kw_only=True)
class BareWeights:
    """Weights of a stage's fullest rank without Megatron's buffers: of an untrained model, or in host memory."""

    num_bytes: int
    dense_bytes: int
    """Weights outside of experts; part of `num_bytes`."""
    largest_bytes: int
    """Size of the largest tensor."""


@cache
def bare_weights(shape: ModelShape, parallel: MegatronParallel, *, dtype: str) -> tuple[BareWeights, ...]:
    """Return the weights per pipeline stage."""
    layout, ranks_of = _one_layer_per_chunk(shape, parallel, dtype=dtype)
    stages = []
    for stage in range(parallel.pipeline):
        layers = {
            f"chunk{chunk}": len(parallel.chunk_layers(shape.num_layers, stage=stage, chunk=chunk))
            for chunk in range(parallel.virtual_pipeline)
        }
        held = [layout.by_rank[rank].tensors for rank in ranks_of[stage]]
        sizes = [
            {name: repeats(name, layers[name.partition(".")[0]]) * spec.num_bytes for name, spec in tensors.items()}
            for tensors in held
        ]
        fullest = max(sizes, key=lambda each: sum(each.values()))
        stages.append(
            BareWeights(
                num_bytes=sum(fullest.values()),
                dense_bytes=sum(size for name, size in fullest.items() if not _is_expert(name)),
                largest_bytes=max(spec.num_bytes for tensors in held for spec in tensors.values()),
            )
        )
    return tuple(stages)


def _one_layer_per_chunk(
    shape: ModelShape, parallel: MegatronParallel, *, dtype: str
) -> tuple[Layout, list[list[int]]]:
    """Return a layout with the same shares of a layer and the fewest replicas, and the ranks of a replica per stage."""
    expert_ranks = parallel.expert * parallel.ranks_per_expert
    data = expert_ranks // math.gcd(expert_ranks, parallel.tensor)
    thin = replace(parallel, context=1, data=data, first_stage_layers=None, last_stage_layers=None)
    one_layer_each = replace(shape, num_layers=parallel.pipeline * parallel.virtual_pipeline)
    ranks_of = [
        [thin.rank(tensor=tensor, data=0, pipeline=stage) for tensor in range(parallel.tensor)]
        for stage in range(parallel.pipeline)
    ]
    return megatron_layout(one_layer_each, thin, dtype=dtype), ranks_of


@dataclass(frozen=True, slots=True, kw_only=True)
class GradientBuffers:
    """Elements of a rank's gradient buffers with Megatron's padding; its weight buffers have the same sizes."""

    dense: int
    """Reduced over and sharded by the replicas: context x data."""
    expert: int
    """Reduced over and sharded by the replicas of the experts; 0 if experts are not divided."""

    @property
    def num_elements(self) -> int:
        return self.dense + self.expert


def gradient_buffers(holding: Holding, shape: ModelShape, parallel: MegatronParallel, stage: int) -> GradientBuffers:
    """Return the buffers of a rank; `holding` has one layer per chunk, which stands for all layers of the chunk.

    A chunk is one bucket, because gradients are reduced after the backward pass; tied embeddings on two stages have a
    bucket of their own, and so have divided experts.
    """
    dense, expert = 0, 0
    for chunk in range(parallel.virtual_pipeline):
        layers = len(parallel.chunk_layers(shape.num_layers, stage=stage, chunk=chunk))
        sizes = {
            name: repeats(name, layers) * round_up(prod(spec.shape), PARAM_ALIGNMENT)
            for name, spec in holding.tensors.items()
            if name.startswith(f"chunk{chunk}.")
        }
        is_tied_apart = shape.has_tied_embeddings and parallel.pipeline > 1
        tied = [size for name, size in sizes.items() if is_tied_apart and _is_vocabulary(name)]
        experts = sum(size for name, size in sizes.items() if parallel.expert > 1 and _is_expert(name))
        rest = sum(sizes.values()) - sum(tied) - experts
        dense += sum(round_up(size, math.lcm(parallel.replicas, BUCKET_ALIGNMENT)) for size in (*tied, rest))
        expert += round_up(experts, math.lcm(parallel.expert_data, BUCKET_ALIGNMENT))
    return GradientBuffers(dense=dense, expert=expert)


def repeats(name: str, layers: int) -> int:
    """Return how often a tensor of a one-layer model occurs in a model of `layers` equal layers."""
    return layers if ".layers." in name else 1


def planned_cached_tokens(
    shape: ModelShape,
    rollout: EngineRoleConfig,
    gpu: GpuModel,
    *,
    lora: LoraConfig | None = None,
    num_adapters: int = 0,
) -> int:
    """Return the tokens of KV cache that the plan grants one engine on GPUs of this kind.

    They do not depend on what else is on the GPU when the engine starts, unlike the size that SGLang would choose.
    """
    memory = engine_memory(shape, rollout, gpu.memory_bytes, lora=lora, num_adapters=num_adapters)
    return memory.cached_tokens


def adapter_slots(max_staleness: int) -> int:
    """Return the versions of an adapter that an engine has at a time: those in use, the newest, and one arriving."""
    return max_staleness + 2


def engine_memory(
    shape: ModelShape,
    rollout: EngineRoleConfig,
    capacity_bytes: int | None,
    *,
    lora: LoraConfig | None = None,
    num_adapters: int = 0,
) -> EngineMemory:
    """Return the memory of the fullest TP rank; the KV cache has `max_cached_tokens`, or what `memory_fraction` leaves.

    `capacity_bytes` is None on a CPU. SGLang has room for `num_adapters` and for requests without one.
    """
    device: Device = "cpu" if capacity_bytes is None else "cuda"
    item_bytes = 1 if rollout.has_fp8_cache else ITEM_BYTES[dtype_on(device)]
    weights = _engine_weights(shape, rollout.tensor, rollout.expert, device, rollout.fp8_keep)
    adapter_bytes = 0
    if lora is not None:
        adapter_bytes = (num_adapters + 1) * _adapter_bytes(shape, rollout.tensor, rollout.expert, device, lora)
    per_token = 2 * shape.num_layers * -(-shape.num_kv_heads // rollout.tensor) * shape.head_dim * item_bytes
    if rollout.max_cached_tokens is not None:
        cached_tokens = rollout.max_cached_tokens
    elif capacity_bytes is None:
        cached_tokens = CPU_CACHED_TOKENS
    else:
        # SGLang takes its fraction of the memory that is free when its context exists.
        static_bytes = int((capacity_bytes - ENGINE_CONTEXT_BYTES) * rollout.memory_fraction)
        cached_tokens = max(0, static_bytes - weights.held_bytes - adapter_bytes) // per_token
    return EngineMemory(
        weight_bytes=weights.held_bytes,
        adapter_bytes=adapter_bytes,
        expert_bytes=weights.expert_bytes,
        cache_bytes=cached_tokens * per_token,
        cache_bytes_per_token=per_token,
        cached_tokens=cached_tokens,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class _EngineWeights:
    held_bytes: int
    expert_bytes: int


@cache
def _engine_weights(
    shape: ModelShape, tensor: int, expert: int, device: Device, fp8_keep: tuple[str, ...] | None
) -> _EngineWeights:
    """Return the weights of the fullest TP rank; cached, because a search for proposals computes few engines often."""
    # All layers are alike, unless patterns name some of them.
    layers = shape.num_layers if not fp8_keep else 1
    one = shape if fp8_keep else replace(shape, num_layers=1)
    layout = sglang_layout(one, tensor=tensor, expert=expert, dtype=dtype_on(device), is_cpu_engine=device == "cpu")
    if fp8_keep is not None:
        layout = fp8_engine_layout(layout, one, fp8_keep)
    return _EngineWeights(
        held_bytes=max(
            sum(repeats(name, layers) * spec.num_bytes for name, spec in holding.tensors.items())
            for holding in layout.holdings
        ),
        expert_bytes=layers
        * sum(spec.num_bytes for name, spec in layout.holdings[0].tensors.items() if _is_expert(name)),
    )


@cache
def _adapter_bytes(shape: ModelShape, tensor: int, expert: int, device: Device, lora: LoraConfig) -> int:
    """Return the memory of one adapter in the fullest TP rank."""
    layout = sglang_layout(
        replace(shape, num_layers=1),
        tensor=tensor,
        expert=expert,
        dtype=dtype_on(device),
        is_cpu_engine=device == "cpu",
    )
    held = adapter_layout(layout, LoraShape.of(lora))
    return shape.num_layers * max(holding.num_bytes for holding in held.holdings)


def _is_vocabulary(local_name: str) -> bool:
    return "word_embeddings" in local_name or "output_layer" in local_name


def _is_expert(local_name: str) -> bool:
    return ".experts." in local_name
