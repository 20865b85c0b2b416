"""Commands that write recipes."""

from __future__ import annotations

from pathlib import Path

import pytest

from megarl.cli.main import run
from megarl.config.load import read_recipe
from megarl.planner.fit import PlanQuestion, answer
from tests.repository import ROOT

WORDS = ["--model", "models/Qwen2.5-7B", "--shape", "qwen2.5-7b", "--train", "train.parquet", "--reward", "gsm8k"]


@pytest.mark.patient
@pytest.mark.parametrize("shape", ["qwen2.5-7b", "qwen3-vl-8b"])
def test_a_recipe_that_fits_is_written(shape: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "mine.yaml"
    words = [*WORDS, "--shape", shape, "--gpus", "8", "--eval", "eval.parquet"]
    assert run(["init", str(path), *words]) == 0, capsys.readouterr().err
    recipe = read_recipe(path).recipe
    assert (recipe.run.name, recipe.reward.kind) == ("mine", "gsm8k")
    assert recipe.evaluation is not None
    assert answer(path, [], PlanQuestion(shape_name=shape)).plan.sizes.fits
    assert run(["init", str(path), *WORDS, "--gpus", "8"]) == 2
    assert "exists; name another file" in capsys.readouterr().err


@pytest.mark.patient
def test_gpus_that_are_too_few_are_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = [*WORDS, "--gpus", "1", "--gpu", "l40s"]
    assert run(["init", str(tmp_path / "mine.yaml"), *words]) == 2
    assert "no layout of 1 x 1 l40s fits" in capsys.readouterr().err
    assert not (tmp_path / "mine.yaml").exists()


def test_what_is_not_named_and_cannot_be_asked_is_a_sentence(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(["init", str(tmp_path / "mine.yaml")]) == 2
    assert "--model: missing: folder of the model" in capsys.readouterr().err
    assert run(["init", str(tmp_path / "mine.yaml"), *WORDS[:-1], "magic", "--gpus", "0"]) == 2
    assert "--reward: 'magic': name one of exact" in capsys.readouterr().err


EXAMPLES = ROOT / "tests" / "tools" / "import_verl" / "configs"


@pytest.mark.parametrize("name", ["lora.yaml", "multi_turn.yaml"])
def test_an_import_writes_a_recipe_and_prints_the_report(
    name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "recipe.yaml"
    assert run(["import-verl", str(EXAMPLES / name), "--out", str(out)]) == 0
    read_recipe(out)
    report = capsys.readouterr().out
    assert "not supported (" in report
    assert "  data.train_files=" in report


def test_without_a_file_the_recipe_goes_to_stdout_and_the_report_to_stderr(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["import-verl", str(EXAMPLES / "grpo.yaml")]) == 0
    captured = capsys.readouterr()
    assert "\nalgorithm:\n  kind: grpo\n" in captured.out
    assert "mapped (23)" in captured.err


def test_what_is_still_wrong_with_the_recipe_is_said(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    script = tmp_path / "run.sh"
    script.write_text(
        "main_ppo algorithm.adv_estimator=grpo data.train_files=t.parquet trainer.n_gpus_per_node=3 "
        "actor_rollout_ref.model.path=Qwen/Qwen2.5-7B\n"
    )
    assert run(["import-verl", str(script)]) == 2
    lines = capsys.readouterr().err.splitlines()
    assert f"{script}: 2 problem(s)" in lines
    assert lines[-1].startswith("  sampling.rollouts_per_prompt: 1 leaves nothing to compare")
