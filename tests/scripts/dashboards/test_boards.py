"""Dashboards: complete, well-formed, and answered by a real Prometheus that reads a run's exporter."""

from __future__ import annotations

import time
from pathlib import Path

import pytest
from pydantic import BaseModel, ConfigDict, Field, JsonValue
from pydantic.alias_generators import to_camel

from megarl.observe.catalogue import METRICS, PREFIX
from megarl.observe.metrics import TARGETS_FILE, MetricsEndpoint, Targets
from scripts.dashboards.monitoring import DASHBOARDS
from scripts.dashboards.panels import Dashboard, metrics_in, names_in, to_grafana
from tests.observe.prometheus import prometheus
from tests.observe.scripted_run import ScriptedRun

QUERIES = [query for board in DASHBOARDS for query in board.queries]


class Strict(BaseModel):
    """Of Grafana's published schema, version 39, the fields that we write; others are a mistake."""

    model_config = ConfigDict(extra="forbid", strict=True, alias_generator=to_camel)


class GridPos(Strict):
    x: int = Field(ge=0, lt=24)
    y: int = Field(ge=0)
    w: int = Field(gt=0, le=24)
    h: int = Field(gt=0)


class DataSource(Strict):
    type: str = Field(pattern="^prometheus$")
    uid: str = Field(min_length=1)


class Target(Strict):
    ref_id: str = Field(pattern="^[A-Z]$")
    datasource: DataSource
    expr: str = Field(min_length=1)
    legend_format: str
    range: bool
    instant: bool
    format: str = Field(pattern="^(time_series|table|heatmap)$")


class FieldConfig(Strict):
    defaults: dict[str, JsonValue]
    overrides: list[JsonValue]


class GrafanaPanel(Strict):
    id: int = Field(gt=0)
    type: str = Field(pattern="^(row|timeseries|stat|gauge|table)$")
    title: str = Field(min_length=1)
    grid_pos: GridPos
    description: str = ""
    datasource: DataSource | None = None
    field_config: FieldConfig | None = None
    options: dict[str, JsonValue] | None = None
    targets: list[Target] = []
    collapsed: bool | None = None
    panels: list[JsonValue] = []


class Variables(Strict):
    list: list[dict[str, JsonValue]]


class GrafanaDashboard(Strict):
    uid: str = Field(pattern="^[a-zA-Z0-9_-]{1,40}$")
    title: str = Field(min_length=1)
    description: str
    tags: list[str]
    schema_version: int = Field(ge=36)
    version: int
    editable: bool
    graph_tooltip: int = Field(ge=0, le=2)
    timezone: str
    refresh: str
    time: dict[str, str]
    links: list[dict[str, JsonValue]]
    annotations: dict[str, list[JsonValue]]
    templating: Variables
    panels: list[GrafanaPanel]


@pytest.mark.parametrize("board", DASHBOARDS, ids=lambda board: board.uid)
def test_a_dashboard_has_the_fields_that_grafana_publishes(board: Dashboard) -> None:
    drawn = GrafanaDashboard.model_validate(to_grafana(board))
    ids = [panel.id for panel in drawn.panels]
    assert len(ids) == len(set(ids))
    for panel in drawn.panels:
        assert (panel.type == "row") == (not panel.targets)
        references = [target.ref_id for target in panel.targets]
        assert len(references) == len(set(references))
    assert [variable["name"] for variable in drawn.templating.list] == ["datasource", "run"]


def test_every_name_on_a_panel_is_in_the_catalogue() -> None:
    known = {name for metric in METRICS for name in metric.stored_names}
    assert {name for query in QUERIES for name in names_in(query.text, PREFIX)} <= known


def test_every_metric_is_on_a_panel() -> None:
    shown = {metric for query in QUERIES for metric in metrics_in(query.text, METRICS)}
    assert set(METRICS) - shown == set()


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
