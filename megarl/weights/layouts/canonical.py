"""The tensors of a Hugging Face checkpoint, from the model's shape alone. Pure: no torch, no transformers."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import groupby
from math import prod

from megarl.families import family_of, uniform_shapes
from megarl.families.interface import Block
from megarl.families.shape import ModelShape
from megarl.weights.algebra.slices import TensorSpec

_ROOT = "model."
EMBEDDING = "model.embed_tokens.weight"
"""This and the next are the names of engines; `rooted` has those of files."""
FINAL_NORM = "model.norm.weight"
HEAD = "lm_head.weight"
VALUE_HEAD = "score.weight"
EXPERT = "{e}"
"""In the name of a tensor of a family: the number of an expert."""


def canonical_tensors(shape: ModelShape) -> dict[str, TensorSpec]:
    """Return name and spec of every tensor, in the order of the model. Tied embeddings are one tensor."""
    vocabulary = TensorSpec(shape=(shape.vocab, shape.hidden), dtype=shape.dtype)
    tensors = {rooted(EMBEDDING, shape): vocabulary}
    layers = layer_tensors(shape)
    for index, kind in enumerate(family_of(shape).kinds(shape)):
        prefix = rooted(layer_prefix(index), shape)
        tensors.update({prefix + name: spec for name, spec in layers[kind].items()})
    tensors[rooted(FINAL_NORM, shape)] = TensorSpec(shape=(shape.hidden,), dtype=shape.dtype)
    if shape.has_value_head:
        tensors[VALUE_HEAD] = TensorSpec(shape=(1, shape.hidden), dtype=shape.dtype)
    elif not shape.has_tied_embeddings:
        tensors[HEAD] = vocabulary
    return tensors


def layer_prefix(index: int) -> str:
    return f"{_ROOT}layers.{index}."


def rooted(name: str, shape: ModelShape) -> str:
    """Return the name in files of what engines call `name`."""
    return family_of(shape).root + name.removeprefix(_ROOT)


def layer_tensors(shape: ModelShape) -> dict[str, dict[str, TensorSpec]]:
    """Return the tensors of a layer of each kind, named within it."""
    num_experts = shape.experts.num if shape.experts else 0
    return {
        kind: dict(_layer(block, num_experts=num_experts, dtype=shape.dtype))
        for kind, block in family_of(shape).blocks(shape).items()
    }


def _layer(block: Block, *, num_experts: int, dtype: str) -> Iterator[tuple[str, TensorSpec]]:
    """Yield the tensors of a layer; those of one expert are together."""
    specs = {weight.name: TensorSpec(shape=weight.shape, dtype=weight.dtype or dtype) for weight in block.weights}
    for is_expert, names in groupby(specs, key=lambda name: EXPERT in name):
        together = tuple(names)
        for index in range(num_experts if is_expert else 1):
            for name in together:
                yield name.replace(EXPERT, str(index)), specs[name]


def num_parameters(shape: ModelShape) -> int:
    return sum(prod(spec.shape) for spec in canonical_tensors(shape).values())


def num_active_parameters(shape: ModelShape) -> int:
    """Return the parameters that one token uses: all, less the experts that it is not sent to."""
    idle = 0
    for each, num_layers in uniform_shapes(shape):
        if each.experts is not None:
            num_idle = each.experts.num - each.experts.per_token
            idle += num_idle * num_layers * 3 * each.ffn_hidden * each.hidden
    return num_parameters(shape) - idle


def head_name(shape: ModelShape) -> str:
    """Return the canonical tensor that produces the logits."""
    return rooted(EMBEDDING, shape) if shape.has_tied_embeddings else HEAD
