"""Memory that ranks and engines hold at all times: weights, gradients, optimizer, KV cache. All exact."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache
from math import prod

from megarl.config.lora import LoraConfig
from megarl.config.recipe import Recipe
from megarl.config.roles import EngineRoleConfig
from megarl.config.section import CPU_CACHED_TOKENS, Device, dtype_on, round_up
from megarl.families import family_of, uniform_shapes
from megarl.families.shape import ModelShape
from megarl.planner.draft import draft_memory
from megarl.planner.hardware import GpuModel
from megarl.planner.tower import engine_tower_parameters
from megarl.weights.algebra.slices import ITEM_BYTES, Layout, TensorSpec
from megarl.weights.layouts.fp8 import fp8_engine_layout
from megarl.weights.layouts.lora import LoraShape, adapter_layout, served_layout
from megarl.weights.layouts.megatron import MegatronParallel, megatron_layout
from megarl.weights.layouts.sglang import sglang_layout

PARAM_ALIGNMENT = 64
BUCKET_ALIGNMENT = 128
"""Elements. Megatron starts a parameter at a multiple of the first, and ends a bucket at a multiple of the second."""

BUFFERS = (".expert_bias",)
"""Ends of the names of Megatron's buffers, which have no gradients."""

ENGINE_CONTEXT_BYTES = 1 << 30
"""Allowance for CUDA context, loaded kernels and workspaces of an engine, without its graphs."""

NCCL_BYTES = 418 << 20
"""GPU memory of NCCL's kernels, once in each process that has a communicator; measured on an H200."""

COMMUNICATOR_BYTES = 225 << 20
"""Allowance for the buffers of one more communicator of ranks, per channel and neighbour on NVLink. Over sockets it is
6 MiB."""

PUBLISH_COMMUNICATOR_BYTES = 14 << 20
"""The same for the communicator of a publish, which only connects nodes; measured for 8 to 64 peers over sockets."""


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
    tower_bytes: int
    """Weights of what sees images; part of `weight_bytes`."""
    draft_bytes: int
    """Weights of a draft; part of `weight_bytes`."""
    adapter_bytes: int
    """Memory that is reserved for the adapters of all versions that are loaded at a time."""
    expert_bytes: int
    """Weights in experts; part of `weight_bytes`."""
    cache_bytes: int
    cache_bytes_per_token: int
    cached_tokens: int
    """Tokens that one engine caches; its TP ranks share each token's cache."""
    state_bytes_per_request: int
    """State of layers that no token attends in; part of `cache_bytes` for each request that runs."""
    is_cache_given: bool
    """Whether the size of the cache does not depend on the memory that is left."""

    def most_requests(self, tokens: int) -> int:
        """Return the requests of so many tokens that the cache holds, where none has a state reserved yet."""
        if self.is_cache_given:
            return self.cached_tokens // tokens
        return self.cache_bytes // (tokens * self.cache_bytes_per_token + self.state_bytes_per_request)


