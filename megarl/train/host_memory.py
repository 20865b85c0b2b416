"""Pinned host memory, and device memory that leaves for it for a while.

Storages are emptied and refilled in place, so that every view of them stays valid: parameters, Megatron's buckets, the
optimizer's shards. `Offload` knows nothing of their contents; `release` and `reload` alternate.
"""

from __future__ import annotations

import mmap
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import accumulate

import psutil
import torch
from torch import Tensor

from megarl.errors import MachineError
from megarl.train.memory import synchronize

_ALIGNMENT = 64
"""Bytes; a multiple of the size of every dtype."""
_PINNING_THREADS = 8
_PINNED_AT_ONCE = 1 << 28
"""Bytes that one thread clears at a time."""


class Offload:
    """Releases and reloads the device memory of one rank's tensors. Host memory is pinned at first use and kept."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        # By address of the storage, with the storage itself: while it is kept, no other gets its address.
        self._places: dict[int, tuple[torch.UntypedStorage, Tensor]] = {}
        self._absent: list[int] = []

    def release(self, tensors: Iterable[Tensor]) -> None:
        """Copy the tensors to host memory and free their own."""
        assert not self._absent, "released already"
        storages = _storages(tensors)
        self._reserve(storages)
        for key, storage in storages.items():
            self._places[key][1].copy_(_bytes(storage), non_blocking=True)
        synchronize(self._device)
        for storage in storages.values():
            storage.resize_(0)
        self._absent = list(storages)

    def reload(self) -> None:
        """Allocate the memory again. Work submitted from now on sees the values."""
        for storage, host in (self._places[key] for key in self._absent):
            storage.resize_(host.nbytes)
            _bytes(storage).copy_(host, non_blocking=True)
        self._absent = []

    def at_hand(self, tensor: Tensor) -> Tensor:
        """Return the tensor, or its copy in host memory while it is released."""
        key = tensor.untyped_storage()._cdata
        if key not in self._absent:
            return tensor
        host = self._places[key][1]
        first = host.storage_offset() // tensor.element_size() + tensor.storage_offset()
        empty = torch.empty(0, dtype=tensor.dtype)
        return empty.set_(host.untyped_storage(), first, tensor.shape, tensor.stride())

    def _reserve(self, storages: dict[int, torch.UntypedStorage]) -> None:
        new = {key: storage for key, storage in storages.items() if key not in self._places}
        places = host_places([storage.nbytes() for storage in new.values()], self._device)
        self._places |= {key: (storage, place) for (key, storage), place in zip(new.items(), places, strict=True)}


def _storages(tensors: Iterable[Tensor]) -> dict[int, torch.UntypedStorage]:
    """Return each storage once, in order."""
    storages = (tensor.untyped_storage() for tensor in tensors)
    # Memory that a CPU shares with other processes cannot be resized.
    return {storage._cdata: storage for storage in storages if storage.resizable() and storage.nbytes()}


def _bytes(storage: torch.UntypedStorage) -> Tensor:
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)


def host_places(sizes: Sequence[int], device: torch.device) -> list[Tensor]:
    """Return places of these sizes in bytes in one block of `host_zeros`."""
    starts = [0, *accumulate(-(-size // _ALIGNMENT) * _ALIGNMENT for size in sizes)]
    block = host_zeros(starts[-1], torch.uint8, device)
    return [block[start : start + size] for start, size in zip(starts, sizes, strict=False)]


def host_zeros(num_elements: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Return host memory of exactly that size, pinned for copies to and from a GPU.

    torch rounds its own pinned allocations up to a power of two.
    """
    if device.type != "cuda" or not num_elements:
        return torch.zeros(num_elements, dtype=dtype)
    num_bytes, available = num_elements * dtype.itemsize, psutil.virtual_memory().available
    if num_bytes > available:
        raise MachineError(
            f"{num_bytes / 1e9:.1f} GB of host memory are needed and {available / 1e9:.1f} GB are free; "
            "free some, set `offload` of the role to nothing, or give the reference a pool"
        )
    pages = _Pages(-1, num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    block = torch.frombuffer(pages, dtype=dtype)
    # The kernel clears a page at its first use, which takes one thread long.
    with ThreadPoolExecutor(_PINNING_THREADS) as pool:
        list(pool.map(Tensor.zero_, torch.split(block, _PINNED_AT_ONCE // block.element_size())))
    code = torch.cuda.cudart().cudaHostRegister(block.data_ptr(), block.nbytes, 0)  # type: ignore[no-untyped-call]
    if int(code):
        raise MachineError(
            f"cannot pin {block.nbytes / 1e9:.1f} GB of host memory (CUDA error {int(code)}); "
            "free some, set `offload` of the role to nothing, or give the reference a pool"
        )
    pages.pinned_address = block.data_ptr()
    return block


class _Pages(mmap.mmap):
    """Whole pages, which no other memory shares, unpinned before they are given back: CUDA pins no page twice."""

    pinned_address: int | None = None

    def __del__(self) -> None:
        if self.pinned_address is not None:
            torch.cuda.cudart().cudaHostUnregister(self.pinned_address)  # type: ignore[no-untyped-call]
