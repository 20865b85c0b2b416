"""Carrying out a plan between processes: pack, send, stage, digest, commit. No SGLang, no Megatron.

A sender packs a bucket while the one before it travels. A receiver keeps what arrives in staging and touches its
parameters only in `commit`, so that a version is delivered whole or not at all. Between two processes on one device
nothing travels: the receiver sees the sender's own tensors, which do not change before the version is committed.

Source rank s of a plan is peer s of the group; target rank t is peer `first_target_peer + t`.
"""

from __future__ import annotations

import json
from collections import deque
from collections.abc import Iterator, Mapping

import torch

from megarl.errors import WeightSyncError
from megarl.faults import reach
from megarl.weights.box_digest import BoxDigest, digest_bytes
from megarl.weights.buckets import DEFAULT_BUCKET_BYTES, NUM_LANES, Bucket, Parcel, buckets_from, buckets_to
from megarl.weights.check import check_delivery
from megarl.weights.digest import digest_tensor, to_ints
from megarl.weights.group import Pending, StoreAddress, StoreServer, TransferGroup
from megarl.weights.mapped import export_tensors, open_tensors
from megarl.weights.plan import Plan
from megarl.weights.slices import Slice
from megarl.weights.tensors import box_of, torch_dtype

__all__ = ["DEFAULT_BUCKET_BYTES", "Receiver", "Sender", "StoreAddress", "StoreServer", "TransferGroup", "exchange"]

