"""What each Megatron rank holds: GPTModel with the local layer spec, under any TP, PP, VPP and DP. Pure: no Megatron.

Local names are `chunk{i}.{parameter name}`, i the virtual-pipeline chunk (0 without VPP). Ranks follow Megatron's
default order: tensor fastest, then data, pipeline slowest.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from megarl.config.model import ModelShape
from megarl.errors import ConfigError, Problem
from megarl.weights.canonical import EMBEDDING, FINAL_NORM, VALUE_HEAD, canonical_tensors, head_name, layer_prefix
from megarl.weights.fused import LocalTensor, Segment, column_window, replicate, row_window, whole
from megarl.weights.slices import Holding, Layout, TensorSpec

_VOCAB_ROWS = 64
"""Rows of a rank's vocabulary shard come in multiples of this: a good size for matrix kernels."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MegatronParallel:
    tensor: int = 1
    pipeline: int = 1
    virtual_pipeline: int = 1
    """Chunks of layers per pipeline stage; 1 is no interleaving."""
    data: int = 1

    @property
    def world_size(self) -> int:
        return self.tensor * self.pipeline * self.data

    def rank(self, *, tensor: int, data: int, pipeline: int) -> int:
        """The global rank at these coordinates."""
        return tensor + self.tensor * (data + self.data * pipeline)


def padded_vocab(vocab: int, tensor: int) -> int:
    """Rows of the embedding and output matrices over all tensor-parallel ranks."""
    step = _VOCAB_ROWS * tensor
    return -(-vocab // step) * step


def megatron_layout(shape: ModelShape, parallel: MegatronParallel, *, dtype: str) -> Layout:
    """What every global rank holds, as parameters of `dtype`. A split that Megatron cannot make is a ConfigError."""
    _refuse_impossible(shape, parallel)
    canonical = canonical_tensors(shape)
    holdings: list[Holding] = []
    for stage in range(parallel.pipeline):
        for tensor_rank in range(parallel.tensor):
            ranks = [parallel.rank(tensor=tensor_rank, data=i, pipeline=stage) for i in range(parallel.data)]
            cut = _Cut(shape=shape, canonical=canonical, rank=tensor_rank, size=parallel.tensor)
            holdings += replicate(ranks, _stage_tensors(cut, parallel, stage), dtype=dtype)
    return Layout(canonical=canonical, holdings=tuple(sorted(holdings, key=lambda holding: holding.rank)))


@dataclass(frozen=True, slots=True, kw_only=True)
class _Cut:
    """One tensor-parallel rank's share of the model."""

    shape: ModelShape
    canonical: dict[str, TensorSpec]
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


def _stage_tensors(cut: _Cut, parallel: MegatronParallel, stage: int) -> Iterator[LocalTensor]:
    """All parameters of one stage: chunk c of stage s is number c * pipeline + s in the order of the layers."""
    num_chunks = parallel.pipeline * parallel.virtual_pipeline
    layers_per_chunk = cut.shape.num_layers // num_chunks
    for chunk in range(parallel.virtual_pipeline):
        position = chunk * parallel.pipeline + stage
        is_first, is_last = position == 0, position == num_chunks - 1
        prefix = f"chunk{chunk}."
        if is_first:
            yield _vocab_tensor(cut, f"{prefix}embedding.word_embeddings.weight", EMBEDDING)
        for index in range(layers_per_chunk):
            source = layer_prefix(position * layers_per_chunk + index)
            yield from _layer_tensors(cut, f"{prefix}decoder.layers.{index}.", source)
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


def _layer_tensors(cut: _Cut, local: str, source: str) -> Iterator[LocalTensor]:
    shape = cut.shape
    yield cut.whole(f"{local}input_layernorm.weight", f"{source}input_layernorm.weight")
    yield cut.columns(f"{local}self_attention.linear_proj.weight", f"{source}self_attn.o_proj.weight")
    yield _qkv(cut, f"{local}self_attention.linear_qkv.weight", source, "weight", columns=(shape.hidden,))
    if shape.has_qkv_bias:
        yield _qkv(cut, f"{local}self_attention.linear_qkv.bias", source, "bias", columns=())
    if shape.has_qk_norm:
        yield cut.whole(f"{local}self_attention.q_layernorm.weight", f"{source}self_attn.q_norm.weight")
        yield cut.whole(f"{local}self_attention.k_layernorm.weight", f"{source}self_attn.k_norm.weight")
    yield cut.whole(f"{local}pre_mlp_layernorm.weight", f"{source}post_attention_layernorm.weight")
    yield _gate_up(cut, f"{local}mlp.linear_fc1.weight", source)
    yield cut.columns(f"{local}mlp.linear_fc2.weight", f"{source}mlp.down_proj.weight")


def _qkv(cut: _Cut, local: str, source: str, suffix: str, *, columns: tuple[int, ...]) -> LocalTensor:
    """[queries of a group | its key | its value], group after group, cut into equal rows.

    With fewer groups than ranks a rank's rows end inside a group: Megatron gathers the activations, not the weights.
    """
    shape = cut.shape
    queries = shape.num_heads // shape.num_kv_heads * shape.head_dim
    segments = tuple(
        Segment(name=f"{source}self_attn.{projection}.{suffix}", start=group * num_rows, num_rows=num_rows)
        for group in range(shape.num_kv_heads)
        for projection, num_rows in (("q_proj", queries), ("k_proj", shape.head_dim), ("v_proj", shape.head_dim))
    )
    total = (shape.num_heads + 2 * shape.num_kv_heads) * shape.head_dim
    return cut.rows(local, segments, total=total, columns=columns)


def _gate_up(cut: _Cut, local: str, source: str) -> LocalTensor:
    """[gate of the rank; up of the rank]."""
    share = cut.shape.ffn_hidden // cut.size
    segments = tuple(
        Segment(name=f"{source}mlp.{projection}.weight", start=cut.rank * share, num_rows=share)
        for projection in ("gate_proj", "up_proj")
    )
    return row_window(local, segments, start=0, num_rows=2 * share, columns=(cut.shape.hidden,))


def _refuse_impossible(shape: ModelShape, parallel: MegatronParallel) -> None:
    tensor, num_chunks = parallel.tensor, parallel.pipeline * parallel.virtual_pipeline
    problems = []
    for what, count in (("attention heads", shape.num_heads), ("ffn_hidden", shape.ffn_hidden)):
        if count % tensor:
            problems.append(Problem(key="tensor", message=f"{tensor} does not divide {what} {count}"))
    if shape.num_kv_heads % tensor and tensor % shape.num_kv_heads:
        message = f"{tensor} is neither a divisor nor a multiple of the {shape.num_kv_heads} KV heads"
        problems.append(Problem(key="tensor", message=message))
    if shape.num_layers % num_chunks:
        message = (
            f"{parallel.pipeline} stages * {parallel.virtual_pipeline} chunks do not divide {shape.num_layers} layers"
        )
        problems.append(Problem(key="pipeline", message=message))
    if parallel.virtual_pipeline > 1 and parallel.pipeline == 1:
        problems.append(Problem(key="virtual_pipeline", message="needs pipeline of at least 2"))
    if problems:
        raise ConfigError("Megatron layout", tuple(problems))
