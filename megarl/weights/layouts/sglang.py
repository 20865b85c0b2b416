"""The parameters of each SGLang tensor-parallel rank. Pure: no SGLang.

The rank of TP rank t of engine e is `e * tensor + t`. Tied embeddings are one parameter: `lm_head` is `embed_tokens`.
The experts of a layer are two stacked parameters. With expert parallelism neighbouring ranks share a set of experts.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from megarl.config.checks.splits import ENGINE_VOCAB_STEP, check_engine_experts, check_engine_split, check_experts
from megarl.config.section import round_up
from megarl.errors import ConfigError
from megarl.families import family_of
from megarl.families.shape import ModelShape
from megarl.weights.algebra.slices import Layout, TensorSpec
from megarl.weights.layouts.canonical import (
    EMBEDDING,
    FINAL_NORM,
    HEAD,
    canonical_tensors,
    layer_prefix,
    layer_tensors,
    rooted,
)
from megarl.weights.layouts.cuts import RankShare, RankShares
from megarl.weights.layouts.pieces import LocalTensor, Segment, repeated, replicate, row_window, whole

_CPU_FFN_STEP = 32


def sglang_layout(
    shape: ModelShape, *, tensor: int, expert: int = 1, num_engines: int = 1, dtype: str, is_cpu_engine: bool = False
) -> Layout:
    """Return what every TP rank of every engine holds, as parameters of `dtype`.

    Where the ranks do not divide heads or feed-forward rows, an engine on CPU pads them; one on GPU replicates KV heads
    and refuses the rest.
    """
    _refuse_impossible(shape, tensor, expert, is_cpu_engine=is_cpu_engine)
    layers, num_experts = layer_tensors(shape), shape.experts.num if shape.experts else 0
    vocab_step = ENGINE_VOCAB_STEP
    if is_cpu_engine and round_up(shape.vocab, vocab_step) % tensor:
        vocab_step *= tensor
    vocab_rows = round_up(shape.vocab, vocab_step) // tensor
    holdings = []
    for rank in range(tensor):
        ranks = [engine * tensor + rank for engine in range(num_engines)]
        shares = engine_shares(num_experts, rank=rank, tensor=tensor, expert=expert, is_cpu_engine=is_cpu_engine)
        holdings += replicate(ranks, _rank_tensors(shape, shares, vocab_rows, layers), dtype=dtype)
    ordered = tuple(sorted(holdings, key=lambda holding: holding.rank))
    return Layout(canonical=canonical_tensors(shape), holdings=ordered)


def _refuse_impossible(shape: ModelShape, tensor: int, expert: int, *, is_cpu_engine: bool) -> None:
    exact = check_engine_split(shape, tensor=tensor, expert=expert, pads_vocabulary=False)
    sizes = check_experts(shape, expert) if is_cpu_engine else exact
    if problems := (*check_engine_experts(tensor=tensor, expert=expert), *sizes):
        raise ConfigError("SGLang layout", problems)


def engine_shares(num_experts: int, *, rank: int, tensor: int, expert: int, is_cpu_engine: bool) -> RankShares:
    """Return what a rank has of every layer. Neighbouring ranks share a set of experts; the next ones have others."""
    step = _CPU_FFN_STEP * tensor if is_cpu_engine else 1
    ranks_per_expert = tensor // expert
    in_set = num_experts // expert
    first = rank // ranks_per_expert * in_set
    return RankShares(
        dense=RankShare(rank=rank, size=tensor, step=step),
        expert=RankShare(rank=rank % ranks_per_expert, size=ranks_per_expert, step=step),
        experts=range(first, first + in_set),
    )


def _rank_tensors(
    shape: ModelShape, shares: RankShares, vocab_rows: int, layers: Mapping[str, Mapping[str, TensorSpec]]
) -> Iterator[LocalTensor]:
    family = family_of(shape)
    templates = {kind: tuple(shares.layer(block.sglang, layers[kind])) for kind, block in family.blocks(shape).items()}
    if family.engine.has_whole_embedding:
        spec = TensorSpec(shape=(shape.vocab, shape.hidden), dtype=shape.dtype)
        yield whole(EMBEDDING, rooted(EMBEDDING, shape), spec)
    else:
        yield _vocab_tensor(shape, shares.dense.rank, vocab_rows, EMBEDDING, rooted(EMBEDDING, shape))
    for index, kind in enumerate(family.kinds(shape)):
        prefix = layer_prefix(index)
        yield from repeated(templates[kind], local=prefix, source=rooted(prefix, shape))
    yield whole(FINAL_NORM, rooted(FINAL_NORM, shape), TensorSpec(shape=(shape.hidden,), dtype=shape.dtype))
    if not shape.has_tied_embeddings:
        yield _vocab_tensor(shape, shares.dense.rank, vocab_rows, HEAD, HEAD)


def _vocab_tensor(shape: ModelShape, rank: int, num_rows: int, local: str, name: str) -> LocalTensor:
    segments = (Segment(name=name, start=0, num_rows=shape.vocab),)
    return row_window(local, segments, start=rank * num_rows, num_rows=num_rows, columns=(shape.hidden,))
