"""How moves travel: packed end to end into buckets, equally on both sides. Pure: no torch.

The buckets between two ranks depend on the plan and `bucket_bytes` alone, so sender and receiver need no header.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from math import prod

from megarl.weights.algebra.locality import Link
from megarl.weights.algebra.plan import Move, Plan, SourceBox
from megarl.weights.algebra.slices import ITEM_BYTES, Slice, shift

DEFAULT_BUCKET_BYTES = 64 << 20

NUM_LANES = 2
"""Buckets of a sender that travel or are being packed at any time."""

_ALIGNMENT = 16
"""Moves start at multiples of this, so that a bucket can be viewed in any dtype."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Bucket:
    """One message, from a source to a target or, after the first hop, between targets.

    All moves in it have made the same number of hops, so that a bucket never waits for one that waits for it.
    """

    source_rank: int
    target_rank: int
    hop: int
    index: int
    """Its number among the buckets of this sender for this target."""
    moves: tuple[Move, ...]
    starts: tuple[int, ...]
    """Byte at which each move begins."""

    @property
    def num_bytes(self) -> int:
        return self.starts[-1] + self.moves[-1].num_bytes

    @property
    def is_forwarded(self) -> bool:
        return self.hop > 0

    def link(self, plan: Plan) -> Link:
        return _link(plan, self.moves[0])


def buckets_from(plan: Plan, rank: int, *, bucket_bytes: int) -> tuple[Bucket, ...]:
    """Return what source `rank` sends. Targets take turns, and each source starts at another target."""
    return _in_turns(plan, rank, plan.moves_from(rank), bucket_bytes)


def buckets_forwarded_by(plan: Plan, rank: int, *, bucket_bytes: int) -> tuple[Bucket, ...]:
    """Return what target `rank` sends on, ordered by hop: no bucket waits for one of a later hop."""
    return _in_turns(plan, rank + 1, plan.moves_forwarded_by(rank), bucket_bytes)


def buckets_to(plan: Plan, rank: int, *, bucket_bytes: int) -> tuple[Bucket, ...]:
    """Return what target `rank` receives, in the order of sending."""
    buckets = _buckets(plan.moves_to(rank), bucket_bytes)
    return tuple(sorted(buckets, key=lambda bucket: (bucket.hop, bucket.index, bucket.source_rank)))


def split_box(box: SourceBox, *, bucket_bytes: int) -> Iterator[Slice]:
    """Yield a box as it travels: by rows where it is larger than a bucket."""
    return _split(box.slice, bucket_bytes // ITEM_BYTES[box.dtype])


def staging_bound(plan: Plan, rank: int, *, bucket_bytes: int, shares_device: bool = False) -> int:
    """Return the bytes that target `rank` holds at most beside its parameters: one version, and what it forwards.

    Each move may be preceded by a gap; a bucket is larger than `bucket_bytes` only where a single row is. With
    `shares_device` what is on the target's own device is not staged.
    """
    near = Link.DEVICE if shares_device else Link.PROCESS
    received = [move for move in plan.moves_to(rank) if _link(plan, move) > near]
    num_moves = sum(sum(1 for _ in _split(move.slice, _max_elements(move, bucket_bytes))) for move in received)
    bound = sum(move.num_bytes for move in received) + _ALIGNMENT * num_moves
    rows = [prod(move.slice.shape[1:]) * ITEM_BYTES[move.dtype] for move in plan.moves_forwarded_by(rank)]
    return bound + NUM_LANES * max(bucket_bytes, *rows) if rows else bound


def _link(plan: Plan, move: Move) -> Link:
    givers = plan.locations.targets if move.hop else plan.locations.sources
    return givers[move.source_rank].link(plan.locations.targets[move.target_rank])


def _in_turns(plan: Plan, first_target: int, moves: Iterable[Move], bucket_bytes: int) -> tuple[Bucket, ...]:
    num_targets = 1 + max((holding.rank for holding in plan.target.holdings), default=0)

    def turn(bucket: Bucket) -> tuple[int, int, int]:
        return bucket.hop, bucket.index, (bucket.target_rank - first_target) % num_targets

    return tuple(sorted(_buckets(moves, bucket_bytes), key=turn))


def _buckets(moves: Iterable[Move], bucket_bytes: int) -> Iterator[Bucket]:
    by_pair: defaultdict[tuple[int, int, bool], defaultdict[int, list[Move]]] = defaultdict(lambda: defaultdict(list))
    for move in moves:
        by_pair[move.source_rank, move.target_rank, move.hop > 0][move.hop].append(move)
    for (source_rank, target_rank, _), by_hop in by_pair.items():
        packed = ((hop, content) for hop in sorted(by_hop) for content in _packed(by_hop[hop], bucket_bytes))
        for index, (hop, content) in enumerate(packed):
            yield Bucket(
                source_rank=source_rank,
                target_rank=target_rank,
                hop=hop,
                index=index,
                moves=tuple(move for move, _ in content),
                starts=tuple(start for _, start in content),
            )


def _packed(moves: Iterable[Move], bucket_bytes: int) -> Iterator[list[tuple[Move, int]]]:
    """Yield the moves and starts of one bucket after the other."""
    content: list[tuple[Move, int]] = []
    end = 0
    for whole in moves:
        for box in _split(whole.slice, _max_elements(whole, bucket_bytes)):
            move = whole if box is whole.slice else _part(whole, box)
            start = -(-end // _ALIGNMENT) * _ALIGNMENT
            if content and start + move.num_bytes > bucket_bytes:
                yield content
                content, start = [], 0
            content.append((move, start))
            end = start + move.num_bytes
    if content:
        yield content


def _max_elements(move: Move, bucket_bytes: int) -> int:
    return bucket_bytes // ITEM_BYTES[move.dtype]


def _split(box: Slice, max_elements: int) -> Iterator[Slice]:
    """Yield parts by rows, whatever travels with them; a single row that is too large stays whole."""
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
