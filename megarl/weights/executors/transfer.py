"""Carrying out a plan between processes: pack, send, stage, pass on, digest, commit. No SGLang, no Megatron.

A sender packs a bucket while the one before it travels. A receiver keeps what arrives in staging, passes on what others
wait for as soon as it is there, and touches its parameters only in `commit`: a version is delivered whole or not at
all. Between two processes on one device nothing travels: the receiver sees the sender's own tensors, which do not
change before the version is committed.

Nobody waits in a circle: receivers are ready for everything from the start, and a bucket waits only for buckets of
earlier hops, which come first in everyone's order.

Source rank s of a plan is peer s of the group; target rank t is peer `first_target_peer + t`.
"""

from __future__ import annotations

import json
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace

import torch

from megarl.errors import WeightSyncError
from megarl.system.faults import reach
from megarl.weights.algebra.buckets import (
    DEFAULT_BUCKET_BYTES,
    NUM_LANES,
    Bucket,
    Parcel,
    buckets_from,
    buckets_on_from,
    buckets_to,
    parts_of,
)
from megarl.weights.algebra.check import check_delivery
from megarl.weights.algebra.locality import Link
from megarl.weights.algebra.plan import Delivery, Plan
from megarl.weights.algebra.slices import shift
from megarl.weights.executors.box_digest import BoxDigest, digest_bytes
from megarl.weights.executors.digest import MODULUS, DigestSums, Part, digest_tensor, to_ints
from megarl.weights.executors.group import Pending, StoreAddress, StoreServer, TransferGroup
from megarl.weights.executors.same_device import Seen, Shown
from megarl.weights.executors.tensors import box_of, torch_dtype

