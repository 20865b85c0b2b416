from __future__ import annotations

import json
from pathlib import Path

import pytest

from megarl.cli.main import run
from megarl.cli.metrics import metrics_page
from megarl.observe.catalogue import METRICS
from megarl.observe.metrics import Targets
from scripts.dashboards.monitoring import monitoring_files
from tests.repository import ROOT

DOCS = ROOT / "docs"


def test_the_table_in_the_docs_is_that_of_the_code() -> None:
    assert (DOCS / "metrics.md").read_text() == metrics_page()


def test_the_list_has_every_metric(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["metrics", "list"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines] == [metric.full_name for metric in METRICS]


def test_targets_of_several_runs_are_gathered(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for name in ("first", "second"):
        Targets(tmp_path / name, run=name, exporter=f"{name}:9464")
    out = tmp_path / "targets.json"
    assert run(["metrics", "targets", str(tmp_path / "first"), str(tmp_path / "second"), "--out", str(out)]) == 0
    assert [entry["targets"] for entry in json.loads(out.read_text())] == [["first:9464"], ["second:9464"]]
    assert capsys.readouterr().out == f"wrote {out}: 2 targets\n"


def test_a_recipe_stands_for_its_run(tmp_path: Path) -> None:
    recipe = tmp_path / "sample.yaml"
    recipe.write_text(
        f"run: {{name: sample, steps: 1, device: cpu, folder: {tmp_path}/runs}}\n"
        "model: {path: model}\ndata: {train: [train.parquet]}\npools: {train: {gpus_per_node: 1}}\n"
        "roles: {actor: {pool: train}}\nalgorithm: {kind: sft}\ntrain: {prompts_per_step: 8}\n"
    )
    Targets(tmp_path / "runs" / "sample", run="sample", exporter="127.0.0.1:9464")
    out = tmp_path / "targets.json"
    assert run(["metrics", "targets", str(recipe), "--out", str(out)]) == 0
    assert json.loads(out.read_text())[0]["targets"] == ["127.0.0.1:9464"]


def test_something_else_is_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["metrics", "targets", str(tmp_path / "x"), "--out", str(tmp_path / "out.json")]) == 3
    assert capsys.readouterr().err == f"megarl: {tmp_path / 'x'}: neither the folder of a run nor a recipe\n"


def test_dashboards_and_alerts_are_written(tmp_path: Path) -> None:
    assert run(["dashboards", "--out", str(tmp_path / "new")]) == 0
    assert {path.name: path.read_text() for path in (tmp_path / "new").iterdir()} == monitoring_files()
