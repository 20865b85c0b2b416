from __future__ import annotations

import json
import sys
import tomllib
from dataclasses import asdict, replace
from fnmatch import fnmatch
from pathlib import Path

import pytest
import torch

from bench import gpu_pieces
from bench.__main__ import run
from bench.algo import StepMeasurement
from bench.checkpoint import CheckpointFigure
from bench.dataplane import PlaneFigure
from bench.exporter import ExporterFigure
from bench.figures import RECORDS, Failure, Figure
from bench.gpu_figures import print_results
from bench.gpu_pieces import GpuPiece, PieceOptions, Report, Results, run_pieces
from bench.image_families import Overhead
from bench.planning import Goal, Measurement
from tests.repository import ROOT


def planned(seconds: float) -> Measurement:
    goal = Goal(seconds=1.0, megabytes=500.0)
    return Measurement(command="megarl plan", seconds=seconds, cpu_seconds=0.5, megabytes=100.0, goal=goal)


def stepped(seconds: float) -> StepMeasurement:
    return StepMeasurement(
        kind="gae",
        num_rollouts=32,
        num_tokens=64,
        assign_seconds=seconds,
        pack_seconds=0.0,
        cpu_seconds=0.5,
        input_megabytes=10.0,
        peak_megabytes=20.0,
    )


def saved(times: float) -> CheckpointFigure:
    return CheckpointFigure(name="save against dd", value=times, unit="times", goal=0.7)


def read(us: float) -> PlaneFigure:
    return PlaneFigure(name="read", value=us, unit="us/token", goal=0.15, before=1.0)


def exported(percent: float) -> ExporterFigure:
    return ExporterFigure(name="overhead", value=percent, unit="% of a step", goal=0.5)


