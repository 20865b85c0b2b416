"""Memory of activations: an estimate from the tensors that the trainer's layers make for packed sequences.

Recomputed tensors are not kept; they exist again while their layer runs its backward pass.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import groupby
from typing import TypeAlias

from megarl.config.lora import LoraConfig
from megarl.config.roles import ModelParallelConfig
from megarl.config.section import LOGIT_CHUNK_BYTES, Device, round_up
from megarl.families import family_of, uniform_shapes
from megarl.families.shape import Activation, Experts, ModelShape
from megarl.weights.algebra.slices import ITEM_BYTES
from megarl.weights.layouts.megatron import MegatronParallel, padded_vocab

NUM_CPU_LOGIT_CHUNKS = 4
"""On a CPU logits, exponentials and gradients of one chunk of tokens exist together; on a GPU gradients overwrite the
logits."""

_FP8_BYTES = 1
_MASK_BYTES = 1
_FLOAT32_BYTES = 4
_INDEX_BYTES = 8
_ACTIVATED: Mapping[Activation, int] = {"silu": 2, "gelu_tanh": 3, "clamped": 6}
"""Elements that an activation keeps for each element of its product: gate, up, and what comes between."""
_DRAWN_BYTES = 3 * 4
"""Three numbers of 32 bits exist together for each input of which an adapter may leave something out."""
_ADAPTED: Mapping[str, frozenset[str]] = {
    "qkv_proj": frozenset({"q_proj", "k_proj", "v_proj"}),
    "o_proj": frozenset({"o_proj"}),
    "gate_up_proj": frozenset({"gate_proj", "up_proj"}),
    "down_proj": frozenset({"down_proj"}),
}
"""Linear layers with one input, and the modules of adapters that they consist of."""


@dataclass(frozen=True, kw_only=True)
class ModelWork:
    """One model, its split, and the size of a full micro-batch."""

    shape: ModelShape
    split: ModelParallelConfig
    tokens: int
    """Tokens of a full micro-batch on one rank, with padding."""
    device: Device
    lora: LoraConfig | None = None
    """The adapter that is trained; None trains the model itself, or nothing."""
    keys_per_token: float = 1.0
    """Keys of whole rows for each token that is computed: more than one where rows share some."""

    @property
    def item_bytes(self) -> int:
        return ITEM_BYTES[self.split.dtype_on(self.device)]

    @property
    def product_bytes(self) -> int:
        """Bytes of an element that a linear layer keeps of its input."""
        return _FP8_BYTES if self.split.precision == "fp8" else self.item_bytes

    @property
    def norm_bytes(self) -> int:
        """Bytes of an element that a norm keeps of its input: centred ones compute in float32."""
        return _FLOAT32_BYTES if self.shape.has_centred_norms else self.item_bytes

    @property
    def is_fused(self) -> bool:
        """Whether kernels rotate and activate."""
        return self.device == "cuda" and self.split.is_fused

    @property
    def sequence_ranks(self) -> int:
        """Tensor-parallel ranks that have a part of the tokens each, outside of attention and blocks."""
        return self.split.tensor if self.split.is_sequence_parallel else 1

    @classmethod
    def of(
        cls,
        shape: ModelShape,
        split: ModelParallelConfig,
        *,
        tokens_per_micro_batch: int,
        device: Device,
        lora: LoraConfig | None = None,
        keys_per_token: float = 1.0,
    ) -> ModelWork:
        tokens = round_up(tokens_per_micro_batch, split.pack_multiple) // split.context
        return cls(shape=shape, split=split, tokens=tokens, device=device, lora=lora, keys_per_token=keys_per_token)

    def chunk_layers(self, stage: int) -> int:
        """Return the number of layers of each chunk of a stage."""
        parallel = MegatronParallel.of(self.split, data=1)
        return len(parallel.chunk_layers(self.shape.num_layers, stage=stage, chunk=0))

    def chunks(self, stage: int) -> list[Runs]:
        """Return the layers of each chunk of a stage."""
        parallel, number = MegatronParallel.of(self.split, data=1), self.shape.num_layers
        chunks = [parallel.chunk_layers(number, stage=stage, chunk=chunk) for chunk in range(parallel.virtual_pipeline)]
        return [
            [(self._alone[kind], len([*group])) for kind, group in groupby(self._kinds[layers.start : layers.stop])]
            for layers in chunks
        ]

    @cached_property
    def _kinds(self) -> tuple[tuple[str, bool], ...]:
        """The kind of each layer, and whether it is in BF16 where others are in FP8."""
        exact = self._exact_layers()
        return tuple((kind, layer in exact) for layer, kind in enumerate(family_of(self.shape).kinds(self.shape)))

    @cached_property
    def _alone(self) -> Mapping[tuple[str, bool], ModelWork]:
        """By kind the work of a model with layers of this kind only."""
        family, in_bf16 = family_of(self.shape), self.split.model_copy(update={"precision": "bf16"})
        return {
            (kind, is_exact): replace(
                self, shape=family.alone(self.shape, kind), split=in_bf16 if is_exact else self.split
            )
            for kind, is_exact in dict.fromkeys(self._kinds)
        }

    @cached_property
    def layer_bytes(self) -> LayerBytes:
        """The tensors of a layer; all layers of the model are of one kind."""
        return _layer_bytes(self)

    def _exact_layers(self) -> frozenset[int]:
        """Return the layers that are not in FP8, unlike the others."""
        if self.split.precision != "fp8" or self.split.fp8_scaling == "delayed":
            return frozenset()
        return frozenset({0, self.shape.num_layers - 1})


Runs: TypeAlias = list[tuple[ModelWork, int]]
"""Layers in their order: the work of a model with layers of one kind only, and how many of them follow each other."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Recomputation:
    """The recomputation that the role's `megatron` options ask for."""

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
    """Return what the micro-batches in flight on a stage keep for backward, and what one layer's backward needs."""
    kept = max(_kept_bytes_per_token(runs) for runs in work.chunks(stage))
    return work.tokens * chunks_in_flight(work.split, stage) * kept + _passing_bytes(work, stage)


