"""The memory of a rank: freed on the device for a while and taken again, and measured.

Values that are needed again are copied to host memory, others are dropped. Storages are emptied and refilled in place,
so that every view of them stays valid: parameters, Megatron's buckets, the optimizer's shards. `Offload` knows nothing
of their contents; `release` and `reload` alternate.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import psutil
import torch
import torch.distributed as dist
from torch import Tensor

from megarl.errors import MachineError
from megarl.results import RankUsage
from megarl.train.topology import Topology

_ALIGNMENT = 64
"""Bytes; a multiple of the size of every dtype."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Absent:
    storage: torch.UntypedStorage
    num_bytes: int
    host: Tensor | None  # [num_bytes], uint8; None if the values were dropped


class Offload:
    """Releases and reloads the device memory of one rank. Host memory is pinned at first use and kept."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._is_cuda = device.type == "cuda"
        self._stream = torch.cuda.Stream(device) if self._is_cuda else None  # type: ignore[no-untyped-call]
        # By address of the storage, with the storage itself: while it is kept, no other gets its address.
        self._places: dict[int, tuple[torch.UntypedStorage, Tensor]] = {}
        self._absent: dict[int, _Absent] = {}
        self._arrival: torch.cuda.Event | None = None

    @property
    def is_released(self) -> bool:
        return bool(self._absent)

    def release(self, kept: Iterable[Tensor], dropped: Iterable[Tensor]) -> None:
        """Free the memory of these tensors; only the values of `kept` can be reloaded."""
        assert not self._absent, "released already"
        self.wait()
        wanted = _storages(kept)
        self._reserve(wanted)
        with torch.cuda.stream(self._stream):
            if self._stream is not None:
                self._stream.wait_stream(torch.cuda.current_stream(self._device))
            for key, storage in wanted.items():
                host = self._places[key][1]
                host.copy_(_bytes(storage), non_blocking=True)
                self._absent[key] = _Absent(storage=storage, num_bytes=storage.nbytes(), host=host)
        for key, storage in _storages(dropped).items():
            self._absent.setdefault(key, _Absent(storage=storage, num_bytes=storage.nbytes(), host=None))
        if self._is_cuda:
            torch.cuda.synchronize(self._device)
        for absent in self._absent.values():
            absent.storage.resize_(0)
        free_cache(self._device)

    def reload(self, first: Iterable[Tensor]) -> None:
        """Allocate the memory again. Work submitted from now on sees the values of `first`, and zeros in dropped ones.

        Other values are copied in the background and can be used after `wait`.
        """
        keys = list(_storages(first, even_if_empty=True))
        order = [*(key for key in keys if key in self._absent), *(key for key in self._absent if key not in keys)]
        absents = [(key, self._absent[key]) for key in order]
        for _, absent in absents:
            absent.storage.resize_(absent.num_bytes)
            if absent.host is None:
                _bytes(absent.storage).zero_()
        compute = torch.cuda.current_stream(self._device) if self._is_cuda else None
        with torch.cuda.stream(self._stream):
            if self._stream is not None and compute is not None:
                # The memory just allocated may still be in use by work submitted before.
                self._stream.wait_stream(compute)
            for number, (_, absent) in enumerate(absents):
                if absent.host is not None:
                    _bytes(absent.storage).copy_(absent.host, non_blocking=True)
                if compute is not None and self._stream is not None and number + 1 == len(set(keys) & set(order)):
                    compute.wait_event(self._stream.record_event())
            self._arrival = None if self._stream is None else self._stream.record_event()
        self._absent = {}

    def wait(self) -> None:
        """Make work submitted from now on see all reloaded values."""
        if self._arrival is not None:
            torch.cuda.current_stream(self._device).wait_event(self._arrival)
            self._arrival = None

    def at_hand(self, tensor: Tensor) -> Tensor:
        """Return the tensor, or its copy in host memory while it is released."""
        absent = self._absent.get(tensor.untyped_storage()._cdata)
        if absent is None:
            return tensor
        assert absent.host is not None, "its values were dropped"
        first = absent.host.storage_offset() // tensor.element_size() + tensor.storage_offset()
        empty = torch.empty(0, dtype=tensor.dtype)
        return empty.set_(absent.host.untyped_storage(), first, tensor.shape, tensor.stride())

    def _reserve(self, storages: dict[int, torch.UntypedStorage]) -> None:
        new = {key: storage for key, storage in storages.items() if key not in self._places}
        if not new:
            return
        sizes = [-(-storage.nbytes() // _ALIGNMENT) * _ALIGNMENT for storage in new.values()]
        block = _pinned(sum(sizes)) if self._is_cuda else torch.empty(sum(sizes), dtype=torch.uint8)
        start = 0
        for (key, storage), size in zip(new.items(), sizes, strict=True):
            self._places[key] = storage, block[start : start + storage.nbytes()]
            start += size


def free_cache(device: torch.device) -> None:
    """Give back the memory that torch keeps for later: other processes of the device need it now."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
        torch.cuda.ipc_collect()  # type: ignore[no-untyped-call]
        torch.cuda.empty_cache()


def _storages(tensors: Iterable[Tensor], *, even_if_empty: bool = False) -> dict[int, torch.UntypedStorage]:
    """Return each storage once, in order."""
    storages = (tensor.untyped_storage() for tensor in tensors)
    # Memory that a CPU shares with other processes cannot be resized.
    return {
        storage._cdata: storage for storage in storages if storage.resizable() and (even_if_empty or storage.nbytes())
    }


def _bytes(storage: torch.UntypedStorage) -> Tensor:
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)


def _pinned(num_bytes: int) -> Tensor:
    """Allocate exactly that size: torch rounds its own pinned allocations up to a power of two."""
    block = torch.empty(num_bytes, dtype=torch.uint8)
    code = torch.cuda.cudart().cudaHostRegister(block.data_ptr(), num_bytes, 0)  # type: ignore[no-untyped-call]
    if int(code):
        raise MachineError(
            f"cannot pin {num_bytes / 1e9:.1f} GB of host memory (CUDA error {int(code)}); "
            "free some, or set roles.actor.offload to nothing"
        )
    return block


def measure_usage(topology: Topology) -> RankUsage:
    """Return the worst of all ranks since the last call; collective, the same on every rank."""
    host = psutil.virtual_memory()
    # The maximum of the negated available memory is the minimum over ranks.
    values = [psutil.Process().memory_info().rss, -host.available, host.total]
    gpu_name = None
    if topology.device.type == "cuda":
        gpu_name = torch.cuda.get_device_name(topology.device)
        values += [
            torch.cuda.max_memory_allocated(topology.device),
            torch.cuda.max_memory_reserved(topology.device),
            torch.cuda.mem_get_info(topology.device)[1],
        ]
        torch.cuda.reset_peak_memory_stats(topology.device)
    worst = torch.tensor(values, dtype=torch.int64, device=topology.device)
    dist.all_reduce(worst, dist.ReduceOp.MAX)
    resident, negated_available, total, *of_gpu = worst.tolist()
    allocated, reserved, gpu_total = of_gpu or (None, None, None)
    return RankUsage(
        resident_bytes=resident,
        host_available_bytes=-negated_available,
        host_total_bytes=total,
        gpu_allocated_bytes=allocated,
        gpu_reserved_bytes=reserved,
        gpu_total_bytes=gpu_total,
        gpu_name=gpu_name,
    )
