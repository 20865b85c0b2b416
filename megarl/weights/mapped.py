"""Tensors of one process in the address space of another that uses the same device: no copy, no staging.

One handle per storage, however many tensors lie in it (Megatron keeps all weights of a model chunk in one). Through
torch's own interprocess storages: CUDA IPC on a GPU, a shared file on a CPU. The owner keeps the memory alive, and does
not write while the other reads; who may do what when is not decided here.
"""

from __future__ import annotations

import base64
import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

import torch

from megarl.errors import WeightSyncError
from megarl.weights.slices import Index
from megarl.weights.tensors import torch_dtype

_DEVICE_FIELD = 0
"""Of a CUDA handle: the number of the GPU, which another process may see under another number."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _View:
    storage: int
    """Index of its handle."""
    offset: int
    """In elements."""
    shape: Index
    strides: Index
    dtype: str


def export_tensors(tensors: Mapping[str, torch.Tensor]) -> bytes:
    """What another process needs to see them; on a CPU they move to shared memory, in place."""
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
    handles = [[_to_json(field) for field in _share(storages[index])] for index in range(len(storages))]
    kind = next(iter(tensors.values())).device.type if tensors else "cpu"
    return json.dumps({"kind": kind, "handles": handles, "views": views}).encode()


def open_tensors(exported: bytes) -> dict[str, torch.Tensor]:
    """The tensors of `export_tensors`, in memory that the other process owns, for as long as they are kept."""
    found = json.loads(exported)
    try:
        storages = [_open(found["kind"], [_from_json(field) for field in handle]) for handle in found["handles"]]
    except RuntimeError as error:
        reason = str(error).strip().splitlines()[0]
        raise WeightSyncError(f"the trainer's memory cannot be opened in this process: {reason}") from error
    tensors = {}
    for name, fields in found["views"].items():
        view = _View(**fields)
        storage = storages[view.storage]
        empty = torch.empty(0, dtype=torch_dtype(view.dtype), device=storage.device)
        tensors[name] = empty.set_(storage, view.offset, view.shape, view.strides)
    return tensors


def _share(storage: torch.UntypedStorage) -> tuple[Any, ...]:
    share = storage._share_cuda_ if storage.is_cuda else storage._share_filename_cpu_
    handle: tuple[Any, ...] = share()
    return handle


def _open(kind: str, handle: list[Any]) -> torch.UntypedStorage:
    if kind != "cuda":
        return torch.UntypedStorage._new_shared_filename_cpu(*handle)
    torch.cuda.init()  # type: ignore[no-untyped-call]
    handle[_DEVICE_FIELD] = torch.cuda.current_device()
    return torch.UntypedStorage._new_shared_cuda(*handle)


def _to_json(field: Any) -> Any:
    return {"base64": base64.b64encode(field).decode()} if isinstance(field, bytes) else field


def _from_json(field: Any) -> Any:
    return base64.b64decode(field["base64"]) if isinstance(field, dict) else field
