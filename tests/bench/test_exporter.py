from __future__ import annotations

import json

import pytest

from bench import exporter as module
from bench.__main__ import run
from bench.exporter import QUICKSTART, ExporterFigure, measure_exporter
from megarl.observe.catalogue import MAX_SERIES, METRICS


def test_every_series_there_can_be_is_scraped() -> None:
    *overheads, series, scrape = measure_exporter([QUICKSTART], repeats=1)
    assert [figure.goal for figure in overheads] == [0.5]
    assert all(figure.value > 0 for figure in (*overheads, scrape))
    assert sum(metric.limit for metric in METRICS) < series.value <= MAX_SERIES


@pytest.mark.parametrize(("value", "exit_code"), [(0.5, 0), (0.6, 1)])
def test_a_missed_goal_is_an_exit_code(
    value: float, exit_code: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    figures = [ExporterFigure(name="overhead", value=value, unit="% of a step", goal=0.5)]
    monkeypatch.setattr(module, "measure_exporter", lambda repeats: figures)
    assert run(["exporter", "--json"]) == exit_code
    assert json.loads(capsys.readouterr().out.splitlines()[-1])[0]["value"] == value
