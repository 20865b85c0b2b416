"""What a pass through a model needs besides the weights: an estimate from the tensors that the trainer's layers make.

Sequences are packed. What Megatron recomputes is not kept, and is there once more while its layer goes backward.
"""

from __future__ import annotations

from dataclasses import dataclass

from megarl.config.model import ModelShape
from megarl.config.recipe import Recipe
from megarl.config.roles import ModelParallelConfig
from megarl.config.section import LOGIT_CHUNK_BYTES, PAD_MULTIPLE, Device, dtype_on
from megarl.weights.algebra.slices import ITEM_BYTES
from megarl.weights.layouts.megatron import MegatronParallel, padded_vocab

NUM_CPU_LOGIT_CHUNKS = 4
"""On a CPU logits, their exponentials and gradients of one chunk of tokens exist together; on a GPU gradients take the
place of the logits."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelWork:
    """One model, how it is split, and what it computes on at a time."""

    shape: ModelShape
    split: ModelParallelConfig
    tokens: int
    """Of a full micro-batch."""
    device: Device

    @property
    def item_bytes(self) -> int:
        return ITEM_BYTES[dtype_on(self.device)]

    @classmethod
    def of(cls, recipe: Recipe, shape: ModelShape, split: ModelParallelConfig) -> ModelWork:
        return cls(
            shape=shape,
            split=split,
            tokens=_round_up(recipe.train.tokens_per_micro_batch, PAD_MULTIPLE * split.tensor),
            device=recipe.run.device,
        )

    def chunk_layers(self, stage: int) -> int:
        """Of each chunk of a stage."""
        parallel = MegatronParallel.of(self.split, data=1)
        return len(parallel.chunk_layers(self.shape.num_layers, stage=stage, chunk=0))


@dataclass(frozen=True, slots=True, kw_only=True)
class Recomputation:
    """What `megatron` says about it."""

    is_full: bool
    method: str
    num_layers: int
    modules: frozenset[str]

    @classmethod
    def of(cls, split: ModelParallelConfig) -> Recomputation | None:
        options = split.megatron
        granularity = options.get("recompute_granularity")
        if granularity is None:
            return None
        modules = options.get("recompute_modules", ["core_attn"])
        number = options.get("recompute_num_layers", 1)
        return cls(
            is_full=granularity == "full",
            method=str(options.get("recompute_method")),
            num_layers=number if isinstance(number, int) else 1,
            modules=frozenset(str(name) for name in modules) if isinstance(modules, list) else frozenset(),
        )


def activation_bytes(work: ModelWork, stage: int) -> int:
    """What the micro-batches in flight on a stage keep for the backward pass, and what one layer's backward needs."""
    layers = work.chunk_layers(stage)
    kept = chunks_in_flight(work.split, stage) * _kept_bytes_per_token(work, layers)
    return work.tokens * (kept + _recomputed_bytes_per_token(work, layers) + _backward_bytes_per_token(work))


def forward_bytes(work: ModelWork) -> int:
    """Of a pass without gradients: one layer at a time, nothing is kept."""
    return work.tokens * layer_bytes(work).total


def chunks_in_flight(split: ModelParallelConfig, stage: int) -> int:
    """Forward passes of model chunks whose backward has not come, at most: 1F1B, interleaved with virtual stages."""
    behind = split.pipeline - 1 - stage
    if split.virtual_pipeline == 1:
        return behind + 1
    return 2 * behind + (split.virtual_pipeline - 1) * split.pipeline + 1


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerBytes:
    """Made by one layer and wanted again by its backward pass, per token of the micro-batch and rank."""

    inputs: int
    """Of the two norms: of the layer itself, and after attention."""
    normed: int
    attention: int
    """Projections, rotated ones and what was attended to."""
    statistics: int
    feed_forward: int
    """With a mixture's router."""
    is_mixture: bool

    @property
    def total(self) -> int:
        return self.inputs + self.normed + self.attention + self.statistics + self.feed_forward

    @property
    def of_layer_input(self) -> int:
        return self.inputs // 2

    def recomputed(self, modules: frozenset[str]) -> int:
        """What is not kept with selective recomputation. The output of attention is kept: its projection wants it."""
        by_module = {
            "core_attn": self.statistics,
            "mlp": 0 if self.is_mixture else self.feed_forward,
            "moe": self.feed_forward if self.is_mixture else 0,
            "layernorm": self.normed,
        }
        return sum(size for name, size in by_module.items() if name in modules)


