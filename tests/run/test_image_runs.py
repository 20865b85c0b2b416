"""Whole runs with images: rows of images and of text, published at each update."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from megarl.tools.quickstart.arithmetic import make_arithmetic
from megarl.tools.quickstart.squares import make_squares
from tests.engine.template import EngineTemplate
from tests.run.runs import run
from tests.run.test_family_runs import ONE_RANK, STEPS, check_agrees

DATA = ("train", "eval")


@pytest.fixture(scope="module")
def folder(whole_run: None, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("runs")
    make_squares(path / "squares", num_train=64, num_sft=16, num_eval=16)
    make_arithmetic(path / "arithmetic", num_train=32, num_sft=16, num_eval=16)
    return path


def common(folder: Path, model: Path) -> tuple[str, ...]:
    """Return the settings of a run that asks about images and about sums."""
    files = {kind: [str(folder / task / f"{kind}.parquet") for task in ("squares", "arithmetic")] for kind in DATA}
    return (
        f"model.path={model}",
        f"run.steps={STEPS}",
        *(f"data.{kind}={json.dumps(paths)}" for kind, paths in files.items()),
        "data.max_prompt_tokens=40",
        "checkpoint={save_every_steps: 1, keep_last: 4}",
        "roles.rollout={pool: rollout, workers: 1, canary_every: 1}",
    )


def test_a_run_learns_from_images_and_sums(folder: Path, engine_template: EngineTemplate) -> None:
    settings = common(folder, folder / "squares" / "model")
    done = run(folder, "squares_once", *settings, *ONE_RANK, engines=engine_template)
    check_agrees(done, "qwen2_5_vl")
    assert list(done.evaluations) == [0, STEPS]
    # Each image is kept once, whatever asks about it.
    assert len(list((done.folder / "images").iterdir())) == 64 + 16
