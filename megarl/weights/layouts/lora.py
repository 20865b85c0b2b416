"""The layout of LoRA adapters, as extra canonical tensors. Pure.

An adapter adds B @ A to a matrix W: A is [rank, columns of W], B is [rows of W, rank]. A holder of some rows of W holds
the same rows of B, and a holder of some columns of W holds the same columns of A. The layout of the adapters therefore
follows from the layout of the matrices, for trainer and engine alike, and a plan moves adapters like other tensors.

In a fused parameter B is fused in the same way; the A of its matrices are stacked in their order.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from megarl.weights.algebra.slices import Holding, Index, Layout, Piece, Slice, TensorSpec

_WEIGHT = ".weight"
_LAYERS = "model.layers."


@dataclass(frozen=True, slots=True, kw_only=True)
class LoraShape:
    rank: int
    modules: frozenset[str]
    """Names of the adapted linear layers within their block, such as q_proj."""

    def adapts(self, name: str) -> bool:
        """Whether a canonical tensor is a matrix with an adapter."""
        return name.startswith(_LAYERS) and name.removesuffix(_WEIGHT).rpartition(".")[2] in self.modules


def canonical_a(name: str) -> str:
    """Return the name of A in the adapter's file, for the matrix `name`."""
    return f"base_model.model.{name.removesuffix(_WEIGHT)}.lora_A.weight"


def canonical_b(name: str) -> str:
    return f"base_model.model.{name.removesuffix(_WEIGHT)}.lora_B.weight"


def adapter_tensors(canonical: Mapping[str, TensorSpec], lora: LoraShape) -> dict[str, TensorSpec]:
    """Return name and spec of every adapter tensor of a model."""
    tensors: dict[str, TensorSpec] = {}
    for name, spec in canonical.items():
        if lora.adapts(name):
            rows, columns = spec.shape
            tensors[canonical_a(name)] = TensorSpec(shape=(lora.rank, columns), dtype=spec.dtype)
            tensors[canonical_b(name)] = TensorSpec(shape=(rows, lora.rank), dtype=spec.dtype)
    return tensors


def adapter_layout(layout: Layout, lora: LoraShape) -> Layout:
    """Return what the same holders hold of the adapters. Replicas stay replicas."""
    done: dict[int, Holding] = {}
    holdings = []
    for holding in layout.holdings:
        known = done.get(id(holding.pieces))
        if known is None:
            known = done[id(holding.pieces)] = _adapters(holding, lora)
        holdings.append(Holding(rank=holding.rank, tensors=known.tensors, pieces=known.pieces))
    return Layout(canonical=adapter_tensors(layout.canonical, lora), holdings=tuple(holdings))


def _adapters(holding: Holding, lora: LoraShape) -> Holding:
    by_tensor: defaultdict[str, list[Piece]] = defaultdict(list)
    for piece in holding.pieces:
        if lora.adapts(piece.slice.name):
            by_tensor[piece.local_name].append(piece)
    tensors: dict[str, TensorSpec] = {}
    pieces: list[Piece] = []
    for name, parts in by_tensor.items():
        spec = holding.tensors[name]
        places = _stack(parts)
        *experts, rows, columns = spec.shape
        height = lora.rank * (1 + max(places.values()))
        local_a, local_b = (f"{name.removesuffix(_WEIGHT)}.{which}" for which in ("lora_a", "lora_b"))
        tensors[local_a] = TensorSpec(shape=(*experts, height, columns), dtype=spec.dtype)
        tensors[local_b] = TensorSpec(shape=(*experts, rows, lora.rank), dtype=spec.dtype)
        pieces += _pieces(parts, places, lora.rank, local_a, local_b)
    return Holding(rank=holding.rank, tensors=tensors, pieces=tuple(pieces))


def _stack(parts: Sequence[Piece]) -> dict[str, int]:
    """Return the position of each matrix's A; each expert of a stacked parameter has a stack of its own."""
    seen: defaultdict[Index, list[str]] = defaultdict(list)
    for piece in parts:
        names = seen[piece.local_offsets[:-2]]
        if piece.slice.name not in names:
            names.append(piece.slice.name)
    return {name: position for names in seen.values() for position, name in enumerate(names)}


def _pieces(
    parts: Sequence[Piece], places: Mapping[str, int], rank: int, local_a: str, local_b: str
) -> Iterator[Piece]:
    has_a: set[str] = set()
    for piece in parts:
        box = piece.slice
        (row, column), (rows, columns) = box.offsets, box.shape
        *experts, local_row, local_column = piece.local_offsets
        yield Piece(
            slice=Slice(name=canonical_b(box.name), offsets=(row, 0), shape=(rows, rank)),
            local_name=local_b,
            local_offsets=(*experts, local_row, 0),
        )
        # The rows of one matrix may come in several pieces, all with the same columns.
        if box.name not in has_a:
            has_a.add(box.name)
            yield Piece(
                slice=Slice(name=canonical_a(box.name), offsets=(0, column), shape=(rank, columns)),
                local_name=local_a,
                local_offsets=(*experts, places[box.name] * rank, local_column),
            )
