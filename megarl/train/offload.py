"""The optimizer of a role with `offload`: states, and with "everything" the weights, that leave the device.

Optimizer states stay in pinned host memory and come to the device piece by piece. Storages of weights are emptied and
refilled in place, so that every view of them stays valid: parameters, Megatron's buckets, the optimizer's shards.
"""

from __future__ import annotations

import mmap
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from itertools import accumulate

import psutil
import torch
from megatron.core.distributed import DistributedDataParallel
from megatron.core.distributed.param_and_grad_buffer import _ParamAndGradBuffer
from megatron.core.optimizer.clip_grads import clip_grad_by_total_norm_fp32
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
from torch import Tensor

from megarl.config.roles import NUM_PIECES, PIECE_ELEMENTS, OptimizerConfig, TrainedModelConfig
from megarl.errors import MachineError
from megarl.train.model import Model
from megarl.train.optimizer import ModelOptimizer
from megarl.train.optimizer_states import MOMENTS, Shard, shards_of
from megarl.train.topology import free_cache, synchronize


def build_optimizer(chunks: Sequence[Model], config: OptimizerConfig, split: TrainedModelConfig) -> ModelOptimizer:
    """Return the optimizer of the model chunks, as `offload` of the role says."""
    return (ModelOptimizer if split.offload == "nothing" else OffloadedOptimizer)(chunks, config, split)


class OffloadedOptimizer(ModelOptimizer):
    """Keeps its states in host memory; gradients take device memory from `zero_grad` until `trim`."""

    def __init__(self, chunks: Sequence[Model], config: OptimizerConfig, split: TrainedModelConfig) -> None:
        super().__init__(chunks, config, split)
        self._has_offloaded_weights = split.offload == "everything"
        self._offload = Offload(self._device)
        self._states = [HostStates(optimizer, self._device) for optimizer in self._optimizer.chained_optimizers]
        free_cache(self._device)

    def _shards(self) -> Iterator[tuple[torch.nn.Parameter, Shard]]:
        for states in self._states:
            yield from states.shards.items()

    def trim(self) -> None:
        """Free what only passes need, and the gradients, which the next `zero_grad` allocates again."""
        for gradient in self._gradients():
            gradient.untyped_storage().resize_(0)
        super().trim()

    def release(self) -> None:
        """Free device memory for engines: as `trim` does, and the weights if they are offloaded."""
        if self._has_offloaded_weights:
            self._offload.release(self._weights())
        self.trim()
        self.is_released = True
        self.has_weights = not self._has_offloaded_weights

    def reload(self) -> None:
        self._offload.reload()
        self.is_released = False
        self.has_weights = True

    def at_hand(self, tensor: Tensor) -> Tensor:
        return self._offload.at_hand(tensor)

    def adopt_weights(self) -> None:
        for states in self._states:
            states.adopt_weights()

    def zero_grad(self) -> None:
        for gradient in self._gradients():
            if not gradient.untyped_storage().nbytes():
                gradient.untyped_storage().resize_(gradient.nbytes)
        super().zero_grad()

    def _update(self) -> None:
        """Do the same as Megatron's own step, with states that are in host memory."""
        grad_norm, clip = self.grad_norm(), self._config.clip_grad_norm
        for optimizer in self._optimizer.chained_optimizers:
            if clip > 0 and optimizer.get_parameters():
                clip_grad_by_total_norm_fp32(optimizer.get_parameters(), max_norm=clip, total_norm=grad_norm)
        for states in self._states:
            states.step()
        if not self.chunks[0].ddp_config.overlap_param_gather:
            for chunk in self.chunks:
                chunk.start_param_sync()

    def _weights(self) -> list[Tensor]:
        frozen = [each.data for chunk in self.chunks for each in chunk.module.parameters() if not each.requires_grad]
        return [*(buffer.param_data for chunk in self.chunks for buffer in _buffers(chunk)), *frozen]

    def _gradients(self) -> list[Tensor]:
        return [buffer.grad_data for chunk in self.chunks for buffer in _buffers(chunk)]


def _buffers(chunk: DistributedDataParallel) -> list[_ParamAndGradBuffer]:
    return [*chunk.buffers, *chunk.expert_parallel_buffers]


_MASTER = "master"


@dataclass(frozen=True, slots=True, kw_only=True)
class _Segment:
    """The part of a shard that lies in one piece."""

    shard: Shard
    inner: slice
    """Its elements of the shard."""
    weight: Tensor
    """The same elements of the model's parameter."""
    place: slice
    """Its elements of the piece."""


