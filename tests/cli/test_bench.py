from __future__ import annotations

import json
from dataclasses import replace

import pytest
import torch

from megarl.cli import measure
from megarl.cli.gpu_figures import print_figures
from megarl.cli.main import run
from megarl.cli.measure import Goal, Measurement
from megarl.observe.figures import Figure


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
    assert run(["bench", "plan", "--repeats", "1"]) == code
    assert verdict in capsys.readouterr().out


def test_the_last_line_is_json_on_request(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    pretend(monkeypatch, 0.5)
    assert run(["bench", "plan", "--json", "--repeats", "2"]) == 0
    *table, last = capsys.readouterr().out.splitlines()
    assert any("megarl plan" in line for line in table)
    first, _ = json.loads(last)
    assert first["seconds"] == 0.5
    assert first["goal"] == {"seconds": 1.0, "megabytes": 500.0}


@pytest.mark.parametrize("command", ["train", "engine"])
def test_figures_of_a_gpu_need_one(
    command: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert run(["bench", command]) == 5
    assert "megarl: this benchmark needs a CUDA device, and torch sees none\n" in capsys.readouterr().err


@pytest.mark.parametrize(("ratio", "verdict"), [(0.44, True), (0.46, False), (2.0, False)])
def test_a_ratio_may_fall_a_little_below_its_record(ratio: float, verdict: bool) -> None:
    figure = Figure(name="step", value=1.0, unit="ms", against="peak", ratio=ratio, record=0.53)
    assert figure.has_fallen is verdict
    assert not replace(figure, record=None).has_fallen


def test_figures_are_a_table_and_json_in_the_last_line(capsys: pytest.CaptureFixture[str]) -> None:
    figure = Figure(name="step", value=1.0, unit="ms", against="peak", ratio=0.4, record=0.5)
    print_figures([figure], {"device": "some GPU"})
    *table, last = capsys.readouterr().out.splitlines()
    assert any("fallen from 0.5" in line for line in table)
    assert json.loads(last)["figures"][0]["ratio"] == 0.4
    assert json.loads(last)["machine"] == {"device": "some GPU"}
