"""States of Megatron's distributed Adam on one rank: a flat range of each parameter, its master weights and moments.

The only file that knows how Megatron and the Adam inside it store them; checkpoints and offloading read and write them.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Literal, TypeAlias, get_args

import torch
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
from torch import Tensor

from megarl.weights.layouts.pieces import FlatRange

Moment: TypeAlias = Literal["exp_avg", "exp_avg_sq"]
MOMENTS: tuple[Moment, ...] = get_args(Moment)


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
    for group_index, group in enumerate(optimizer.optimizer.param_groups):
        # Megatron puts the parameters of float32 first, whatever their place in the model; its own index of groups
        # (`model_param_group_index_map`) has them in the order of the model.
        parameters = (*optimizer.model_fp32_groups[group_index], *optimizer.model_float16_groups[group_index])
        for parameter, master in zip(parameters, group["params"], strict=True):
            buffer_index, dtype, bucket_index = optimizer.model_param_gbuf_map[parameter]
            bucket = optimizer.gbuf_ranges[buffer_index][dtype][bucket_index]
            held = bucket["param_map"][parameter]["param"]
            assert master.numel() == held.end - held.start, f"{master.numel()} elements of {held}"
            shard = Shard(
                range=(held.start, held.end),
                master=master,
                optimizer=optimizer.optimizer,
                key=master,
                group_index=group_index,
            )
            yield parameter, shard
