"""Histories of fixed seeds, those that once broke something, and proof that the world notices what they look for."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from unittest import mock

import pytest

from megarl.checkpoint import folder
from tests.simulation.fleets import run_scene
from tests.simulation.histories import Accident, Plan, run_plan, shrink, worlds
from tests.simulation.judges import run_judge
from tests.simulation.talks import TalkPlan, run_talk
from tests.simulation.tools import run_bench

_NUM_HISTORIES, _NUM_TALKS, _NUM_FLEETS, _NUM_TOOLS, _NUM_JUDGES, _NUM_PARTS = 120, 150, 50, 150, 50, 4
"""About a quarter of a minute of one core. `make simulate` takes other seeds for as long as it is told."""


@pytest.fixture(autouse=True)
def world() -> Iterator[None]:
    level = logging.root.manager.disable
    logging.disable(logging.CRITICAL)
    with worlds():
        yield
    logging.disable(level)


@pytest.mark.patient
@pytest.mark.parametrize("part", range(_NUM_PARTS))
@pytest.mark.fault("drivers, ranks, disks and stores by a seed", "no invariant of a run is broken, whatever happens")
def test_histories_keep_their_invariants(part: int) -> None:
    for seed in range(part, _NUM_HISTORIES, _NUM_PARTS):
        verdict = run_plan(Plan.of(seed))
        assert not verdict.broken, shrink(verdict)


@pytest.mark.patient
@pytest.mark.fault("models, tools and servers that say anything", "no text loses an episode, none ends the run")
def test_episodes_survive_what_is_said_to_them() -> None:
    for seed in range(_NUM_TALKS):
        talk = run_talk(TalkPlan.of(seed))
        assert not talk.broken, (talk.plan, talk.broken, talk.log)


@pytest.mark.patient
@pytest.mark.fault("engines that die, freeze and lie by a seed", "the same tokens, and all of them serve again")
def test_engines_give_the_same_tokens_whatever_happens_to_them() -> None:
    for seed in range(_NUM_FLEETS):
        scene = run_scene(seed)
        assert not scene.broken, (seed, scene.broken)


@pytest.mark.patient
@pytest.mark.fault("interpreters that are slow, die and write frames", "a result belongs to its call, or is lost")
def test_a_tool_gives_results_to_their_calls() -> None:
    for seed in range(_NUM_TOOLS):
        bench = run_bench(seed)
        assert not bench.broken, (seed, bench.broken)


@pytest.mark.fault("policies that address their judge, engines that lie to it", "the judge reads plain text")
def test_a_judge_reads_plain_text() -> None:
    for seed in range(_NUM_JUDGES):
        bench = run_judge(seed)
        assert not bench.broken, (seed, bench.broken)


KEPT = {
    "the names of a new run's folders are synced, so that no power failure takes its first checkpoints": Plan(
        seed=1, kind="shared", steps=5, save_every=1, flock="shared", accidents=(Accident(8.7, "power"),)
    ),
    "a record of the lease that cannot be removed ends neither the run's clean-up nor the run": Plan(
        seed=63, kind="shared", steps=5, save_every=2, flock="none", accidents=(Accident(9.88, "disk_fails", 34.0),)
    ),
    "a disk that fails while a run starts is a fault of the machine": Plan(
        seed=2101,
        kind="mirror",
        steps=2,
        save_every=2,
        flock="host",
        accidents=(Accident(0.52, "freeze_host", 10.0), Accident(9.65, "disk_fails", 38.0)),
    ),
    "a driver that wakes up in an upload removes nothing of its successor's mirror": Plan(
        seed=2197,
        kind="mirror",
        steps=3,
        save_every=1,
        flock="shared",
        accidents=(Accident(9.32, "freeze_host", 70.0),),
    ),
    "ranks that a driver was starting when it froze end when it wakes up behind its successor": Plan(
        seed=900005117,
        kind="pods",
        steps=2,
        save_every=1,
        flock="none",
        accidents=(Accident(3.62, "kill_rank", 34.0), Accident(3.75, "freeze_driver", 70.0)),
    ),
    "what a driver left that was killed behind its last step goes with the next one": Plan(
        seed=910006715,
        kind="shared",
        steps=3,
        save_every=1,
        flock="shared",
        accidents=(Accident(10.07, "sigterm"),),
        drops=True,
    ),
    "the lock of a driver that a hanging disk held goes with its process": Plan(
        seed=900000734,
        kind="shared",
        steps=3,
        save_every=2,
        flock="shared",
        accidents=(
            Accident(5.89, "disk_full", 34.0),
            Accident(10.69, "disk_hangs", 38.0),
            Accident(11.65, "disk_hangs", 10.0),
        ),
        keeps_torn=True,
    ),
}


@pytest.mark.parametrize("what", KEPT)
def test_a_history_that_once_failed(what: str) -> None:
    verdict = run_plan(KEPT[what])
    assert not verdict.broken, verdict


def test_a_seed_is_one_history() -> None:
    plan = next(plan for plan in map(Plan.of, range(100)) if len(plan.accidents) > 2)
    first, second = run_plan(plan), run_plan(plan)
    assert first.log == second.log
    assert first.num_events == second.num_events


@pytest.mark.patient
def test_a_seed_is_one_history_of_a_fleet() -> None:
    """Whatever was in memory before: requests of an engine that dies go elsewhere in the order of their beginning."""
    for seed in range(12):
        first, second = run_scene(seed), run_scene(seed)
        assert first.log, seed
        assert first.log == second.log, seed


def test_a_failing_plan_is_made_smaller() -> None:
    """The names of folders are not synced: the accident that shows it stays, the others go."""
    accidents = (Accident(4.0, "kill_rank"), Accident(8.0, "power"), Accident(12.0, "sigterm"))
    plans = (
        Plan(seed=seed, kind="shared", steps=4, save_every=1, flock="shared", accidents=accidents, drops=True)
        for seed in range(20)
    )
    with mock.patch.object(folder, "_sync_names_of"):
        verdict = next(verdict for verdict in map(run_plan, plans) if verdict.broken)
        smaller = shrink(verdict)
    assert [accident.what for accident in smaller.plan.accidents] == ["power"]
    assert not smaller.plan.drops
    assert "BROKEN: newest kept" in str(smaller)
