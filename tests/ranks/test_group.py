from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
import ray

from megarl.cluster.worker_group import WorkerDiedError
from megarl.config.roles import ModelParallelConfig
from megarl.ranks.calls import ModelCalls
from megarl.ranks.ranks import RankGroup


async def _end() -> int:
    return 1


async def _die() -> int:
    raise ray.exceptions.RayActorError


def test_a_call_to_some_ranks_names_the_one_that_died() -> None:
    async def call() -> None:
        group: RankGroup[ModelCalls] = RankGroup(
            "critic",
            [],
            split=ModelParallelConfig(),
            timeout_s=60,
            report_folder=Path(),
            device_lock=asyncio.Lock(),
        )
        await group.gather("compute_credit", [_end(), _die()], ranks=[0, 2])

    with pytest.raises(WorkerDiedError, match="critic rank 2: died during compute_credit") as raised:
        asyncio.run(call())
    assert raised.value.ranks == (2,)
