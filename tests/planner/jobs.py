"""What rank processes do in the tests of the ledger."""

from __future__ import annotations

from dataclasses import dataclass

from tests.train.jobs import Setup, build


@dataclass(frozen=True, slots=True, kw_only=True)
class Buffers:
    """Elements that Megatron allocated on one rank."""

    weights: int
    gradients: int
    master: int
    """Of the distributed optimizer's shard."""


def buffers(rank: int, world: int, port: int, setup: Setup) -> Buffers:
    trainer = build(rank, world, port, setup)
    optimizer = trainer._optimizer
    found = [buffer for chunk in optimizer.chunks for buffer in (*chunk.buffers, *chunk.expert_parallel_buffers)]
    result = Buffers(
        weights=sum(buffer.param_data.numel() for buffer in found),
        gradients=sum(buffer.grad_data.numel() for buffer in found),
        master=sum(parameter.numel() for group in optimizer._optimizer.param_groups for parameter in group["params"]),
    )
    trainer.close()
    return result
