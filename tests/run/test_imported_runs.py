"""Recipes that were imported from scripts of verl train."""

from __future__ import annotations

from pathlib import Path

import pytest

from megarl.cli.main import main
from megarl.cli.main import run as run_command
from megarl.config.algorithm import CispoLossConfig, GrpoConfig
from megarl.config.load import read_recipe
from tests.engine.template import EngineTemplate
from tests.repository import ROOT
from tests.run.runs import REWARD, finished, forked

SCRIPT = ROOT / "tests" / "tools" / "import_verl" / "scripts" / "cispo.sh"


def test_verls_cispo_example_is_imported_without_a_lower_clip(tmp_path: Path) -> None:
    recipe = tmp_path / "cispo.yaml"
    assert run_command(["import-verl", str(SCRIPT), "--out", str(recipe)]) == 0
    algorithm = read_recipe(recipe).recipe.algorithm
    assert isinstance(algorithm, GrpoConfig)
    assert algorithm.loss == CispoLossConfig(kind="cispo", clip_low=10.0, clip_high=0.2)


@pytest.mark.slow
def test_verls_cispo_example_trains(folder: Path, engine_template: EngineTemplate) -> None:
    """Two updates per step: the ratios of the second are not 1, and some are clipped above, none below."""
    name, recipe = "cispo", folder / "cispo.yaml"
    assert run_command(["import-verl", str(SCRIPT), "--out", str(recipe)]) == 0
    (folder / "reward.py").write_text(REWARD)
    overrides = (
        f"run={{name: {name}, folder: {folder}/runs, steps: 3, device: cpu, seed: 3}}",
        "cluster.lease_s=0",
        f"reward={{kind: function, path: {folder}/reward.py, workers: 1}}",
    )
    words = ["megarl", "train", str(recipe), *(word for each in overrides for word in ("--set", each))]
    output = folder / f"{name}.out"
    with forked(main, words, folder=folder, output=output, environment={}, engines=engine_template) as process:
        process.wait(timeout=1200)
    done = finished(folder, name, process)
    assert done.exit_code == 0, done.output
    updates = [event.summary.update for event in done.steps]
    assert len(updates) == 3
    for update in updates:
        assert update is not None
        assert update.grad_norm > 0
        assert update.mismatch_max < 1e-3
    assert len({update.loss for update in updates if update is not None}) == 3
