"""A rank's part of a checkpoint, copied to host memory: what a save reads while the trainer is already changing it.

A rank copies only the boxes that the save's plan takes from it, so replicas share the work and nothing is held twice.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import TypeAlias

import torch

from megarl.checkpoint.save import assign_tensors
from megarl.weights.algebra.locality import same_processes
from megarl.weights.algebra.plan import Move, plan
from megarl.weights.algebra.slices import Holding, Index, Layout, Piece, TensorSpec

BoxView: TypeAlias = Callable[[str, Index, Index], torch.Tensor]
"""(name of a rank's own tensor, offsets, shape) -> that box of it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Contribution:
    """What every rank gives to a save of one layout; computed once."""

    layout: Layout
    """Of the snapshots: each box is a tensor of its own."""
    boxes: Mapping[str, tuple[str, Index]]
    """Of this rank, by their names in `layout`: the tensor they are in, and where."""


def contribution(layout: Layout, rank: int) -> Contribution:
    """`layout` is of the trainer's own tensors; saving the result writes what saving `layout` would write.

    The writers are the same: each keeps some of every tensor it was assigned, and nobody holds one that did not before.
    """
    target = assign_tensors(layout)
    moves = plan(layout, target, locations=same_processes(layout, target))
    holdings = [_boxes_of(holding, moves.moves_from(holding.rank)) for holding in layout.holdings]
    return Contribution(
        layout=Layout(canonical=layout.canonical, holdings=tuple(holdings)),
        boxes={_name(move): (move.source_name, move.source_offsets) for move in moves.moves_from(rank)},
    )


def copy_to_host(given: Contribution, rank: int, view: BoxView) -> dict[str, torch.Tensor]:
    """This rank's boxes as they are now."""
    specs = given.layout.by_rank[rank].tensors
    copies: dict[str, torch.Tensor] = {}
    device = torch.device("cpu")
    for name, (source_name, offsets) in given.boxes.items():
        source = view(source_name, offsets, specs[name].shape)
        device = source.device
        # Pinned, so that the copies of all boxes are under way at once.
        copy = torch.empty(source.shape, dtype=source.dtype, pin_memory=device.type == "cuda")
        copies[name] = copy.copy_(source, non_blocking=True)
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return copies


def _boxes_of(holding: Holding, moves: Iterable[Move]) -> Holding:
    tensors: dict[str, TensorSpec] = {}
    pieces: list[Piece] = []
    for move in moves:
        box, name = move.slice, _name(move)
        tensors[name] = TensorSpec(shape=box.shape, dtype=holding.tensors[move.source_name].dtype)
        pieces.append(Piece(slice=box, local_name=name, local_offsets=(0,) * len(box.shape)))
    return Holding(rank=holding.rank, tensors=tensors, pieces=tuple(pieces))


def _name(move: Move) -> str:
    return str(move.slice)
