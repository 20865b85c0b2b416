"""An exchange among ranks of one kind, for a save: every peer is a source and a target of the plan."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from math import prod

import torch

from megarl.weights.algebra.buckets import (
    DEFAULT_BUCKET_BYTES,
    PeerNumbers,
    buckets_forwarded_by,
    buckets_from,
    buckets_to,
)
from megarl.weights.algebra.plan import Move, Plan
from megarl.weights.executors.digest import DigestSums, SourceDigests, Summand, check_digests, digest_bytes
from megarl.weights.executors.group import TransferGroup
from megarl.weights.executors.tensors import source_view, target_view
from megarl.weights.executors.transfer import Rounds


def exchange(
    plan: Plan,
    sources: Mapping[str, torch.Tensor],
    targets: Mapping[str, torch.Tensor],
    group: TransferGroup,
    *,
    bucket_bytes: int = DEFAULT_BUCKET_BYTES,
    filled: Callable[[str], None] = lambda _name: None,
) -> None:
    """Send and receive on every peer, and check what arrived by digest. Source and target rank r are both peer r.

    `filled` is called with the name of a target tensor once all of it is there; digests are compared after the last.
    """
    number, rank = group.next_round(), group.peer
    peers = PeerNumbers(first_target=0, num_peers=group.num_peers)
    leaving = [bucket for bucket in buckets_from(plan, rank, bucket_bytes=bucket_bytes) if bucket.target_rank != rank]
    arriving = [bucket for bucket in buckets_to(plan, rank, bucket_bytes=bucket_bytes) if peers.sender(bucket) != rank]
    forwarded = buckets_forwarded_by(plan, rank, bucket_bytes=bucket_bytes)
    digests = SourceDigests(plan, rank, sources, digest_bytes, own_target=rank, bucket_bytes=bucket_bytes)
    missing = _Missing(plan.moves_to(rank), filled)
    missing.take(_copy_own(plan, rank, sources, targets))
    with group.transfer() as deadline:
        steps = Rounds(
            group, peers, rank, sent=[*leaving, *forwarded], received=arriving, sources=sources, targets=targets
        )
        steps.run(number, deadline, digests.advance, missing.take)
        moves = [move for bucket in arriving for move in bucket.moves]
        boxes = [target_view(targets, move) for move in moves]
        arrived = DigestSums(Summand.of_moves(plan, moves), digest_bytes).compute(boxes)
    _check_with_senders(plan, group, number, digests.finish(), arrived)


def _copy_own(
    plan: Plan, rank: int, sources: Mapping[str, torch.Tensor], targets: Mapping[str, torch.Tensor]
) -> Iterator[Move]:
    """Copy what a peer sends to itself, and yield each move when it is done."""
    for move in plan.moves_to(rank):
        if move.source_rank == rank and not move.hop:
            values, target = source_view(sources, move), target_view(targets, move)
            if target.data_ptr() != values.data_ptr():  # a target may be the source itself
                target.copy_(values)
            yield move


class _Missing:
    """The number of elements that each target tensor still lacks."""

    def __init__(self, moves: Iterable[Move], filled: Callable[[str], None]) -> None:
        self._filled = filled
        self._num_left: Counter[str] = Counter()
        for move in moves:
            self._num_left[move.target_name] += prod(move.slice.shape)

    def take(self, moves: Iterable[Move]) -> None:
        for move in moves:
            self._num_left[move.target_name] -= prod(move.slice.shape)
            if not self._num_left[move.target_name]:
                self._filled(move.target_name)


def _check_with_senders(
    plan: Plan, group: TransferGroup, number: int, sent: Mapping[tuple[int, str], int], arrived: Mapping[str, int]
) -> None:
    for target_rank in sorted({rank for rank, _ in sent}):
        mine = {name: value for (rank, name), value in sent.items() if rank == target_rank}
        group.report(f"digests {number} from {group.peer} to {target_rank}", json.dumps(mine).encode())
    sources = sorted({move.source_rank for move in plan.moves_to(group.peer)} - {group.peer})
    keys = [f"digests {number} from {rank} to {group.peer}" for rank in sources]
    reports = group.collect(keys, group.timeout_s)
    group.forget(keys)
    parts = [{(group.peer, name): value for name, value in json.loads(reports[key]).items()} for key in keys]
    check_digests(parts, {group.peer: arrived})
