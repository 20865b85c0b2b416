from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from megarl.cli.main import run
from megarl.tools.check_sync import ClassVerdict, rehearse
from megarl.weights.algebra.plan import Plan
from tests.repository import ROOT

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
