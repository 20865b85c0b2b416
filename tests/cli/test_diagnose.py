from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from megarl.cli.main import run
from megarl.config.recipe import Recipe
from megarl.tools.small_recipe import SmallRecipe
from megarl.weights.diagnosis import Conversation, Diagnosis, HookPointError, reach_verdict
from megarl.weights.hook_points import hook_points
from tests.run.runs import write_recipe
from tests.weights.reference import make_shape

BROKEN = "model.layers.2.mlp.up_proj"
Asked = list[tuple[str | int, Path | None]]


def diagnosis(*, broken: str | None) -> Diagnosis:
    names = [point.name for point in hook_points(make_shape())]
    wrong = set() if broken is None else set(names[names.index(broken) :])
    errors = [
        HookPointError(point=point, error=0.5 if point.name in wrong else 1e-6, token=3, tolerance=1e-4)
        for point in hook_points(make_shape())
    ]
    conversation = Conversation(
        prompt_ids=np.arange(4, dtype=np.int32),
        response_ids=np.arange(3, dtype=np.int32),
        engine_logprobs=np.zeros(3, np.float32),
        trainer_logprobs=np.zeros(3, np.float32),
        temperature=1.0,
    )
    return reach_verdict(errors, (), conversation, is_before_temperature=False)


@pytest.fixture(scope="session")
def recipe(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("diagnose")
    assert run(["data", "make", "arithmetic", "--out", str(folder / "arithmetic")]) == 0
    return str(write_recipe(folder, "one"))


def pretend(monkeypatch: pytest.MonkeyPatch, found: Diagnosis) -> Asked:
    """Answer without starting anything; returns what was asked for."""
    asked: Asked = []

    def answer(
        recipe: Recipe,
        *,
        question: str | int,
        checkpoint: Path | None,
        ray_address: str | None,
        on_start: Callable[[SmallRecipe], None],
    ) -> Diagnosis:
        asked.append((question, checkpoint))
        on_start(SmallRecipe(recipe=recipe, notes=("smaller than the recipe",)))
        return found

    monkeypatch.setattr("megarl.tools.diagnose.run.diagnose_recipe", answer)
    return asked


def test_nothing_differs(recipe: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    asked = pretend(monkeypatch, diagnosis(broken=None))
    assert run(["diagnose", "mismatch", recipe]) == 0
    out = capsys.readouterr().out
    assert asked == [(0, None)]
    assert out.startswith("starting 2 trainer rank(s) and an engine of tensor 1; logs and recordings: ")
    assert "note: smaller than the recipe\n" in out
    assert out.splitlines()[-1].startswith("nothing differs: ")


def test_the_first_module_that_differs_is_shown_among_its_neighbours(
    recipe: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    asked = pretend(monkeypatch, diagnosis(broken=BROKEN))
    assert run(["diagnose", "mismatch", recipe, "--row", "3", "--checkpoint", "here", "--json"]) == 77
    *table, sentence, last = capsys.readouterr().out.splitlines()
    assert asked == [(3, Path("here"))]
    (marked,) = [line for line in table if "first to differ" in line]
    assert marked.split()[:2] == [BROKEN, "5.0e-01"]
    modules = [line.split()[0] for line in table if line.strip().startswith(("model.", "lm_head", "logprobs", "..."))]
    assert len(modules) == 4 + 1 + 4 + 1 + 3
    assert modules[-4:] == ["...", "model.norm", "lm_head", "logprobs"]
    assert sentence.startswith(f"computation differs: {BROKEN} is the first module that differs")
    answer = json.loads(last)
    assert answer["verdict"] == "computation differs"
    assert answer["first"]["module"] == BROKEN
    assert len(answer["modules"]) == 1 + 11 * 4 + 3


def test_a_prompt_and_a_row_are_one_too_many(
    recipe: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    asked = pretend(monkeypatch, diagnosis(broken=None))
    assert run(["diagnose", "mismatch", recipe, "--row", "3", "--prompt", "12+34="]) == 2
    assert "name a --prompt or a --row, not both" in capsys.readouterr().err
    assert run(["diagnose", "mismatch", recipe, "--prompt", "12+34="]) == 0
    assert asked == [("12+34=", None)]


def test_a_checkpoint_that_is_none_is_refused_before_anything_starts(
    recipe: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(["diagnose", "mismatch", recipe, "--checkpoint", str(tmp_path)]) == 4
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.startswith(f"megarl: {tmp_path}")
