"""Runs that took known multiples of the modelled times, read and replayed."""

from __future__ import annotations

from pathlib import Path

import pytest

from megarl.errors import DataError
from megarl.planner.fit import replay_run
from megarl.planner.hardware import GPUS
from megarl.planner.replay import GENERATE, OTHER, UPDATE, read_run
from tests.observe.samples import run_started, write_events
from tests.planner.recipes import make_recipe
from tests.planner.runs import MEANS, OTHER_S, modelled, recorded_workload, write_run

FACTORS = {"generate": 2.0, "update": 0.5, "publish": 3.0}


def test_a_run_is_read_with_its_lengths_its_gpu_and_without_its_start(tmp_path: Path) -> None:
    run = read_run(write_run(tmp_path, make_recipe(), FACTORS))
    assert [step.step for step in run.steps] == [2, 3, 4, 5, 6, 7]
    assert run.num_left_out == 1
    assert run.gpu is GPUS["h100"]
    assert run.workload.mean_response_tokens == sum(MEANS) / len(MEANS)
    assert run.workload.quantiles == recorded_workload(1000).quantiles
    assert all(step.seconds[OTHER] == pytest.approx(OTHER_S) for step in run.steps)


def test_the_factors_of_a_run_are_found_on_half_of_it_and_hold_on_the_other(tmp_path: Path) -> None:
    recipe = make_recipe()
    run = read_run(write_run(tmp_path, recipe, FACTORS))
    found = replay_run(run)
    for part, factor in FACTORS.items():
        assert found.parts[part].factor == pytest.approx(factor)
    # The model has no other work in separate pools: the time is kept as it is.
    assert found.parts[OTHER].factor is None
    assert found.parts[OTHER].corrected(7.0) == pytest.approx(OTHER_S)
    assert (found.num_fitted, found.num_tested) == (3, 3)
    assert found.corrected_error == pytest.approx(0, abs=1e-6)
    recorded = sum(step.total_s for step in run.steps)
    assert found.error == pytest.approx(
        sum(sum(modelled(recipe, step.workload).values()) for step in run.steps) / recorded - 1
    )
    assert abs(found.error) > 0.2


def test_another_recipe_is_estimated_with_the_factors_of_the_run(tmp_path: Path) -> None:
    run = read_run(write_run(tmp_path, make_recipe(), FACTORS))
    found = replay_run(run)
    for change in ("pools.rollout.nodes=2", "pools.train.nodes=4", "train.prompts_per_step=64"):
        changed = modelled(make_recipe(change), run.workload)
        assert found.parts[GENERATE].corrected(changed[GENERATE]) == pytest.approx(2 * changed[GENERATE])
        assert found.parts[UPDATE].corrected(changed[UPDATE]) == pytest.approx(0.5 * changed[UPDATE])


def test_generating_beside_training_is_known_only_if_it_is_waited_for(tmp_path: Path) -> None:
    recipe = make_recipe("train.max_staleness=1")
    slow = replay_run(read_run(write_run(tmp_path / "slow", recipe, {"generate": 5.0})))
    assert slow.knows_rollout
    assert slow.parts[GENERATE].factor == pytest.approx(5.0)
    fast = replay_run(read_run(write_run(tmp_path / "fast", recipe, {"generate": 0.01, "update": 10.0})))
    assert not fast.knows_rollout
    assert fast.parts[GENERATE].factor == pytest.approx(1.0)


def test_groups_that_were_dropped_are_generated_in_rounds_unless_they_are_oversampled(tmp_path: Path) -> None:
    plain = make_recipe("algorithm={kind: grpo, filter: {}}")
    run = read_run(write_run(tmp_path, plain, {}, num_dropped=8))
    assert run.workload.kept_share == 0.5
    twice = make_recipe("algorithm={kind: grpo, filter: {oversampling: 2.0}}")
    rounds, at_once = modelled(plain, run.workload)[GENERATE], modelled(twice, run.workload)[GENERATE]
    kept = modelled(plain, recorded_workload(1000))[GENERATE]
    assert rounds == pytest.approx(2 * kept, rel=0.01)
    assert kept < at_once < rounds


def test_a_shorter_limit_cuts_the_recorded_lengths() -> None:
    cut = recorded_workload(1000).limited(500)
    assert cut.max_response_tokens == 500
    assert cut.mean_response_tokens == pytest.approx(500 - 500 * 500 / 4000, rel=0.02)
    assert recorded_workload(1000).limited(4000) == recorded_workload(1000)


def test_what_cannot_be_replayed_is_one_line(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"not the folder of a run, events.jsonl is missing; name one like"):
        read_run(tmp_path)
    write_events(tmp_path, [run_started()])
    with pytest.raises(DataError, match="no step was finished since the run last started"):
        read_run(tmp_path)
