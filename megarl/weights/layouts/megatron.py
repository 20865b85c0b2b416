"""The parameters of each Megatron rank: GPTModel of the local layer spec, under any TP, PP, VPP, EP, ETP, CP, DP. Pure.

Local names are `chunk{i}.{parameter name}`, i the virtual-pipeline chunk (0 without VPP). Ranks follow Megatron's
default order: tensor fastest, then context, data, pipeline. For experts the ranks of a stage are numbered again, as
Megatron does: expert-tensor fastest, then expert, then the replicas.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import product

from megarl.config.checks.splits import check_expert_ranks, check_megatron_split, check_stages
from megarl.config.model import ModelShape
from megarl.config.roles import ModelParallelConfig
from megarl.errors import ConfigError
from megarl.weights.algebra.slices import Holding, Layout, TensorSpec
from megarl.weights.layouts.canonical import (
    DENSE_BLOCK,
    EMBEDDING,
    FINAL_NORM,
    SHARED_BLOCK,
    SHARED_GATE,
    VALUE_HEAD,
    canonical_tensors,
    expert_block,
    head_name,
    layer_of,
    layer_prefix,
    matrix_names,
    router_name,
)
from megarl.weights.layouts.pieces import LocalTensor, Segment, column_window, repeated, replicate, row_window, whole

_VOCAB_ROWS = 64
"""A rank's vocabulary shard has a multiple of this many rows: a good size for matrix kernels."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MegatronParallel:
    tensor: int = 1
    pipeline: int = 1
    virtual_pipeline: int = 1
    """Chunks of layers per pipeline stage; 1 is no interleaving."""
    context: int = 1
    """Ranks that share each sequence; they hold the same parameters, like data-parallel ones."""
    data: int = 1
    expert: int = 1
    expert_tensor: int | None = None
    """None is `tensor`."""
    first_stage_layers: int | None = None
    last_stage_layers: int | None = None
    """None: as many as the other stages."""

    @classmethod
    def of(cls, split: ModelParallelConfig, *, data: int) -> MegatronParallel:
        return cls(
            tensor=split.tensor,
            pipeline=split.pipeline,
            virtual_pipeline=split.virtual_pipeline,
            context=split.context,
            data=data,
            expert=split.expert,
            expert_tensor=split.expert_tensor,
            first_stage_layers=split.first_stage_layers,
            last_stage_layers=split.last_stage_layers,
        )

    @property
    def world_size(self) -> int:
        return self.tensor * self.pipeline * self.replicas

    @property
    def replicas(self) -> int:
        """Ranks that hold the same parameters outside of experts."""
        return self.context * self.data

    @property
    def ranks_per_expert(self) -> int:
        return self.tensor if self.expert_tensor is None else self.expert_tensor

    @property
    def expert_data(self) -> int:
        """Replicas of each expert."""
        return self.tensor * self.replicas // (self.expert * self.ranks_per_expert)

    def rank(self, *, tensor: int, data: int, pipeline: int, context: int = 0) -> int:
        """Return the global rank at these coordinates."""
        return tensor + self.tensor * (context + self.context * (data + self.data * pipeline))

    def expert_place(self, *, tensor: int, data: int, context: int = 0) -> ExpertPlace:
        """Return which part of which experts the rank at these coordinates has, in any stage."""
        rest, part = divmod(tensor + self.tensor * (context + self.context * data), self.ranks_per_expert)
        return ExpertPlace(expert=rest % self.expert, part=part)

    def chunk_layers(self, num_layers: int, *, stage: int, chunk: int) -> range:
        """Return the layers of a chunk: chunk c of stage s is number c * pipeline + s in the order of the layers."""
        sizes = self._stage_layers(num_layers)
        before = chunk * sum(sizes) + sum(sizes[:stage])
        return range(before, before + sizes[stage])

    def _stage_layers(self, num_layers: int) -> list[int]:
        """Return the number of layers in one chunk of each stage."""
        num_chunks = self.pipeline * self.virtual_pipeline
        ends = {0: self.first_stage_layers, self.pipeline - 1: self.last_stage_layers}
        fixed = {stage: layers for stage, layers in ends.items() if layers is not None}
        equal = (num_layers - sum(fixed.values())) // max(1, num_chunks - len(fixed))
        return [fixed.get(stage, equal) for stage in range(self.pipeline)]


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpertPlace:
    expert: int
    """The set of experts, of `expert` such sets."""
    part: int
    """Number of the part of each of these experts."""


