"""The memory of a rank's device: what is in use, and what torch keeps for later."""

from __future__ import annotations

import psutil
import torch
import torch.distributed as dist

from megarl.results import RankUsage
from megarl.train.topology import Topology


def synchronize(device: torch.device) -> None:
    """Wait until the device has done everything that was submitted."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def free_cache(device: torch.device) -> None:
    """Give back the memory that torch keeps for later: other processes of the device need it now."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
        torch.cuda.ipc_collect()  # type: ignore[no-untyped-call]
        torch.cuda.empty_cache()


def measure_usage(topology: Topology) -> RankUsage:
    """Return the worst of all ranks since the last call; collective, the same on every rank."""
    host = psutil.virtual_memory()
    # The maximum of the negated available memory is the minimum over ranks.
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
