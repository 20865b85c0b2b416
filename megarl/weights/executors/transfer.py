"""Carrying out a plan between processes: pack, send, stage, forward, digest, commit. No SGLang, no Megatron.

A sender packs a bucket while the one before it travels. A receiver stages what arrives, forwards what others wait for
as soon as it has arrived, and writes its parameters only in `commit`: a version is delivered whole or not at all. Two
processes on one device share memory instead: the receiver reads the sender's tensors, which do not change before the
commit.

No cycle of waits is possible: receivers post all their receives first, and a bucket waits only for buckets of earlier
hops, which come first in every rank's order.

Source rank s of a plan is peer s of the group; target rank t is peer `first_target_peer + t`.
"""

from __future__ import annotations

import json
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence

import torch

from megarl.errors import WeightSyncError
from megarl.system.faults import reach
from megarl.weights.algebra.buckets import (
    DEFAULT_BUCKET_BYTES,
    NUM_LANES,
    Bucket,
    buckets_forwarded_by,
    buckets_from,
    buckets_to,
)
from megarl.weights.algebra.locality import Link
from megarl.weights.algebra.plan import Move, Plan
from megarl.weights.executors.digest import MODULUS, BoxDigest, digest_bytes, digest_tensor, to_ints
from megarl.weights.executors.digest_sums import SourceDigests, add, check_digests
from megarl.weights.executors.group import Pending, TransferGroup
from megarl.weights.executors.shared_memory import SharedSource, SharedTarget
from megarl.weights.executors.tensors import device_of, source_view, target_view, torch_dtype

_MAX_BUCKETS_PER_PAIR = 1 << 15


class Sender:
    """Source rank `rank` of a plan, with its tensors by local name."""

    def __init__(
        self,
        plan: Plan,
        rank: int,
        tensors: Mapping[str, torch.Tensor],
        group: TransferGroup,
        *,
        first_target_peer: int | None = None,
        bucket_bytes: int = DEFAULT_BUCKET_BYTES,
        digest: BoxDigest = digest_tensor,
        shares_device: bool = False,
        keeps_open: bool = True,
    ) -> None:
        """Without `first_target_peer`, the targets come after all the sources.

        With `shares_device`, targets on this rank's device read its tensors; with `keeps_open` they keep them open
        between versions.
        """
        self._rank = rank
        self._tensors = tensors
        self._group = group
        first_peer = _first_target_peer(plan, first_target_peer)
        buckets = buckets_from(plan, rank, bucket_bytes=bucket_bytes)
        readers = {bucket.target_rank for bucket in buckets if shares_device and bucket.link(plan) is Link.DEVICE}
        own_target = group.peer - first_peer
        self._shared = SharedSource(tensors, rank, sorted(readers), keeps_open=keeps_open)
        self._buckets = [bucket for bucket in buckets if bucket.target_rank not in {*readers, own_target}]
        self._wire = _Wire(self._buckets, device_of(tensors), group, first_peer)
        self._digests = SourceDigests(plan, rank, tensors, digest, own_target=own_target, bucket_bytes=bucket_bytes)

    def send(self, version: int) -> dict[tuple[int, str], int]:
        """Send every bucket of this rank. Return a digest per (target rank, target tensor) that it is the origin of.

        Digests are of the source's own tensors, cast as they travel: they reveal an error in packing or on the way.
        """
        with self._group.transfer() as deadline:
            self._shared.offer(self._group, version)
            self._digests.begin()
            for bucket in self._buckets:
                lane = self._wire.pack(bucket, lambda move: source_view(self._tensors, move), deadline)
                if reach("bucket_packed", step=version, rank=self._rank, of=self._group.name) == "corrupt":
                    lane[0] ^= 1
                self._wire.send(bucket, lane, version)
                reach("bucket_sent", step=version, rank=self._rank, of=self._group.name)
                self._digests.advance(bucket.num_bytes)
            digests = self._digests.finish()
            self._wire.finish(deadline)
        return digests


