"""Where hidden states can be compared: the outputs of a decoder's modules, in canonical names and columns. Pure.

The columns that a linear layer makes are the rows of its weight, and those it takes are the weight's columns. So what a
rank holds says which canonical columns pass through each of its modules, whatever the parallel layout.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from megarl.config.model import ModelShape
from megarl.weights.algebra.slices import Holding, Piece
from megarl.weights.layouts.canonical import EMBEDDING, FINAL_NORM, canonical_tensors, head_name, layer_prefix

LM_HEAD = "lm_head"
"""The log-probabilities that follow from the logits."""
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
class Site:
    """The output of one module, and the canonical tensors it depends on besides its input."""

    name: str
    weights: tuple[str, ...]


def sites(shape: ModelShape) -> tuple[Site, ...]:
    """All of a model, in the order of its forward pass."""
    tensors = canonical_tensors(shape)

    def site(name: str, *modules: str) -> Site:
        candidates = [f"{module}.{kind}" for module in modules for kind in ("weight", "bias")]
        return Site(name=name, weights=tuple(tensor for tensor in candidates if tensor in tensors))

    found = [site(_module(EMBEDDING), _module(EMBEDDING))]
    for index in range(shape.num_layers):
        for module in _LAYER:
            name = f"{layer_prefix(index)}{module}"
            # Queries and keys are normalised between their projections and the attention.
            owners = [f"{layer_prefix(index)}self_attn.{norm}" for norm in ("q_norm", "k_norm")]
            found.append(site(name, *(owners if module == _ATTENTION else [name])))
    found.append(site(_module(FINAL_NORM), _module(FINAL_NORM)))
    return (*found, Site(name=LM_HEAD, weights=(head_name(shape),)), Site(name=LOGPROBS, weights=()))


@dataclass(frozen=True, slots=True, kw_only=True)
class Columns:
    """Some columns of a site, and where they are in what a rank's module takes or makes."""

    site: str
    first: int
    local_first: int
    size: int | None
    """None is all of them: every rank has the whole width."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Watch:
    """One module of a rank, by its local name."""

    module: str
    takes: tuple[Columns, ...]
    makes: tuple[Columns, ...]


def watches(holding: Holding) -> tuple[Watch, ...]:
    """The modules of one rank through which the columns of all its sites pass."""
    by_module: dict[str, list[Piece]] = {}
    for piece in holding.pieces:
        if piece.local_name.endswith(_WEIGHT):
            by_module.setdefault(_module(piece.local_name), []).append(piece)
    return tuple(watch for module, pieces in by_module.items() for watch in _watch(module, pieces))


def _watch(module: str, pieces: list[Piece]) -> Iterator[Watch]:
    name = _module(pieces[0].slice.name)
    prefix, _, leaf = name.rpartition(".")
    if leaf in ("embed_tokens", "norm"):
        yield Watch(module=module, takes=(), makes=(_whole(name),))
    elif leaf in ("q_proj", "k_proj", "v_proj", "gate_proj", "up_proj"):
        layer, _, block = prefix.rpartition(".")
        before = _INPUT_NORM if block == "self_attn" else _POST_NORM
        made = [_columns(piece, _module(piece.slice.name), axis=0) for piece in pieces]
        # What enters the projections is what the norm made; some engines run the norm inside another kernel.
        yield Watch(module=module, takes=(_whole(f"{layer}.{before}"),), makes=tuple(made))
    elif leaf in ("o_proj", "down_proj"):
        before = "attention" if leaf == "o_proj" else "activation"
        taken = [_columns(piece, f"{prefix}.{before}", axis=1) for piece in pieces]
        yield Watch(module=module, takes=tuple(taken), makes=(_whole(name),))


def _columns(piece: Piece, site: str, *, axis: int) -> Columns:
    box = piece.slice
    return Columns(site=site, first=box.offsets[axis], local_first=piece.local_offsets[axis], size=box.shape[axis])


def _whole(site: str) -> Columns:
    return Columns(site=site, first=0, local_first=0, size=None)


def _module(tensor: str) -> str:
    return tensor.removesuffix(_WEIGHT)
