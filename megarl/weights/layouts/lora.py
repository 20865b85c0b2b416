"""The layout of LoRA adapters, as extra canonical tensors. Pure.

An adapter adds B @ A to a matrix W: A is [rank, columns of W], B is [rows of W, rank]. A holder of some rows of W holds
the same rows of B, and a holder of some columns of W holds the same columns of A. The layout of the adapters therefore
follows from the layout of the matrices, for trainer and engine alike, and a plan moves adapters like other tensors.

In a fused parameter B is fused in the same way; the A of its matrices are stacked in their order. Every holder of some
rows of a fused parameter holds the A of all its matrices: what it computes with them is summed over the holders.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TypeAlias

from megarl.config.lora import EXPERTS, SHARED_EXPERT, LoraConfig, served_name
from megarl.weights.algebra.slices import Holding, Layout, Piece, Slice, TensorSpec
from megarl.weights.layouts.canonical import VALUE_HEAD

LOCAL_A, LOCAL_B = ".lora_a", ".lora_b"
"""Ends of the names of a holder's own tensors."""

_WEIGHT = ".weight"
_LAYERS = "model.layers."
_EXPERTS = ".experts."
_SHARED = f".{SHARED_EXPERT}."
_PREFIX = "base_model.model."
ADAPTED_HEAD = _PREFIX + VALUE_HEAD
"""The value head of a critic, which is trained as a whole, in the file of its adapter."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LoraShape:
    rank: int
    modules: frozenset[str]
    """Names of the adapted linear layers within their block, such as q_proj."""

    @classmethod
    def of(cls, lora: LoraConfig) -> LoraShape:
        return cls(rank=lora.rank, modules=frozenset(lora.modules))

    def adapts(self, name: str) -> bool:
        """Whether a canonical tensor is a matrix with an adapter; of routed experts all three are, or none."""
        is_matrix = name.startswith(_LAYERS) and name.endswith(_WEIGHT)
        return is_matrix and (EXPERTS if _EXPERTS in name else _module(name)) in self.modules


def _module(name: str) -> str:
    return name.removesuffix(_WEIGHT).rpartition(".")[2]


def canonical_a(name: str) -> str:
    """Return the name of A in the adapter's file, for the matrix `name`."""
    return f"{_PREFIX}{name.removesuffix(_WEIGHT)}.lora_A.weight"


def canonical_b(name: str) -> str:
    return f"{_PREFIX}{name.removesuffix(_WEIGHT)}.lora_B.weight"


def adapter_tensors(
    canonical: Mapping[str, TensorSpec], lora: LoraShape, *, dtype: str | None = None
) -> dict[str, TensorSpec]:
    """Return name and spec of every tensor in the file of an adapter; a critic's has the value head as well."""
    tensors: dict[str, TensorSpec] = {}
    for name, spec in canonical.items():
        kind = dtype or spec.dtype
        if lora.adapts(name):
            rows, columns = spec.shape
            tensors[canonical_a(name)] = TensorSpec(shape=(lora.rank, columns), dtype=kind)
            tensors[canonical_b(name)] = TensorSpec(shape=(rows, lora.rank), dtype=kind)
        elif name == VALUE_HEAD:
            tensors[ADAPTED_HEAD] = TensorSpec(shape=spec.shape, dtype=kind)
    return tensors


def adapter_layout(layout: Layout, lora: LoraShape, *, dtype: str | None = None) -> Layout:
    """Return what the same holders hold of the adapters. Replicas stay replicas."""
    return _derived(layout, lora, _siblings(layout, lora.adapts), dtype=dtype)


def served_layout(layout: Layout, lora: LoraShape) -> Layout:
    """Return what the ranks of engines hold of one version, from the layout of their weights.

    A stack has room for each matrix of its parameter, adapted or not. The layers of a shared expert are not fused.
    """
    apart = layout.derive(layout.canonical, _without_fused_experts)
    return _derived(apart, lora, _siblings(apart, lambda _: True))


def _derived(layout: Layout, lora: LoraShape, siblings: _Siblings, *, dtype: str | None = None) -> Layout:
    canonical = adapter_tensors(layout.canonical, lora, dtype=dtype)
    return layout.derive(canonical, lambda holding: _adapters(holding, lora, siblings))


