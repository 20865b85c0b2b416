"""Whether two sides hold the same weights, canonical tensor by canonical tensor, however each of them is split."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import TypeAlias

import torch

from megarl.weights.algebra.slices import Holding, Layout, Slice, TensorSpec
from megarl.weights.executors.digest import MODULUS, digest_tensor, to_ints
from megarl.weights.executors.tensors import box_of

Census: TypeAlias = Mapping[str, int]
"""The digest of every canonical box that a rank holds, by the text of the box."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WeightSide:
    """Everyone who holds one copy of a model, in the order of the layout's holdings."""

    layout: Layout
    censuses: Sequence[Census]


def take_census(holding: Holding, canonical: Mapping[str, TensorSpec], tensors: Mapping[str, torch.Tensor]) -> Census:
    """Of one rank's tensors, as they are now."""
    sums = {}
    for piece in holding.pieces:
        values = box_of(tensors[piece.local_name], piece.local_offsets, piece.slice.shape)
        sums[str(piece.slice)] = digest_tensor(values, piece.slice, canonical[piece.slice.name].shape)
    return to_ints(sums)


def differing_tensors(one: WeightSide, other: WeightSide) -> tuple[str, ...]:
    """Canonical tensors whose bits are not the same on both sides, or not in all copies within one of them."""
    mine, theirs = _totals(one), _totals(other)
    return tuple(name for name in one.layout.canonical if mine[name] is None or mine[name] != theirs[name])


def _totals(side: WeightSide) -> dict[str, int | None]:
    """Per canonical tensor the digest of the whole: the sum over its parts. None where copies of a part differ."""
    digests: defaultdict[Slice, set[int]] = defaultdict(set)
    for holding, census in zip(side.layout.holdings, side.censuses, strict=True):
        for piece in holding.pieces:
            digests[piece.slice].add(census[str(piece.slice)])
    parts: defaultdict[str, list[Slice]] = defaultdict(list)
    for box in digests:
        parts[box.name].append(box)
    totals: dict[str, int | None] = {}
    for name, spec in side.layout.canonical.items():
        covered = sum(box.num_elements for box in parts[name])
        assert covered == prod(spec.shape), f"{covered} of the {prod(spec.shape)} elements of {name} are held"
        is_consistent = all(len(digests[box]) == 1 for box in parts[name])
        totals[name] = sum(min(digests[box]) for box in parts[name]) % MODULUS if is_consistent else None
    return totals
