"""How much memory each GPU needs in each phase. Weights, gradients, optimizer, staging and cache are exact; the rest is
an estimate from the tensors that the trainer's layers keep for the backward pass.

Sizes follow what the trainer and the engine do today: packed sequences, no recomputation, no offload; in a shared pool
a sleeping engine gives back its KV cache and keeps its weights.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from math import prod

from megarl.config.model import ModelShape
from megarl.config.recipe import Recipe, RolloutRoleConfig
from megarl.planner.hardware import GIB, Gpu
from megarl.planner.placement import Placement
from megarl.weights.megatron import MegatronParallel, megatron_layout, padded_vocab
from megarl.weights.sglang import sglang_layout
from megarl.weights.slices import Holding

PARAM_ALIGNMENT = 64
BUCKET_ALIGNMENT = 128
"""Elements. Megatron starts each parameter at a multiple of the one, and ends a bucket at one of the other."""

SENDER_BYTES = 2 * (64 << 20)
"""Two buckets under way."""
LOGIT_CHUNK_BYTES = 640 << 20
"""Of one chunk of tokens, in the weights' type; their gradient takes their place."""
NUM_CPU_LOGIT_CHUNKS = 4
"""On a CPU logits, their exponentials and gradients exist together."""
CONTEXT_BYTES = 2 * GIB
"""CUDA context, NCCL buffers and fragmentation of one process: an allowance."""
GRAPH_BYTES = 3 * GIB
"""CUDA graphs and activations of an engine: an allowance."""
PAD_TOKENS = 8
"""Packed lengths are multiples of this times the tensor-parallel size."""


CPU_CACHED_TOKENS = 32_768


class Phase(StrEnum):
    GENERATING = "generating"
    TRAINING = "training"
    PUBLISHING = "publishing"


@dataclass(frozen=True, slots=True, kw_only=True)
class Item:
    name: str
    num_bytes: int
    is_exact: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Ledger:
    """One GPU (the fullest of its kind) in one phase."""

    where: str
    phase: Phase
    items: tuple[Item, ...]
    capacity_bytes: int | None
    """None on a CPU run: the ledger is then of host memory."""

    @property
    def total_bytes(self) -> int:
        return sum(item.num_bytes for item in self.items)

    @property
    def margin_bytes(self) -> int | None:
        return None if self.capacity_bytes is None else self.capacity_bytes - self.total_bytes


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