def head_bytes(work: ModelWork, stage: int) -> int:
    """Return what the last stage's head needs beyond one layer's backward pass, which begins after the head's."""
    if stage != work.split.pipeline - 1:
        return 0
    return max(0, scoring_bytes(work, has_gradients=True) - _passing_bytes(work, stage))


def fp8_weight_bytes(work: ModelWork, stage: int) -> int:
    """Return the copies of a stage's weights in FP8, one for the forward and one for the backward pass."""
    runs = (run for chunk in work.chunks(stage) for run in chunk)
    elements = (number * _matrix_elements(each) for each, number in runs if each.split.precision == "fp8")
    return 2 * _FP8_BYTES * sum(elements)


def _matrix_elements(work: ModelWork) -> int:
    """Return the elements of a layer's matrices on a rank."""
    shape, split, attention = work.shape, work.split, family_of(work.shape).attention(work.shape)
    widths = attention.queries + attention.keys + attention.values + attention.gates + attention.outputs
    projections = widths * shape.hidden // split.tensor
    matrices = 3 * shape.ffn_hidden * shape.hidden
    if shape.experts is None:
        return projections + matrices // split.tensor
    matrices = matrices * shape.experts.num // (split.expert * split.ranks_per_expert)
    return projections + matrices + 3 * shape.experts.shared * shape.hidden // split.tensor


def forward_bytes(work: ModelWork) -> int:
    """Return the activations of a pass without gradients: one layer at a time, nothing is kept."""
    kinds = (replace(work, shape=each, lora=None) for each, _ in uniform_shapes(work.shape))
    return work.tokens * max(kind.layer_bytes.total + _recurrence_bytes(kind) for kind in kinds)


def _recurrence_bytes(work: ModelWork) -> int:
    """Return what a layer with states needs per token while it computes; 0 for other layers."""
    recurrence = family_of(work.shape).attention(work.shape).recurrence
    return 0 if recurrence is None else recurrence.working_bytes // work.split.tensor


