"""Jobs of the rank processes in the tests of the ledger."""

from __future__ import annotations

from dataclasses import dataclass

from megarl.train.frozen import ReferenceRank
from megarl.train.trained import TrainedRank
from tests.train.jobs import Setup, build_critic, build_empty, spec_of


@dataclass(frozen=True, slots=True, kw_only=True)
class Buffers:
    """Elements that Megatron allocated on one rank."""

    weights: int
    gradients: int
    master: int
    """Elements of the distributed optimizer's shard."""
    frozen: int
    """Elements of parameters that are not trained."""


def buffers(rank: int, world: int, port: int, setup: Setup) -> Buffers:
    build = build_critic if setup.shape.has_value_head else build_empty
    return _buffers_of(build(rank, world, port, setup))


def reference_elements(rank: int, world: int, port: int, setup: Setup) -> int:
    reference = ReferenceRank(spec_of(rank, world, port, setup))
    num_elements = sum(tensor.numel() for tensor in reference.tensors().values())
    reference.close()
    return num_elements


def _buffers_of(trainer: TrainedRank) -> Buffers:
    optimizer = trainer._optimizer
    found = [buffer for chunk in optimizer.chunks for buffer in (*chunk.buffers, *chunk.expert_parallel_buffers)]
    result = Buffers(
        weights=sum(buffer.param_data.numel() for buffer in found),
        gradients=sum(buffer.grad_data.numel() for buffer in found),
        frozen=sum(
            parameter.numel()
            for chunk in optimizer.chunks
            for parameter in chunk.module.parameters()
            if not parameter.requires_grad
        ),
        master=sum(parameter.numel() for group in optimizer._optimizer.param_groups for parameter in group["params"]),
    )
    trainer.close()
    return result
