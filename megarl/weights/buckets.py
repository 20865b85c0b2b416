"""How moves travel: packed end to end into buckets, equally on both sides. Pure: no torch.

Buckets of one pair of ranks depend on the plan and `bucket_bytes` alone, so sender and receiver agree without a header.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from math import prod

from megarl.weights.plan import Move, Plan
from megarl.weights.slices import ITEM_BYTES, shift

DEFAULT_BUCKET_BYTES = 64 << 20

NUM_LANES = 2
"""Buckets of a sender under way or being packed at any time."""

_ALIGNMENT = 16
"""Parcels start at multiples of this, so that a bucket can be viewed in any dtype."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Parcel:
    """One move inside a bucket, as `dtype`."""

    move: Move
    dtype: str
    start: int
    num_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Bucket:
    """One message from a source rank to a target rank."""

    source_rank: int
    target_rank: int
    index: int
    """Its number among the buckets of this pair."""
    num_bytes: int
    parcels: tuple[Parcel, ...]


def buckets_from(plan: Plan, rank: int, *, bucket_bytes: int) -> tuple[Bucket, ...]:
    """What source `rank` sends. Targets take turns, each source starting at another one, so that none waits for all."""
    num_targets = 1 + max((holding.rank for holding in plan.target.holdings), default=0)
    buckets = _buckets(plan, plan.moves_from.get(rank, ()), bucket_bytes)
    return tuple(sorted(buckets, key=lambda bucket: (bucket.index, (bucket.target_rank - rank) % num_targets)))


def buckets_to(plan: Plan, rank: int, *, bucket_bytes: int) -> tuple[Bucket, ...]:
    """What target `rank` receives, first buckets first."""
    buckets = _buckets(plan, plan.moves_to.get(rank, ()), bucket_bytes)
    return tuple(sorted(buckets, key=lambda bucket: (bucket.index, bucket.source_rank)))


def _buckets(plan: Plan, moves: Iterable[Move], bucket_bytes: int) -> Iterator[Bucket]:
    by_pair: defaultdict[tuple[int, int], list[Move]] = defaultdict(list)
    for move in moves:
        by_pair[move.source_rank, move.target_rank].append(move)
    for (source_rank, target_rank), wanted in by_pair.items():
        for index, parcels in enumerate(_filled(plan, wanted, bucket_bytes)):
            yield Bucket(
                source_rank=source_rank,
                target_rank=target_rank,
                index=index,
                num_bytes=parcels[-1].start + parcels[-1].num_bytes,
                parcels=tuple(parcels),
            )


def _filled(plan: Plan, moves: Iterable[Move], bucket_bytes: int) -> Iterator[list[Parcel]]:
    parcels: list[Parcel] = []
    end = 0
    for whole in moves:
        dtype = plan.dtype_of(whole)
        for move in _split(whole, bucket_bytes // ITEM_BYTES[dtype]):
            num_bytes = move.slice.num_elements * ITEM_BYTES[dtype]
            start = -(-end // _ALIGNMENT) * _ALIGNMENT
            if parcels and start + num_bytes > bucket_bytes:
                yield parcels
                parcels, start = [], 0
            parcels.append(Parcel(move=move, dtype=dtype, start=start, num_bytes=num_bytes))
            end = start + num_bytes
    if parcels:
        yield parcels


def _split(move: Move, max_elements: int) -> Iterator[Move]:
    """Parts of a move by rows; a single row that is still too large stays whole."""
    box = move.slice
    if box.num_elements <= max_elements:
        yield move
        return
    rows = max(1, max_elements // prod(box.shape[1:]))
    for first in range(0, box.shape[0], rows):
        offsets = (box.offsets[0] + first, *box.offsets[1:])
        part = replace(box, offsets=offsets, shape=(min(rows, box.shape[0] - first), *box.shape[1:]))
        yield replace(
            move,
            slice=part,
            source_offsets=shift(offsets, box.offsets, move.source_offsets),
            target_offsets=shift(offsets, box.offsets, move.target_offsets),
        )
