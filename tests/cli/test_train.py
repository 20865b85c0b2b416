from __future__ import annotations

from io import StringIO
from pathlib import Path

import pytest
import yaml
from rich.console import Console

from megarl.cli.main import run
from megarl.cli.train import print_report
from megarl.config.recipe import ProfileConfig, Recipe
from megarl.env import RAY_AUTH_TOKEN, RAY_AUTH_TOKEN_PATH
from megarl.errors import FinishedError
from megarl.observe.report import ReportRow, RunReport
from megarl.run import launch
from megarl.tools.quickstart.arithmetic import make_arithmetic
from tests.system.test_run_lock import another_driver


def write_recipe(folder: Path, run: dict[str, str], *, tokens_per_micro_batch: int, gpu: str | None = "l40s") -> Path:
    files = make_arithmetic(folder, num_train=8, num_sft=1, num_eval=1)
    recipe = {
        "run": {**run, "folder": str(folder / "runs"), "steps": 1},
        "model": {"path": str(files.model)},
        "data": {"train": [str(files.train)], "max_prompt_tokens": 32},
        "cluster": {"gpu": gpu},
        "pools": {"all": {"gpus_per_node": 1}},
        "roles": {"actor": {"pool": "all"}, "rollout": {"pool": "all", "memory_fraction": 0.5}},
        "algorithm": {"kind": "grpo"},
        "sampling": {"max_response_tokens": 8},
        "train": {"prompts_per_step": 2, "tokens_per_micro_batch": tokens_per_micro_batch},
    }
    path = folder / "recipe.yaml"
    path.write_text(yaml.safe_dump(recipe))
    return path


def test_the_table_has_every_row_and_the_picture_its_path() -> None:
    out = StringIO()
    rows = (
        ReportRow(name="reward", first=0.25, last=0.5, best=0.75, best_step=12),
        ReportRow(name="entropy", first=1.5, last=2e-5, best=None, best_step=None),
        ReportRow(name="tokens/s", first=1200.4, last=1500, best=1500, best_step=3),
    )
    print_report(RunReport(rows=rows, curves=Path("runs/sample/curves.png")), Console(file=out, width=100))
    header, *lines = [line.strip("┃│ ").split() for line in out.getvalue().splitlines() if line[0] in "┃│"]
    assert [word for word in header if word != "┃"] == ["first", "last", "best", "best", "at", "step"]
    assert [[word for word in line if word != "│"] for line in lines] == [
        ["reward", "0.250", "0.500", "0.750", "12"],
        ["entropy", "1.500", "2.0e-05"],
        ["tokens/s", "1,200", "1,500", "1,500", "3"],
    ]
    assert out.getvalue().splitlines()[-1] == "curves: runs/sample/curves.png"


def test_a_run_that_does_not_fit_is_refused_before_anything_starts(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    path = write_recipe(tmp_path, {"name": "big", "ray_address": "127.0.0.1:1"}, tokens_per_micro_batch=10_000_000)
    assert run(["train", str(path)]) == 2
    title, line = capsys.readouterr().err.splitlines()[-2:]
    assert title == "big: 1 problem(s)"
    assert line.startswith("  does not fit l40s: ")
    assert "GiB too much (actor + engine, training); fits with --set train.tokens_per_micro_batch=" in line
    assert "--override-fit" in line
    assert not (tmp_path / "runs").exists()
    # Overridden, it goes on to the next thing that is missing: the token of the cluster.
    monkeypatch.setenv("HOME", str(tmp_path))
    for variable in (RAY_AUTH_TOKEN_PATH, RAY_AUTH_TOKEN):
        monkeypatch.delenv(variable.name, raising=False)
    assert run(["train", str(path), "--override-fit"]) not in (0, 2)
    assert "no token" in capsys.readouterr().err


def test_a_run_on_a_gpu_of_this_machine_is_refused_before_ray_starts(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    monkeypatch.setattr(launch, "names_of_driver", lambda: ["NVIDIA H100 80GB HBM3", "NVIDIA L40S"])
    path = write_recipe(tmp_path, {"name": "big"}, tokens_per_micro_batch=10_000_000, gpu=None)
    assert run(["train", str(path)]) == 2
    assert capsys.readouterr().err.splitlines()[-1].startswith("  does not fit l40s: ")
    assert not (tmp_path / "runs").exists()


def test_a_second_driver_of_a_run_is_refused_before_it_touches_anything(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = write_recipe(tmp_path, {"name": "mine", "device": "cpu"}, tokens_per_micro_batch=64)
    (tmp_path / "runs" / "mine").mkdir(parents=True)
    (tmp_path / "runs" / "mine" / "of_the_first").touch()
    with another_driver(tmp_path / "runs" / "mine") as first:
        assert run(["train", str(path)]) == 5
    assert f"process {first.pid} on " in capsys.readouterr().err
    assert [each.name for each in (tmp_path / "runs").iterdir() if not each.name.startswith(".")] == ["mine"]
    assert (tmp_path / "runs" / "mine" / "of_the_first").exists()


def test_steps_and_ranks_to_profile_are_part_of_the_recipe(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    path = write_recipe(tmp_path, {"name": "profiled", "device": "cpu"}, tokens_per_micro_batch=4096)
    trained: list[Recipe] = []

    def train(recipe: Recipe, **_: object) -> None:
        trained.append(recipe)
        raise FinishedError("done")

    monkeypatch.setattr("megarl.run.launch.train", train)
    monkeypatch.setattr("megarl.observe.report.make_report", lambda _: RunReport(rows=(), curves=tmp_path))
    words = ["--profile", "3", "--profile", "5", "--profile-rank", "1"]
    assert run(["train", str(path), *words]) == 0, capsys.readouterr().err
    assert trained[0].observe.profile == ProfileConfig(steps=(3, 5), ranks=(1,))
