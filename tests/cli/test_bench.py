from __future__ import annotations

import json

import pytest

from megarl.cli import measure
from megarl.cli.main import run
from megarl.cli.measure import Goal, Measurement


def pretend(monkeypatch: pytest.MonkeyPatch, seconds: float) -> None:
    goal = Goal(seconds=1.0, megabytes=500.0)
    found = Measurement(command="plan", seconds=seconds, cpu_seconds=0.5, megabytes=100.0, goal=goal)
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