def _without_fused_experts(holding: Holding) -> Holding:
    """Give each matrix of a shared expert a tensor of its own, with the name that its layer has in engines."""
    stacks: defaultdict[str, dict[str, None]] = defaultdict(dict)
    for piece in holding.pieces:
        if _SHARED in piece.slice.name:
            stacks[piece.local_name][piece.slice.name] = None
    tensors, starts = dict(holding.tensors), dict[str, int]()
    for local_name, names in stacks.items():
        spec = tensors.pop(local_name)
        rows, columns = spec.shape[0] // len(names), spec.shape[1]
        for place, name in enumerate(names):
            starts[name] = place * rows
            tensors[_served(local_name, name)] = TensorSpec(shape=(rows, columns), dtype=spec.dtype)
    pieces = tuple(
        replace(
            piece,
            local_name=_served(piece.local_name, piece.slice.name),
            local_offsets=(piece.local_offsets[0] - starts[piece.slice.name], piece.local_offsets[1]),
        )
        if piece.slice.name in starts
        else piece
        for piece in holding.pieces
    )
    return Holding(rank=holding.rank, tensors=tensors, pieces=pieces)


def _served(local_name: str, name: str) -> str:
    """Return the name of the layer of a shared expert's matrix; that of its block is that of the fused parameter."""
    block, _, _ = local_name.partition(_SHARED)
    _, _, module = name.partition(_SHARED)
    return served_name(f"{block}{_SHARED}{module}")


def stacked_rows(holding: Holding, lora: LoraShape) -> dict[str, list[tuple[int, range]]]:
    """Return for each B of a holding of adapters which A of the stack goes with which of its rows."""
    place_of = {
        piece.slice.name.replace(".lora_A.", ".lora_B."): piece.local_offsets[0] // lora.rank
        for piece in holding.pieces
        if piece.local_name.endswith(LOCAL_A)
    }
    rows: defaultdict[str, list[tuple[int, range]]] = defaultdict(list)
    for piece in holding.pieces:
        if piece.local_name.endswith(LOCAL_B):
            first = piece.local_offsets[0]
            rows[piece.local_name].append((place_of[piece.slice.name], range(first, first + piece.slice.shape[0])))
    return dict(rows)


_Siblings: TypeAlias = Mapping[str, tuple[str, ...]]
"""For each adapted matrix those that are in one parameter with it, itself included, in their order."""


def _siblings(layout: Layout, is_stacked: Callable[[str], bool]) -> _Siblings:
    """Return the matrices that holders stack, as their family says; a rank may have rows of some of them only."""
    stacks: defaultdict[tuple[str, str], dict[str, None]] = defaultdict(dict)
    seen: set[int] = set()
    for holding in layout.holdings:
        if id(holding.pieces) in seen:
            continue
        seen.add(id(holding.pieces))
        for piece in holding.pieces:
            if is_stacked(name := piece.slice.name):
                # Stages give their layers the same names, and ranks their experts.
                block = name.removesuffix(_WEIGHT).rpartition(".")[0]
                stacks[block, piece.local_name][name] = None
    return {name: tuple(names) for names in stacks.values() for name in names}


def _adapters(holding: Holding, lora: LoraShape, siblings: _Siblings) -> Holding:
    by_tensor: defaultdict[str, list[Piece]] = defaultdict(list)
    tensors: dict[str, TensorSpec] = {}
    pieces: list[Piece] = []
    for piece in holding.pieces:
        if lora.adapts(piece.slice.name):
            by_tensor[piece.local_name].append(piece)
        elif piece.slice.name == VALUE_HEAD:
            tensors[piece.local_name] = holding.tensors[piece.local_name]
            pieces.append(replace(piece, slice=replace(piece.slice, name=ADAPTED_HEAD)))
    for name, parts in by_tensor.items():
        spec = holding.tensors[name]
        rows, columns = spec.shape
        height = lora.rank * len(siblings[parts[0].slice.name])
        local_a, local_b = (f"{name.removesuffix(_WEIGHT)}{which}" for which in (LOCAL_A, LOCAL_B))
        tensors[local_a] = TensorSpec(shape=(height, columns), dtype=spec.dtype)
        tensors[local_b] = TensorSpec(shape=(rows, lora.rank), dtype=spec.dtype)
        pieces += _pieces(parts, lora, siblings, local_a, local_b)
    return Holding(rank=holding.rank, tensors=tensors, pieces=tuple(pieces))


def _pieces(
    parts: Sequence[Piece], lora: LoraShape, siblings: _Siblings, local_a: str, local_b: str
) -> Iterator[Piece]:
    has_a: set[str] = set()
    rank = lora.rank
    for piece in parts:
        box = piece.slice
        (row, column), (rows, columns) = box.offsets, box.shape
        local_row, local_column = piece.local_offsets
        yield Piece(
            slice=Slice(name=canonical_b(box.name), offsets=(row, 0), shape=(rows, rank)),
            local_name=local_b,
            local_offsets=(local_row, 0),
        )
        # The rows of one matrix may come in several pieces, all with the same columns.
        for place, name in enumerate(siblings[box.name]):
            if name not in has_a and lora.adapts(name):
                has_a.add(name)
                yield Piece(
                    slice=Slice(name=canonical_a(name), offsets=(0, column), shape=(rank, columns)),
                    local_name=local_a,
                    local_offsets=(place * rank, local_column),
                )
