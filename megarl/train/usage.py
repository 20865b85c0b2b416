"""What an update needed: memory of the ranks' machines, and how much there was to compute. All ranks ask together."""

from __future__ import annotations

import numpy as np
import psutil
import torch
import torch.distributed as dist

from megarl.config.model import ModelShape
from megarl.planner.hardware import GPUS
from megarl.planner.timing import forward_flops
from megarl.train.topology import Topology
from megarl.types import RankUsage, TrainBatch, TrainingWork

_PASSES = 3
"""In units of the forward one: the backward pass multiplies with weights and with activations."""


def measure_usage(topology: Topology) -> RankUsage:
    """The worst of all ranks since this was last asked; the same answer on every rank."""
    host = psutil.virtual_memory()
    # What is scarce when it is small is reduced by its opposite.
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


def training_work(
    shape: ModelShape, batch: TrainBatch, *, epochs: int, num_ranks: int, gpu: str | None
) -> TrainingWork:
    """Of all sequences of a step, whoever computes them; padding is nobody's work."""
    lengths = [
        np.diff(micro_batch.sequence_starts)[micro_batch.sample_ids >= 0]
        for mini_batch in batch.mini_batches
        for share in mini_batch.shares
        for micro_batch in share
    ]
    tokens = np.concatenate(lengths).astype(np.float64)
    forward = forward_flops(shape, num_tokens=float(tokens.sum()), num_squared_tokens=float(np.square(tokens).sum()))
    peak = None if gpu is None else peak_flops(gpu)
    return TrainingWork(
        flops=_PASSES * epochs * forward, peak_flops_per_second=None if peak is None else num_ranks * peak
    )


def peak_flops(gpu_name: str) -> float | None:
    """Dense bfloat16, as stated for the GPU that the driver calls so; None for one that is not in the table."""
    return next((gpu.flops for name, gpu in GPUS.items() if name in gpu_name.lower()), None)
