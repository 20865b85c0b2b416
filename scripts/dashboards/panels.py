"""The parts of a Grafana dashboard: panels with queries over the catalogue, and their JSON."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

from pydantic import JsonValue

from megarl.observe.catalogue import METRICS, Metric, Section

SCHEMA_VERSION = 39
"""The schema of Grafana 10.4; older servers refuse it, newer ones migrate it."""
COLUMNS = 24
_SELECTOR = 'run=~"$run"'
_DATASOURCE: dict[str, JsonValue] = {"type": "prometheus", "uid": "${datasource}"}

Kind = Literal["timeseries", "stat", "gauge", "table"]
Unit = Literal["short", "percentunit", "s", "bytes", "none", "ops", "dateTimeFromNow", "sci"]
Needs = Literal["components", "critic", "gpu", "mixture", "pairs", "reference", "staleness"]
"""Parts that a run must have beside a trainer and engines for a query to have data."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Query:
    text: str
    """PromQL; `$run` is the selected runs."""
    legend: str
    needs: Needs | None = None

    def needing(self, needs: Needs) -> Query:
        return replace(self, needs=needs)


@dataclass(frozen=True, slots=True, kw_only=True)
class Panel:
    title: str
    queries: tuple[Query, ...]
    unit: Unit = "short"
    kind: Kind = "timeseries"
    text: str = ""
    """Healthy values, for people who do not know the metric."""
    width: int = 8
    height: int = 7
    is_log: bool = False
    is_stacked: bool = False
    max: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class PanelRow:
    title: str
    panels: tuple[Panel, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Dashboard:
    uid: str
    """Also the name of its file, without the suffix."""
    title: str
    text: str
    sections: tuple[Section, ...]
    """Sections of the catalogue whose metrics belong on this board; one that no row shows gets a panel at the end."""
    rows: tuple[PanelRow, ...]

    @property
    def queries(self) -> tuple[Query, ...]:
        return tuple(query for row in self.rows for panel in row.panels for query in panel.queries)


def complete(boards: Sequence[Dashboard]) -> tuple[Dashboard, ...]:
    """Add a panel for each metric of the catalogue that no board shows."""
    shown = {metric for board in boards for query in board.queries for metric in metrics_in(query.text, METRICS)}
    complete_boards = []
    for board in boards:
        others = tuple(_panel_of(m) for m in METRICS if m.section in board.sections and m not in shown)
        rows = (*board.rows, PanelRow(title="Other", panels=others)) if others else board.rows
        complete_boards.append(replace(board, rows=rows))
    return tuple(complete_boards)


def _panel_of(metric: Metric) -> Panel:
    units: dict[str, Unit] = {"seconds": "s", "bytes": "bytes", "ratio": "percentunit", "per_second": "ops"}
    queries = {"gauge": value, "counter": increase, "histogram": mean}
    return Panel(title=metric.text, unit=units.get(metric.unit, "short"), queries=(queries[metric.kind](metric),))


def value(metric: Metric, legend: str = "", *, where: str = "") -> Query:
    """Return a query of the metric itself, one line per set of labels; `where` selects some of them."""
    selector = f"{_SELECTOR},{where}" if where else _SELECTOR
    labels = " ".join(f"{{{{{label}}}}}" for label in metric.labels)
    return Query(text=f"{metric.full_name}{{{selector}}}", legend=_legend(f"{legend} {labels}".strip()))


def rate(metric: Metric, legend: str = "", *, where: str = "") -> Query:
    """Return a query of how fast a counter grows, per second."""
    plain = value(metric, legend, where=where)
    return replace(plain, text=f"rate({plain.text}[$__rate_interval])")


def increase(metric: Metric, legend: str = "") -> Query:
    """Return a query of how much a counter has grown in the last hour."""
    plain = value(metric, legend)
    return replace(plain, text=f"increase({plain.text}[1h])")


def quantile(metric: Metric, share: float) -> Query:
    """Return a query of a quantile of a histogram."""
    text = f"histogram_quantile({share}, sum by (run, le) (rate({metric.full_name}_bucket{{{_SELECTOR}}}[5m])))"
    return Query(text=text, legend=_legend(f"p{share * 100:g}"))


def mean(metric: Metric) -> Query:
    """Return a query of the mean of a histogram."""
    sums, counts = (f"rate({metric.full_name}_{part}{{{_SELECTOR}}}[5m])" for part in ("sum", "count"))
    return Query(text=f"{sums} / {counts}", legend=_legend("mean"))


def formula(text: str, legend: str) -> Query:
    """Return a query of any PromQL; `{run}` becomes the selector of the selected runs."""
    return Query(text=text.replace("{run}", f"{{{_SELECTOR}}}"), legend=_legend(legend))


def of_engine(name: str) -> Query:
    """Return a query of a metric of SGLang: `sglang:name`, or `sglang_name` where Prometheus asks for OpenMetrics."""
    return Query(text=f'{{__name__=~"sglang[:_]{name}",{_SELECTOR}}}', legend=_legend("engine {{engine}}"))


def _legend(name: str) -> str:
    return f"{name} ({{{{run}}}})" if name else "{{run}}"


def to_grafana(dashboard: Dashboard) -> dict[str, JsonValue]:
    panels: list[JsonValue] = []
    top = 0
    for row in dashboard.rows:
        panels.append(_row(row, panel_id=len(panels) + 1, top=top))
        top += 1
        left, height = 0, 0
        for panel in row.panels:
            if left + panel.width > COLUMNS:
                left, top, height = 0, top + height, 0
            panels.append(_panel(panel, panel_id=len(panels) + 1, left=left, top=top))
            left, height = left + panel.width, max(height, panel.height)
        top += height
    return {
        "uid": dashboard.uid,
        "title": dashboard.title,
        "description": dashboard.text,
        "tags": ["megarl"],
        "schemaVersion": SCHEMA_VERSION,
        "version": 1,
        "editable": True,
        "graphTooltip": 1,
        "timezone": "browser",
        "refresh": "10s",
        "time": {"from": "now-6h", "to": "now"},
        "links": [
            {
                "type": "dashboards",
                "title": "megarl",
                "tags": ["megarl"],
                "asDropdown": False,
                "includeVars": True,
                "keepTime": True,
            }
        ],
        "annotations": {"list": []},
        "templating": {"list": _variables()},
        "panels": panels,
    }


def _variables() -> list[JsonValue]:
    return [
        {"name": "datasource", "label": "data source", "type": "datasource", "query": "prometheus"},
        {
            "name": "run",
            "label": "run",
            "type": "query",
            "datasource": _DATASOURCE,
            "query": {"query": "label_values(megarl_run_info, run)", "refId": "run"},
            "definition": "label_values(megarl_run_info, run)",
            "refresh": 2,
            "sort": 1,
            "multi": True,
            "includeAll": True,
            "allValue": ".+",
            "current": {"text": "All", "value": "$__all"},
        },
    ]


def _row(row: PanelRow, *, panel_id: int, top: int) -> JsonValue:
    return {
        "id": panel_id,
        "type": "row",
        "title": row.title,
        "collapsed": False,
        "gridPos": {"x": 0, "y": top, "w": COLUMNS, "h": 1},
        "panels": [],
    }


def _panel(panel: Panel, *, panel_id: int, left: int, top: int) -> JsonValue:
    return {
        "id": panel_id,
        "type": panel.kind,
        "title": panel.title,
        "description": panel.text,
        "datasource": _DATASOURCE,
        "gridPos": {"x": left, "y": top, "w": panel.width, "h": panel.height},
        "fieldConfig": {"defaults": _defaults(panel), "overrides": []},
        "options": _options(panel),
        "targets": [_target(query, index, panel) for index, query in enumerate(panel.queries)],
    }


def _defaults(panel: Panel) -> dict[str, JsonValue]:
    defaults: dict[str, JsonValue] = {"unit": panel.unit}
    if panel.max is not None:
        defaults |= {"min": 0, "max": panel.max}
    if panel.kind == "timeseries":
        defaults["custom"] = {
            "lineWidth": 2,
            "fillOpacity": 30 if panel.is_stacked else 0,
            "showPoints": "auto",
            "spanNulls": True,
            "stacking": {"mode": "normal" if panel.is_stacked else "none", "group": "A"},
            "scaleDistribution": {"type": "log", "log": 10} if panel.is_log else {"type": "linear"},
        }
    return defaults


def _options(panel: Panel) -> dict[str, JsonValue]:
    reduce: dict[str, JsonValue] = {"calcs": ["lastNotNull"], "fields": "", "values": False}
    match panel.kind:
        case "timeseries":
            return {
                "legend": {"displayMode": "list", "placement": "bottom", "showLegend": True, "calcs": []},
                "tooltip": {"mode": "multi", "sort": "desc"},
            }
        case "stat":
            return {"reduceOptions": reduce, "graphMode": "area", "colorMode": "value", "textMode": "auto"}
        case "gauge":
            return {"reduceOptions": reduce, "showThresholdLabels": False, "showThresholdMarkers": True}
        case "table":
            return {"showHeader": True}


def _target(query: Query, index: int, panel: Panel) -> JsonValue:
    is_table = panel.kind == "table"
    return {
        "refId": chr(ord("A") + index),
        "datasource": _DATASOURCE,
        "expr": query.text,
        "legendFormat": query.legend,
        "range": not is_table,
        "instant": is_table,
        "format": "table" if is_table else "time_series",
    }


def metrics_in(text: str, metrics: Sequence[Metric]) -> set[Metric]:
    """Return the metrics that a query reads."""
    words = set(_words(text))
    return {metric for metric in metrics if words & set(metric.stored_names)}


def names_in(text: str, prefix: str) -> set[str]:
    """Return the names with this prefix in a query."""
    return {word for word in _words(text) if word.startswith(prefix)}


def _words(text: str) -> list[str]:
    return "".join(character if character.isalnum() or character in "_:" else " " for character in text).split()
