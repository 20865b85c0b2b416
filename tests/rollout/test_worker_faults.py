"""Accidents of rollout workers, with one, two and four of them: no prompt is lost, and no token is another one."""

from __future__ import annotations

import asyncio
import os
import signal
from pathlib import Path

import pytest

from megarl.cluster.local_ray import private_ray
from megarl.types import ScoredGroup
from tests.rollout.planes import (
    NUM_ENGINES,
    Plane,
    answer,
    answer_here,
    assert_same,
    lose_node,
    node_ids,
    plane,
    when_busy,
    when_lost,
    when_whole,
)
from tests.run.seeded_engine import SeededEngines

with private_ray():
    # Ray reads its environment when it is imported, here as in a run.

    from megarl.cluster.local_ray import LocalRay

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def expected(engines: SeededEngines, model: Path) -> list[ScoredGroup]:
    return answer_here(engines, model)


async def _accident(
    each: Plane, engines: SeededEngines, kind: signal.Signals
) -> tuple[list[ScoredGroup], list[ScoredGroup]]:
    """Signal a worker while it works; return the groups that were under way and those of all workers after it."""
    engines.is_held = True
    asked = asyncio.ensure_future(answer(each.workers))
    await when_busy(engines)
    process = next(worker.process for worker in each.workers._workers if worker.num_outstanding and worker.process)
    os.kill(process.pid, kind)
    await when_lost(each.counts)
    engines.is_held = False
    groups = await asked
    await when_whole(each.workers)
    assert process not in [worker.process for worker in each.workers._workers]
    return groups, await answer(each.workers)


KILLED = pytest.mark.fault("kill -9 of a rollout worker", "its prompts are asked again by another; it is replaced")
FROZEN = pytest.mark.fault(
    "SIGSTOP of a rollout worker", "replaced when it is silent; its prompts are asked again by another"
)


@pytest.mark.parametrize("num_workers", [1, 2, 4])
@pytest.mark.parametrize(
    "kind", [pytest.param(signal.SIGKILL, marks=KILLED), pytest.param(signal.SIGSTOP, marks=FROZEN)]
)
def test_a_killed_or_frozen_worker_loses_no_prompt(
    nodes: LocalRay,
    engines: SeededEngines,
    model: Path,
    expected: list[ScoredGroup],
    kind: signal.Signals,
    num_workers: int,
) -> None:
    first = node_ids()[0]
    with plane(engines, model, [first] * NUM_ENGINES, per_node=num_workers, silence_timeout_s=5) as each:
        assert len(each.workers._workers) == num_workers
        assert_same(each.run(answer(each.workers)), expected)
        for groups in each.run(_accident(each, engines, kind)):
            assert_same(groups, expected)


@pytest.mark.fault(
    "loss of a node with rollout workers",
    "their prompts, and those of finished groups that were stored there, are asked again on other nodes",
)
@pytest.mark.parametrize("num_workers", [1, 2, 4])
def test_workers_of_a_lost_node_lose_no_prompt(
    nodes: LocalRay, engines: SeededEngines, model: Path, expected: list[ScoredGroup], num_workers: int
) -> None:
    if len(node_ids()) == 1:
        nodes.start_node(num_slots=1)
        nodes.wait_started()
    first, second = node_ids()
    of_engines = [second] * NUM_ENGINES if num_workers == 1 else [first, first, second, second]

    async def lose(each: Plane) -> None:
        await when_whole(each.workers)
        await lose_node(each, nodes, second, engines, await answer(each.workers), expected)

    with plane(engines, model, of_engines, per_node=max(1, num_workers // 2)) as each:
        assert len(each.workers._workers) == num_workers
        each.run(lose(each))
