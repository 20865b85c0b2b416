"""Times an engine rank that reads the memory of a trainer rank on its node, and digests it."""

from __future__ import annotations

import multiprocessing
import time
from collections.abc import Callable, Iterator
from multiprocessing.connection import Connection

import torch

from bench.figures import Figure
from megarl.weights.algebra.slices import Slice
from megarl.weights.executors.digest import DigestSums, Summand
from megarl.weights.executors.shared_memory import export_tensors, open_tensors

_NUM_MATRICES = 16
_SHAPE = (16384, 8192)
_NUM_REPEATS = 7


def measure_reads() -> Iterator[Figure]:
    """Copy 4.3 GB out of another process's memory, with and without digests, against a copy inside one process."""
    tensors = {f"w{index}": torch.randn(_SHAPE, device="cuda").bfloat16() for index in range(_NUM_MATRICES)}
    torch.cuda.synchronize()
    context = multiprocessing.get_context("spawn")
    here, there = context.Pipe()
    process = context.Process(target=_read, args=(export_tensors(tensors), there), daemon=True)
    process.start()
    try:
        assert here.poll(120), "the other process does not answer"
        seconds: dict[str, float] = here.recv()
    finally:
        process.kill()
        process.join()
    num_bytes = sum(tensor.nbytes for tensor in tensors.values())
    for key, name in (("read", "read"), ("digested", "read and digested in one pass")):
        yield Figure(
            key=f"reads, {key}",
            name=f"{num_bytes / 1e9:.1f} GB of another process on the GPU, {name}",
            value=1e3 * seconds[key],
            unit="ms",
            against=f"one copy inside the process, {1e3 * seconds['copy']:.2f} ms",
            ratio=seconds["copy"] / seconds[key],
        )


def _read(memory: bytes, pipe: Connection) -> None:
    tensors = open_tensors(memory)
    theirs = list(tensors.values())
    mine = [torch.empty_like(tensor) for tensor in theirs]
    source, target = (torch.empty(len(mine), *_SHAPE, dtype=torch.bfloat16, device="cuda") for _ in range(2))
    sums = DigestSums(
        [
            Summand(
                key=name,
                dtype=tensor.dtype,
                box=Slice(name=name, offsets=(0, 0), shape=_SHAPE),
                canonical_shape=_SHAPE,
            )
            for name, tensor in tensors.items()
        ]
    )
    pipe.send(
        {
            "copy": _seconds(lambda: target.copy_(source)),
            "read": _seconds(lambda: torch._foreach_copy_(mine, theirs)),
            "digested": _seconds(lambda: sums.compute(theirs, mine)),
        }
    )


def _seconds(call: Callable[[], object]) -> float:
    times = []
    for _ in range(_NUM_REPEATS):
        torch.cuda.synchronize()
        start = time.perf_counter()
        call()
        torch.cuda.synchronize()
        times.append(time.perf_counter() - start)
    return min(times)