_MAX_BUCKETS_PER_PAIR = 1 << 16


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
    ) -> None:
        """Without `first_target_peer`, the targets come after all the sources.

        `shares_device`: source rank r and target rank r are two processes on one device, for every r.
        """
        self._plan = plan
        self._rank = rank
        self._tensors = tensors
        self._group = group
        self._digest = digest
        self._first_target_peer = _first_target_peer(plan, first_target_peer)
        buckets = buckets_from(plan, rank, bucket_bytes=bucket_bytes)
        own_device = {rank} if shares_device else set()
        self._shown = [bucket for bucket in buckets if bucket.target_rank in own_device]
        self._memory = export_tensors(tensors) if self._shown else None
        away = [bucket for bucket in buckets if bucket.target_rank not in own_device]
        self._buckets = [bucket for bucket in away if self._peer_of(bucket) != group.peer]
        largest = max((bucket.num_bytes for bucket in self._buckets), default=0)
        self._lanes = [_wire_buffer(group, largest) for _ in range(NUM_LANES)]
        self._device = device = _device_of(tensors)
        # Many small copies are made on the tensors' own device; then one copy crosses to where the wire starts.
        self._packing = self._lanes[0] if device == group.wire_device else _buffer(largest, device)

    def send(self, version: int) -> dict[tuple[int, str], int]:
        """Send everything this rank owes. Returns what it sent: a digest per (target rank, target tensor).

        Digests are of the source's own tensors, cast as they travel: an error in packing is found as well.
        """
        digests: dict[tuple[Slice, str], torch.Tensor] = {}
        sums: dict[tuple[int, str], torch.Tensor] = {}
        with self._group.transfer() as deadline:
            if self._memory is not None:
                if self._device.type == "cuda":
                    torch.cuda.synchronize(self._device)  # the other process knows nothing of our streams
                self._group.report(_memory_key(version, self._rank), self._memory)
            under_way: deque[Pending] = deque()
            for number, bucket in enumerate(self._buckets):
                if len(under_way) == NUM_LANES:
                    under_way.popleft().wait(deadline)
                lane = self._pack(bucket, self._lanes[number % NUM_LANES])
                if reach("bucket_packed", step=version, rank=self._rank, of=self._group.name) == "corrupt":
                    lane[0] ^= 1
                under_way.append(self._group.send(lane, peer=self._peer_of(bucket), tag=_tag(version, bucket)))
                reach("bucket_sent", step=version, rank=self._rank, of=self._group.name)
                self._add_digests(bucket, digests, sums)
            for bucket in self._shown:
                self._add_digests(bucket, digests, sums)
            for pending in under_way:
                pending.wait(deadline)
        return to_ints(sums)

    def _pack(self, bucket: Bucket, lane: torch.Tensor) -> torch.Tensor:
        is_direct = self._packing.device == lane.device
        packed = (lane if is_direct else self._packing)[: bucket.num_bytes]
        for parcel in bucket.parcels:
            _view(packed, parcel).copy_(self._source(parcel))
        return packed if is_direct else lane[: bucket.num_bytes].copy_(packed)

    def _add_digests(
        self,
        bucket: Bucket,
        digests: dict[tuple[Slice, str], torch.Tensor],
        sums: dict[tuple[int, str], torch.Tensor],
    ) -> None:
        for parcel in bucket.parcels:
            box = parcel.move.slice
            # Engines are replicas: the same box goes to many, and is hashed once.
            if (box, parcel.dtype) not in digests:
                values = self._source(parcel).to(torch_dtype(parcel.dtype))
                shape = self._plan.target.canonical[box.name].shape
                digests[box, parcel.dtype] = self._digest(values, box, shape)
            key = (bucket.target_rank, parcel.move.target_name)
            found = digests[box, parcel.dtype]
            sums[key] = sums[key] + found if key in sums else found

    def _source(self, parcel: Parcel) -> torch.Tensor:
        move = parcel.move
        return box_of(self._tensors[move.source_name], move.source_offsets, move.slice.shape)

    def _peer_of(self, bucket: Bucket) -> int:
        return self._first_target_peer + bucket.target_rank


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
    ) -> None:
        """Staging is allocated here, once. Other arguments are those of the senders."""
        self._plan = plan
        self._rank = rank
        self._tensors = tensors
        self._group = group
        self._digest = digest
        expected_peer = _first_target_peer(plan, first_target_peer) + rank
        assert expected_peer == group.peer, f"target rank {rank} is peer {expected_peer}, not {group.peer}"
        buckets = buckets_to(plan, rank, bucket_bytes=bucket_bytes)
        own_device = {rank} if shares_device else set()
        self._seen = [bucket for bucket in buckets if bucket.source_rank in own_device]
        self._memory = b""
        self._sources: Mapping[str, torch.Tensor] = {}
        away = [bucket for bucket in buckets if bucket.source_rank not in own_device]
        self._buckets = [bucket for bucket in away if bucket.source_rank != group.peer]
        self._staging = [_wire_buffer(group, bucket.num_bytes) for bucket in self._buckets]
        self._device = _device_of(tensors)
        self._expected: list[Pending] = []
        self._staged_version: int | None = None

    def expect(self, version: int) -> None:
        """Be ready to receive without waiting; `stage` does it too. A peer that also sends calls this first."""
        self._staged_version = None
        self._expected = [
            self._group.receive(buffer, peer=bucket.source_rank, tag=_tag(version, bucket))
            for bucket, buffer in zip(self._buckets, self._staging, strict=True)
        ]

    def stage(self, version: int) -> dict[str, int]:
        """Receive one version into staging. Returns a digest per tensor, of what arrived."""
        sums: dict[str, torch.Tensor] = {}
        with self._group.transfer() as deadline:
            if not self._expected:
                self.expect(version)
            expected, self._expected = self._expected, []
            self._open_memory(version)
            for parcel, values in self._visible():
                self._add_digest(parcel, values, sums)
            for bucket, buffer, pending in zip(self._buckets, self._staging, expected, strict=True):
                pending.wait(deadline)
                if reach("bucket_received", step=version, rank=self._rank, of=self._group.name) == "corrupt":
                    buffer[0] ^= 1
                for parcel, values in self._arrived(bucket, buffer):
                    self._add_digest(parcel, values, sums)
        self._staged_version = version
        found = to_ints(sums)
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
        for parcel, values in self._visible():
            self._put(parcel, values)
        for bucket, buffer in zip(self._buckets, self._staging, strict=True):
            for parcel, values in self._arrived(bucket, buffer):
                self._put(parcel, values)
        self._staged_version = None
        reach("committed", step=version, rank=self._rank, of=self._group.name)

    def abort(self) -> None:
        """Forget what is staged; the parameters stay as they are."""
        self._staged_version = None

    def _open_memory(self, version: int) -> None:
        """Once the sender says that its tensors are this version's; they stay open until it shows others."""
        if not self._seen:
            return
        key = _memory_key(version, self._rank)
        memory = self._group.collect([key], self._group.timeout_s)[key]
        self._group.forget([key])
        if memory != self._memory:
            self._sources, self._memory = open_tensors(memory), memory

    def _visible(self) -> Iterator[tuple[Parcel, torch.Tensor]]:
        """What need not travel, in the sender's own memory."""
        for bucket in self._seen:
            for parcel in bucket.parcels:
                move = parcel.move
                values = box_of(self._sources[move.source_name], move.source_offsets, move.slice.shape)
                yield parcel, values.to(torch_dtype(parcel.dtype))

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
    for move in plan.moves_to.get(group.peer, ()):
        if move.source_rank == group.peer:
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
    sources = sorted({move.source_rank for move in plan.moves_to.get(group.peer, ())} - {group.peer})
    keys = [f"digests {number} from {rank} to {group.peer}" for rank in sources]
    reports = group.collect(keys, group.timeout_s)
    group.forget(keys)
    parts = [{(group.peer, name): value for name, value in json.loads(reports[key]).items()} for key in keys]
    check_delivery(parts, {group.peer: arrived})


def _first_target_peer(plan: Plan, given: int | None) -> int:
    return len(plan.source.holdings) if given is None else given


def _tag(version: int, bucket: Bucket) -> int:
    """Buckets of another version never match: they end in a timeout, not in the parameters."""
    return version * _MAX_BUCKETS_PER_PAIR + bucket.index


def _memory_key(version: int, rank: int) -> str:
    return f"memory of rank {rank} at version {version}"


def _view(buffer: torch.Tensor, parcel: Parcel) -> torch.Tensor:
    values = buffer[parcel.start : parcel.start + parcel.num_bytes].view(torch_dtype(parcel.dtype))
    return values.view(parcel.move.slice.shape)


def _device_of(tensors: Mapping[str, torch.Tensor]) -> torch.device:
    return next((tensor.device for tensor in tensors.values()), torch.device("cpu"))


def _wire_buffer(group: TransferGroup, num_bytes: int) -> torch.Tensor:
    return _buffer(num_bytes, group.wire_device)


def _buffer(num_bytes: int, device: torch.device) -> torch.Tensor:
    is_pinned = device.type == "cpu" and torch.cuda.is_available()
    return torch.empty(num_bytes, dtype=torch.uint8, device=device, pin_memory=is_pinned)
