"""The run of the last stage: the recipe's own layout with another model and data, and what is read off its events."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from megarl.config.checks.recipe import check_without_files
from megarl.config.load import read_recipe
from megarl.errors import ConfigError
from megarl.observe.events import Event, RunFinished, RunStatus
from megarl.planner.deployment import find_shapes
from megarl.tools.doctor import Check, CheckStatus
from megarl.tools.doctor.first_step import STEPS, FirstStepFiles, first_step_recipe, judge_events
from tests.observe.samples import published, step_finished
from tests.repository import ROOT

FILES = FirstStepFiles(model=Path("/m/model"), data=Path("/m/data.parquet"), reward=Path("/m/reward.py"))
LARGE = sorted(path for path in (ROOT / "recipes").glob("*.yaml") if "nodes:" in path.read_text())


@pytest.mark.parametrize("path", LARGE, ids=lambda path: path.stem)
def test_every_large_recipe_has_a_first_step_with_its_own_layout(path: Path) -> None:
    recipe = read_recipe(path).recipe
    if recipe.algorithm.needs.rows == "pairs":
        with pytest.raises(ConfigError, match="trains on pairs"):
            first_step_recipe(recipe, Path("/m"), FILES)
        return
    first = first_step_recipe(recipe, Path("/m"), FILES)
    assert first.pools == recipe.pools
    assert first.roles.actor == recipe.roles.actor
    assert first.roles.rollout == recipe.roles.rollout
    assert first.run.total_steps == STEPS
    shapes = find_shapes(recipe.model, recipe.roles)
    assert check_without_files(first, shapes.policy, critic=shapes.critic) == []


LOG = Path("/m/train.log")


def judged(*events: Event, planned_s: float | None = None) -> dict[str, Check]:
    return {check.name: check for check in judge_events(events, planned_publish_s=planned_s, has_engines=True, log=LOG)}


def test_two_steps_with_a_publish_are_fine() -> None:
    found = judged(published(0), step_finished(1), published(1), step_finished(2))
    assert list(found) == ["publish", "update", "same policy"]
    assert found["update"].status is CheckStatus.OK
    assert found["update"].found.startswith("2 updates, ")


def test_a_run_that_trains_nothing_says_why() -> None:
    ended = RunFinished(status=RunStatus.FAILED, reason="engine 0: CUDA out of memory")
    (check,) = judged(published(0), ended).values()
    assert check.status is CheckStatus.ERROR
    assert check.remedy == "engine 0: CUDA out of memory; its log is /m/train.log"


def test_a_loss_that_is_not_finite_is_an_error_and_a_slow_publish_a_warning() -> None:
    slow = replace(published(0), result=replace(published(0).result, seconds=10.0))
    found = judged(slow, step_finished(1, loss=float("nan")), planned_s=0.5)
    assert found["update"].status is CheckStatus.ERROR
    assert found["publish"].status is CheckStatus.WARNING
    assert found["publish"].found.endswith("planned 0.50")
