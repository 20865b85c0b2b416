"""Jobs of the rank processes in the tests of the optimizer."""

from __future__ import annotations

from dataclasses import dataclass

from megarl.types import FloatArray, TrainBatch
from tests.train.jobs import Setup, build


@dataclass(frozen=True, slots=True, kw_only=True)
class Updated:
    """One rank after one update."""

    num_buckets: int
    adam: str
    """Name of the class that Megatron chose."""
    tensors: dict[str, FloatArray]


def update(rank: int, world: int, port: int, setup: Setup, batch: TrainBatch) -> Updated:
    trainer = build(rank, world, port, setup)
    trainer.update(batch)
    optimizer = trainer._optimizer
    (chained,) = optimizer._optimizer.chained_optimizers
    result = Updated(
        num_buckets=sum(len(buffer.buckets) for chunk in optimizer.chunks for buffer in chunk.buffers),
        adam=type(chained.optimizer).__name__,
        tensors={name: tensor.numpy().copy() for name, tensor in trainer.tensors().items()},
    )
    trainer.close()
    return result