@pytest.mark.parametrize(
    ("function", "found", "code", "verdict"),
    [
        ("planning.measure_planning", planned(0.9), 0, "met"),
        ("planning.measure_planning", planned(1.9), 0, "missed, 1.9 times the goal"),
        ("planning.measure_planning", planned(2.1), 1, "missed, 2.1 times the goal"),
        ("algo.measure_steps", stepped(1.9), 0, "met"),
        ("algo.measure_steps", stepped(4.2), 1, "missed, 2.1 times"),
        ("checkpoint.measure_checkpoint", saved(0.8), 0, "met"),
        ("checkpoint.measure_checkpoint", saved(0.5), 0, "missed, by 1.4 times"),
        ("checkpoint.measure_checkpoint", saved(0.3), 1, "missed, by 2.3 times"),
        ("dataplane.measure_dataplane", read(0.15), 0, "read"),
        ("dataplane.measure_dataplane", read(0.2), 1, "read"),
        ("exporter.measure_exporter", exported(0.5), 0, "overhead"),
        ("exporter.measure_exporter", exported(0.6), 1, "overhead"),
    ],
)
def test_a_goal_that_is_missed_too_widely_is_an_exit_code_and_json_is_the_last_line(
    function: str,
    found: Measurement | StepMeasurement | CheckpointFigure | PlaneFigure | ExporterFigure,
    code: int,
    verdict: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(f"bench.{function}", lambda *_values, **_options: [found])
    monkeypatch.setattr("bench.worker_plane.measure_workers", lambda load: [])
    assert run([function.partition(".")[0].replace("planning", "plan"), "--json"]) == code
    *table, last = capsys.readouterr().out.splitlines()
    assert any(verdict in line for line in table)
    shown, *_ = json.loads(last)
    assert shown.items() >= json.loads(json.dumps(asdict(found))).items()


@pytest.mark.parametrize(("seeing_s", "code"), [([2.04, 2.1, 3.0], 0), ([2.06, 2.06, 2.06], 1)])
def test_a_family_that_sees_images_may_cost_a_run_of_text_two_hundredths(
    seeing_s: list[float], code: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    found = Overhead(name="update", text_s=[2.0, 2.0, 2.0], same_s=[2.0, 2.0, 2.02], seeing_s=seeing_s)
    monkeypatch.setattr("bench.image_families.measure_families", lambda **_: [found])
    assert run(["image-families"]) == code
    assert "itself again 1.000; 3 turns" in capsys.readouterr().out


def test_figures_of_a_gpu_need_one(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert run(["gpu"]) == 5
    assert "megarl: this benchmark needs a CUDA device, and torch finds none\n" in capsys.readouterr().err


def test_a_piece_that_is_none_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["gpu", "--piece", "step-8b"]) == 2
    assert "step-8b: no such piece; one of machine, " in " ".join(capsys.readouterr().err.split())


FIGURE = Figure(key="step", name="step", value=1.0, unit="ms", against="peak", ratio=0.4)


@pytest.mark.parametrize(("ratio", "verdict"), [(0.44, True), (0.46, False), (2.0, False)])
def test_a_ratio_may_fall_a_little_below_its_record(
    ratio: float, verdict: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    figure = replace(FIGURE, ratio=ratio)
    assert not figure.has_fallen
    monkeypatch.setitem(RECORDS, "step", 0.53)
    assert figure.has_fallen is verdict


def test_figures_are_a_table_and_json_in_the_last_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(RECORDS, "step", 0.5)
    failure = Failure(part="engine", reason="not done within 1 s")
    print_results(Results(machine={"device": "some GPU"}, figures=[FIGURE], failures=[failure]))
    *table, last = capsys.readouterr().out.splitlines()
    assert any("fallen from 0.5" in line for line in table)
    assert any("not done within 1 s" in line and "no figure" in line for line in table)
    found = json.loads(last)
    assert found["figures"][0]["ratio"] == 0.4
    assert found["figures"][0]["record"] == 0.5
    assert found["machine"] == {"device": "some GPU"}


@pytest.mark.patient
def test_a_piece_that_fails_or_hangs_keeps_what_it_told_and_spares_the_others(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    figure = gpu_pieces._MARK + gpu_pieces._to_line(FIGURE)
    machine = gpu_pieces._MARK + gpu_pieces._to_line({"device": "some GPU"})
    # The code that the pieces' processes run instead of measuring.
    code = f"""
import sys, time
name = sys.argv[1]
print("a library says something")
print({figure!r}.replace("step", name), flush=True)
if name == "hangs":
    time.sleep(60)
if name == "fails":
    sys.exit("out of memory")
print({machine!r}, flush=True)
"""

    def nothing(_options: PieceOptions, _tell: Report) -> None:
        raise AssertionError("measured in the parent")

    timeouts_s = {"hangs": 5, "fails": 600, "works": 600}
    monkeypatch.setattr(gpu_pieces, "_COMMAND", (sys.executable, "-c", code))
    monkeypatch.setattr(
        gpu_pieces,
        "PIECES",
        {name: GpuPiece(timeout_s=timeout_s, measure=nothing) for name, timeout_s in timeouts_s.items()},
    )
    options = PieceOptions(engine_model="qwen2.5-7b", engine_options={})
    results = run_pieces(["hangs", "fails", "works"], options, out=tmp_path / "lines")
    assert [figure.key for figure in results.figures] == ["hangs", "fails", "works"]
    assert results.failures == [
        Failure(part="hangs", reason="not done within 5 s"),
        Failure(part="fails", reason="ended with 1: out of memory"),
    ]
    assert results.machine == {"device": "some GPU"}
    assert len((tmp_path / "lines").read_text().splitlines()) == 6


@pytest.mark.parametrize(
    "command", ["plan", "checkpoint", "algo", "page", "exporter", "agents", "async", "reshard", "gpu"]
)
def test_every_benchmark_has_help(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run([command, "--help"]) == 0
    assert f"Usage: python -m bench {command}" in capsys.readouterr().out


def test_the_wheel_has_megarl_and_no_benchmark() -> None:
    patterns = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]["packages"]["find"]["include"]
    packages = {path.parent.name for path in ROOT.glob("*/__init__.py")}
    assert "bench" in packages
    assert {name for name in packages if any(fnmatch(name, pattern) for pattern in patterns)} == {"megarl"}
