"""Carrying out a plan between processes: the ends of a publish, and the rounds of a transfer. No SGLang, no Megatron.

A receiver gets a version in place. What lies in the memory of a sender that its device can reach is read from there;
the rest comes in rounds: pack, exchange, unpack in place. A peer holds two buckets, one that leaves and one that
arrives, whatever the size of the model. From the first byte until its digests are compared, a receiver's parameters are
of no version: the caller lets no request use them, and sends the version again after a failure.

Source rank s of a plan is peer s of the group; target rank t is peer `first_target_peer + t`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from copy import copy
from dataclasses import dataclass

import torch

from megarl.system.fault_points import PublishPoint
from megarl.system.faults import reach
from megarl.weights.algebra.buckets import (
    DEFAULT_BUCKET_BYTES,
    Bucket,
    PeerNumbers,
    buckets_forwarded_by,
    buckets_from,
    buckets_to,
    rounds,
)
from megarl.weights.algebra.plan import Move, Plan
from megarl.weights.algebra.slices import Link
from megarl.weights.executors.digest import DigestSums, SourceDigests, Summand
from megarl.weights.executors.group import Message, TransferGroup
from megarl.weights.executors.shared_memory import export_tensors, open_tensors
from megarl.weights.executors.tensor_digest import MODULUS, BoxDigest, digest_tensor
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
        bucket_bytes: int = DEFAULT_BUCKET_BYTES,
        digest: BoxDigest = digest_tensor,
        direct: Link = Link.PROCESS,
        keeps_open: bool = True,
    ) -> None:
        """Targets read this rank's tensors over links up to `direct`; with `keeps_open` they keep them open."""
        self._group = group
        buckets = buckets_from(plan, rank, bucket_bytes=bucket_bytes)
        readers = {bucket.target_rank for bucket in buckets if bucket.link(plan) <= direct}
        self._shared = _SharedSource(tensors, rank, sorted(readers), keeps_open=keeps_open)
        sent = [bucket for bucket in buckets if bucket.target_rank not in readers]
        self._rounds = Rounds(group, _peers(plan, group), rank, sent=sent, sources=tensors, targets={})
        self._digests = SourceDigests(plan, rank, tensors, digest, bucket_bytes=bucket_bytes)

    def send(self, version: int) -> dict[tuple[int, str], int]:
        """Send every bucket of this rank. Return a digest per (target rank, target tensor) that it is the origin of.

        Digests are of the source's own tensors, cast as they travel: they reveal an error in packing or on the way.
        """
        with self._group.transfer() as deadline:
            self._shared.offer(self._group, version)
            self._digests.begin()
            self._rounds.run(version, deadline, self._digests.advance)
            return self._digests.finish()


class Receiver:
    """Target rank `rank` of a plan, with its tensors by local name."""

    def __init__(
        self,
        plan: Plan,
        rank: int,
        tensors: Mapping[str, torch.Tensor],
        group: TransferGroup,
        *,
        bucket_bytes: int = DEFAULT_BUCKET_BYTES,
        digest: BoxDigest = digest_tensor,
        direct: Link = Link.PROCESS,
        keeps_open: bool = True,
    ) -> None:
        """The arguments mean the same as the senders'."""
        peers = _peers(plan, group)
        assert group.peer == peers.first_target + rank, f"target rank {rank} is not peer {group.peer}"
        self._rank = rank
        self._group = group
        buckets = buckets_to(plan, rank, bucket_bytes=bucket_bytes)
        near, far = _near_and_far(plan, buckets, direct)
        read = [move for bucket in near for move in bucket.moves]
        self._shared = _SharedTarget(
            rank, read, tensors, DigestSums(Summand.of_moves(plan, read), digest), keeps_open=keeps_open
        )
        self._rounds = Rounds(
            group,
            peers,
            rank,
            sent=buckets_forwarded_by(plan, rank, bucket_bytes=bucket_bytes),
            received=far,
            sources={},
            targets=tensors,
        )
        self._moves = [move for bucket in far for move in bucket.moves]
        self._digests = DigestSums(Summand.of_moves(plan, self._moves), digest)
        self._boxes = [target_view(tensors, move) for move in self._moves]

    def beside(self, tensors: Mapping[str, torch.Tensor]) -> Receiver:
        """Return a receiver in other tensors of the same shapes. Both have the same buckets on the way."""
        other = copy(self)
        other._shared = self._shared.beside(tensors)
        other._rounds = self._rounds.beside(tensors)
        other._digests = copy(self._digests)
        other._boxes = [target_view(tensors, move) for move in self._moves]
        return other

    def receive(self, version: int) -> dict[str, int]:
        """Receive one version in place, and forward what others wait for. Return a digest per tensor."""
        with self._group.transfer() as deadline:
            digests = self._shared.copy(self._group, version)
            self._rounds.run(version, deadline)
        for name, value in self._digests.compute(self._boxes).items():
            digests[name] = (digests.get(name, 0) + value) % MODULUS
        if reach("received", step=version, rank=self._rank, of=self._group.name) == "corrupt":
            digests[next(iter(digests))] ^= 1
        return digests