def padded_vocab(vocab: int, tensor: int) -> int:
    """Return the rows of the embedding and output matrices over all tensor-parallel ranks."""
    step = _VOCAB_ROWS * tensor
    return -(-vocab // step) * step


_FUSED_NORMS = {
    "self_attention.linear_qkv.layer_norm_weight": "input_layernorm.weight",
    "mlp.linear_fc1.layer_norm_weight": "pre_mlp_layernorm.weight",
}
_GROUPED_EXPERT = re.compile(r"\.experts\.(linear_fc[12])\.weight(\d+)$")


def layout_name(name: str) -> str:
    """Return a parameter's name in the layout. Only Transformer Engine's layers have others: norms inside the linear
    layer behind them, and all experts of a rank in one layer. Shapes and bytes are the same."""
    for fused, own in _FUSED_NORMS.items():
        if name.endswith(fused):
            return name.removesuffix(fused) + own
    return _GROUPED_EXPERT.sub(r".experts.local_experts.\2.\1.weight", name)


def megatron_layout(shape: ModelShape, parallel: MegatronParallel, *, dtype: str) -> Layout:
    """Return what every global rank holds, as parameters of `dtype`. An impossible split is a ConfigError."""
    _refuse_impossible(shape, parallel)
    canonical = canonical_tensors(shape)
    specs = canonical | layer_of(canonical)
    replicas: defaultdict[tuple[int, int, ExpertPlace], list[int]] = defaultdict(list)
    for stage in range(parallel.pipeline):
        for data, context in product(range(parallel.data), range(parallel.context)):
            for tensor in range(parallel.tensor):
                place = parallel.expert_place(tensor=tensor, data=data, context=context)
                # Ranks of a dense model that differ in their experts only are replicas.
                key = (stage, tensor, place if shape.experts else ExpertPlace(expert=0, part=tensor))
                replicas[key].append(parallel.rank(tensor=tensor, data=data, context=context, pipeline=stage))
    holdings: list[Holding] = []
    for (stage, tensor, place), ranks in replicas.items():
        share = _share(shape, specs, parallel, tensor, place)
        holdings += replicate(ranks, _stage_tensors(share, parallel, stage), dtype=dtype)
    return Layout(canonical=canonical, holdings=tuple(sorted(holdings, key=lambda holding: holding.rank)))


@dataclass(frozen=True, slots=True, kw_only=True)
class _Cut:
    """One of `size` equal shares of the matrices that are divided together."""

    shape: ModelShape
    canonical: dict[str, TensorSpec]
    """Tensors by name; those of a layer also by their names within it."""
    rank: int
    size: int

    def rows(self, local: str, segments: tuple[Segment, ...], *, total: int, columns: tuple[int, ...]) -> LocalTensor:
        share = total // self.size
        return row_window(local, segments, start=self.rank * share, num_rows=share, columns=columns)

    def columns(self, local: str, name: str) -> LocalTensor:
        spec = self.canonical[name]
        share = spec.shape[1] // self.size
        return column_window(local, name, spec, start=self.rank * share, num_columns=share)

    def whole(self, local: str, name: str) -> LocalTensor:
        return whole(local, name, self.canonical[name])


@dataclass(frozen=True, slots=True, kw_only=True)
class _Share:
    """One rank's share of every layer."""

    dense: _Cut
    """The cut of all tensors outside the experts."""
    expert: _Cut
    experts: range


def _share(
    shape: ModelShape, canonical: dict[str, TensorSpec], parallel: MegatronParallel, tensor: int, place: ExpertPlace
) -> _Share:
    num_experts = shape.experts.num // parallel.expert if shape.experts else 0
    return _Share(
        dense=_Cut(shape=shape, canonical=canonical, rank=tensor, size=parallel.tensor),
        expert=_Cut(shape=shape, canonical=canonical, rank=place.part, size=parallel.ranks_per_expert),
        experts=range(place.expert * num_experts, (place.expert + 1) * num_experts),
    )


def _stage_tensors(share: _Share, parallel: MegatronParallel, stage: int) -> Iterator[LocalTensor]:
    """Yield all parameters of one stage."""
    cut = share.dense
    layer = tuple(_layer_tensors(share))
    for chunk in range(parallel.virtual_pipeline):
        is_first = chunk == stage == 0
        is_last = chunk == parallel.virtual_pipeline - 1 and stage == parallel.pipeline - 1
        prefix = f"chunk{chunk}."
        if is_first:
            yield _vocab_tensor(cut, f"{prefix}embedding.word_embeddings.weight", EMBEDDING)
        for index, number in enumerate(parallel.chunk_layers(cut.shape.num_layers, stage=stage, chunk=chunk)):
            yield from repeated(layer, local=f"{prefix}decoder.layers.{index}.", source=layer_prefix(number))
        if is_last:
            yield cut.whole(f"{prefix}decoder.final_layernorm.weight", FINAL_NORM)
            if cut.shape.has_value_head:
                yield cut.whole(f"{prefix}value_head.weight", VALUE_HEAD)
            # A last stage that is not also the first keeps its own copy of tied embeddings.
            elif not (is_first and cut.shape.has_tied_embeddings):
                yield _vocab_tensor(cut, f"{prefix}output_layer.weight", head_name(cut.shape))


def _vocab_tensor(cut: _Cut, local: str, name: str) -> LocalTensor:
    segments = (Segment(name=name, start=0, num_rows=cut.shape.vocab),)
    total = padded_vocab(cut.shape.vocab, cut.size)
    return cut.rows(local, segments, total=total, columns=(cut.shape.hidden,))


def _layer_tensors(share: _Share) -> Iterator[LocalTensor]:
    """Yield the parameters of any layer, named within it."""
    cut, shape = share.dense, share.dense.shape
    yield cut.whole("input_layernorm.weight", "input_layernorm.weight")
    yield cut.columns("self_attention.linear_proj.weight", "self_attn.o_proj.weight")
    yield _qkv(cut, "self_attention.linear_qkv.weight", "weight", columns=(shape.hidden,))
    if shape.has_qkv_bias:
        yield _qkv(cut, "self_attention.linear_qkv.bias", "bias", columns=())
    if shape.has_qk_norm:
        yield cut.whole("self_attention.q_layernorm.weight", "self_attn.q_norm.weight")
        yield cut.whole("self_attention.k_layernorm.weight", "self_attn.k_norm.weight")
    yield cut.whole("pre_mlp_layernorm.weight", "post_attention_layernorm.weight")
    if shape.experts is None:
        yield from _feed_forward(cut, "mlp.", DENSE_BLOCK)
        return
    yield cut.whole("mlp.router.weight", router_name(shape))
    if shape.experts.shared:
        yield cut.whole("mlp.shared_experts.gate_weight", SHARED_GATE)
        yield from _feed_forward(cut, "mlp.shared_experts.", SHARED_BLOCK)
    for index, expert in enumerate(share.experts):
        yield from _feed_forward(share.expert, f"mlp.experts.local_experts.{index}.", expert_block(shape, expert))


def _qkv(cut: _Cut, local: str, suffix: str, *, columns: tuple[int, ...]) -> LocalTensor:
    """Return [queries of a group | its key | its value], group after group, cut into equal rows.

    With fewer groups than ranks a rank's rows end inside a group: Megatron gathers the activations, not the weights.
    """
    shape = cut.shape
    queries = shape.num_heads // shape.num_kv_heads * shape.head_dim
    segments = tuple(
        Segment(name=f"self_attn.{projection}.{suffix}", start=group * num_rows, num_rows=num_rows)
        for group in range(shape.num_kv_heads)
        for projection, num_rows in (("q_proj", queries), ("k_proj", shape.head_dim), ("v_proj", shape.head_dim))
    )
    total = (shape.num_heads + 2 * shape.num_kv_heads) * shape.head_dim
    return cut.rows(local, segments, total=total, columns=columns)


def _feed_forward(cut: _Cut, local: str, block: str) -> Iterator[LocalTensor]:
    """Yield [gate of the rank; up of the rank], and the columns of down that go with them."""
    gate, up, down = matrix_names(cut.shape)
    share = cut.canonical[block + gate].shape[0] // cut.size
    segments = tuple(Segment(name=block + name, start=cut.rank * share, num_rows=share) for name in (gate, up))
    yield row_window(f"{local}linear_fc1.weight", segments, start=0, num_rows=2 * share, columns=(cut.shape.hidden,))
    yield cut.columns(f"{local}linear_fc2.weight", block + down)


def _refuse_impossible(shape: ModelShape, parallel: MegatronParallel) -> None:
    problems = [*check_stages(parallel), *check_megatron_split(shape, parallel)]
    if shape.experts is not None:
        problems += check_expert_ranks(parallel, stage_ranks=parallel.tensor * parallel.replicas)
    if problems:
        raise ConfigError("Megatron layout", tuple(problems))
