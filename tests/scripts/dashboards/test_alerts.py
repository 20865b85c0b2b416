"""Every alert, by Prometheus's own `promtool`: fires on a series that it is about, is silent on a healthy run."""

from __future__ import annotations

import subprocess
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

import pytest
import yaml

from megarl.observe.catalogue import METRICS, PREFIX
from megarl.tools.dashboards import FOLDER, write_monitoring
from scripts.dashboards.alerts import ALERTS, RUNBOOK, Alert
from scripts.dashboards.monitoring import RULES_FILE, monitoring_files
from scripts.dashboards.panels import names_in
from tests.packages import program
from tests.repository import ROOT

EVALUATED_AT = "5h"

_CASES = yaml.safe_load((Path(__file__).parent / "alerts.yaml").read_text())
HEALTHY: Mapping[str, str] = _CASES["healthy"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Trouble:
    """What is otherwise than in a healthy run, and what is said then."""

    series: Mapping[str, str | None]
    """None is not there."""
    summary: str
    labels: Mapping[str, str] = field(default_factory=dict)


TROUBLES = {name: Trouble(**case) for name, case in _CASES["troubles"].items()}


def test_every_alert_is_tried() -> None:
    assert list(TROUBLES) == [alert.name for alert in ALERTS]


def test_every_name_in_a_rule_is_in_the_catalogue() -> None:
    known = {name for metric in METRICS for name in metric.stored_names}
    assert {name for alert in ALERTS for name in names_in(alert.text, PREFIX)} <= known


def test_every_alert_has_a_chapter_in_the_runbook() -> None:
    text = (ROOT / RUNBOOK).read_text()
    chapters = [line.removeprefix("## ") for line in text.splitlines() if line.startswith("## ")]
    assert chapters == [alert.full_name for alert in ALERTS]


def test_the_files_in_the_package_are_what_the_code_writes() -> None:
    assert {path.name: path.read_text() for path in FOLDER.iterdir()} == monitoring_files()


@pytest.mark.needs("prometheus")
def test_prometheus_accepts_the_rules(tmp_path: Path) -> None:
    write_monitoring(tmp_path)
    promtool("check", "rules", str(tmp_path / RULES_FILE))


@pytest.mark.patient
@pytest.mark.needs("prometheus")
def test_every_alert_fires_when_it_should_and_none_in_a_healthy_run(tmp_path: Path) -> None:
    """Each beside no other rule, all of which Prometheus would compute for each of them."""
    write_monitoring(tmp_path)
    groups = yaml.safe_load((tmp_path / RULES_FILE).read_text())["groups"]
    rules = {rule["alert"]: rule for group in groups for rule in group["rules"]}
    cases = {RULES_FILE: healthy()}
    for alert in ALERTS:
        own = {"groups": [{"name": "own", "rules": [rules.pop(alert.full_name)]}]}
        (tmp_path / f"{alert.name}.yaml").write_text(yaml.safe_dump(own, width=1000))
        cases[f"{alert.name}.yaml"] = troubled(alert, TROUBLES[alert.name])
    assert rules == {}
    for file, case in cases.items():
        test = {"rule_files": [file], "evaluation_interval": "2m", "tests": [case]}
        (tmp_path / f"test_{file}").write_text(yaml.safe_dump(test, width=1000))
    promtool("test", "rules", *(str(tmp_path / f"test_{file}") for file in cases))


def healthy() -> dict[str, object]:
    quiet = [
        {"eval_time": time, "alertname": alert.full_name, "exp_alerts": []}
        for alert in ALERTS
        for time in ("2m", "30m", "2h", EVALUATED_AT)
    ]
    return {"name": "healthy", "interval": "1m", "input_series": series(HEALTHY), "alert_rule_test": quiet}


def troubled(alert: Alert, trouble: Trouble) -> dict[str, object]:
    assert set(trouble.series) <= set(HEALTHY), f"{alert.name}: {set(trouble.series) - set(HEALTHY)}"
    values = {name: value for name, value in {**HEALTHY, **trouble.series}.items() if value is not None}
    expected = {
        "exp_labels": {"severity": alert.severity, "run": "a", **trouble.labels},
        "exp_annotations": {
            "summary": f"run a: {trouble.summary}",
            "runbook": f"{RUNBOOK}#{alert.full_name.lower()}",
        },
    }
    fires = {"eval_time": EVALUATED_AT, "alertname": alert.full_name, "exp_alerts": [expected]}
    return {"name": alert.name, "interval": "1m", "input_series": series(values), "alert_rule_test": [fires]}


def series(values: Mapping[str, str]) -> list[dict[str, str]]:
    return [{"series": _named(name), "values": value} for name, value in values.items()]


def _named(name: str) -> str:
    bare, _, labels = name.partition("{")
    prefix = "" if bare == "up" else PREFIX
    return f'{prefix}{bare}{{run="a",{labels}' if labels else f'{prefix}{bare}{{run="a"}}'


def promtool(*words: str) -> None:
    done = subprocess.run([program("promtool"), *words], capture_output=True, text=True, timeout=600, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