def _peers(plan: Plan, group: TransferGroup) -> PeerNumbers:
    return PeerNumbers(first_target=len(plan.source.holdings), num_peers=group.num_peers)


def _near_and_far(plan: Plan, buckets: Sequence[Bucket], direct: Link) -> tuple[list[Bucket], list[Bucket]]:
    """Return the buckets whose boxes a target reads from the memory of their source, and the others."""
    near = [bucket for bucket in buckets if not bucket.is_forwarded and bucket.link(plan) <= direct]
    return near, [bucket for bucket in buckets if bucket.is_forwarded or bucket.link(plan) > direct]


class _SharedSource:
    """The sender's end: lets receivers read its tensors, which change only after they have answered."""

    def __init__(
        self, tensors: Mapping[str, torch.Tensor], rank: int, readers: Sequence[int], *, keeps_open: bool
    ) -> None:
        """`readers` are target ranks. Without `keeps_open` the tensors may move between versions."""
        self._tensors = tensors
        self._rank = rank
        self._readers = readers
        self._keeps_open = keeps_open
        self._memory = b""

    def offer(self, group: TransferGroup, version: int) -> None:
        """Report to each reader where the tensors are, once they are this version's."""
        if self._readers and (device := device_of(self._tensors)).type == "cuda":
            torch.cuda.synchronize(device)  # another process does not wait for the streams of this one
        for reader in self._readers:
            if not self._memory or not self._keeps_open:
                self._memory = export_tensors(self._tensors)  # a handle that is not kept open is for one reader
            group.report(_memory_key(version, self._rank, reader), self._memory)


class _SharedTarget:
    """The receiver's end: copies boxes out of the memory of one or more senders."""

    def __init__(
        self,
        rank: int,
        moves: Sequence[Move],
        tensors: Mapping[str, torch.Tensor],
        sums: DigestSums[str],
        *,
        keeps_open: bool,
    ) -> None:
        """`sums` are of the moves' boxes."""
        self._sums = sums
        self._rank = rank
        self._moves = moves
        self._keeps_open = keeps_open
        self._sources: dict[int, tuple[bytes, Mapping[str, torch.Tensor]]] = {}
        self._boxes: list[torch.Tensor] = []
        self._targets = [target_view(tensors, move) for move in moves]

    def beside(self, tensors: Mapping[str, torch.Tensor]) -> _SharedTarget:
        other = copy(self)
        other._sums, other._sources, other._boxes = copy(self._sums), {}, []
        other._targets = [target_view(tensors, move) for move in self._moves]
        return other

    @torch.no_grad()
    def copy(self, group: TransferGroup, version: int) -> dict[str, int]:
        """Copy this version's boxes; return a digest per tensor. The memory is then closed, unless it is kept open."""
        for source_rank in sorted({move.source_rank for move in self._moves}):
            key = _memory_key(version, source_rank, self._rank)
            memory = group.collect([key], group.timeout_s)[key]
            group.forget([key])
            if source_rank not in self._sources or self._sources[source_rank][0] != memory:
                self._boxes = []
                self._sums.forget()
                self._sources[source_rank] = memory, open_tensors(memory)
        if not self._boxes:
            self._boxes = [source_view(self._sources[move.source_rank][1], move) for move in self._moves]
        digests = self._sums.compute(self._boxes, self._targets)
        if not self._keeps_open:
            self._close()
        return digests

    def _close(self) -> None:
        if self._boxes and self._boxes[0].is_cuda:
            torch.cuda.synchronize(self._boxes[0].device)
        self._boxes, self._sources = [], {}
        self._sums.forget()


def _memory_key(version: int, source_rank: int, target_rank: int) -> str:
    return f"memory of rank {source_rank} at version {version} for {target_rank}"