def chunks_in_flight(split: ModelParallelConfig, stage: int) -> int:
    """Return the most chunks whose backward is still to come: 1F1B, interleaved with virtual stages."""
    behind = split.pipeline - 1 - stage
    if split.virtual_pipeline == 1:
        return behind + 1
    return 2 * behind + (split.virtual_pipeline - 1) * split.pipeline + 1


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerBytes:
    """Tensors that one layer makes and its backward pass reads, per token of the micro-batch and rank."""

    layer_input: int
    inputs: int
    """Inputs of the norms: of the layer itself, after attention, and behind both blocks where there are such."""
    normed: int
    attention: int
    """Projections, rotated projections, keys and values of other ranks, and the attention's output."""
    statistics: int
    feed_forward: int
    """Includes the router of a mixture, and its shared expert."""
    is_mixture: bool

    @property
    def total(self) -> int:
        return self.inputs + self.normed + self.attention + self.statistics + self.feed_forward

    def recomputed(self, modules: frozenset[str]) -> int:
        """Return what selective recomputation does not keep. Attention's output is kept: its projection reads it."""
        by_module = {
            "core_attn": self.statistics,
            "mlp": 0 if self.is_mixture else self.feed_forward,
            "moe": self.feed_forward if self.is_mixture else 0,
            "layernorm": self.normed,
        }
        return sum(size for name, size in by_module.items() if name in modules)