__all__ = ["DEFAULT_BUCKET_BYTES", "Receiver", "Sender", "StoreAddress", "StoreServer", "TransferGroup", "exchange"]

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

        `shares_device`: targets that the plan says are on this rank's device read its tensors themselves; `keeps_open`:
        and may keep them open between versions.
        """
        self._plan = plan
        self._rank = rank
        self._tensors = tensors
        self._group = group
        self._digest = digest
        self._bucket_bytes = bucket_bytes
        first_peer = _first_target_peer(plan, first_target_peer)
        buckets = buckets_from(plan, rank, bucket_bytes=bucket_bytes)
        sees_this = {bucket.target_rank for bucket in buckets if shares_device and _is_on_device(plan, bucket)}
        self._shown = Shown(tensors, keeps_open=keeps_open)
        self._readers = sorted(sees_this)
        self._buckets = [
            bucket
            for bucket in buckets
            if bucket.target_rank not in sees_this and first_peer + bucket.target_rank != group.peer
        ]
        self._deliveries = tuple(_besides(group.peer - first_peer, plan.deliveries_from(rank)))
        self._device = _device_of(tensors)
        self._wire = _Wire(self._buckets, self._device, group, first_peer)
        self._at_once: DigestSums[int] | None = None
        if self._device.type == "cuda" and digest is digest_tensor:
            self._at_once = DigestSums(
                [
                    Part(
                        key=number,
                        dtype=torch_dtype(each.dtype),
                        box=each.slice,
                        canonical_shape=plan.target.canonical[each.slice.name].shape,
                    )
                    for number, each in enumerate(self._deliveries)
                ]
            )
            self._boxes = [
                box_of(tensors[each.source_name], each.source_offsets, each.slice.shape) for each in self._deliveries
            ]

    def send(self, version: int) -> dict[tuple[int, str], int]:
        """Send everything this rank owes. Returns a digest per (target rank, target tensor) that it is the origin of.

        Digests are of the source's own tensors, cast as they travel: an error in packing or on the way is found.
        """
        sums: dict[tuple[int, str], torch.Tensor] = {}
        with self._group.transfer() as deadline:
            if self._readers:
                if self._device.type == "cuda":
                    torch.cuda.synchronize(self._device)  # the other process knows nothing of our streams
                for reader in self._readers:
                    self._group.report(_memory_key(version, self._rank, reader), self._shown.memory())
            digested = iter(()) if self._at_once is not None else self._digest_bit_by_bit(sums)
            sent_bytes, digested_bytes = 0, 0
            for bucket in self._buckets:
                lane = self._wire.pack(bucket, self._source, deadline)
                if reach("bucket_packed", step=version, rank=self._rank, of=self._group.name) == "corrupt":
                    lane[0] ^= 1
                self._wire.send(bucket, lane, version)
                reach("bucket_sent", step=version, rank=self._rank, of=self._group.name)
                sent_bytes += bucket.num_bytes
                while digested_bytes < sent_bytes and (num_bytes := next(digested, None)) is not None:
                    digested_bytes += num_bytes
            for _ in digested:
                pass
            found = to_ints(sums) if self._at_once is None else self._digest_at_once(self._at_once)
            self._wire.finish(deadline)
        return found

    def _digest_at_once(self, sums: DigestSums[int]) -> dict[tuple[int, str], int]:
        """As `_digest_bit_by_bit`, on a GPU, which does not need this process to hash while buckets travel."""
        found: dict[tuple[int, str], int] = {}
        for number, value in sums.compute(self._boxes).items():
            for key in self._deliveries[number].targets:
                found[key] = (found.get(key, 0) + value) % MODULUS
        return found

    def _digest_bit_by_bit(self, sums: dict[tuple[int, str], torch.Tensor]) -> Iterator[int]:
        """While buckets travel. A box that goes to many is hashed once. Gives the bytes of each part."""
        for delivery in self._deliveries:
            whole = delivery.slice
            shape = self._plan.target.canonical[whole.name].shape
            for part in parts_of(delivery, bucket_bytes=self._bucket_bytes):
                offsets = shift(part.offsets, whole.offsets, delivery.source_offsets)
                values = box_of(self._tensors[delivery.source_name], offsets, part.shape)
                values = values.to(torch_dtype(delivery.dtype))
                found = self._digest(values, part, shape)
                for key in delivery.targets:
                    sums[key] = sums[key] + found if key in sums else found
                yield values.numel() * values.element_size()

    def _source(self, parcel: Parcel) -> torch.Tensor:
        move = parcel.move
        return box_of(self._tensors[move.source_name], move.source_offsets, move.slice.shape)


class _Wire:
    """Packs buckets and sends them, `NUM_LANES` at a time."""

    def __init__(
        self, buckets: Sequence[Bucket], device: torch.device, group: TransferGroup, first_target_peer: int
    ) -> None:
        self._group = group
        self._first_target_peer = first_target_peer
        largest = max((bucket.num_bytes for bucket in buckets), default=0)
        self._lanes = [_wire_buffer(group, largest) for _ in range(NUM_LANES)]
        # Many small copies are made on the tensors' own device; then one copy crosses to where the wire starts.
        self._packing = None if device == group.wire_device else _buffer(largest, device)
        self._under_way: deque[Pending] = deque()
        self._num_sent = 0

    def pack(self, bucket: Bucket, content: Callable[[Parcel], torch.Tensor], deadline: float) -> torch.Tensor:
        """The bucket, ready to travel."""
        if len(self._under_way) == NUM_LANES:
            self._under_way.popleft().wait(deadline)
        lane = self._lanes[self._num_sent % NUM_LANES][: bucket.num_bytes]
        packed = lane if self._packing is None else self._packing[: bucket.num_bytes]
        for parcel in bucket.parcels:
            _view(packed, parcel).copy_(content(parcel))
        return lane if packed is lane else lane.copy_(packed)

    def send(self, bucket: Bucket, lane: torch.Tensor, version: int) -> None:
        peer = self._first_target_peer + bucket.target_rank
        self._under_way.append(self._group.send(lane, peer=peer, tag=_tag(version, bucket)))
        self._num_sent += 1

    def finish(self, deadline: float) -> None:
        while self._under_way:
            self._under_way.popleft().wait(deadline)

    def forget(self) -> None:
        """After a failure: what was under way is not waited for again."""
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
        """Staging is allocated here, once. Other arguments are those of the senders."""
        self._plan = plan
        self._rank = rank
        self._tensors = tensors
        self._group = group
        self._digest = digest
        self._first_peer = _first_target_peer(plan, first_target_peer)
        expected_peer = self._first_peer + rank
        assert expected_peer == group.peer, f"target rank {rank} is peer {expected_peer}, not {group.peer}"
        buckets = buckets_to(plan, rank, bucket_bytes=bucket_bytes)
        beside = [bucket for bucket in buckets if shares_device and _is_on_device(plan, bucket)]
        self._seen = Seen(plan, beside, tensors, digest=digest, keeps_open=keeps_open)
        seen = {id(bucket) for bucket in beside}
        away = [bucket for bucket in buckets if id(bucket) not in seen]
        self._buckets = [bucket for bucket in away if self._giver_of(bucket) != group.peer]
        self._staging = [_wire_buffer(group, bucket.num_bytes) for bucket in self._buckets]
        self._device = _device_of(tensors)
        self._passed_on = _Passing(
            self._buckets,
            self._staging,
            buckets_on_from(plan, rank, bucket_bytes=bucket_bytes),
            group,
            self._first_peer,
        )
        self._expected: list[Pending] = []
        self._staged_version: int | None = None

    def expect(self, version: int) -> None:
        """Be ready to receive without waiting; `stage` does it too. A peer that also sends calls this first."""
        self._staged_version = None
        self._expected = [
            self._group.receive(buffer, peer=self._giver_of(bucket), tag=_tag(version, bucket))
            for bucket, buffer in zip(self._buckets, self._staging, strict=True)
        ]

    def stage(self, version: int) -> dict[str, int]:
        """Receive one version into staging, and pass on what others wait for.

        Returns a digest per tensor, of what arrived.
        """
        sums: dict[str, torch.Tensor] = {}
        with self._group.transfer() as deadline:
            if not self._expected:
                self.expect(version)
            expected, self._expected = self._expected, []
            self._passed_on.begin(version, deadline)
            beside = self._look(version)
            for number, (bucket, pending) in enumerate(zip(self._buckets, expected, strict=True)):
                pending.wait(deadline)
                if reach("bucket_received", step=version, rank=self._rank, of=self._group.name) == "corrupt":
                    self._staging[number][0] ^= 1
                self._passed_on.arrived(number)
                for parcel, values in self._arrived(bucket, self._staging[number]):
                    self._add_digest(parcel, values, sums)
            self._passed_on.finish()
        self._staged_version = version
        found = to_ints(sums)
        for name, value in beside.items():
            found[name] = (found.get(name, 0) + value) % MODULUS
        if reach("staged", step=version, rank=self._rank, of=self._group.name) == "corrupt":
            name = next(iter(found))
            found[name] ^= 1
        return found

    def commit(self, version: int) -> None:
        """Copy staging into the parameters, in place; refused for any version but the staged one."""
        if self._staged_version != version:
            who = f"{self._group.name}: peer {self._group.peer}"
            raise WeightSyncError(f"{who}: asked to commit version {version}, staged is {self._staged_version}")
        reach("committing", step=version, rank=self._rank, of=self._group.name)
        self._seen.commit()
        self._seen.finish()
        for bucket, buffer in zip(self._buckets, self._staging, strict=True):
            for parcel, values in self._arrived(bucket, buffer):
                self._put(parcel, values)
        self._staged_version = None
        reach("committed", step=version, rank=self._rank, of=self._group.name)

    def abort(self) -> None:
        """Forget what is staged; the parameters stay as they are."""
        self._seen.finish()
        self._staged_version = None

    def _giver_of(self, bucket: Bucket) -> int:
        """As a peer."""
        return bucket.source_rank + (self._first_peer if bucket.is_passed_on else 0)

    def _look(self, version: int) -> dict[str, int]:
        """Digests of what need not travel, once the senders say that their tensors are this version's."""
        for source in self._seen.source_ranks:
            key = _memory_key(version, source, self._rank)
            memory = self._group.collect([key], self._group.timeout_s)[key]
            self._group.forget([key])
            self._seen.open(source, memory)
        return self._seen.digests()

    def _add_digest(self, parcel: Parcel, values: torch.Tensor, sums: dict[str, torch.Tensor]) -> None:
        box, name = parcel.move.slice, parcel.move.target_name
        found = self._digest(values, box, self._plan.target.canonical[box.name].shape)
        sums[name] = sums[name] + found if name in sums else found

    def _put(self, parcel: Parcel, values: torch.Tensor) -> None:
        move = parcel.move
        box_of(self._tensors[move.target_name], move.target_offsets, move.slice.shape).copy_(values)

    def _arrived(self, bucket: Bucket, buffer: torch.Tensor) -> Iterator[tuple[Parcel, torch.Tensor]]:
        arrived = buffer.to(self._device)
        return ((parcel, _view(arrived, parcel)) for parcel in bucket.parcels)