def layer_bytes(work: ModelWork) -> LayerBytes:
    shape, tensor, item = work.shape, work.split.tensor, work.item_bytes
    split = tensor if work.split.is_sequence_parallel else 1
    query, kv = shape.num_heads * shape.head_dim, shape.num_kv_heads * shape.head_dim
    projected = (query + 2 * kv) // tensor
    rotated = (query + kv) // tensor * (2 if shape.has_qk_norm else 1)
    angles = 4 * shape.head_dim  # sine and cosine, for queries and for keys
    attended = query // tensor
    feed_forward = 3 * shape.ffn_hidden // tensor  # gate and up, and their product
    router = 0
    if shape.experts is not None:
        # What goes in, gate and up, and their product before and after its weight, if experts are used alike.
        copies = shape.experts.per_token
        feed_forward = copies * (work.split.ranks_per_expert * shape.hidden + 4 * shape.ffn_hidden) // tensor
        router = 4 * (shape.hidden + 2 * shape.experts.num) // split  # in float32
    return LayerBytes(
        inputs=item * 2 * shape.hidden // split,
        normed=item * 2 * shape.hidden // split,
        attention=item * (projected + rotated + angles + attended),
        statistics=4 * (shape.num_heads // tensor + 2),
        feed_forward=item * feed_forward + router,
        is_mixture=shape.experts is not None,
    )


def scoring_bytes(work: ModelWork, *, has_gradients: bool) -> int:
    """Logits of a chunk of tokens and the gathered hidden states; with gradients also theirs, and that of the output
    matrix in float32 and in the weights' type. A critic makes no logits."""
    hidden_bytes = work.item_bytes * work.tokens * work.shape.hidden
    if work.shape.has_value_head:
        return (2 if has_gradients else 1) * hidden_bytes
    rows = padded_vocab(work.shape.vocab, work.split.tensor) // work.split.tensor
    num_chunks = NUM_CPU_LOGIT_CHUNKS if work.device == "cpu" else 1
    logits = num_chunks * min(LOGIT_CHUNK_BYTES, work.item_bytes * work.tokens * rows)
    if not has_gradients:
        return logits + hidden_bytes
    return logits + 2 * hidden_bytes + (4 + work.item_bytes) * rows * work.shape.hidden


def recomputed_share(work: ModelWork) -> float:
    """Of the arithmetic of a forward pass, what the backward pass repeats."""
    found = Recomputation.of(work.split)
    if found is None:
        return 0.0
    if found.is_full:
        return 1.0 if found.method == "uniform" else min(1.0, found.num_layers / work.chunk_layers(0))
    shape = work.shape
    feed_forward = 3 * shape.ffn_hidden * (1 if shape.experts is None else shape.experts.per_token)
    projections = shape.head_dim * (2 * shape.num_heads + 2 * shape.num_kv_heads)
    module = "mlp" if shape.experts is None else "moe"
    return feed_forward / (feed_forward + projections) if module in found.modules else 0.0


def _kept_bytes_per_token(work: ModelWork, layers: int) -> int:
    """By all layers of a chunk."""
    each, found = layer_bytes(work), Recomputation.of(work.split)
    if found is None:
        return layers * each.total
    if not found.is_full:
        return layers * (each.total - each.recomputed(found.modules))
    if found.method == "uniform":
        return -(-layers // found.num_layers) * each.of_layer_input
    recomputed = min(layers, found.num_layers)
    return recomputed * each.of_layer_input + (layers - recomputed) * each.total


def _recomputed_bytes_per_token(work: ModelWork, layers: int) -> int:
    """Made once more, for as long as the layers they belong to go backward."""
    each, found = layer_bytes(work), Recomputation.of(work.split)
    if found is None:
        return 0
    if not found.is_full:
        return each.recomputed(found.modules)
    return each.total * (min(found.num_layers, layers) if found.method == "uniform" else 1)


def _backward_bytes_per_token(work: ModelWork) -> int:
    """Gradients of the widest tensors of one layer, alive together."""
    shape, split = work.shape, work.split
    if shape.experts is None:
        return work.item_bytes * (4 * shape.ffn_hidden // split.tensor + 2 * shape.hidden)
    in_experts = shape.experts.per_token * (4 * shape.ffn_hidden + 2 * split.ranks_per_expert * shape.hidden)
    return work.item_bytes * (in_experts // split.tensor + 2 * shape.hidden)


def _round_up(count: int, step: int) -> int:
    return -(-count // step) * step
