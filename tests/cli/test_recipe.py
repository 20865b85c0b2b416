"""`validate --explain` names the place of every value."""

from __future__ import annotations

from pathlib import Path

import pytest

from megarl.cli.recipe import print_explanation
from tests.repository import ROOT

GOOD = ROOT / "tests" / "config" / "good.yaml"


def test_every_value_is_explained(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    recipe = tmp_path / "heir.yaml"
    recipe.write_text(f"extends: {GOOD}\nsampling: {{temperature: 0.7}}\n")
    print_explanation(recipe, ["run.seed=5"])
    lines = {line.split()[0]: line.split()[1:] for line in capsys.readouterr().out.splitlines()}
    assert lines["sampling.temperature"] == ["0.7", f"{recipe}:2"]
    assert lines["run.name"] == ["test", f"{GOOD}:2"]
    assert lines["run.seed"] == ["5", "--set"]
    assert lines["sampling.top_k"] == ["null", "default"]
    assert lines["data.train"] == ["[train.parquet]", f"{GOOD}:4"]
