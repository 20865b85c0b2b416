from __future__ import annotations

from io import StringIO
from pathlib import Path

import pytest
from rich.console import Console

from megarl.cli.evaluate import evaluation_document, result_table
from megarl.cli.main import run
from megarl.config.checks.algorithm import check_algorithm
from megarl.config.document import read_document
from megarl.config.load import validated
from megarl.results import EvalResult, Grade, Grades
from megarl.types import PolicyVersion
from tests.repository import ROOT


@pytest.mark.parametrize(
    "name", ["quickstart", "quickstart_ppo", "quickstart_async", "quickstart_dapo", "quickstart_distill"]
)
def test_any_recipe_becomes_one_that_only_evaluates(name: str) -> None:
    document = read_document(ROOT / "recipes" / f"{name}.yaml")
    changed = evaluation_document(
        document, model=Path("model"), data=[Path("other.parquet")], rollouts_per_prompt=4, max_prompts=10
    )
    recipe = validated(changed, source=name).recipe
    assert recipe.model.path == Path("model")
    assert recipe.data.eval == (Path("other.parquet"),)
    assert (recipe.roles.critic, recipe.roles.reference, recipe.roles.teacher) == (None, None, {})
    assert check_algorithm(recipe) == []
    assert recipe.evaluation is not None
    assert (recipe.evaluation.max_prompts, recipe.evaluation.runs_before_training) == (10, True)
    assert set(recipe.pools) == {recipe.roles.actor.pool, recipe.roles.used_pools["rollout"]}


def test_the_table_has_a_row_per_task_and_metric() -> None:
    def grade(accuracy: float, num_prompts: int) -> Grade:
        return Grade(
            num_prompts=num_prompts,
            rollouts_per_prompt=1,
            score_mean=accuracy,
            accuracy=accuracy,
            majority=accuracy,
            pass_at={},
        )

    grades = Grades(overall=grade(0.5, 10), by_source={"gsm8k": grade(0.75, 4), "math": grade(1 / 3, 6)})
    result = EvalResult(version=PolicyVersion(0), greedy=grades, sampled=None)
    out = StringIO()
    Console(file=out, width=100).print(result_table(result, model=Path("model")))
    rows = [[word for word in line.split() if word not in "┃│"] for line in out.getvalue().splitlines()]
    assert ["gsm8k", "accuracy", "0.7500", "0.2500", "4"] in rows
    assert ["all", "score", "0.5000", "10"] in rows


def test_a_model_without_a_recipe_needs_one(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "config.json").write_text("{}")
    assert run(["evaluate", str(tmp_path)]) == 2
    assert "name a recipe with --recipe" in capsys.readouterr().err