class _Wire:
    """Packs buckets and sends them, `NUM_LANES` at a time."""

    def __init__(
        self, buckets: Sequence[Bucket], device: torch.device, group: TransferGroup, first_target_peer: int
    ) -> None:
        self._group = group
        self._first_target_peer = first_target_peer
        largest = max((bucket.num_bytes for bucket in buckets), default=0)
        self._lanes = [_buffer(largest, group.wire_device) for _ in range(NUM_LANES)]
        # Many small copies are made on the tensors' own device; then one copy crosses to the wire's device.
        self._packing = None if device == group.wire_device else _buffer(largest, device)
        self._under_way: deque[Pending] = deque()
        self._num_sent = 0

    def pack(self, bucket: Bucket, content: Callable[[Move], torch.Tensor], deadline: float) -> torch.Tensor:
        """Return the packed bucket, in a lane that is free."""
        if len(self._under_way) == NUM_LANES:
            self._under_way.popleft().wait(deadline)
        lane = self._lanes[self._num_sent % NUM_LANES][: bucket.num_bytes]
        packed = lane if self._packing is None else self._packing[: bucket.num_bytes]
        for move, values in _views(bucket, packed):
            values.copy_(content(move))
        return lane if packed is lane else lane.copy_(packed)

    def send(self, bucket: Bucket, lane: torch.Tensor, version: int) -> None:
        peer = self._first_target_peer + bucket.target_rank
        self._under_way.append(self._group.send(lane, peer=peer, tag=_tag(version, bucket)))
        self._num_sent += 1

    def finish(self, deadline: float) -> None:
        while self._under_way:
            self._under_way.popleft().wait(deadline)

    def forget(self) -> None:
        """Forget the sends of a failed version."""
        self._under_way.clear()


class Receiver:
    """Target rank `rank` of a plan, with its tensors by local name."""

    def __init__(
        self,
        plan: Plan,
        rank: int,
        tensors: Mapping[str, torch.Tensor],
        group: TransferGroup,
        *,
        first_target_peer: int | None = None,
        bucket_bytes: int = DEFAULT_BUCKET_BYTES,
        digest: BoxDigest = digest_tensor,
        shares_device: bool = False,
        keeps_open: bool = True,
    ) -> None:
        """Staging is allocated here, once. The arguments mean the same as the senders'."""
        self._canonical = plan.target.canonical
        self._rank = rank
        self._tensors = tensors
        self._group = group
        self._digest = digest
        self._device = device_of(tensors)
        self._first_peer = _first_target_peer(plan, first_target_peer)
        expected_peer = self._first_peer + rank
        assert expected_peer == group.peer, f"target rank {rank} is peer {expected_peer}, not {group.peer}"
        self._buckets: list[Bucket] = []
        shared: list[Move] = []
        for bucket in buckets_to(plan, rank, bucket_bytes=bucket_bytes):
            if shares_device and not bucket.is_forwarded and bucket.link(plan) is Link.DEVICE:
                shared += bucket.moves
            elif self._sender_of(bucket) != group.peer:
                self._buckets.append(bucket)
        self._shared = SharedTarget(plan, rank, shared, tensors, digest=digest, keeps_open=keeps_open)
        self._staging = [_buffer(bucket.num_bytes, group.wire_device) for bucket in self._buckets]
        forwarded = buckets_forwarded_by(plan, rank, bucket_bytes=bucket_bytes)
        self._forwarding = _Forwarding(self._buckets, self._staging, forwarded, group, self._first_peer)
        self._expected: list[Pending] = []
        self._staged_version: int | None = None

    def expect(self, version: int) -> None:
        """Post all receives without waiting; `stage` does it too. A peer that also sends calls this first."""
        self._staged_version = None
        self._expected = [
            self._group.receive(buffer, peer=self._sender_of(bucket), tag=_tag(version, bucket))
            for bucket, buffer in zip(self._buckets, self._staging, strict=True)
        ]

    def stage(self, version: int) -> dict[str, int]:
        """Receive one version into staging, and forward what others wait for. Return a digest per received tensor."""
        sums: dict[str, torch.Tensor] = {}
        with self._group.transfer() as deadline:
            if not self._expected:
                self.expect(version)
            expected, self._expected = self._expected, []
            self._forwarding.begin(version, deadline)
            shared = self._shared.read(self._group, version)
            for number, pending in enumerate(expected):
                pending.wait(deadline)
                if reach("bucket_received", step=version, rank=self._rank, of=self._group.name) == "corrupt":
                    self._staging[number][0] ^= 1
                self._forwarding.arrived(number)
                for move, values in self._staged(number):
                    digest = self._digest(values, move.slice, self._canonical[move.slice.name].shape)
                    add(sums, move.target_name, digest)
            self._forwarding.finish()
        self._staged_version = version
        digests = to_ints(sums)
        for name, value in shared.items():
            digests[name] = (digests.get(name, 0) + value) % MODULUS
        if reach("staged", step=version, rank=self._rank, of=self._group.name) == "corrupt":
            digests[next(iter(digests))] ^= 1
        return digests

    def commit(self, version: int) -> None:
        """Copy staging into the parameters, in place; refused for any version but the staged one."""
        if self._staged_version != version:
            who = f"{self._group.name}: peer {self._group.peer}"
            raise WeightSyncError(f"{who}: asked to commit version {version}, staged is {self._staged_version}")
        reach("committing", step=version, rank=self._rank, of=self._group.name)
        self._shared.commit()
        self._shared.finish()
        for number in range(len(self._buckets)):
            for move, values in self._staged(number):
                target_view(self._tensors, move).copy_(values)
        self._staged_version = None
        reach("committed", step=version, rank=self._rank, of=self._group.name)

    def abort(self) -> None:
        """Forget what is staged; the parameters stay as they are."""
        self._shared.finish()
        self._staged_version = None

    def _sender_of(self, bucket: Bucket) -> int:
        """Return the peer that sends a bucket."""
        return bucket.source_rank + (self._first_peer if bucket.is_forwarded else 0)

    def _staged(self, number: int) -> Iterator[tuple[Move, torch.Tensor]]:
        return _views(self._buckets[number], self._staging[number].to(self._device))


