"""Weights that need not travel: an engine process reads the tensors of a trainer process on the same node.

There is one handle per storage, however many tensors lie in it (Megatron keeps all weights of a model chunk in one).
Storages are torch's own interprocess ones: CUDA IPC on a GPU; on a CPU memory without a name, which is gone with the
last process that has it open, however that process ended.
"""

from __future__ import annotations

import base64
import json
import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

import torch

from megarl.errors import WeightSyncError, first_line
from megarl.weights.algebra.slices import Index
from megarl.weights.executors.tensors import torch_dtype

UNREADABLE = "the trainer's memory cannot be opened in this process"
"""The beginning of the error of a process that may not read another's memory; the bytes can still be sent to it."""
_DEVICE_FIELD = 0
"""Field of a CUDA handle with the number of the GPU in the process that made it.

A process opens memory of any GPU of its node from its own GPU, which then reads it directly; CUDA allows this even for
GPUs that the process does not see.
"""
_WAITS_FIELD = 7
"""Field of a CUDA handle that says whether the reader waits for an event of the process that made it.

An event is opened on the GPU that it belongs to, which the reader may not see. The sender has waited for its streams
before it shares their results, so there is nothing left to wait for.
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
        raise WeightSyncError(f"{UNREADABLE}: {first_line(error)}") from error
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
        handle[_WAITS_FIELD] = False
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
