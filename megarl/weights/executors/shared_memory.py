"""Weights that need not travel: an engine process reads the tensors of a trainer process on the same node.

There is one handle per storage, however many tensors lie in it (Megatron keeps all weights of a model chunk in one).
Storages are torch's own interprocess ones: CUDA IPC on a GPU; on a CPU memory without a name, which is gone with the
last process that has it open, however that process ended.
"""

from __future__ import annotations

import base64
import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch

from megarl.errors import WeightSyncError, first_line
from megarl.weights.algebra.plan import Move
from megarl.weights.algebra.slices import Index
from megarl.weights.executors.digest import DigestSums
from megarl.weights.executors.group import TransferGroup
from megarl.weights.executors.tensors import device_of, source_view, target_view, torch_dtype

_DEVICE_FIELD = 0
"""Field of a CUDA handle with the number of the GPU in the process that made it.

A process opens memory of any GPU of its node from its own GPU, which then reads it directly; CUDA allows this even for
GPUs that the process does not see.
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class _View:
    storage: int
    """Index of the storage's handle."""
    offset: int
    """Counted in elements."""
    shape: Index
    strides: Index
    dtype: str


class SharedSource:
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


class SharedTarget:
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


def export_tensors(tensors: Mapping[str, torch.Tensor]) -> bytes:
    """Return what another process needs to open the tensors; on a CPU they move to shared memory, in place."""
    storages: dict[int, torch.UntypedStorage] = {}
    indices: dict[int, int] = {}
    views = {}
    for name, tensor in tensors.items():
        storage = tensor.untyped_storage()
        index = indices.setdefault(storage._cdata, len(indices))
        storages[index] = storage
        view = _View(
            storage=index,
            offset=int(tensor.storage_offset()),
            shape=tuple(tensor.shape),
            strides=tuple(tensor.stride()),
            dtype=str(tensor.dtype).removeprefix("torch."),
        )
        views[name] = asdict(view)
    try:
        handles = [[_to_json(field) for field in _share(storages[index])] for index in range(len(storages))]
    except RuntimeError as error:
        num_bytes = sum(storage.nbytes() for storage in storages.values())
        raise WeightSyncError(
            f"{num_bytes} bytes of weights cannot be shared with an engine: {first_line(error)}; "
            "make /dev/shm larger, or give trainer and engines pools of their own"
        ) from error
    kind = next(iter(tensors.values())).device.type if tensors else "cpu"
    return json.dumps({"kind": kind, "handles": handles, "views": views}).encode()


def open_tensors(exported: bytes) -> dict[str, torch.Tensor]:
    """Open the tensors of `export_tensors`, in memory that the other process owns."""
    description = json.loads(exported)
    try:
        handles = [[_from_json(field) for field in handle] for handle in description["handles"]]
        storages = [_open(description["kind"], handle) for handle in handles]
    except (RuntimeError, OSError) as error:
        raise WeightSyncError(f"the trainer's memory cannot be opened in this process: {first_line(error)}") from error
    tensors = {}
    for name, fields in description["views"].items():
        view = _View(**fields)
        storage = storages[view.storage]
        empty = torch.empty(0, dtype=torch_dtype(view.dtype), device=storage.device)
        tensors[name] = empty.set_(storage, view.offset, view.shape, view.strides)
    return tensors


def _share(storage: torch.UntypedStorage) -> tuple[Any, ...]:
    if storage.is_cuda:
        cuda_handle: tuple[Any, ...] = storage._share_cuda_()  # type: ignore[no-untyped-call]
        return cuda_handle
    descriptor, num_bytes = storage._share_fd_cpu_()
    return os.getpid(), descriptor, num_bytes


def _open(kind: str, handle: list[Any]) -> torch.UntypedStorage:
    if kind == "cuda":
        torch.cuda.init()  # type: ignore[no-untyped-call]
        handle[_DEVICE_FIELD] = torch.cuda.current_device()
        return torch.UntypedStorage._new_shared_cuda(*handle)
    pid, number, num_bytes = handle
    descriptor = os.open(f"/proc/{pid}/fd/{number}", os.O_RDWR)
    try:
        opened: torch.UntypedStorage = torch.UntypedStorage._new_shared_fd_cpu(descriptor, num_bytes)  # type: ignore[attr-defined]
        return opened
    finally:
        os.close(descriptor)


def _to_json(field: Any) -> Any:
    return {"base64": base64.b64encode(field).decode()} if isinstance(field, bytes) else field


def _from_json(field: Any) -> Any:
    return base64.b64decode(field["base64"]) if isinstance(field, dict) else field