class _Passing:
    """What a receiver sends on out of its staging: each bucket as soon as all of it is there, in a fixed order."""

    def __init__(
        self,
        received: Sequence[Bucket],
        staging: Sequence[torch.Tensor],
        buckets: Sequence[Bucket],
        group: TransferGroup,
        first_target_peer: int,
    ) -> None:
        self._staged = {
            parcel.move.slice: (number, _view(staging[number], parcel))
            for number, bucket in enumerate(received if buckets else ())
            for parcel in bucket.parcels
        }
        self._buckets = [
            (bucket, max(self._staged[parcel.move.slice][0] for parcel in bucket.parcels)) for bucket in buckets
        ]
        self._wire = _Wire(buckets, group.wire_device, group, first_target_peer)
        self._version, self._deadline = 0, 0.0
        self._num_sent = 0

    def begin(self, version: int, deadline: float) -> None:
        self._version, self._deadline = version, deadline
        self._num_sent = 0
        self._wire.forget()

    def arrived(self, number: int) -> None:
        """Buckets up to `number`, in the order in which they are received, are here."""
        for bucket, last in self._buckets[self._num_sent :]:
            if last > number:
                return
            lane = self._wire.pack(bucket, lambda parcel: self._staged[parcel.move.slice][1], self._deadline)
            self._wire.send(bucket, lane, self._version)
            self._num_sent += 1

    def finish(self) -> None:
        assert self._num_sent == len(self._buckets), f"{self._num_sent} of {len(self._buckets)} buckets passed on"
        self._wire.finish(self._deadline)


