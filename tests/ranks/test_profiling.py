"""A profile is of the chosen steps and ranks alone, and has what a rank computes."""

from __future__ import annotations

import asyncio
import gzip
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch

from megarl.config.recipe import ProfileConfig
from megarl.config.roles import ModelParallelConfig
from megarl.ranks.profiling import Profiling
from megarl.ranks.ranks import RankGroup
from megarl.train.profiling import RankProfile


def test_a_trace_has_the_operations_of_the_rank(tmp_path: Path) -> None:
    recording = RankProfile()
    torch.ones(8, 8) @ torch.ones(8, 8)
    (trace, *_) = recording.write(tmp_path / "profiles" / "step_3" / "rank_0")
    assert trace.name == "rank_0.trace.json.gz"
    events = json.loads(gzip.decompress(trace.read_bytes()))["traceEvents"]
    assert any(event.get("name") == "aten::mm" for event in events)


class Remote:
    """A method of an actor that notes its calls."""

    def __init__(self, name: str, rank: int, calls: list[tuple[object, ...]]) -> None:
        self._name, self._rank, self._calls = name, rank, calls

    async def remote(self, *arguments: object) -> None:
        self._calls.append((self._name, self._rank, *(arguments or (None,))))


async def test_only_the_chosen_ranks_record_the_chosen_step(tmp_path: Path) -> None:
    calls: list[Any] = []
    workers: list[Any] = [
        SimpleNamespace(**{name: Remote(name, rank, calls) for name in ("begin_profile", "end_profile")})
        for rank in range(4)
    ]
    group: RankGroup[Any] = RankGroup(
        "actor", workers, split=ModelParallelConfig(), timeout_s=60, run_folder=tmp_path, device_lock=asyncio.Lock()
    )
    # Rank 9 is none of a smaller run's.
    profiling = Profiling(config=ProfileConfig(steps=(2,), ranks=(0, 3, 9)), actor=group, folder=tmp_path)
    for step in (1, 2, 3):
        await profiling.begin(step)
        await profiling.end()
    folder = tmp_path / "step_2"
    assert sorted(calls, key=lambda call: call[:2]) == [
        ("begin_profile", 0, None),
        ("begin_profile", 3, None),
        ("end_profile", 0, folder / "rank_0"),
        ("end_profile", 3, folder / "rank_3"),
    ]
