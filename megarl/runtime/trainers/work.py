"""The floating-point operations of one step's updates, and what the actor's GPUs could do at most."""

from __future__ import annotations

import numpy as np

from megarl.config.model import ModelShape
from megarl.planner.hardware import GPUS
from megarl.planner.timing import forward_flops
from megarl.results import RankUsage, TrainingWork
from megarl.types import TrainBatch

_PASSES = 3
"""In units of the forward pass: the backward pass multiplies with weights and with activations."""


def training_work(
    batch: TrainBatch, usage: RankUsage, *, shape: ModelShape, epochs: int, num_ranks: int
) -> TrainingWork:
    """Return the work of all sequences of a step; padding is not counted."""
    lengths = [
        np.diff(micro_batch.sequence_starts)[micro_batch.sample_ids >= 0]
        for mini_batch in batch.mini_batches
        for share in mini_batch.shares
        for micro_batch in share
    ]
    tokens = np.concatenate(lengths).astype(np.float64)
    forward = forward_flops(shape, num_tokens=float(tokens.sum()), num_squared_tokens=float(np.square(tokens).sum()))
    peak = None if usage.gpu_name is None else peak_flops(usage.gpu_name)
    return TrainingWork(
        flops=_PASSES * epochs * forward, peak_flops_per_second=None if peak is None else num_ranks * peak
    )


def peak_flops(gpu_name: str) -> float | None:
    """Return the dense bfloat16 rate of the GPU with this driver name; None for one that is not in the table."""
    return next((gpu.flops for name, gpu in GPUS.items() if name in gpu_name.lower()), None)
