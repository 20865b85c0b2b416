"""Dashboards: complete, well-formed, and answered by a real Prometheus that reads a run's exporter."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest

from megarl.observe.catalogue import METRICS, PREFIX
from megarl.observe.endpoint import TARGETS_FILE, MetricsEndpoint
from megarl.observe.metrics import Targets
from scripts.dashboards.monitoring import DASHBOARDS
from scripts.dashboards.panels import Dashboard, metrics_in, names_in, to_grafana
from tests.observe.prometheus import prometheus
from tests.observe.scripted_run import ScriptedRun

QUERIES = [query for board in DASHBOARDS for query in board.queries]


# Of Grafana's published schema, version 39, the fields that we write; Grafana ignores others.
DASHBOARD = {"uid", "title", "description", "tags", "schemaVersion", "version", "editable", "graphTooltip"}
DASHBOARD |= {"timezone", "refresh", "time", "links", "annotations", "templating", "panels"}
PANEL = {"id", "type", "title", "gridPos"}
OPTIONAL = {"description", "datasource", "fieldConfig", "options", "targets", "collapsed", "panels"}
TARGET = {"refId", "datasource", "expr", "legendFormat", "range", "instant", "format"}


@pytest.mark.parametrize("board", DASHBOARDS, ids=lambda board: board.uid)
def test_a_dashboard_has_the_fields_that_grafana_publishes(board: Dashboard) -> None:
    drawn: Any = to_grafana(board)
    assert set(drawn) == DASHBOARD
    ids = [panel["id"] for panel in drawn["panels"]]
    assert len(ids) == len(set(ids))
    for panel in drawn["panels"]:
        assert PANEL <= set(panel) <= PANEL | OPTIONAL
        assert panel["type"] in {"row", "timeseries", "stat", "gauge", "table"}
        assert set(panel["gridPos"]) == set("xywh")
        targets = panel.get("targets", [])
        assert (panel["type"] == "row") == (not targets)
        assert len({target["refId"] for target in targets}) == len(targets)
        for target in targets:
            assert set(target) == TARGET
            assert target["datasource"]["type"] == "prometheus"
            assert target["format"] in {"time_series", "table", "heatmap"}
            assert target["expr"]
    assert [variable["name"] for variable in drawn["templating"]["list"]] == ["datasource", "run"]


def test_every_name_on_a_panel_is_in_the_catalogue() -> None:
    known = {name for metric in METRICS for name in metric.stored_names}
    assert {name for query in QUERIES for name in names_in(query.text, PREFIX)} <= known


def test_every_metric_is_on_a_panel() -> None:
    shown = {metric for query in QUERIES for metric in metrics_in(query.text, METRICS)}
    assert set(METRICS) - shown == set()


@pytest.mark.patient
@pytest.mark.needs("prometheus")
def test_every_query_has_an_answer_for_a_run_that_has_everything(tmp_path: Path) -> None:
    """All but SGLang's own: there is no engine here."""
    ours = [query for query in QUERIES if "sglang" not in query.text]
    run = ScriptedRun(tmp_path)
    endpoint = MetricsEndpoint(run.meter.registry, port=0)
    targets = Targets(tmp_path, run="sample", exporter=endpoint.address)
    try:
        with prometheus(tmp_path, targets=[tmp_path / TARGETS_FILE]) as server:
            for _ in range(8):  # the mismatch of the first eight is what later ones are compared with
                run.step()
            deadline = time.monotonic() + 300
            missing = ours
            while missing and time.monotonic() < deadline:
                run.step()
                time.sleep(1)
                missing = server.unanswered(missing)
            assert missing == []
    finally:
        targets.close()
        endpoint.close()
