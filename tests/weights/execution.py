"""The reference for the executors, in numpy and one process: rounds in which a send ends only with its receive."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from megarl.weights.algebra.buckets import (
    Bucket,
    PeerNumbers,
    Round,
    buckets_forwarded_by,
    buckets_from,
    buckets_to,
    rounds,
)
from megarl.weights.algebra.plan import Plan
from tests.weights.reference import PADDING, Arrays, box


@dataclass(frozen=True, kw_only=True)
class Buckets:
    """The buckets of all ranks of a plan."""

    sent: Mapping[int, Sequence[Bucket]]
    received: Mapping[int, Sequence[Bucket]]
    forwarded: Mapping[int, Sequence[Bucket]]

    @property
    def peers(self) -> PeerNumbers:
        return PeerNumbers(first_target=len(self.sent), num_peers=len(self.sent) + len(self.received))

    def rounds(self) -> dict[int, deque[Round]]:
        """Return the rounds of every peer."""
        peers = self.peers
        sources = {rank: rounds(sent, (), peers) for rank, sent in self.sent.items()}
        targets = {
            peers.first_target + rank: rounds(self.forwarded[rank], received, peers)
            for rank, received in self.received.items()
        }
        return {peer: deque(each) for peer, each in {**sources, **targets}.items()}


def buckets_of(plan: Plan, *, bucket_bytes: int) -> Buckets:
    sources, targets = ([holding.rank for holding in layout.holdings] for layout in (plan.source, plan.target))
    return Buckets(
        sent={rank: buckets_from(plan, rank, bucket_bytes=bucket_bytes) for rank in sources},
        received={rank: buckets_to(plan, rank, bucket_bytes=bucket_bytes) for rank in targets},
        forwarded={rank: buckets_forwarded_by(plan, rank, bucket_bytes=bucket_bytes) for rank in targets},
    )


def execute(buckets: Buckets, sources: Mapping[int, Arrays], targets: Mapping[int, Arrays]) -> None:
    """Fill `targets`; fail where peers wait in a cycle, or where an element is written twice.

    A peer leaves a round only when both its buckets were taken over: nothing is buffered, and nothing posted ahead.
    """
    peers, waiting = buckets.peers, buckets.rounds()
    done: set[tuple[int, bool]] = set()
    """(peer, is sending) of the halves of current rounds that are over."""
    is_moving = True
    while is_moving:
        is_moving = False
        for sender, steps in waiting.items():
            sent = steps[0].sent if steps else None
            if sent is not None and (sender, True) not in done:
                receiver = peers.receiver(sent)
                if waiting[receiver] and waiting[receiver][0].received == sent:
                    _copy(sent, targets if sent.is_forwarded else sources, targets)
                    done |= {(sender, True), (receiver, False)}
        for peer, steps in waiting.items():
            if steps and all(
                bucket is None or (peer, is_sending) in done
                for bucket, is_sending in ((steps[0].sent, True), (steps[0].received, False))
            ):
                steps.popleft()
                done -= {(peer, True), (peer, False)}
                is_moving = True
    assert not any(waiting.values()), "peers wait for each other"


def _copy(bucket: Bucket, givers: Mapping[int, Arrays], targets: Mapping[int, Arrays]) -> None:
    for move in bucket.moves:
        values = box(givers[move.source_rank][move.source_name], move.source_offsets, move.slice.shape)
        assert (values != PADDING).all(), f"{move} sends what its holder lacks"
        target = box(targets[move.target_rank][move.target_name], move.target_offsets, move.slice.shape)
        assert target.shape == move.slice.shape, f"{move} leaves its target"
        assert (target == PADDING).all(), f"{move} writes an element twice"
        target[...] = values