@cache
def stage_memory(
    shape: ModelShape,
    parallel: MegatronParallel,
    *,
    dtype: str,
    lora: LoraConfig | None = None,
    num_adapters: int = 1,
) -> tuple[StageMemory, ...]:
    """Return per pipeline stage the weights in `dtype`, float32 gradients, and the distributed optimizer's shard of
    float32 master weights and two moments. Under adapters the model has weights alone."""
    # Float32 weights are their own master weights.
    state_bytes = 8 if dtype == "float32" else 12
    frozen_bytes = [0] * parallel.pipeline
    if lora is not None:
        frozen_bytes = [stage.num_bytes for stage in bare_weights(shape, parallel, dtype=dtype)]
        if shape.has_value_head:
            # It is trained as a whole, and counted with the adapter.
            frozen_bytes[-1] -= shape.hidden * ITEM_BYTES[dtype]
    stages = []
    for stage in range(parallel.pipeline):
        ranks = held_tensors(shape, parallel, stage, dtype=dtype, lora=lora)
        buffers = max((gradient_buffers(shape, parallel, held) for held in ranks), key=lambda each: each.num_elements)
        sharded = buffers.dense // parallel.replicas + buffers.expert // parallel.expert_data
        stages.append(
            StageMemory(
                stage=stage,
                weight_bytes=frozen_bytes[stage]
                + num_adapters * (ITEM_BYTES[dtype] * buffers.num_elements + (4 - ITEM_BYTES[dtype]) * buffers.float32),
                gradient_bytes=num_adapters * 4 * buffers.num_elements,
                optimizer_bytes=num_adapters
                * (state_bytes * sharded - (state_bytes - 8) * (buffers.float32 // parallel.replicas)),
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
    stages = []
    for stage in range(parallel.pipeline):
        held = held_tensors(shape, parallel, stage, dtype=dtype)
        fullest = max(held, key=lambda tensors: sum(each.num_bytes for each in tensors))
        stages.append(
            BareWeights(
                num_bytes=sum(each.num_bytes for each in fullest),
                dense_bytes=sum(each.num_bytes for each in fullest if not _is_expert(each.name)),
                largest_bytes=max(each.spec.num_bytes for tensors in held for each in tensors),
            )
        )
    return tuple(stages)


@dataclass(frozen=True, slots=True, kw_only=True)
class HeldTensor:
    """A tensor of a rank, and how many equal ones the rank has: one in each layer of a kind."""

    name: str
    spec: TensorSpec
    count: int

    @property
    def num_bytes(self) -> int:
        return self.count * self.spec.num_bytes


def held_tensors(
    shape: ModelShape, parallel: MegatronParallel, stage: int, *, dtype: str, lora: LoraConfig | None = None
) -> list[list[HeldTensor]]:
    """Return the tensors of each rank of one replica of a stage; under an adapter those of the adapter."""
    family = family_of(shape)
    kinds = family.kinds(shape)
    ranks: list[list[HeldTensor]] = [[] for _ in range(parallel.tensor)]
    for place, kind in enumerate(dict.fromkeys(kinds)):
        numbers = [
            sum(kinds[layer] == kind for layer in parallel.chunk_layers(shape.num_layers, stage=stage, chunk=chunk))
            for chunk in range(parallel.virtual_pipeline)
        ]
        by_stage = _one_layer_per_chunk(family.alone(shape, kind), _thin(parallel), dtype=dtype)
        # The last stage is the last one here as well; the second stands for those between.
        layout = by_stage[-1] if stage == parallel.pipeline - 1 else by_stage[min(stage, 1)]
        if lora is not None:
            layout = adapter_layout(layout, LoraShape.of(lora))
        for holding, held in zip(layout.holdings, ranks, strict=True):
            for name, spec in holding.tensors.items():
                # What is outside of the layers is in the layout of every kind.
                count = numbers[_chunk_of(name)] if ".layers." in name else int(place == 0)
                if count:
                    held.append(HeldTensor(name=name, spec=spec, count=count))
    return ranks


def _chunk_of(name: str) -> int:
    return int(name.partition(".")[0].removeprefix("chunk"))


def _thin(parallel: MegatronParallel) -> MegatronParallel:
    """Return a split whose ranks have the same shares of a layer: with the fewest replicas, and one stage for all
    between the first and the last."""
    expert_ranks = parallel.expert * parallel.ranks_per_expert
    return replace(
        parallel,
        context=1,
        data=expert_ranks // math.gcd(expert_ranks, parallel.tensor),
        pipeline=min(parallel.pipeline, 3),
        first_stage_layers=None,
        last_stage_layers=None,
    )


@cache
def _one_layer_per_chunk(shape: ModelShape, thin: MegatronParallel, *, dtype: str) -> tuple[Layout, ...]:
    """Return per stage the layout of the ranks of one replica, with one layer in each chunk."""
    one_layer_each = replace(shape, num_layers=thin.pipeline * thin.virtual_pipeline)
    return tuple(
        megatron_layout(
            one_layer_each,
            thin,
            dtype=dtype,
            ranks=[thin.rank(tensor=tensor, data=0, pipeline=stage) for tensor in range(thin.tensor)],
        )
        for stage in range(thin.pipeline)
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class GradientBuffers:
    """Elements of a rank's gradient buffers with Megatron's padding; its weight buffers have the same sizes."""

    dense: int
    """Reduced over and sharded by the replicas: context x data."""
    expert: int
    """Reduced over and sharded by the replicas of the experts; 0 if experts are not divided."""
    float32: int
    """Elements of `dense` in a buffer of their own: weights that are float32 among others that are not."""

    @property
    def num_elements(self) -> int:
        return self.dense + self.expert


def gradient_buffers(shape: ModelShape, parallel: MegatronParallel, held: Sequence[HeldTensor]) -> GradientBuffers:
    """Return the buffers of a rank.

    A chunk is one bucket, because gradients are reduced after the backward pass; tied embeddings on two stages have a
    bucket of their own, and so have divided experts and weights of another dtype.
    """
    dense, expert, float32 = 0, 0, 0
    is_mixed = any(each.spec.dtype != "float32" for each in held)
    dense_multiple = math.lcm(parallel.replicas, BUCKET_ALIGNMENT)
    for chunk in range(parallel.virtual_pipeline):
        sizes = [
            (each, each.count * round_up(prod(each.spec.shape), PARAM_ALIGNMENT))
            for each in held
            if _chunk_of(each.name) == chunk and not each.name.endswith(BUFFERS)
        ]
        is_tied_apart = shape.has_tied_embeddings and parallel.pipeline > 1
        tied = [size for each, size in sizes if is_tied_apart and _is_vocabulary(each.name)]
        experts = sum(size for each, size in sizes if parallel.expert > 1 and _is_expert(each.name))
        wide = sum(size for each, size in sizes if is_mixed and each.spec.dtype == "float32")
        rest = sum(size for _, size in sizes) - sum(tied) - experts - wide
        dense += sum(round_up(size, dense_multiple) for size in (*tied, rest, wide))
        expert += round_up(experts, math.lcm(parallel.expert_data, BUCKET_ALIGNMENT))
        float32 += round_up(wide, dense_multiple)
    return GradientBuffers(dense=dense, expert=expert, float32=float32)


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


def adapter_versions(max_staleness: int) -> int:
    """Return the versions of an adapter that an engine has at a time: those in use, the newest, and one arriving."""
    return max_staleness + 2


def adapter_slots(recipe: Recipe) -> int:
    """Return the adapters that an engine has at a time: the versions of all policies."""
    return max(1, len(recipe.policies)) * adapter_versions(recipe.train.max_staleness)


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
    tower_bytes = ITEM_BYTES[dtype_on(device)] * engine_tower_parameters(shape, tensor=rollout.tensor)
    draft = draft_memory(rollout.served_draft, tensor=rollout.tensor, device=device)
    draft_bytes = 0 if draft is None else draft.weight_bytes
    weight_bytes = weights.held_bytes + tower_bytes + draft_bytes
    adapter_bytes = 0
    if lora is not None:
        adapter_bytes = (num_adapters + 1) * _adapter_bytes(shape, rollout.tensor, rollout.expert, device, lora)
    costs = [(family_of(each).attention(each), layers) for each, layers in uniform_shapes(shape)]
    per_token = sum(layers * cost.cached_on(rollout.tensor) for cost, layers in costs) * item_bytes
    per_request = sum(layers * cost.recurrence.state_bytes for cost, layers in costs if cost.recurrence)
    per_request //= rollout.tensor
    # SGLang has one more, for the padding of batches.
    states_bytes = per_request * (rollout.max_running_requests + 1) if rollout.max_running_requests else 0
    if rollout.max_cached_tokens is not None:
        cached_tokens = rollout.max_cached_tokens
    elif capacity_bytes is None:
        cached_tokens = CPU_CACHED_TOKENS
    else:
        # SGLang takes its fraction of the memory that is free when its context exists.
        static_bytes = int((capacity_bytes - ENGINE_CONTEXT_BYTES) * rollout.memory_fraction)
        counted = per_token if draft is None else per_token * (shape.num_layers + draft.num_layers) // shape.num_layers
        cached_tokens = max(0, static_bytes - weight_bytes - adapter_bytes - states_bytes) // counted
    per_token += 0 if draft is None else draft.cache_bytes_per_token
    return EngineMemory(
        weight_bytes=weight_bytes,
        tower_bytes=tower_bytes,
        draft_bytes=draft_bytes,
        adapter_bytes=adapter_bytes,
        expert_bytes=weights.expert_bytes,
        cache_bytes=cached_tokens * per_token + states_bytes,
        cache_bytes_per_token=per_token,
        cached_tokens=cached_tokens,
        state_bytes_per_request=per_request,
        is_cache_given=rollout.max_cached_tokens is not None or capacity_bytes is None,
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
    # All layers of a kind are alike, unless patterns name some of them.
    kinds = ((shape, 1),) if fp8_keep else tuple((replace(each, num_layers=1), n) for each, n in uniform_shapes(shape))
    held, in_experts = [0] * tensor, 0
    for place, (one, layers) in enumerate(kinds):
        layout = sglang_layout(one, tensor=tensor, expert=expert, dtype=dtype_on(device), is_cpu_engine=device == "cpu")
        if fp8_keep is not None:
            layout = fp8_engine_layout(layout, one, fp8_keep)
        for rank, holding in enumerate(layout.holdings):
            # What is outside of the layers is in the layout of every kind.
            for name, spec in holding.tensors.items():
                held[rank] += spec.num_bytes * (layers if ".layers." in name else int(place == 0))
        experts = (spec.num_bytes for name, spec in layout.holdings[0].tensors.items() if _is_expert(name))
        in_experts += layers * sum(experts)
    return _EngineWeights(held_bytes=max(held), expert_bytes=in_experts)


@cache
def _adapter_bytes(shape: ModelShape, tensor: int, expert: int, device: Device, lora: LoraConfig) -> int:
    """Return the memory of one adapter in the fullest TP rank."""
    held = [0] * tensor
    for each, layers in uniform_shapes(shape):
        layout = sglang_layout(
            replace(each, num_layers=1),
            tensor=tensor,
            expert=expert,
            dtype=dtype_on(device),
            is_cpu_engine=device == "cpu",
        )
        for rank, holding in enumerate(served_layout(layout, LoraShape.of(lora)).holdings):
            held[rank] += layers * holding.num_bytes
    return max(held)


def _is_vocabulary(local_name: str) -> bool:
    return "word_embeddings" in local_name or "output_layer" in local_name


def _is_expert(local_name: str) -> bool:
    return ".experts." in local_name
