"""The profile of one rank: torch's trace of what it computes, and on a GPU a snapshot of its memory.

`nsys profile --capture-range=cudaProfilerApi` records the same time.
"""

from __future__ import annotations

from pathlib import Path

import torch
from torch.profiler import ProfilerActivity, profile

_MAX_ALLOCATIONS = 200_000
"""Allocations and frees that a snapshot of memory has: the last of a step."""


class RankProfile:
    """Records from its construction to `write`, both in the thread that computes."""

    def __init__(self) -> None:
        self._has_gpu = torch.cuda.is_available()
        activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if self._has_gpu else [])]
        if self._has_gpu:
            torch.cuda.memory._record_memory_history(max_entries=_MAX_ALLOCATIONS)  # its only name
            torch.cuda.profiler.start()  # type: ignore[no-untyped-call]
        self._trace = profile(activities=activities, record_shapes=True, profile_memory=True)
        self._trace.start()

    def write(self, path: Path) -> list[Path]:
        """Write `<path>.trace.json.gz` and, on a GPU, `<path>.memory.pickle`; return what was written."""
        if self._has_gpu:
            torch.cuda.synchronize()
        self._trace.stop()
        path.parent.mkdir(parents=True, exist_ok=True)
        written = [path.with_name(f"{path.name}.trace.json.gz")]
        self._trace.export_chrome_trace(str(written[0]))
        if self._has_gpu:
            torch.cuda.profiler.stop()  # type: ignore[no-untyped-call]
            written.append(path.with_name(f"{path.name}.memory.pickle"))
            torch.cuda.memory._dump_snapshot(str(written[1]))  # type: ignore[no-untyped-call]
            torch.cuda.memory._record_memory_history(enabled=None)
        return written
