"""The states of the distributed Adam on this rank: a flat range of each parameter, with master weights and moments.

The only file that knows how Megatron and the Adam inside it store them.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from math import prod
from typing import Literal, TypeAlias, get_args

import torch
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
from torch import Tensor

from megarl.weights.algebra.slices import Index
from megarl.weights.layouts.pieces import FlatRange

Moment: TypeAlias = Literal["exp_avg", "exp_avg_sq"]
MOMENTS: tuple[Moment, ...] = get_args(Moment)


@dataclass(frozen=True, slots=True, kw_only=True)
class Shard:
    """One parameter's range on this rank."""

    range: FlatRange
    master: Tensor  # [range], float32
    optimizer: torch.optim.Optimizer
    group_index: int

    def moment(self, kind: Moment) -> Tensor:
        """Return a moment; zeros before the first update, as Adam starts from."""
        values: Tensor | None = self.optimizer.state.get(self.master, {}).get(kind)
        return torch.zeros_like(self.master) if values is None else values

    def restore(self, moments: Mapping[Moment, Tensor], *, num_updates: int) -> None:
        """Set the moments and the count of updates."""
        state: dict[str, Tensor] = {kind: values.to(self.master.device) for kind, values in moments.items()}
        if isinstance(self.optimizer, torch.optim.Adam):
            # torch counts per parameter, in a float on the host.
            state["step"] = torch.tensor(float(num_updates))
        else:
            # Fused Adams of Transformer Engine and Apex count per group.
            self.optimizer.param_groups[self.group_index]["step"] = num_updates
        self.optimizer.state[self.master] = state


def shards_of(optimizer: DistributedOptimizer) -> Iterator[tuple[torch.nn.Parameter, Shard]]:
    """Yield every parameter of which this rank has a range."""
    for parameter, (group_index, place) in optimizer.model_param_group_index_map.items():
        buffer_index, dtype, bucket_index = optimizer.model_param_gbuf_map[parameter]
        bucket = optimizer.gbuf_ranges[buffer_index][dtype][bucket_index]
        held = bucket["param_map"][parameter]["param"]
        master = optimizer.optimizer.param_groups[group_index]["params"][place]
        assert master.numel() == held.end - held.start, f"{master.numel()} elements of {held}"
        shard = Shard(
            range=(held.start, held.end), master=master, optimizer=optimizer.optimizer, group_index=group_index
        )
        yield parameter, shard


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