class _Forwarding:
    """Forwards buckets out of a receiver's staging: each as soon as all of it has arrived, in a fixed order."""

    def __init__(
        self,
        received: Sequence[Bucket],
        staging: Sequence[torch.Tensor],
        buckets: Sequence[Bucket],
        group: TransferGroup,
        first_target_peer: int,
    ) -> None:
        self._staged = {
            move.slice: (number, values)
            for number, bucket in enumerate(received if buckets else ())
            for move, values in _views(bucket, staging[number])
        }
        self._buckets = [(bucket, max(self._staged[move.slice][0] for move in bucket.moves)) for bucket in buckets]
        self._wire = _Wire(buckets, group.wire_device, group, first_target_peer)
        self._version, self._deadline = 0, 0.0
        self._num_sent = 0

    def begin(self, version: int, deadline: float) -> None:
        self._version, self._deadline = version, deadline
        self._num_sent = 0
        self._wire.forget()

    def arrived(self, number: int) -> None:
        """Send on what is complete after bucket `number` in the order of receiving."""
        for bucket, last in self._buckets[self._num_sent :]:
            if last > number:
                return
            lane = self._wire.pack(bucket, lambda move: self._staged[move.slice][1], self._deadline)
            self._wire.send(bucket, lane, self._version)
            self._num_sent += 1

    def finish(self) -> None:
        assert self._num_sent == len(self._buckets), f"{self._num_sent} of {len(self._buckets)} buckets forwarded"
        self._wire.finish(self._deadline)


def exchange(
    plan: Plan,
    sources: Mapping[str, torch.Tensor],
    targets: Mapping[str, torch.Tensor],
    group: TransferGroup,
    *,
    bucket_bytes: int = DEFAULT_BUCKET_BYTES,
) -> None:
    """Send and receive on every peer, and check what arrived by digest. Source and target rank r are both peer r."""
    number = group.next_round()
    sender = Sender(
        plan, group.peer, sources, group, first_target_peer=0, bucket_bytes=bucket_bytes, digest=digest_bytes
    )
    receiver = Receiver(
        plan, group.peer, targets, group, first_target_peer=0, bucket_bytes=bucket_bytes, digest=digest_bytes
    )
    receiver.expect(number)
    sent = sender.send(number)
    arrived = receiver.stage(number)
    _check_with_senders(plan, group, number, sent, arrived)
    receiver.commit(number)
    for move in plan.moves_to(group.peer):
        if move.source_rank == group.peer and not move.hop:
            values, target = source_view(sources, move), target_view(targets, move)
            if target.data_ptr() != values.data_ptr():  # a target may be the source itself
                target.copy_(values)


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


def _first_target_peer(plan: Plan, given: int | None) -> int:
    return len(plan.source.holdings) if given is None else given


def _tag(version: int, bucket: Bucket) -> int:
    """Return a tag that no other version has: a bucket of another version ends in a timeout, not in the parameters."""
    assert bucket.index < _MAX_BUCKETS_PER_PAIR, f"bucket {bucket.index} of a pair; make buckets larger"
    return (2 * version + bucket.is_forwarded) * _MAX_BUCKETS_PER_PAIR + bucket.index


def _views(bucket: Bucket, buffer: torch.Tensor) -> Iterator[tuple[Move, torch.Tensor]]:
    """Yield every move of a bucket with its values in `buffer`."""
    for move, start in zip(bucket.moves, bucket.starts, strict=True):
        values = buffer[start : start + move.num_bytes].view(torch_dtype(move.dtype))
        yield move, values.view(move.slice.shape)


def _buffer(num_bytes: int, device: torch.device) -> torch.Tensor:
    is_pinned = device.type == "cpu" and torch.cuda.is_available()
    return torch.empty(num_bytes, dtype=torch.uint8, device=device, pin_memory=is_pinned)
