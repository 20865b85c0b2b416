"""The parameters of each Megatron rank: GPTModel of the local layer spec, under any TP, PP, VPP, EP, ETP, CP, DP. Pure.

Local names are `chunk{i}.{parameter name}`, i the virtual-pipeline chunk (0 without VPP). Ranks follow Megatron's
default order: tensor fastest, then context, data, pipeline. For experts the ranks of a stage are numbered again, as
Megatron does: expert-tensor fastest, then expert, then the replicas.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Container, Iterator, Mapping
from dataclasses import dataclass
from itertools import product
from typing import TypeAlias

from megarl.config.checks.splits import check_expert_ranks, check_megatron_split, check_stages
from megarl.config.roles import ModelParallelConfig
from megarl.errors import ConfigError
from megarl.families import family_of
from megarl.families.shape import ModelShape
from megarl.weights.algebra.slices import Holding, Layout, TensorSpec
from megarl.weights.layouts.canonical import (
    EMBEDDING,
    FINAL_NORM,
    VALUE_HEAD,
    canonical_tensors,
    head_name,
    layer_prefix,
    layer_tensors,
    rooted,
)
from megarl.weights.layouts.cuts import RankShare, RankShares
from megarl.weights.layouts.pieces import LocalTensor, Segment, repeated, replicate, row_window, whole

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
_GROUPED_EXPERT = re.compile(r"\.experts\.(linear_fc[12])\.(weight|bias)(\d+)$")


def layout_name(name: str) -> str:
    """Return a parameter's name in the layout. Only Transformer Engine's layers have others: norms inside the linear
    layer behind them, and all experts of a rank in one layer. Shapes and bytes are the same."""
    for fused, own in _FUSED_NORMS.items():
        if name.endswith(fused):
            return name.removesuffix(fused) + own
    return _GROUPED_EXPERT.sub(r".experts.local_experts.\3.\1.\2", name)


_Templates: TypeAlias = Mapping[str, tuple[LocalTensor, ...]]
"""The parameters of a layer of each kind, named within it."""


def megatron_layout(
    shape: ModelShape, parallel: MegatronParallel, *, dtype: str, ranks: Container[int] | None = None
) -> Layout:
    """Return what global ranks hold, or only some of them, as parameters of `dtype`. An impossible split is a
    ConfigError."""
    _refuse_impossible(shape, parallel)
    canonical, layers, blocks = canonical_tensors(shape), layer_tensors(shape), family_of(shape).blocks(shape)
    replicas: defaultdict[tuple[int, int, ExpertPlace], list[int]] = defaultdict(list)
    for stage in range(parallel.pipeline):
        for data, context in product(range(parallel.data), range(parallel.context)):
            for tensor in range(parallel.tensor):
                rank = parallel.rank(tensor=tensor, data=data, context=context, pipeline=stage)
                if ranks is not None and rank not in ranks:
                    continue
                place = parallel.expert_place(tensor=tensor, data=data, context=context)
                # Ranks of a dense model that differ in their experts only are replicas.
                key = (stage, tensor, place if shape.experts else ExpertPlace(expert=0, part=tensor))
                replicas[key].append(rank)
    holdings: list[Holding] = []
    templates: dict[tuple[int, ExpertPlace], _Templates] = {}  # of all stages: deriving them takes most of the time
    for (stage, tensor, place), equal in replicas.items():
        shares = _shares(shape, parallel, tensor, place)
        if (tensor, place) not in templates:
            each = {kind: tuple(shares.layer(block.megatron, layers[kind])) for kind, block in blocks.items()}
            templates[tensor, place] = each
        stage_tensors = _stage_tensors(shape, shares, parallel, stage, templates[tensor, place])
        holdings += replicate(equal, stage_tensors, dtype=dtype)
    return Layout(canonical=canonical, holdings=tuple(sorted(holdings, key=lambda holding: holding.rank)))


def _shares(shape: ModelShape, parallel: MegatronParallel, tensor: int, place: ExpertPlace) -> RankShares:
    num_experts = shape.experts.num // parallel.expert if shape.experts else 0
    return RankShares(
        dense=RankShare(rank=tensor, size=parallel.tensor),
        expert=RankShare(rank=place.part, size=parallel.ranks_per_expert),
        experts=range(place.expert * num_experts, (place.expert + 1) * num_experts),
    )


def _stage_tensors(
    shape: ModelShape,
    shares: RankShares,
    parallel: MegatronParallel,
    stage: int,
    templates: _Templates,
) -> Iterator[LocalTensor]:
    """Yield all parameters of one stage."""
    kinds = family_of(shape).kinds(shape)
    norm = TensorSpec(shape=(shape.hidden,), dtype=shape.dtype)
    for chunk in range(parallel.virtual_pipeline):
        is_first = chunk == stage == 0
        is_last = chunk == parallel.virtual_pipeline - 1 and stage == parallel.pipeline - 1
        prefix = f"chunk{chunk}."
        if is_first:
            local = f"{prefix}embedding.word_embeddings.weight"
            yield _vocab_tensor(shape, shares.dense, local, rooted(EMBEDDING, shape))
        for index, number in enumerate(parallel.chunk_layers(shape.num_layers, stage=stage, chunk=chunk)):
            template = templates[kinds[number]]
            source = rooted(layer_prefix(number), shape)
            yield from repeated(template, local=f"{prefix}decoder.layers.{index}.", source=source)
        if is_last:
            yield whole(f"{prefix}decoder.final_layernorm.weight", rooted(FINAL_NORM, shape), norm)
            if shape.has_value_head:
                head = TensorSpec(shape=(1, shape.hidden), dtype=shape.dtype)
                yield whole(f"{prefix}value_head.weight", VALUE_HEAD, head)
            # A last stage that is not also the first keeps its own copy of tied embeddings.
            elif not (is_first and shape.has_tied_embeddings):
                yield _vocab_tensor(shape, shares.dense, f"{prefix}output_layer.weight", head_name(shape))


def _vocab_tensor(shape: ModelShape, share: RankShare, local: str, name: str) -> LocalTensor:
    segments = (Segment(name=name, start=0, num_rows=shape.vocab),)
    rows = padded_vocab(shape.vocab, share.size) // share.size
    return row_window(local, segments, start=share.rank * rows, num_rows=rows, columns=(shape.hidden,))


def _refuse_impossible(shape: ModelShape, parallel: MegatronParallel) -> None:
    problems = [*check_stages(parallel), *check_megatron_split(shape, parallel)]
    if shape.experts is not None:
        problems += check_expert_ranks(parallel, stage_ranks=parallel.tensor * parallel.replicas)
    if problems:
        raise ConfigError("Megatron layout", tuple(problems))
