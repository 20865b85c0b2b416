from __future__ import annotations

import json
import sys
import tomllib
from dataclasses import replace
from fnmatch import fnmatch
from pathlib import Path

import pytest
import torch

from bench import gpu_pieces
from bench import planning as measure
from bench.__main__ import run
from bench.figures import RECORDS, Failure, Figure
from bench.gpu_figures import print_results
from bench.gpu_pieces import GpuPiece, PieceOptions, Report, Results, run_pieces
from bench.planning import Goal, Measurement
from tests.repository import ROOT


def pretend(monkeypatch: pytest.MonkeyPatch, seconds: float) -> None:
    goal = Goal(seconds=1.0, megabytes=500.0)
    found = Measurement(command="megarl plan", seconds=seconds, cpu_seconds=0.5, megabytes=100.0, goal=goal)
    monkeypatch.setattr(measure, "measure_planning", lambda *, repeats: [found] * repeats)


@pytest.mark.parametrize(
    ("seconds", "code", "verdict"),
    [(0.9, 0, "met"), (1.9, 0, "missed, 1.9 times the goal"), (2.1, 1, "missed, 2.1 times the goal")],
)
def test_only_a_goal_that_is_missed_widely_fails(
    seconds: float, code: int, verdict: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    pretend(monkeypatch, seconds)
    assert run(["plan", "--repeats", "1"]) == code
    assert verdict in capsys.readouterr().out


def test_the_last_line_is_json_on_request(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    pretend(monkeypatch, 0.5)
    assert run(["plan", "--json", "--repeats", "2"]) == 0
    *table, last = capsys.readouterr().out.splitlines()
    assert any("megarl plan" in line for line in table)
    first, _ = json.loads(last)
    assert first["seconds"] == 0.5
    assert first["goal"] == {"seconds": 1.0, "megabytes": 500.0}


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


def test_a_piece_that_fails_or_hangs_keeps_what_it_told_and_spares_the_others(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    # The code that the pieces' processes run instead of measuring.
    code = """
import sys, time
from bench.gpu_pieces import _MARK, _to_line
from bench.figures import Figure
name = sys.argv[1]
print("a library says something")
print(_MARK + _to_line(Figure(key=name, name=name, value=1.0, unit="ms", against="peak", ratio=0.4)), flush=True)
if name == "hangs":
    time.sleep(60)
if name == "fails":
    sys.exit("out of memory")
print(_MARK + _to_line({"device": "some GPU"}), flush=True)
"""

    def nothing(_options: PieceOptions, _tell: Report) -> None:
        raise AssertionError("measured in the parent")

    timeouts_s = {"hangs": 15, "fails": 600, "works": 600}
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
        Failure(part="hangs", reason="not done within 15 s"),
        Failure(part="fails", reason="ended with 1: out of memory"),
    ]
    assert results.machine == {"device": "some GPU"}
    assert len((tmp_path / "lines").read_text().splitlines()) == 6


@pytest.mark.parametrize("command", ["plan", "checkpoint", "algo", "page", "exporter", "async", "reshard", "gpu"])
def test_every_benchmark_has_help(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run([command, "--help"]) == 0
    assert f"Usage: python -m bench {command}" in capsys.readouterr().out


def test_the_wheel_has_megarl_and_no_benchmark() -> None:
    patterns = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]["packages"]["find"]["include"]
    packages = {path.parent.name for path in ROOT.glob("*/__init__.py")}
    assert "bench" in packages
    assert {name for name in packages if any(fnmatch(name, pattern) for pattern in patterns)} == {"megarl"}
