from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import cast

import pytest
from ray.actor import ActorHandle

from megarl.cluster.remote_process import RemoteProcess
from megarl.config.roles import ModelParallelConfig
from megarl.errors import WorkerError
from megarl.ranks.calls import ModelCalls
from megarl.ranks.ranks import RankGroup
from megarl.ranks.start import adopt_ranks


class FakeMethod:
    """A method of a Ray actor that runs in this process."""

    def __init__(self, function: Callable[..., object]) -> None:
        self._function = function

    def options(self, **_: object) -> FakeMethod:
        return self

    def remote(self, *arguments: object) -> Coroutine[None, None, object]:
        async def run() -> object:
            return self._function(*arguments)

        return run()


class FakeWorker:
    def __init__(self, outcome: bool | WorkerError) -> None:
        self.num_adopted = 0
        self._outcome = outcome
        self.follow = FakeMethod(lambda token: RemoteProcess(node="here", pid=1, started=token + 1))
        self.adopt = FakeMethod(self._adopt)

    def _adopt(self, token: int, fill: object) -> bool:
        self.num_adopted += 1
        if isinstance(self._outcome, WorkerError):
            raise self._outcome
        return self._outcome


@pytest.mark.parametrize(
    ("outcome", "is_shared", "expected"),
    [(True, False, True), (False, False, True), (True, True, False), (WorkerError("rank 1 failed"), False, False)],
)
async def test_ranks_are_adopted_unless_they_failed_or_share_their_devices(
    outcome: bool | WorkerError, is_shared: bool, expected: bool
) -> None:
    worker = FakeWorker(outcome)

    ranks: RankGroup[ModelCalls] = RankGroup(
        "actor",
        [cast("ActorHandle", worker)],
        split=ModelParallelConfig(),
        timeout_s=60,
        run_folder=Path(),
        device_lock=asyncio.Lock(),
    )
    is_adopted = await adopt_ranks(ranks, lambda _: True, is_shared=is_shared)
    assert [process.pid for process in ranks.processes] == ([] if is_shared else [1])
    assert is_adopted is expected
    assert worker.num_adopted == (not is_shared)
