"""Where hidden states can be compared: the outputs of a decoder's modules, in canonical names and columns. Pure.

The output columns of a linear layer are the rows of its weight, and its input columns are the weight's columns. The
pieces of a rank therefore give the canonical columns that pass through each of its modules, for any parallel layout.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from megarl.config.model import ModelShape
from megarl.weights.algebra.slices import Holding, Piece
from megarl.weights.layouts.canonical import EMBEDDING, FINAL_NORM, canonical_tensors, head_name, layer_prefix

LM_HEAD = "lm_head"
"""The log-probabilities computed from the logits."""
LOGPROBS = "logprobs"
"""The log-probabilities as they are reported."""

_WEIGHT = ".weight"
_INPUT_NORM, _POST_NORM = "input_layernorm", "post_attention_layernorm"
_ATTENTION, _ACTIVATION = "self_attn.attention", "mlp.activation"
_LAYER = (
    _INPUT_NORM,
    "self_attn.q_proj",
    "self_attn.k_proj",
    "self_attn.v_proj",
    _ATTENTION,
    "self_attn.o_proj",
    _POST_NORM,
    "mlp.gate_proj",
    "mlp.up_proj",
    _ACTIVATION,
    "mlp.down_proj",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class HookPoint:
    """The output of one module, and the canonical tensors that it depends on beside its input."""

    name: str
    weights: tuple[str, ...]


def hook_points(shape: ModelShape) -> tuple[HookPoint, ...]:
    """Return all hook points of a model, in the order of its forward pass."""
    tensors = canonical_tensors(shape)

    def point(name: str, *modules: str) -> HookPoint:
        candidates = [f"{module}.{kind}" for module in modules for kind in ("weight", "bias")]
        return HookPoint(name=name, weights=tuple(tensor for tensor in candidates if tensor in tensors))

    points = [point(_module(EMBEDDING), _module(EMBEDDING))]
    for index in range(shape.num_layers):
        for module in _LAYER:
            name = f"{layer_prefix(index)}{module}"
            # Queries and keys are normalised between their projections and the attention.
            owners = [f"{layer_prefix(index)}self_attn.{norm}" for norm in ("q_norm", "k_norm")]
            points.append(point(name, *(owners if module == _ATTENTION else [name])))
    points.append(point(_module(FINAL_NORM), _module(FINAL_NORM)))
    return (*points, HookPoint(name=LM_HEAD, weights=(head_name(shape),)), HookPoint(name=LOGPROBS, weights=()))


@dataclass(frozen=True, slots=True, kw_only=True)
class Columns:
    """Some columns of a hook point, and their place in the input or output of a rank's module."""

    hook_point: str
    first: int
    local_first: int
    size: int | None
    """None: every rank has the whole width."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ModuleHook:
    """One module of a rank, by its local name, and the columns of hook points that pass through it."""

    module: str
    inputs: tuple[Columns, ...]
    outputs: tuple[Columns, ...]


def module_hooks(holding: Holding) -> tuple[ModuleHook, ...]:
    """Return the modules of one rank that together see the columns of all its hook points."""
    by_module: dict[str, list[Piece]] = {}
    for piece in holding.pieces:
        if piece.local_name.endswith(_WEIGHT):
            by_module.setdefault(_module(piece.local_name), []).append(piece)
    return tuple(hook for module, pieces in by_module.items() for hook in _module_hook(module, pieces))


def _module_hook(module: str, pieces: list[Piece]) -> Iterator[ModuleHook]:
    name = _module(pieces[0].slice.name)
    prefix, _, leaf = name.rpartition(".")
    if leaf in ("embed_tokens", "norm"):
        yield ModuleHook(module=module, inputs=(), outputs=(_whole(name),))
    elif leaf in ("q_proj", "k_proj", "v_proj", "gate_proj", "up_proj"):
        layer, _, block = prefix.rpartition(".")
        before = _INPUT_NORM if block == "self_attn" else _POST_NORM
        outputs = tuple(_columns(piece, _module(piece.slice.name), axis=0) for piece in pieces)
        # The input of the projections is the norm's output; some engines run the norm inside another kernel.
        yield ModuleHook(module=module, inputs=(_whole(f"{layer}.{before}"),), outputs=outputs)
    elif leaf in ("o_proj", "down_proj"):
        before = "attention" if leaf == "o_proj" else "activation"
        inputs = tuple(_columns(piece, f"{prefix}.{before}", axis=1) for piece in pieces)
        yield ModuleHook(module=module, inputs=inputs, outputs=(_whole(name),))


def _columns(piece: Piece, hook_point: str, *, axis: int) -> Columns:
    first, local_first, size = piece.slice.offsets[axis], piece.local_offsets[axis], piece.slice.shape[axis]
    return Columns(hook_point=hook_point, first=first, local_first=local_first, size=size)


def _whole(hook_point: str) -> Columns:
    return Columns(hook_point=hook_point, first=0, local_first=0, size=None)


def _module(tensor: str) -> str:
    return tensor.removesuffix(_WEIGHT)
