"""The reference for the executors, in numpy and one process: every peer keeps its order, and no wait may last."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from megarl.weights.algebra.buckets import Bucket, buckets_forwarded_by, buckets_from, buckets_to
from megarl.weights.algebra.plan import Plan
from megarl.weights.algebra.slices import Slice
from tests.weights.reference import PADDING, Array, Arrays, box

Key = tuple[bool, int, int, int]
"""(is forwarded, sender, receiver, index)."""


@dataclass(kw_only=True)
class Peer:
    """A target: receives its buckets one after the other, and forwards what it can in between."""

    incoming: Sequence[Bucket]
    outgoing: Sequence[Bucket]
    staged: dict[Slice, Array] = field(default_factory=dict)
    num_arrived: int = 0
    num_sent: int = 0

    @property
    def is_done(self) -> bool:
        return self.num_arrived == len(self.incoming) and self.num_sent == len(self.outgoing)


@dataclass(frozen=True, kw_only=True)
class Buckets:
    """The buckets of all ranks of a plan."""

    sent: Mapping[int, Sequence[Bucket]]
    received: Mapping[int, Sequence[Bucket]]
    forwarded: Mapping[int, Sequence[Bucket]]


def buckets_of(plan: Plan, *, bucket_bytes: int) -> Buckets:
    sources, targets = ([holding.rank for holding in layout.holdings] for layout in (plan.source, plan.target))
    return Buckets(
        sent={rank: buckets_from(plan, rank, bucket_bytes=bucket_bytes) for rank in sources},
        received={rank: buckets_to(plan, rank, bucket_bytes=bucket_bytes) for rank in targets},
        forwarded={rank: buckets_forwarded_by(plan, rank, bucket_bytes=bucket_bytes) for rank in targets},
    )


def execute(buckets: Buckets, sources: Mapping[int, Arrays], targets: Mapping[int, Arrays]) -> None:
    """Fill `targets`; fail where peers wait in a cycle, or where an element is written twice."""
    wire: dict[Key, list[Array]] = {}
    for rank, arrays in sources.items():
        for bucket in buckets.sent[rank]:
            wire[_key(bucket)] = [
                box(arrays[move.source_name], move.source_offsets, move.slice.shape).copy() for move in bucket.moves
            ]
    peers = {rank: Peer(incoming=buckets.received[rank], outgoing=buckets.forwarded[rank]) for rank in targets}
    while any(_advance(peer, targets[rank], wire) for rank, peer in peers.items()):
        pass
    assert all(peer.is_done for peer in peers.values()), "peers wait for each other"
    assert not wire, f"{len(wire)} buckets have no receiver"


def _advance(peer: Peer, arrays: Arrays, wire: dict[Key, list[Array]]) -> bool:
    """Do the peer's next action; return whether there was one."""
    if peer.num_arrived < len(peer.incoming) and _key(peer.incoming[peer.num_arrived]) in wire:
        bucket = peer.incoming[peer.num_arrived]
        for move, values in zip(bucket.moves, wire.pop(_key(bucket)), strict=True):
            assert (values != PADDING).all(), f"{move} sends what its holder lacks"
            target = box(arrays[move.target_name], move.target_offsets, move.slice.shape)
            assert target.shape == move.slice.shape, f"{move} leaves its target"
            assert (target == PADDING).all(), f"{move} writes an element twice"
            target[...] = values
            peer.staged[move.slice] = values
        peer.num_arrived += 1
        return True
    if peer.num_sent < len(peer.outgoing):
        bucket = peer.outgoing[peer.num_sent]
        boxes = [move.slice for move in bucket.moves]
        if all(part in peer.staged for part in boxes):
            wire[_key(bucket)] = [peer.staged[part] for part in boxes]
            peer.num_sent += 1
            return True
    return False


def _key(bucket: Bucket) -> Key:
    return bucket.is_forwarded, bucket.source_rank, bucket.target_rank, bucket.index