def _layer_bytes(work: ModelWork) -> LayerBytes:
    shape, item = work.shape, work.item_bytes
    hidden = shape.hidden // work.sequence_ranks
    # The norm in front of experts is a layer of its own.
    second = work.product_bytes if shape.experts is None else item
    is_recurrent = family_of(shape).attention(shape).recurrence is not None
    if shape.experts is None:
        feed_forward = _block_bytes(work, shape.ffn_hidden) // work.split.tensor
    else:
        feed_forward = _mixture_bytes(work, shape.experts)
    return LayerBytes(
        layer_input=item * hidden,
        inputs=work.norm_bytes * (4 if shape.has_post_norms else 2) * hidden,
        normed=(work.product_bytes + second) * hidden,
        attention=_attention_bytes(work) + _dropped_bytes(work, "qkv_proj", "o_proj"),
        statistics=0 if is_recurrent else 4 * (shape.num_heads // work.split.tensor + 2),
        feed_forward=feed_forward + _dropped_bytes(work, "gate_up_proj", "down_proj"),
        is_mixture=shape.experts is not None,
    )


def _attention_bytes(work: ModelWork) -> int:
    """Return what attention, or what is in its place, keeps of its projections and its output."""
    shape, split, item = work.shape, work.split, work.item_bytes
    cost = family_of(shape).attention(shape)
    projected, outputs = cost.queries + cost.keys + cost.values + cost.gates, cost.outputs
    if cost.recurrence is not None:
        # All but the projected hidden state and the output is computed again.
        return item * (projected + outputs) // split.tensor
    rotated = cost.queries + (cost.keys if split.context == 1 else 0)
    kept = item * (rotated + outputs)
    if split.context > 1 and split.context_exchange == "all_to_all":
        kept += item * outputs  # before and after its heads are exchanged for tokens
    if shape.latent is not None:
        # The kernel has one width for queries, keys, values and its output.
        kept += item * 2 * cost.queries
    elif split.context == 1 or shape.has_qk_norm:
        # Values, and inputs of norms, are views of what was projected at once; elsewhere keys and values are copied.
        kept += item * projected
    if shape.has_qk_norm and (shape.has_centred_norms or not work.is_fused):
        kept += work.norm_bytes * (cost.queries + cost.keys)
    elif shape.has_qk_norm and shape.num_kv_heads > split.tensor:
        kept += item * cost.queries  # those of several groups are no view
    if shape.has_output_gate:
        kept += (item + _FLOAT32_BYTES) * outputs  # what is gated, and its weights
    angles = 0 if work.is_fused else 4 * shape.head_dim  # sine and cosine, for queries and for keys
    per_rank = angles + _kept_of_others(shape, split) + _latent_elements(work)
    if work.keys_per_token > 1:
        # A rank's own keys are counted above; context-parallel ranks gather them as well.
        for_rows = _gathered_for_rows(work, work.keys_per_token - (split.context == 1))
        per_rank += max(0, for_rows - _gathered(shape, split))
    return kept // split.tensor + item * per_rank


def _latent_elements(work: ModelWork) -> int:
    """Return what a rank keeps of small vectors in front of queries, keys and values, and of their norms."""
    widths, ranks = work.shape.latent, work.sequence_ranks
    if widths is None:
        return 0
    # Of the queries' vector a rank's part is a view of all ranks' tokens; the keys' is copied.
    queries = 0 if widths.query_rank is None else widths.query_rank + widths.query_rank // ranks
    return queries + 2 * widths.key_rank // ranks


def _mixture_bytes(work: ModelWork, experts: Experts) -> int:
    """Return what experts keep that are used equally, their router, and the expert that all tokens share."""
    shape, split, item, tensor = work.shape, work.split, work.item_bytes, work.split.tensor
    copies, ranks = experts.per_token, work.sequence_ranks
    inputs = work.product_bytes * split.ranks_per_expert * shape.hidden
    # The product before and after the router's weight.
    each = inputs + _block_bytes(work, shape.ffn_hidden) + item * shape.ffn_hidden
    scores = 2 if experts.score == "sigmoid" or not experts.is_normalized else 1
    masks = 1 if experts.num_groups == 1 else 2
    router = (_FLOAT32_BYTES * scores + _MASK_BYTES * masks) * experts.num + 2 * _INDEX_BYTES * copies
    if family_of(shape).options(shape).get("moe_router_dtype") == "fp32":
        router += _FLOAT32_BYTES * shape.hidden  # its input
    kept = copies * each // tensor + router // ranks
    if experts.shared:
        kept += _block_bytes(work, experts.shared) // tensor
        kept += item * shape.hidden // ranks if experts.is_shared_gated else 0  # what the gate weighs
    return kept


def _block_bytes(work: ModelWork, width: int) -> int:
    """Return what a block of this inner width keeps for its activation, and the product for its second matrix."""
    kept = _ACTIVATED[work.shape.activation]
    if work.shape.activation == "silu" and not work.is_fused:
        kept += 1  # of the gate
    return (kept * work.item_bytes + work.product_bytes) * width


def _dropped_bytes(work: ModelWork, *layers: str) -> int:
    """Return what `lora.dropout` makes of the inputs of linear layers: a mask, and the inputs that are left."""
    return sum((_MASK_BYTES + work.item_bytes) * _dropped_width(work, layer) for layer in layers)


def _dropped_width(work: ModelWork, layer: str) -> int:
    """Return the width of a layer's input on a rank of which an adapter leaves something out; 0 where none does."""
    lora, shape, tensor = work.lora, work.shape, work.split.tensor
    if lora is None or not lora.dropout or _ADAPTED[layer].isdisjoint(lora.modules):
        return 0
    match layer:
        case "o_proj":
            return family_of(shape).attention(shape).outputs // tensor
        case "down_proj":
            return (shape.ffn_hidden if shape.experts is None else shape.experts.shared) // tensor
        case _:
            return shape.hidden // (tensor if work.split.is_sequence_parallel else 1)


def _kept_of_others(shape: ModelShape, split: ModelParallelConfig) -> int:
    """Return the elements per token of keys and values that attention keeps in buffers of its own: gathered ones, or
    as many as a rank has of its own, which backward exchanges again."""
    if split.context > 1 and split.context_exchange != "gather":
        return family_of(shape).attention(shape).cached_on(split.tensor)
    return _gathered(shape, split)


def _gathered(shape: ModelShape, split: ModelParallelConfig) -> int:
    """Return the elements per token of the keys and values that a rank's two chunks of a sequence see, of all ranks
    that share it: those of the earlier chunk twice. Exchanged ones are those of the present and of the next turn."""
    if split.context == 1:
        return 0
    heads = -(-shape.num_kv_heads // split.tensor)
    return (2 * split.context + 1 if split.context_exchange == "gather" else 4) * heads * shape.head_dim


def _gathered_for_rows(work: ModelWork, keys_per_token: float) -> int:
    """Return the elements per token of keys and values that are gathered for whole rows, in one width for both."""
    cost = family_of(work.shape).attention(work.shape)
    return int(2 * max(cost.keys, cost.values) // work.split.tensor * keys_per_token)


def scoring_bytes(work: ModelWork, *, has_gradients: bool) -> int:
    """Return the memory of a chunk's logits and of the gathered hidden states; with gradients also theirs, and that of
    the output matrix in float32 and in the weights' type. A critic makes no logits."""
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
    """Return the share of a forward pass that the backward pass repeats."""
    recomputation = Recomputation.of(work.split)
    if recomputation is None:
        return 0.0
    if recomputation.is_full:
        return 1.0 if recomputation.method == "uniform" else min(1.0, recomputation.num_layers / work.chunk_layers(0))
    repeated, total = 0, 0
    for shape, layers in uniform_shapes(work.shape):
        attention, feed_forward = family_of(shape).attention(shape), 3 * shape.ffn_hidden
        if shape.experts is not None:
            feed_forward = feed_forward * shape.experts.per_token + 3 * shape.experts.shared
        projected = attention.queries + attention.keys + attention.values + attention.gates + attention.outputs
        total += layers * (feed_forward + projected)
        module = "mlp" if shape.experts is None else "moe"
        repeated += layers * feed_forward if module in recomputation.modules else 0
    return repeated / total


def _kept_bytes_per_token(runs: Runs) -> int:
    """Return what the layers of a chunk keep."""
    recomputation = Recomputation.of(runs[0][0].split)
    kept, num_recomputed = 0, 0 if recomputation is None else recomputation.num_layers
    for work, layers in runs:
        layer = work.layer_bytes
        if recomputation is None:
            kept += layers * layer.total
        elif not recomputation.is_full:
            kept += layers * (layer.total - layer.recomputed(recomputation.modules))
        elif recomputation.method != "uniform":
            again = min(layers, num_recomputed)
            num_recomputed -= again
            kept += again * layer.layer_input + (layers - again) * layer.total
    if recomputation is not None and recomputation.is_full and recomputation.method == "uniform":
        number = sum(layers for _, layers in runs)
        kept = -(-number // recomputation.num_layers) * runs[0][0].layer_bytes.layer_input
    return kept


def _recomputed_bytes_per_token(work: ModelWork, layers: int) -> int:
    """Return the recomputed tensors that exist while layers of one kind run backward."""
    layer, recomputation = work.layer_bytes, Recomputation.of(work.split)
    if recomputation is None:
        return 0
    if not recomputation.is_full:
        return layer.recomputed(recomputation.modules)
    return layer.total * (min(recomputation.num_layers, layers) if recomputation.method == "uniform" else 1)


def _passing_bytes(work: ModelWork, stage: int) -> int:
    """Return what exists while one layer runs backward, beside what was kept."""
    number = work.chunk_layers(stage)
    return work.tokens * max(
        _recomputed_bytes_per_token(kind, number) + _backward_bytes_per_token(kind)
        for runs in work.chunks(stage)
        for kind, _ in runs
    )


def _backward_bytes_per_token(work: ModelWork) -> int:
    """Return the gradients of the widest tensors of one layer, which exist together, or the numbers that are drawn for
    its widest input."""
    shape, split, item = work.shape, work.split, work.item_bytes
    if shape.experts is None:
        # Gradients of gate, up and their product, which itself is no longer needed.
        in_feed_forward = (3 * item - work.product_bytes) * shape.ffn_hidden // split.tensor
    else:
        in_experts = shape.experts.per_token * (4 * shape.ffn_hidden + 2 * split.ranks_per_expert * shape.hidden)
        in_feed_forward = item * max(in_experts, 4 * shape.experts.shared) // split.tensor
    # The gathered keys and values, and their gradients before and after the sum of both chunks, or of all rows.
    in_attention = _recurrence_bytes(work) or 3 * item * _gathered(shape, split)
    if work.keys_per_token > 1:
        in_attention = max(in_attention, item * _gathered_for_rows(work, work.keys_per_token + 1))
    gradients = max(in_feed_forward, in_attention) + 2 * item * shape.hidden
    return max(gradients, _DRAWN_BYTES * max(_dropped_width(work, layer) for layer in _ADAPTED))