class HostStates:
    """Keeps the states of one distributed Adam in host memory; an update has `NUM_PIECES` of them on the device."""

    def __init__(self, optimizer: DistributedOptimizer, device: torch.device) -> None:
        """Free the master weights on the device, unless they are the model's own weights."""
        self._adam = optimizer.optimizer
        self._device = device
        self._streams = [torch.cuda.Stream(device) if device.type == "cuda" else None for _ in range(NUM_PIECES)]  # type: ignore[no-untyped-call]
        on_device = dict(shards_of(optimizer))
        num_elements = sum(shard.master.numel() for shard in on_device.values())
        self._piece_elements = min(PIECE_ELEMENTS, num_elements)
        self._host = {kind: host_zeros(num_elements, torch.float32, device) for kind in (_MASTER, *MOMENTS)}
        self.shards: dict[torch.nn.Parameter, Shard] = {}
        start = 0
        for parameter, shard in on_device.items():
            place = slice(start, start + shard.master.numel())
            start = place.stop
            if shard.key.untyped_storage()._cdata != parameter.untyped_storage()._cdata:
                shard.key.untyped_storage().resize_(0)
            self._adam.state[shard.key] = {kind: self._host[kind][place] for kind in MOMENTS}
            self.shards[parameter] = replace(shard, master=self._host[_MASTER][place])
        self._pieces = self._cut()
        self.adopt_weights()

    @torch.no_grad()
    def adopt_weights(self) -> None:
        """Copy the model's weights to the master weights."""
        for segment in (segment for piece in self._pieces for segment in piece):
            segment.shard.master[segment.inner].copy_(segment.weight.float(), non_blocking=True)
        synchronize(self._device)

    @torch.no_grad()
    def step(self) -> None:
        """Update master weights and moments with the gradients that are ready, and the model's weights from them."""
        own_parameters = [group["params"] for group in self._adam.param_groups]
        num_updates = max((shard.num_updates for shard in self.shards.values()), default=0)
        lanes = [
            {kind: torch.empty(self._piece_elements, device=self._device) for kind in self._host} for _ in self._streams
        ]
        for stream in self._streams:
            if stream is not None:
                stream.wait_stream(torch.cuda.current_stream(self._device))
        start = 0
        for number, piece in enumerate(self._pieces):
            lane, end = lanes[number % NUM_PIECES], start + piece[-1].place.stop
            # Copies and arithmetic of a lane follow each other in its stream; the other lane's run beside them.
            with torch.cuda.stream(self._streams[number % NUM_PIECES]):
                for kind, block in self._host.items():
                    lane[kind][: end - start].copy_(block[start:end], non_blocking=True)
                self._update(piece, lane, num_updates=num_updates)
                for kind, block in self._host.items():
                    block[start:end].copy_(lane[kind][: end - start], non_blocking=True)
            start = end
        synchronize(self._device)
        for group, parameters in zip(self._adam.param_groups, own_parameters, strict=True):
            group["params"] = parameters
        for shard in self.shards.values():
            shard.restore({}, num_updates=num_updates + 1)

    def _update(self, piece: Sequence[_Segment], lane: Mapping[str, Tensor], *, num_updates: int) -> None:
        """Let Adam update the states of a piece, which are in `lane`, as if they were whole parameters."""
        parts = [replace(segment.shard, key=lane[_MASTER][segment.place]) for segment in piece]
        for group in self._adam.param_groups:
            group["params"] = []
        for segment, part in zip(piece, parts, strict=True):
            gradient = segment.shard.key.grad
            assert gradient is not None, "a step without gradients"
            part.key.grad = gradient[segment.inner]
            self._adam.state[part.key] = {kind: lane[kind][segment.place] for kind in MOMENTS}
            part.restore({}, num_updates=num_updates)
            self._adam.param_groups[part.group_index]["params"].append(part.key)
        self._adam.step()
        for segment, part in zip(piece, parts, strict=True):
            segment.weight.copy_(part.key)
            del self._adam.state[part.key]

    def _cut(self) -> list[list[_Segment]]:
        """Return consecutive pieces of the host memory, all but the last of the same size."""
        pieces: list[list[_Segment]] = []
        filled = self._piece_elements
        for parameter, shard in self.shards.items():
            flat, first = parameter.detach().view(-1)[slice(*shard.range)], 0
            while first < flat.numel():
                if filled == self._piece_elements:
                    pieces.append([])
                    filled = 0
                inner = slice(first, min(flat.numel(), first + self._piece_elements - filled))
                place = slice(filled, filled + inner.stop - first)
                pieces[-1].append(_Segment(shard=shard, inner=inner, weight=flat[inner], place=place))
                filled, first = place.stop, inner.stop
        return pieces


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