def stage_memory(shape: ModelShape, parallel: MegatronParallel, *, is_cpu: bool) -> list[StageMemory]:
    """Per pipeline stage: bfloat16 weights (float32 on a CPU), float32 gradients, and the distributed optimizer's shard
    of float32 master weights and two moments."""
    item_bytes = 4 if is_cpu else 2
    # On a CPU the weights are float32 already and serve as their own master.
    state_bytes = 8 if is_cpu else 12
    thin = _one_layer_per_chunk(parallel)
    layout = megatron_layout(
        replace(shape, num_layers=parallel.pipeline * parallel.virtual_pipeline),
        thin,
        dtype="float32" if is_cpu else "bfloat16",
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
                weight_bytes=item_bytes * buffers.num_elements,
                gradient_bytes=4 * buffers.num_elements,
                optimizer_bytes=state_bytes * sharded,
            )
        )
    return stages


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
    is_cpu = capacity_bytes is None
    item_bytes = 4 if is_cpu else 2
    layout = sglang_layout(
        replace(shape, num_layers=1),
        tensor=rollout.tensor,
        expert=rollout.expert,
        dtype="float32" if is_cpu else "bfloat16",
        is_cpu_engine=is_cpu,
    )
    layers = shape.num_layers
    weight_bytes = max(
        sum(repeats(name, layers) * spec.num_bytes for name, spec in holding.tensors.items())
        for holding in layout.holdings
    )
    expert_bytes = layers * sum(spec.num_bytes for name, spec in layout.holdings[0].tensors.items() if _is_expert(name))
    staging_bytes = item_bytes * max(
        sum(repeats(piece.slice.name, layers) * piece.slice.num_elements for piece in holding.pieces)
        for holding in layout.holdings
    )
    per_token = 2 * layers * -(-shape.num_kv_heads // rollout.tensor) * shape.head_dim * item_bytes
    if rollout.max_cached_tokens is not None:
        cached_tokens = rollout.max_cached_tokens
    elif capacity_bytes is None:
        cached_tokens = CPU_CACHED_TOKENS
    else:
        cached_tokens = max(0, int(capacity_bytes * rollout.memory_fraction) - weight_bytes) // per_token
    return EngineMemory(
        weight_bytes=weight_bytes,
        expert_bytes=expert_bytes,
        staging_bytes=staging_bytes,
        cache_bytes=cached_tokens * per_token,
        cache_bytes_per_token=per_token,
        cached_tokens=cached_tokens,
    )


def activation_bytes(recipe: Recipe, shape: ModelShape, stage: int) -> int:
    """What the micro-batches in flight on a stage keep for the backward pass, and what one layer's backward needs."""
    actor = recipe.roles.actor
    tokens = packed_tokens(recipe)
    parallel = MegatronParallel.of(actor, data=recipe.data_parallel)
    layers = len(parallel.chunk_layers(shape.num_layers, stage=stage, chunk=0))
    in_flight = chunks_in_flight(recipe, stage)
    kept = in_flight * layers * layer_bytes_per_token(recipe, shape)
    return tokens * (kept + _backward_bytes_per_token(recipe, shape))


def packed_tokens(recipe: Recipe) -> int:
    return _round_up(recipe.train.tokens_per_micro_batch, PAD_TOKENS * recipe.roles.actor.tensor)


def chunks_in_flight(recipe: Recipe, stage: int) -> int:
    """Forward passes of model chunks whose backward has not come, at most: 1F1B, interleaved with virtual stages."""
    actor = recipe.roles.actor
    behind = actor.pipeline - 1 - stage
    if actor.virtual_pipeline == 1:
        return behind + 1
    return 2 * behind + (actor.virtual_pipeline - 1) * actor.pipeline + 1


def layer_bytes_per_token(recipe: Recipe, shape: ModelShape) -> int:
    """Kept by one layer for its backward pass, per token of the micro-batch and rank."""
    actor = recipe.roles.actor
    item = 4 if recipe.run.device == "cpu" else 2
    tensor = actor.tensor
    split = tensor if actor.is_sequence_parallel else 1
    query, kv = shape.num_heads * shape.head_dim, shape.num_kv_heads * shape.head_dim
    residual = 4 * shape.hidden // split  # two norms: what goes in and what comes out
    projected = (query + 2 * kv) // tensor
    rotated = (query + kv) // tensor * (2 if shape.has_qk_norm else 1)
    angles = 4 * shape.head_dim  # sine and cosine, for queries and for keys
    attended = query // tensor
    feed_forward = 3 * shape.ffn_hidden // tensor  # gate and up, and their product
    statistics = 4 * (shape.num_heads // tensor + 2)
    if shape.experts is not None:
        # What goes in, gate and up, and their product before and after its weight, if experts are used alike.
        copies = shape.experts.per_token
        feed_forward = copies * (actor.ranks_per_expert * shape.hidden + 4 * shape.ffn_hidden) // tensor
        statistics += 4 * (shape.hidden + 2 * shape.experts.num) // split  # the router's, in float32
    return item * (residual + projected + rotated + angles + attended + feed_forward) + statistics


def ledgers(recipe: Recipe, shape: ModelShape, placement: Placement, gpu: Gpu) -> tuple[Ledger, ...]:
    """The fullest GPU of every kind in every phase."""
    is_cpu = recipe.run.device == "cpu"
    capacity = None if is_cpu else gpu.memory_bytes
    context = () if is_cpu else (Item(name="context", num_bytes=CONTEXT_BYTES, is_exact=False),)
    stages = stage_memory(shape, placement.parallel, is_cpu=is_cpu)
    resident = max((_resident(stage) for stage in stages), key=_total)
    training = max(
        ((*_resident(stage), *_working(recipe, shape, stage)) for stage in stages),
        key=_total,
    )
    sending = Item(name="send buckets", num_bytes=SENDER_BYTES, is_exact=True)
    rollout = recipe.roles.rollout

    def ledger(where: str, phase: Phase, items: Sequence[Item]) -> Ledger:
        return Ledger(where=where, phase=phase, items=(*items, *context), capacity_bytes=capacity)

    if rollout is None:
        return (ledger("actor", Phase.TRAINING, training),)
    engine = engine_memory(shape, rollout, capacity)
    weights = Item(name="engine weights", num_bytes=engine.weight_bytes, is_exact=True)
    cache = Item(name="KV cache", num_bytes=engine.cache_bytes, is_exact=True)
    staging = Item(name="staging", num_bytes=engine.staging_bytes, is_exact=True)
    graphs = () if is_cpu else (Item(name="engine graphs", num_bytes=GRAPH_BYTES, is_exact=False),)
    asleep = (weights, staging, *graphs, *context)
    if placement.is_shared:
        return (
            ledger("actor + engine", Phase.GENERATING, (*resident, sending, *asleep, cache)),
            ledger("actor + engine", Phase.TRAINING, (*training, sending, *asleep)),
            ledger("actor + engine", Phase.PUBLISHING, (*resident, sending, *asleep)),
        )
    return (
        ledger("actor", Phase.TRAINING, (*training, sending)),
        ledger("actor", Phase.PUBLISHING, (*resident, sending)),
        ledger("engine", Phase.GENERATING, (weights, cache, staging, *graphs)),
    )


def _resident(stage: StageMemory) -> tuple[Item, ...]:
    return (
        Item(name="weights", num_bytes=stage.weight_bytes, is_exact=True),
        Item(name="gradients", num_bytes=stage.gradient_bytes, is_exact=True),
        Item(name="optimizer", num_bytes=stage.optimizer_bytes, is_exact=True),
    )


def _working(recipe: Recipe, shape: ModelShape, stage: StageMemory) -> tuple[Item, ...]:
    items = [Item(name="activations", num_bytes=activation_bytes(recipe, shape, stage.stage), is_exact=False)]
    if stage.stage == recipe.roles.actor.pipeline - 1:
        items.append(Item(name="log-probabilities", num_bytes=_scoring_bytes(recipe, shape), is_exact=False))
    return tuple(items)


def _scoring_bytes(recipe: Recipe, shape: ModelShape) -> int:
    """Logits of a chunk of tokens, the gathered hidden states with their gradient, and the gradient of the output
    matrix in float32 and in the weights' type."""
    tensor = recipe.roles.actor.tensor
    item = 4 if recipe.run.device == "cpu" else 2
    rows = padded_vocab(shape.vocab, tensor) // tensor
    tokens = packed_tokens(recipe)
    num_chunks = NUM_CPU_LOGIT_CHUNKS if recipe.run.device == "cpu" else 1
    logits = num_chunks * min(LOGIT_CHUNK_BYTES, item * tokens * rows)
    return logits + 2 * item * tokens * shape.hidden + (4 + item) * rows * shape.hidden


def _backward_bytes_per_token(recipe: Recipe, shape: ModelShape) -> int:
    """Gradients of the widest tensors of one layer, alive together."""
    item = 4 if recipe.run.device == "cpu" else 2
    actor = recipe.roles.actor
    if shape.experts is None:
        return item * (4 * shape.ffn_hidden // actor.tensor + 2 * shape.hidden)
    copies = shape.experts.per_token
    in_experts = copies * (4 * shape.ffn_hidden + 2 * actor.ranks_per_expert * shape.hidden) // actor.tensor
    return item * (in_experts + 2 * shape.hidden)


def _is_vocabulary(local_name: str) -> bool:
    return "word_embeddings" in local_name or "output_layer" in local_name


def _is_expert(local_name: str) -> bool:
    return ".experts." in local_name


def _total(items: Sequence[Item]) -> int:
    return sum(item.num_bytes for item in items)


def _round_up(count: int, step: int) -> int:
    return -(-count // step) * step