class Rounds:
    """The rounds of rank `rank`: it sends boxes of `sources`, receives into `targets` and forwards out of these."""

    def __init__(
        self,
        group: TransferGroup,
        peers: PeerNumbers,
        rank: int,
        *,
        sent: Iterable[Bucket] = (),
        received: Iterable[Bucket] = (),
        sources: Mapping[str, torch.Tensor],
        targets: Mapping[str, torch.Tensor],
    ) -> None:
        """Both lanes are allocated here, once."""
        self._group = group
        self._rank = rank
        self._sources = sources
        self._targets = targets
        self._rounds = [
            (
                None if each.sent is None else _Parcel.of(each.sent, peers.receiver(each.sent)),
                None if each.received is None else _Parcel.of(each.received, peers.sender(each.received)),
            )
            for each in rounds(sent, received, peers)
        ]
        wire, device = group.wire_device, device_of(sources or targets)
        leaving = max((parcel.num_bytes for parcel, _ in self._rounds if parcel), default=0)
        arriving = max((parcel.num_bytes for _, parcel in self._rounds if parcel), default=0)
        self._leaving, self._arriving = _Lane(leaving, wire, device), _Lane(arriving, wire, device)

    def beside(self, targets: Mapping[str, torch.Tensor]) -> Rounds:
        other = copy(self)
        other._targets = targets
        return other

    def run(
        self,
        version: int,
        deadline: float,
        sent: Callable[[int], None] = lambda _num_bytes: None,
        received: Callable[[Sequence[Move]], None] = lambda _moves: None,
    ) -> None:
        """Pass through all rounds; `sent` gets the bytes of each bucket that has left, `received` each one's moves."""
        for leaving, arriving in self._rounds:
            outgoing = incoming = None
            if leaving is not None:
                outgoing = Message(peer=leaving.peer, buffer=self._packed(leaving, version))
            if arriving is not None:
                incoming = Message(peer=arriving.peer, buffer=self._arriving.wire[: arriving.num_bytes])
            parcel = leaving or arriving
            assert parcel is not None, "an empty round"
            self._group.exchange(outgoing, incoming, tag=parcel.tag(version), deadline=deadline)
            if leaving is not None:
                self._reach("bucket_sent", version)
                sent(leaving.num_bytes)
            if arriving is not None:
                self._unpack(arriving, version)
                received(arriving.moves)

    def _packed(self, parcel: _Parcel, version: int) -> torch.Tensor:
        tensors = self._targets if parcel.is_forwarded else self._sources
        for move, values in parcel.views(self._leaving.local):
            values.copy_(source_view(tensors, move))
        wire = self._leaving.to_wire(parcel.num_bytes)
        if self._reach("bucket_packed", version) == "corrupt":
            wire[0] ^= 1
        return wire

    def _unpack(self, parcel: _Parcel, version: int) -> None:
        if self._reach("bucket_received", version) == "corrupt":
            self._arriving.wire[0] ^= 1
        self._arriving.to_local(parcel.num_bytes)
        for move, values in parcel.views(self._arriving.local):
            target_view(self._targets, move).copy_(values)

    def _reach(self, point: PublishPoint, version: int) -> str | None:
        return reach(point, step=version, rank=self._rank, of=self._group.name)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Parcel:
    """A bucket with the numbers that every version needs again."""

    peer: int
    """The other end."""
    index: int
    is_forwarded: bool
    num_bytes: int
    moves: tuple[Move, ...]
    ranges: tuple[slice, ...]
    """The bytes of each move."""

    @classmethod
    def of(cls, bucket: Bucket, peer: int) -> _Parcel:
        assert bucket.index < _MAX_BUCKETS_PER_PAIR, f"bucket {bucket.index} of a pair; make buckets larger"
        places = zip(bucket.moves, bucket.starts, strict=True)
        return cls(
            peer=peer,
            index=bucket.index,
            is_forwarded=bucket.is_forwarded,
            num_bytes=bucket.num_bytes,
            moves=bucket.moves,
            ranges=tuple(slice(start, start + move.num_bytes) for move, start in places),
        )

    def tag(self, version: int) -> int:
        """Return a tag that no other version has; the two buckets of a round have the same."""
        return (2 * version + self.is_forwarded) * _MAX_BUCKETS_PER_PAIR + self.index

    def views(self, buffer: torch.Tensor) -> Iterator[tuple[Move, torch.Tensor]]:
        """Yield every move with its values in `buffer`."""
        for move, place in zip(self.moves, self.ranges, strict=True):
            yield move, buffer[place].view(torch_dtype(move.dtype)).view(move.slice.shape)


class _Lane:
    """A buffer on the device of the tensors and, where the wire needs another, its twin there."""

    def __init__(self, num_bytes: int, wire: torch.device, device: torch.device) -> None:
        is_pinned = wire.type == "cpu" and torch.cuda.is_available()
        self.wire = torch.empty(num_bytes, dtype=torch.uint8, device=wire, pin_memory=is_pinned)
        # Many small copies are made on the tensors' own device; then one copy crosses.
        self.local = self.wire if device == wire else torch.empty(num_bytes, dtype=torch.uint8, device=device)

    def to_wire(self, num_bytes: int) -> torch.Tensor:
        wire = self.wire[:num_bytes]
        return wire if self.local is self.wire else wire.copy_(self.local[:num_bytes])

    def to_local(self, num_bytes: int) -> None:
        if self.local is not self.wire:
            self.local[:num_bytes].copy_(self.wire[:num_bytes])
