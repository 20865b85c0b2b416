"""Commands that try a recipe here: what they print, and their exit codes."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch

from megarl.cli.main import run
from megarl.config.recipe import Recipe
from megarl.tools.check_sync import ClassVerdict, rehearse
from megarl.tools.diagnose.verdict import Conversation, Diagnosis, HookPointError, reach_verdict
from megarl.tools.small_recipe import SmallRecipe
from megarl.weights.algebra.plan import Plan
from megarl.weights.recordings import hook_points
from tests.repository import ROOT
from tests.run.runs import write_recipe
from tests.weights.reference import make_shape

RECIPES = ROOT / "recipes"


def test_a_rehearsal_says_for_every_class_that_it_is_equal(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["check-sync", str(RECIPES / "grpo_7b.yaml"), "--rehearse-only", "--json"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[-1] == "every byte is equal"
    assert "trainer TP4 PP1 DP1 (4 ranks) -> 4 engine(s) of TP1, separate pools" in lines[0]
    found = json.loads(lines[-2])["rehearsal"]
    assert (found["num_sources"], found["num_targets"]) == (4, 4)
    classes = {entry["name"]: entry for entry in found["classes"]}
    assert set(classes) == {"embedding", "qkv", "attention output", "norms", "feed-forward", "output"}
    assert all(entry["first_difference"] is None and entry["bytes"] for entry in classes.values())


def test_a_difference_is_told_with_its_place_and_another_exit_code(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def rehearse_wrongly(plan: Plan, model: dict[str, torch.Tensor]) -> list[ClassVerdict]:
        wrong = ClassVerdict(name="router", num_differing=1, first_difference="target rank 0: here[1, 2] is 3")
        return [*rehearse(plan, model), wrong]

    monkeypatch.setattr("megarl.tools.check_sync.rehearse", rehearse_wrongly)
    assert run(["check-sync", str(RECIPES / "grpo_7b.yaml"), "--rehearse-only"]) == 76
    out = capsys.readouterr().out
    assert "1 elements differ: target rank 0: here[1, 2] is 3" in out
    assert out.splitlines()[-1] == "the engines do NOT hold what was published"


def test_a_model_that_is_nowhere_is_one_problem(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    recipe = str(RECIPES / "grpo_7b.yaml")
    assert run(["check-sync", recipe, "--set", f"model.path={tmp_path}/nowhere", "--rehearse-only"]) == 2
    assert "name a shape with --shape" in capsys.readouterr().err


@pytest.mark.slow
@pytest.mark.usefixtures("whole_run")
@pytest.mark.parametrize("name", ["grpo_7b", "grpo_70b", "grpo_235b", "dapo_32b"])
def test_published_weights_are_read_back_equal(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["check-sync", str(RECIPES / f"{name}.yaml"), "--json"]) == 0
    found = json.loads(capsys.readouterr().out.splitlines()[-2])
    assert found["real"]["is_equal"]
    assert found["real"]["num_sources"] >= 2


RECIPE = str(ROOT / "recipes" / "dapo_32b.yaml")


def test_a_folder_with_a_rehearsal_is_not_written_over(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "run").mkdir()
    assert run(["rehearse", RECIPE, "--out", str(tmp_path)]) == 5
    assert capsys.readouterr().err == (f"megarl: {tmp_path} has a rehearsal already; name another folder with --out\n")
    assert [path.name for path in tmp_path.iterdir()] == ["run"]


def test_a_tensor_parallel_group_over_parts_of_nodes_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    pools = "pools={all: {nodes: 3, gpus_per_node: 8}}"
    overrides = [pools, "roles.actor.tensor=3", "roles.actor.pipeline=8"]
    assert run(["rehearse", RECIPE, *(word for override in overrides for word in ("--set", override))]) == 2
    message = "roles.actor.tensor: 3 and the 8 gpus of a node of pool all do not divide one another; "
    assert message in capsys.readouterr().err


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
