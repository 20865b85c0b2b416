"""What the distributed Adam keeps on this rank: a flat range of each parameter, with its master weights and moments.

The only file that knows how Megatron and the optimizer inside it store them.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Literal, TypeAlias, get_args

import torch
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
from torch import Tensor

from megarl.weights.flat import FlatRange
from megarl.weights.slices import Holding

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
        values: Tensor = self.optimizer.state[self.master][kind]
        return values

    def restore(self, moments: Mapping[Moment, Tensor], *, num_updates: int) -> None:
        """Go on as if this Adam had made `num_updates` updates."""
        state: dict[str, Tensor] = {kind: values.to(self.master.device) for kind, values in moments.items()}
        if isinstance(self.optimizer, torch.optim.Adam):
            # As torch keeps it: per parameter, a float on the host.
            state["step"] = torch.tensor(float(num_updates))
        else:
            # Fused Adams of Transformer Engine and Apex count per group.
            self.optimizer.param_groups[self.group_index]["step"] = num_updates
        self.optimizer.state[self.master] = state


def shards_of(optimizer: DistributedOptimizer) -> Iterator[tuple[torch.nn.Parameter, Shard]]:
    """Every parameter of which this rank has a range."""
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


def spread(values: Mapping[str, Tensor], shards: Mapping[str, Shard], holding: Holding) -> dict[str, Tensor]:
    """Flat ranges in host tensors that are shaped like their parameters; other elements are nobody's and zero."""
    spread_out = {}
    for name, flat in values.items():
        tensor = torch.zeros(holding.tensors[name].shape)
        start, end = shards[name].range
        tensor.view(-1)[start:end].copy_(flat.detach())
        spread_out[name] = tensor
    return spread_out


def cut(tensors: Mapping[str, Tensor], shards: Mapping[str, Shard]) -> dict[str, Tensor]:
    """The opposite of `spread`: the ranges, out of host tensors that are shaped like their parameters."""
    return {name: tensor.view(-1)[slice(*shards[name].range)].clone() for name, tensor in tensors.items()}
