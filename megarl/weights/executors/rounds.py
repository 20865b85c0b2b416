"""One peer's way through the rounds of a plan: pack, exchange, unpack in place. No digests, no SGLang, no Megatron.

A peer holds two buckets, one that leaves and one that arrives, whatever the size of the model. What arrives is written
into the target tensors at once; a later hop reads it from there.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping

import torch

from megarl.system.faults import PublishPoint, reach
from megarl.weights.algebra.buckets import Bucket, PeerNumbers, rounds
from megarl.weights.algebra.plan import Move
from megarl.weights.executors.channel import Message
from megarl.weights.executors.group import TransferGroup
from megarl.weights.executors.tensors import device_of, source_view, target_view, torch_dtype

_MAX_BUCKETS_PER_PAIR = 1 << 15


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
        self._peers = peers
        self._rank = rank
        self._sources = sources
        self._targets = targets
        self._rounds = rounds(sent, received, peers)
        wire, device = group.wire_device, device_of(sources or targets)
        leaving = max((each.sent.num_bytes for each in self._rounds if each.sent), default=0)
        arriving = max((each.received.num_bytes for each in self._rounds if each.received), default=0)
        self._leaving, self._arriving = _Lane(leaving, wire, device), _Lane(arriving, wire, device)

    def run(self, version: int, deadline: float, sent: Callable[[int], None] = lambda _num_bytes: None) -> None:
        """Pass through all rounds; `sent` is called with the bytes of each bucket that has left."""
        for each in self._rounds:
            outgoing = incoming = None
            if each.sent is not None:
                outgoing = Message(peer=self._peers.receiver(each.sent), buffer=self._packed(each.sent, version))
            if each.received is not None:
                buffer = self._arriving.wire[: each.received.num_bytes]
                incoming = Message(peer=self._peers.sender(each.received), buffer=buffer)
            bucket = each.sent or each.received
            assert bucket is not None, "an empty round"
            self._group.exchange(outgoing, incoming, tag=_tag(version, bucket), deadline=deadline)
            if each.sent is not None:
                self._reach("bucket_sent", version)
                sent(each.sent.num_bytes)
            if each.received is not None:
                self._unpack(each.received, version)

    def _packed(self, bucket: Bucket, version: int) -> torch.Tensor:
        tensors = self._targets if bucket.is_forwarded else self._sources
        for move, values in _views(bucket, self._leaving.local):
            values.copy_(source_view(tensors, move))
        wire = self._leaving.to_wire(bucket.num_bytes)
        if self._reach("bucket_packed", version) == "corrupt":
            wire[0] ^= 1
        return wire

    def _unpack(self, bucket: Bucket, version: int) -> None:
        if self._reach("bucket_received", version) == "corrupt":
            self._arriving.wire[0] ^= 1
        self._arriving.to_local(bucket.num_bytes)
        for move, values in _views(bucket, self._arriving.local):
            target_view(self._targets, move).copy_(values)

    def _reach(self, point: PublishPoint, version: int) -> str | None:
        return reach(point, step=version, rank=self._rank, of=self._group.name)


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


def _tag(version: int, bucket: Bucket) -> int:
    """Return a tag that no other version has; the two buckets of a round have the same."""
    assert bucket.index < _MAX_BUCKETS_PER_PAIR, f"bucket {bucket.index} of a pair; make buckets larger"
    return (2 * version + bucket.is_forwarded) * _MAX_BUCKETS_PER_PAIR + bucket.index


def _views(bucket: Bucket, buffer: torch.Tensor) -> Iterator[tuple[Move, torch.Tensor]]:
    """Yield every move of a bucket with its values in `buffer`."""
    for move, start in zip(bucket.moves, bucket.starts, strict=True):
        values = buffer[start : start + move.num_bytes].view(torch_dtype(move.dtype))
        yield move, values.view(move.slice.shape)
