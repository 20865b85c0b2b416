"""The parameters of each SGLang tensor-parallel rank. Pure: no SGLang.

The rank of TP rank t of engine e is `e * tensor + t`. Tied embeddings are one parameter: `lm_head` is `embed_tokens`.
The experts of a layer are two stacked parameters. With expert parallelism neighbouring ranks share a set of experts.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from megarl.config.checks.splits import ENGINE_VOCAB_STEP, check_engine_experts, check_engine_split, check_experts
from megarl.config.model import TRAITS, ModelShape
from megarl.config.section import round_up
from megarl.errors import ConfigError
from megarl.weights.algebra.slices import Layout, TensorSpec
from megarl.weights.layouts.canonical import (
    DENSE_BLOCK,
    EMBEDDING,
    FINAL_NORM,
    HEAD,
    SHARED_BLOCK,
    SHARED_GATE,
    canonical_tensors,
    expert_block,
    layer_of,
    layer_prefix,
    matrix_names,
    router_name,
)
from megarl.weights.layouts.pieces import (
    LocalTensor,
    Segment,
    column_window,
    repeated,
    replicate,
    row_window,
    stacked,
    whole,
)

_CPU_FFN_STEP = 32


def sglang_layout(
    shape: ModelShape, *, tensor: int, expert: int = 1, num_engines: int = 1, dtype: str, is_cpu_engine: bool = False
) -> Layout:
    """Return what every TP rank of every engine holds, as parameters of `dtype`.

    Where the ranks do not divide heads or feed-forward rows, an engine on CPU pads them; one on GPU replicates KV heads
    and refuses the rest.
    """
    _refuse_impossible(shape, tensor, expert, is_cpu_engine=is_cpu_engine)
    grid = _grid(shape, tensor, expert, is_cpu_engine=is_cpu_engine)
    canonical = canonical_tensors(shape)
    specs = canonical | layer_of(canonical)
    holdings = []
    for rank in range(tensor):
        ranks = [engine * tensor + rank for engine in range(num_engines)]
        holdings += replicate(ranks, _rank_tensors(shape, specs, grid, rank), dtype=dtype)
    return Layout(canonical=canonical, holdings=tuple(sorted(holdings, key=lambda holding: holding.rank)))


def _refuse_impossible(shape: ModelShape, tensor: int, expert: int, *, is_cpu_engine: bool) -> None:
    exact = check_engine_split(shape, tensor=tensor, expert=expert, pads_vocabulary=False)
    sizes = check_experts(shape, expert) if is_cpu_engine else exact
    if problems := (*check_engine_experts(tensor=tensor, expert=expert), *sizes):
        raise ConfigError("SGLang layout", problems)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Grid:
    """The heads, rows and columns of every rank, padding included."""

    heads: int
    kv_heads: int
    kv_replicas: int
    """Ranks that share one KV head."""
    ffn: int
    ffn_ranks: int
    """Ranks that share a feed-forward block; the next ones have other experts."""
    experts: int
    """Experts of every rank; 0 in a dense model."""
    shared: int
    """Rows of the shared expert, which all ranks divide; 0 without one."""
    vocab: int


def _grid(shape: ModelShape, tensor: int, expert: int, *, is_cpu_engine: bool) -> _Grid:
    vocab_step, ffn_step = ENGINE_VOCAB_STEP, 1
    kv_heads, kv_replicas = shape.num_kv_heads, max(1, tensor // shape.num_kv_heads)
    if is_cpu_engine:
        ffn_step, kv_heads, kv_replicas = _CPU_FFN_STEP * tensor, round_up(kv_heads, tensor), 1
        vocab_step *= tensor if round_up(shape.vocab, vocab_step) % tensor else 1
    return _Grid(
        heads=kv_heads * (shape.num_heads // shape.num_kv_heads) // tensor,
        kv_heads=max(1, kv_heads // tensor),
        kv_replicas=kv_replicas,
        ffn=round_up(shape.ffn_hidden, ffn_step) // (tensor // expert),
        ffn_ranks=tensor // expert,
        experts=shape.experts.num // expert if shape.experts else 0,
        shared=round_up(shape.experts.shared, ffn_step) // tensor if shape.experts else 0,
        vocab=round_up(shape.vocab, vocab_step) // tensor,
    )


def _rank_tensors(shape: ModelShape, canonical: dict[str, TensorSpec], grid: _Grid, rank: int) -> Iterator[LocalTensor]:
    yield _vocab_tensor(shape, grid, rank, EMBEDDING)
    layer = tuple(_layer_tensors(shape, canonical, grid, rank))
    for index in range(shape.num_layers):
        yield from repeated(layer, local=layer_prefix(index), source=layer_prefix(index))
    yield whole(FINAL_NORM, FINAL_NORM, canonical[FINAL_NORM])
    if not shape.has_tied_embeddings:
        yield _vocab_tensor(shape, grid, rank, HEAD)


def _vocab_tensor(shape: ModelShape, grid: _Grid, rank: int, name: str) -> LocalTensor:
    segments = (Segment(name=name, start=0, num_rows=shape.vocab),)
    return row_window(name, segments, start=rank * grid.vocab, num_rows=grid.vocab, columns=(shape.hidden,))


def _layer_tensors(
    shape: ModelShape, canonical: dict[str, TensorSpec], grid: _Grid, rank: int
) -> Iterator[LocalTensor]:
    """Yield the parameters of any layer, named within it."""
    attention = "self_attn."
    yield _qkv(shape, grid, rank, attention, "weight", columns=(shape.hidden,))
    if shape.has_qkv_bias:
        yield _qkv(shape, grid, rank, attention, "bias", columns=())
    yield _columns(canonical, f"{attention}o_proj.weight", rank, grid.heads * shape.head_dim)
    norms = ["input_layernorm", "post_attention_layernorm"]
    norms += ["self_attn.q_norm", "self_attn.k_norm"] if shape.has_qk_norm else []
    for name in (f"{norm}.weight" for norm in norms):
        yield whole(name, name, canonical[name])
    part, first = rank % grid.ffn_ranks, rank // grid.ffn_ranks * grid.experts
    matrices = matrix_names(shape)
    if shape.experts is None:
        yield from _feed_forward(canonical, DENSE_BLOCK, part, grid.ffn, matrices)
        return
    router = router_name(shape)
    yield whole(router, router, canonical[router])
    if grid.shared:
        yield whole(SHARED_GATE, SHARED_GATE, canonical[SHARED_GATE])
        yield from _feed_forward(canonical, SHARED_BLOCK, rank, grid.shared, matrices)
    blocks = [expert_block(shape, index) for index in range(first, first + grid.experts)]
    experts = f"{TRAITS[shape.family].block}experts"
    gate_up = [_gate_up(canonical, block, block, part, grid.ffn, matrices) for block in blocks]
    yield stacked(f"{experts}.w13_weight", gate_up)
    down = [_columns(canonical, block + matrices[2], part, grid.ffn) for block in blocks]
    yield stacked(f"{experts}.w2_weight", down)


def _feed_forward(
    canonical: dict[str, TensorSpec], block: str, part: int, share: int, matrices: tuple[str, str, str]
) -> Iterator[LocalTensor]:
    yield _gate_up(canonical, f"{block}gate_up_proj.weight", block, part, share, matrices)
    yield _columns(canonical, block + matrices[2], part, share)


def _gate_up(
    canonical: dict[str, TensorSpec], name: str, block: str, part: int, share: int, matrices: tuple[str, str, str]
) -> LocalTensor:
    """Return [gate of the rank; up of the rank]."""
    gate, up, _ = matrices
    total, hidden = canonical[block + gate].shape
    segments = (*_share(block + gate, part, share, total), *_share(block + up, part, share, total))
    return row_window(name, segments, start=0, num_rows=2 * share, columns=(hidden,))


def _qkv(
    shape: ModelShape, grid: _Grid, rank: int, attention: str, suffix: str, *, columns: tuple[int, ...]
) -> LocalTensor:
    """Return [queries | keys | values] of the rank's heads."""
    queries, kv_rows = grid.heads * shape.head_dim, grid.kv_heads * shape.head_dim
    all_queries, all_kv_rows = shape.num_heads * shape.head_dim, shape.num_kv_heads * shape.head_dim
    kv_rank = rank // grid.kv_replicas
    segments = (
        *_share(f"{attention}q_proj.{suffix}", rank, queries, all_queries),
        *_share(f"{attention}k_proj.{suffix}", kv_rank, kv_rows, all_kv_rows),
        *_share(f"{attention}v_proj.{suffix}", kv_rank, kv_rows, all_kv_rows),
    )
    name = f"{attention}qkv_proj.{suffix}"
    return row_window(name, segments, start=0, num_rows=queries + 2 * kv_rows, columns=columns)


def _share(name: str, rank: int, share: int, total: int) -> tuple[Segment, Segment]:
    """Return the rank's rows of a canonical tensor with `total` rows, padded to `share`."""
    start = min(rank * share, total)
    size = min(start + share, total) - start
    return Segment(name=name, start=start, num_rows=size), Segment(name=None, start=0, num_rows=share - size)


def _columns(canonical: dict[str, TensorSpec], name: str, rank: int, share: int) -> LocalTensor:
    return column_window(name, name, canonical[name], start=rank * share, num_columns=share)
