"""The tensors of a Hugging Face checkpoint, from the model's shape alone. Pure: no torch, no transformers."""

from __future__ import annotations

from collections.abc import Mapping
from math import prod

from megarl.config.model import TRAITS, ModelShape
from megarl.errors import ConfigError, Problem
from megarl.weights.algebra.slices import Index, TensorSpec

EMBEDDING = "model.embed_tokens.weight"
FINAL_NORM = "model.norm.weight"
HEAD = "lm_head.weight"
VALUE_HEAD = "score.weight"
DENSE_BLOCK = "mlp."
"""Prefix of the matrices of a feed-forward block; like the next ones, named within a layer."""
SHARED_BLOCK = "mlp.shared_expert."
SHARED_GATE = "mlp.shared_expert_gate.weight"
"""A token's share of the shared expert's output is the sigmoid of this row times the token."""


def canonical_tensors(shape: ModelShape) -> dict[str, TensorSpec]:
    """Return name and spec of every tensor, in the order of the model. Tied embeddings are one tensor."""
    _refuse_unsupported(shape)
    shapes: dict[str, Index] = {EMBEDDING: (shape.vocab, shape.hidden)}
    layer = _layer_shapes(shape)
    for index in range(shape.num_layers):
        prefix = layer_prefix(index)
        shapes.update({prefix + name: extent for name, extent in layer.items()})
    shapes[FINAL_NORM] = (shape.hidden,)
    if shape.has_value_head:
        shapes[VALUE_HEAD] = (1, shape.hidden)
    elif not shape.has_tied_embeddings:
        shapes[HEAD] = (shape.vocab, shape.hidden)
    specs = {extent: TensorSpec(shape=extent, dtype=shape.dtype) for extent in set(shapes.values())}
    return {name: specs[extent] for name, extent in shapes.items()}


def layer_prefix(index: int) -> str:
    return f"model.layers.{index}."


def layer_of(canonical: Mapping[str, TensorSpec]) -> dict[str, TensorSpec]:
    """Return the tensors of one layer, named within it; all layers are alike."""
    prefix = layer_prefix(0)
    return {name.removeprefix(prefix): spec for name, spec in canonical.items() if name.startswith(prefix)}


def router_name(shape: ModelShape) -> str:
    return f"{TRAITS[shape.family].block}gate.weight"


def expert_block(shape: ModelShape, index: int) -> str:
    return f"{TRAITS[shape.family].block}experts.{index}."


def matrix_names(shape: ModelShape) -> tuple[str, str, str]:
    """Return how the matrices of an expert, a shared one or a dense block end: gate, up and down."""
    gate, up, down = TRAITS[shape.family].matrices
    return f"{gate}.weight", f"{up}.weight", f"{down}.weight"


def num_parameters(shape: ModelShape) -> int:
    return sum(prod(spec.shape) for spec in canonical_tensors(shape).values())


def num_active_parameters(shape: ModelShape) -> int:
    """Return the parameters that one token uses: all, less the experts that it is not sent to."""
    idle = 0 if shape.experts is None else shape.experts.num - shape.experts.per_token
    return num_parameters(shape) - idle * shape.num_layers * 3 * shape.ffn_hidden * shape.hidden


def head_name(shape: ModelShape) -> str:
    """Return the canonical tensor that produces the logits."""
    return EMBEDDING if shape.has_tied_embeddings else HEAD


def _layer_shapes(shape: ModelShape) -> dict[str, Index]:
    query_rows = shape.num_heads * shape.head_dim
    kv_rows = shape.num_kv_heads * shape.head_dim
    shapes: dict[str, Index] = {"input_layernorm.weight": (shape.hidden,)}
    for projection, rows in (("q_proj", query_rows), ("k_proj", kv_rows), ("v_proj", kv_rows)):
        shapes[f"self_attn.{projection}.weight"] = (rows, shape.hidden)
        if shape.has_qkv_bias:
            shapes[f"self_attn.{projection}.bias"] = (rows,)
    if shape.has_qk_norm:
        shapes["self_attn.q_norm.weight"] = (shape.head_dim,)
        shapes["self_attn.k_norm.weight"] = (shape.head_dim,)
    shapes["self_attn.o_proj.weight"] = (shape.hidden, query_rows)
    shapes["post_attention_layernorm.weight"] = (shape.hidden,)
    blocks = {DENSE_BLOCK: shape.ffn_hidden}
    if shape.experts is not None:
        shapes[router_name(shape)] = (shape.experts.num, shape.hidden)
        blocks = {expert_block(shape, index): shape.ffn_hidden for index in range(shape.experts.num)}
        if shape.experts.shared:
            shapes[SHARED_GATE] = (1, shape.hidden)
            blocks[SHARED_BLOCK] = shape.experts.shared
    gate, up, down = matrix_names(shape)
    for block, rows in blocks.items():
        shapes[block + gate] = shapes[block + up] = (rows, shape.hidden)
        shapes[block + down] = (shape.hidden, rows)
    return shapes


def _refuse_unsupported(shape: ModelShape) -> None:
    # In transformers, Llama and Qwen3 with `attention_bias` also have a bias on o_proj, which Qwen2 never has.
    if shape.has_qkv_bias and not TRAITS[shape.family].has_qkv_bias:
        message = f"attention_bias is not supported for {shape.family}; supported are models without it"
        raise ConfigError("model.path", (Problem(key="model.path", message=message),))
