"""How moves travel: packed end to end into buckets, equally on both sides. Pure: no torch.

Buckets of one pair of ranks depend on the plan and `bucket_bytes` alone, so sender and receiver agree without a header.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from math import prod

from megarl.weights.algebra.locality import Link
from megarl.weights.algebra.plan import Delivery, Move, Plan
from megarl.weights.algebra.slices import ITEM_BYTES, Slice, shift

DEFAULT_BUCKET_BYTES = 64 << 20

NUM_LANES = 2
"""Buckets of a sender under way or being packed at any time."""

_ALIGNMENT = 16
"""Parcels start at multiples of this, so that a bucket can be viewed in any dtype."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Parcel:
    """One move inside a bucket."""

    move: Move
    start: int

    @property
    def num_bytes(self) -> int:
        return self.move.num_bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class Bucket:
    """One message, from a source to a target or, after the first hop, between targets.

    What it carries has made the same number of hops. So a bucket never waits for one that waits for it.
    """

    source_rank: int
    target_rank: int
    hop: int
    index: int
    """Its number among the buckets that this source, or this target, gives to this target."""
    num_bytes: int
    parcels: tuple[Parcel, ...]

    @property
    def is_passed_on(self) -> bool:
        return self.hop > 0


def buckets_from(plan: Plan, rank: int, *, bucket_bytes: int) -> tuple[Bucket, ...]:
    """What source `rank` sends. Targets take turns, each source starting at another one, so that none waits for all."""
    return _in_turns(plan, rank, _buckets(plan.moves_from(rank), bucket_bytes))


def buckets_on_from(plan: Plan, rank: int, *, bucket_bytes: int) -> tuple[Bucket, ...]:
    """What target `rank` passes on, in an order in which it can: nothing waits for a bucket of a later hop."""
    return _in_turns(plan, rank, _buckets(plan.moves_on_from(rank), bucket_bytes))


def buckets_to(plan: Plan, rank: int, *, bucket_bytes: int) -> tuple[Bucket, ...]:
    """What target `rank` receives, first buckets first."""
    buckets = _buckets(plan.moves_to(rank), bucket_bytes)
    return tuple(sorted(buckets, key=lambda bucket: (bucket.hop, bucket.index, bucket.source_rank)))


def parts_of(delivery: Delivery, *, bucket_bytes: int) -> Iterator[Slice]:
    """A box as it travels: by rows where it is larger than a bucket."""
    return _split(delivery.slice, bucket_bytes // ITEM_BYTES[delivery.dtype])


def staging_bound(plan: Plan, rank: int, *, bucket_bytes: int, shares_device: bool = False) -> int:
    """Bytes that target `rank` holds at most beside its parameters: a version, and what it is passing on.

    Each parcel may be preceded by a gap; a bucket is larger than `bucket_bytes` only where a single row is. With
    `shares_device` it reads what is on its own device, and stages the rest.
    """
    near = Link.DEVICE if shares_device else Link.PROCESS
    received = [move for move in plan.moves_to(rank) if _link(plan, move) > near]
    passed_on = plan.moves_on_from(rank)
    lanes = NUM_LANES * _largest(passed_on, bucket_bytes) if passed_on else 0
    num_parcels = sum(sum(1 for _ in _split(move.slice, _room(move, bucket_bytes))) for move in received)
    return sum(move.num_bytes for move in received) + _ALIGNMENT * num_parcels + lanes


def _link(plan: Plan, move: Move) -> Link:
    givers = plan.locations.targets if move.hop else plan.locations.sources
    return givers[move.source_rank].link(plan.locations.targets[move.target_rank])


def _largest(moves: Iterable[Move], bucket_bytes: int) -> int:
    rows = (prod(move.slice.shape[1:]) * ITEM_BYTES[move.dtype] for move in moves)
    return max(bucket_bytes, max(rows, default=0))


def _in_turns(plan: Plan, rank: int, buckets: Iterable[Bucket]) -> tuple[Bucket, ...]:
    num_targets = 1 + max((holding.rank for holding in plan.target.holdings), default=0)
    turn = {True: rank + 1, False: rank}
    return tuple(
        sorted(
            buckets,
            key=lambda bucket: (
                bucket.hop,
                bucket.index,
                (bucket.target_rank - turn[bucket.is_passed_on]) % num_targets,
            ),
        )
    )


def _buckets(moves: Iterable[Move], bucket_bytes: int) -> Iterator[Bucket]:
    by_pair: defaultdict[tuple[int, int, bool], defaultdict[int, list[Move]]] = defaultdict(lambda: defaultdict(list))
    for move in moves:
        by_pair[move.source_rank, move.target_rank, move.hop > 0][move.hop].append(move)
    for (source_rank, target_rank, _), by_hop in by_pair.items():
        filled = ((hop, parcels) for hop in sorted(by_hop) for parcels in _filled(by_hop[hop], bucket_bytes))
        for index, (hop, parcels) in enumerate(filled):
            yield Bucket(
                source_rank=source_rank,
                target_rank=target_rank,
                hop=hop,
                index=index,
                num_bytes=parcels[-1].start + parcels[-1].num_bytes,
                parcels=tuple(parcels),
            )


def _filled(moves: Iterable[Move], bucket_bytes: int) -> Iterator[list[Parcel]]:
    parcels: list[Parcel] = []
    end = 0
    for whole in moves:
        for box in _split(whole.slice, _room(whole, bucket_bytes)):
            move = whole if box is whole.slice else _part(whole, box)
            start = -(-end // _ALIGNMENT) * _ALIGNMENT
            if parcels and start + move.num_bytes > bucket_bytes:
                yield parcels
                parcels, start = [], 0
            parcels.append(Parcel(move=move, start=start))
            end = start + move.num_bytes
    if parcels:
        yield parcels


def _room(move: Move, bucket_bytes: int) -> int:
    """Elements."""
    return bucket_bytes // ITEM_BYTES[move.dtype]


def _split(box: Slice, max_elements: int) -> Iterator[Slice]:
    """Parts by rows, the same whatever travels with them; a single row that is still too large stays whole."""
    if box.num_elements <= max_elements:
        yield box
        return
    rows = max(1, max_elements // prod(box.shape[1:]))
    for first in range(0, box.shape[0], rows):
        offsets = (box.offsets[0] + first, *box.offsets[1:])
        yield replace(box, offsets=offsets, shape=(min(rows, box.shape[0] - first), *box.shape[1:]))


def _part(move: Move, box: Slice) -> Move:
    return replace(
        move,
        slice=box,
        source_offsets=shift(box.offsets, move.slice.offsets, move.source_offsets),
        target_offsets=shift(box.offsets, move.slice.offsets, move.target_offsets),
    )
