"""How moves travel: packed end to end into buckets, in numbered rounds. Pure: no torch.

The buckets between two ranks, and the round of each, depend on the plan and `bucket_bytes` alone: sender and receiver
need no header. In a round a peer sends at most one bucket and receives at most one. All peers pass through their rounds
in the same order, and a bucket has the same round at both ends, so no cycle of waits is possible even where a send ends
only together with its receive.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from math import prod
from typing import TypeAlias

from megarl.weights.algebra.plan import Move, Plan, SourceBox
from megarl.weights.algebra.slices import ITEM_BYTES, Link, Slice, shift

DEFAULT_BUCKET_BYTES = 64 << 20

RoundNumber: TypeAlias = tuple[int, int, int]
"""(hop, index among the buckets of a pair, distance between the two peers)."""

NUM_LANES = 2
"""Buckets that a peer holds at any time: one that leaves and one that arrives."""

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
        return link_of(plan, self.moves[0])


@dataclass(frozen=True, slots=True, kw_only=True)
class PeerNumbers:
    """The numbers of a plan's ranks in a transfer group: source s is peer s, target t is peer `first_target + t`."""

    first_target: int
    num_peers: int

    def sender(self, bucket: Bucket) -> int:
        return bucket.source_rank + (self.first_target if bucket.is_forwarded else 0)

    def receiver(self, bucket: Bucket) -> int:
        return bucket.target_rank + self.first_target

    def round_of(self, bucket: Bucket) -> RoundNumber:
        """Return a number that no other bucket of the same sender or of the same receiver has."""
        return bucket.hop, bucket.index, (self.receiver(bucket) - self.sender(bucket)) % self.num_peers


@dataclass(frozen=True, slots=True, kw_only=True)
class Round:
    """The buckets that one peer sends and receives at the same time; never neither."""

    sent: Bucket | None
    received: Bucket | None


def rounds(sent: Iterable[Bucket], received: Iterable[Bucket], peers: PeerNumbers) -> tuple[Round, ...]:
    """Return the rounds of a peer that sends and receives these buckets, in the order of all peers."""
    leaving = {peers.round_of(bucket): bucket for bucket in sent}
    arriving = {peers.round_of(bucket): bucket for bucket in received}
    numbers = sorted(leaving.keys() | arriving.keys())
    return tuple(Round(sent=leaving.get(number), received=arriving.get(number)) for number in numbers)


def buckets_from(plan: Plan, rank: int, *, bucket_bytes: int) -> tuple[Bucket, ...]:
    """Return what source `rank` sends."""
    return tuple(_buckets(plan.moves_from(rank), bucket_bytes))


def buckets_forwarded_by(plan: Plan, rank: int, *, bucket_bytes: int) -> tuple[Bucket, ...]:
    """Return what target `rank` sends on: boxes that it received in earlier hops."""
    return tuple(_buckets(plan.moves_forwarded_by(rank), bucket_bytes))


def buckets_to(plan: Plan, rank: int, *, bucket_bytes: int) -> tuple[Bucket, ...]:
    """Return what target `rank` receives."""
    return tuple(_buckets(plan.moves_to(rank), bucket_bytes))


def split_box(box: SourceBox, *, bucket_bytes: int) -> Iterator[Slice]:
    """Yield a box as it travels: by rows where it is larger than a bucket."""
    return _split(box.slice, bucket_bytes // ITEM_BYTES[box.dtype])


def staging_bound(plan: Plan, rank: int, *, bucket_bytes: int, direct: Link = Link.PROCESS) -> int:
    """Return the bytes that target `rank` holds at most beside its parameters: a bucket that arrives, one that leaves.

    A bucket is larger than `bucket_bytes` only where a single row is. Nothing is held for what the target reads from
    its source's memory, over links up to `direct`.
    """
    received = [move for move in plan.moves_to(rank) if move.hop or link_of(plan, move) > direct]
    lanes = [moves for moves in (received, plan.moves_forwarded_by(rank)) if moves]
    return sum(
        min(
            max(bucket_bytes, *(prod(move.slice.shape[1:]) * ITEM_BYTES[move.dtype] for move in moves)),
            sum(move.num_bytes + _ALIGNMENT for move in moves),
        )
        for moves in lanes
    )


def link_of(plan: Plan, move: Move) -> Link:
    """Return the link between the two holders of a move."""
    givers = plan.locations.targets if move.hop else plan.locations.sources
    return givers[move.source_rank].link(plan.locations.targets[move.target_rank])


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
