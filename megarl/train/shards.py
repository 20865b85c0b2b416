"""The states of the distributed Adam on this rank: a flat range of each parameter, with master weights and moments.

The only file that knows how Megatron and the Adam inside it store them. They are on the device, or in host memory, from
where `HostStates` brings them to the device piece by piece.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from math import prod
from typing import Literal, TypeAlias, get_args

import torch
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
from torch import Tensor

from megarl.config.roles import NUM_PIECES, PIECE_ELEMENTS
from megarl.train.host_memory import host_zeros
from megarl.train.memory import synchronize
from megarl.weights.algebra.slices import Index
from megarl.weights.layouts.pieces import FlatRange

Moment: TypeAlias = Literal["exp_avg", "exp_avg_sq"]
MOMENTS: tuple[Moment, ...] = get_args(Moment)


_MASTER = "master"


@dataclass(frozen=True, slots=True, kw_only=True)
class Shard:
    """One parameter's range on this rank."""

    range: FlatRange
    master: Tensor  # [range], float32
    optimizer: torch.optim.Optimizer
    key: Tensor
    """The tensor that the optimizer knows: `master`, or one without memory where `master` is in host memory."""
    group_index: int

    def moment(self, kind: Moment) -> Tensor:
        """Return a moment; zeros before the first update, as Adam starts from."""
        values: Tensor | None = self.optimizer.state.get(self.key, {}).get(kind)
        return torch.zeros_like(self.master) if values is None else values

    def restore(self, moments: Mapping[Moment, Tensor], *, num_updates: int) -> None:
        """Set the given moments, and the count of updates."""
        state = self.optimizer.state[self.key]
        for kind, values in moments.items():
            state[kind] = self.moment(kind).copy_(values)
        if isinstance(self.optimizer, torch.optim.Adam):
            # torch counts per parameter, in a float on the host.
            state["step"] = torch.tensor(float(num_updates))
        else:
            # The fused Adam of Transformer Engine counts per group.
            self.optimizer.param_groups[self.group_index]["step"] = num_updates

    @property
    def num_updates(self) -> int:
        """The updates that the moments have seen."""
        is_torch = isinstance(self.optimizer, torch.optim.Adam)
        counter = self.optimizer.state[self.key] if is_torch else self.optimizer.param_groups[self.group_index]
        return int(counter.get("step", 0))


def shards_of(optimizer: DistributedOptimizer) -> Iterator[tuple[torch.nn.Parameter, Shard]]:
    """Yield every parameter of which this rank has a range."""
    for parameter, (group_index, place) in optimizer.model_param_group_index_map.items():
        buffer_index, dtype, bucket_index = optimizer.model_param_gbuf_map[parameter]
        bucket = optimizer.gbuf_ranges[buffer_index][dtype][bucket_index]
        held = bucket["param_map"][parameter]["param"]
        master = optimizer.optimizer.param_groups[group_index]["params"][place]
        assert master.numel() == held.end - held.start, f"{master.numel()} elements of {held}"
        shard = Shard(
            range=(held.start, held.end),
            master=master,
            optimizer=optimizer.optimizer,
            key=master,
            group_index=group_index,
        )
        yield parameter, shard


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


def box_of_range(flat: Tensor, held: FlatRange, tensor_shape: Index, offsets: Index, shape: Index) -> Tensor:
    """Return a view of a box of a tensor of which `flat` has the elements in `held`; the box lies within them."""
    strides = [prod(tensor_shape[axis + 1 :]) for axis in range(len(tensor_shape))]
    first = sum(offset * stride for offset, stride in zip(offsets, strides, strict=True)) - held[0]
    last = first + sum((size - 1) * stride for size, stride in zip(shape, strides, strict=True))
    assert 0 <= first <= last < flat.numel(), f"elements {first}..{last} of {flat.numel()}"
    flat = flat.detach()
    return flat.as_strided(shape, strides, flat.storage_offset() + first)


def cut(tensors: Mapping[str, Tensor], shards: Mapping[str, Shard]) -> dict[str, Tensor]:
    """Copy the ranges out of host tensors that have the shapes of their parameters."""
    return {name: tensor.view(-1)[slice(*shards[name].range)].clone() for name, tensor in tensors.items()}
