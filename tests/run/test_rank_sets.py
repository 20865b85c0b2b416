"""The loops of several policies on one set of ranks: how one ends the others, and when all leave."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any, cast

import pytest

from megarl.errors import DamagedError, MegarlError, PreemptedError, RewardError, WorkerError
from megarl.run.rank_sets import RankSets
from megarl.serving.serving import NoServing


@contextmanager
def used() -> Iterator[None]:
    yield


def policy(name: str) -> Any:
    return SimpleNamespace(name=name, journal=SimpleNamespace(retained=SimpleNamespace(used=used)))


class FakeLoop:
    """Ends after some turns, with an error if there is one."""

    def __init__(self, turns: int, error: MegarlError | None = None) -> None:
        self.turns = turns
        self.error = error
        self.has_ended = False

    async def run(self) -> None:
        for _ in range(self.turns):
            await asyncio.sleep(0)
        self.has_ended = True
        if self.error is not None:
            raise self.error


async def run(loops: list[FakeLoop]) -> None:
    policies = [policy(name) for name in ("maths", "code")]
    sets = RankSets(recipe=cast("Any", None), policies=policies, observer=cast("Any", None))
    await sets._run(cast("Any", loops), NoServing())


async def test_a_policy_that_fails_ends_the_others_and_is_named() -> None:
    loops = [FakeLoop(1000), FakeLoop(1, RewardError("reward.py:12 failed"))]
    with pytest.raises(RewardError, match=r"^policy code: reward\.py:12 failed$"):
        await run(loops)
    assert not loops[0].has_ended


async def test_lost_ranks_are_those_of_all_policies() -> None:
    with pytest.raises(WorkerError, match=r"^actor rank 0: died$"):
        await run([FakeLoop(1, WorkerError("actor rank 0: died")), FakeLoop(1000)])


async def test_at_a_preemption_each_policy_leaves_when_it_can() -> None:
    loops = [FakeLoop(1, PreemptedError("stopped by SIGTERM after step 3: saved")), FakeLoop(1000)]
    with pytest.raises(PreemptedError, match="after step 3"):
        await run(loops)
    assert loops[1].has_ended


def test_the_damaged_checkpoint_of_one_policy_needs_no_name_and_of_several_has_one() -> None:
    def sets_of(*folders: str | None) -> RankSets:
        points = [None if folder is None else SimpleNamespace(folder=folder) for folder in folders]
        policies = [cast("Any", SimpleNamespace(point=point)) for point in points]
        return RankSets(recipe=cast("Any", None), policies=policies, observer=cast("Any", None))

    unnamed, named = DamagedError("rank 1: a tensor is damaged"), DamagedError("runs/code/step_2/model: damaged")
    one, two = sets_of("runs/maths/step_2"), sets_of("runs/maths/step_2", "runs/code/step_2")
    assert one._damaged(unnamed) is one.policies[0]
    assert two._damaged(named) is two.policies[1]
    for sets in (two, sets_of(None)):
        with pytest.raises(DamagedError, match="a tensor is damaged"):
            sets._damaged(unnamed)
