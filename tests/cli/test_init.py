from __future__ import annotations

from pathlib import Path

import pytest

from megarl.cli.main import run
from megarl.config.load import read_recipe
from megarl.planner.fit import PlanQuestion, answer

WORDS = ["--model", "models/Qwen2.5-7B", "--shape", "qwen2.5-7b", "--train", "train.parquet", "--reward", "gsm8k"]


def test_a_recipe_that_fits_is_written(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "mine.yaml"
    assert run(["init", str(path), *WORDS, "--gpus", "8", "--eval", "eval.parquet"]) == 0, capsys.readouterr().err
    recipe = read_recipe(path).recipe
    assert (recipe.run.name, recipe.reward.kind) == ("mine", "gsm8k")
    assert recipe.evaluation is not None
    assert answer(path, [], PlanQuestion(shape_name="qwen2.5-7b")).plan.sizes.fits
    assert run(["init", str(path), *WORDS, "--gpus", "8"]) == 2
    assert "exists; name another file" in capsys.readouterr().err


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