def exchange(
    plan: Plan,
    sources: Mapping[str, torch.Tensor],
    targets: Mapping[str, torch.Tensor],
    group: TransferGroup,
    *,
    bucket_bytes: int = DEFAULT_BUCKET_BYTES,
) -> None:
    """Every peer gives and takes: source rank r and target rank r are peer r. What arrived is checked by digest."""
    number = group.next_meeting()
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
            values = box_of(sources[move.source_name], move.source_offsets, move.slice.shape)
            target = box_of(targets[move.target_name], move.target_offsets, move.slice.shape)
            # A target may be the source itself.
            if target.data_ptr() != values.data_ptr():
                target.copy_(values)


def _check_with_senders(
    plan: Plan,
    group: TransferGroup,
    number: int,
    sent: Mapping[tuple[int, str], int],
    arrived: Mapping[str, int],
) -> None:
    for target_rank in sorted({rank for rank, _ in sent}):
        mine = {name: value for (rank, name), value in sent.items() if rank == target_rank}
        group.report(f"digests {number} from {group.peer} to {target_rank}", json.dumps(mine).encode())
    sources = sorted({move.source_rank for move in plan.moves_to(group.peer)} - {group.peer})
    keys = [f"digests {number} from {rank} to {group.peer}" for rank in sources]
    reports = group.collect(keys, group.timeout_s)
    group.forget(keys)
    parts = [{(group.peer, name): value for name, value in json.loads(reports[key]).items()} for key in keys]
    check_delivery(parts, {group.peer: arrived})


def _first_target_peer(plan: Plan, given: int | None) -> int:
    return len(plan.source.holdings) if given is None else given


def _besides(rank: int, deliveries: Iterable[Delivery]) -> Iterator[Delivery]:
    """Without what stays in the process of target `rank`."""
    for delivery in deliveries:
        targets = tuple(key for key in delivery.targets if key[0] != rank)
        if targets:
            yield replace(delivery, targets=targets)


def _is_on_device(plan: Plan, bucket: Bucket) -> bool:
    """Whether giver and taker are two processes on one device."""
    locations = plan.locations
    if bucket.is_passed_on:
        return False
    return locations.sources[bucket.source_rank].link(locations.targets[bucket.target_rank]) is Link.DEVICE


def _tag(version: int, bucket: Bucket) -> int:
    """Buckets of another version never match: they end in a timeout, not in the parameters."""
    assert bucket.index < _MAX_BUCKETS_PER_PAIR, f"bucket {bucket.index} of a pair; make buckets larger"
    return (2 * version + bucket.is_passed_on) * _MAX_BUCKETS_PER_PAIR + bucket.index


def _memory_key(version: int, source_rank: int, target_rank: int) -> str:
    return f"memory of rank {source_rank} at version {version} for {target_rank}"


def _view(buffer: torch.Tensor, parcel: Parcel) -> torch.Tensor:
    values = buffer[parcel.start : parcel.start + parcel.num_bytes].view(torch_dtype(parcel.move.dtype))
    return values.view(parcel.move.slice.shape)


def _device_of(tensors: Mapping[str, torch.Tensor]) -> torch.device:
    return next((tensor.device for tensor in tensors.values()), torch.device("cpu"))


def _wire_buffer(group: TransferGroup, num_bytes: int) -> torch.Tensor:
    return _buffer(num_bytes, group.wire_device)


def _buffer(num_bytes: int, device: torch.device) -> torch.Tensor:
    is_pinned = device.type == "cpu" and torch.cuda.is_available()
    return torch.empty(num_bytes, dtype=torch.uint8, device=device, pin_memory=is_pinned)
