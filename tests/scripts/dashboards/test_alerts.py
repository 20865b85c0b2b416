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

# A sample a minute for six hours; `a+bxn` begins with a and adds b n times.
HEALTHY: Mapping[str, str] = {
    "last_step_timestamp_seconds": "0+60x360",
    "run_start_timestamp_seconds": "0x360",
    "step_seconds": "60x360",
    "tokens_per_second": "1000x360",
    "staleness_max_steps": "1x360",
    "staleness_limit_steps": "1x360",
    "rollout_weight_version": "0+1x360",
    'engine_weight_version{engine="0"}': "0+1x360",
    "publish_failures_total": "0x360",
    "publish_seconds": "2x360",
    "engine_mismatch_mean": "0.004x360",
    "mismatch_baseline": "0.004x360",
    "update_kl_nats": "0.001x360",
    "reference_kl_nats": "0.2x360",
    "entropy_nats": "0.5-0.0005x360",
    "reward_mean": "0.3+0.001x360",
    'eval{number="accuracy"}': "0.3+0.001x360",
    "response_repetition_ratio": "0.02x360",
    "response_mean_tokens": "800+1x360",
    "response_empty_ratio": "0x360",
    "skipped_updates_total": "0x360",
    "grad_norm": "0.5x360",
    "explained_variance_ratio": "0.6x360",
    "zero_signal_group_ratio": "0.3x360",
    "response_truncated_ratio": "0.05x360",
    'engines{state="healthy"}': "4x360",
    'engines{state="dead"}': "0x360",
    'restarts_total{role="rollout"}': "0x60 1x300",
    'stragglers_total{role="rollout"}': "0x360",
    "excluded_nodes": "0x360",
    'rollout_retries_total{cause="EngineError"}': "0+1x360",
    "generated_rollouts_total": "0+512x360",
    'reward_failures_total{cause="late"}': "0+1x360",
    "reward_seconds_count": "0+512x360",
    'dropped_groups_total{cause="equal"}': "0+16x360",
    "trained_prompts_total": "0+64x360",
    "trainer_wait_ratio": "0.2x360",
    "producer_wait_ratio": "0.2x360",
    "queue_groups": "8x360",
    "queue_capacity_groups": "128x360",
    "step": "0+1x360",
    "checkpoint_step": "0x50 50x50 100x50 150x50 200x50 250x50 300x60",
    "checkpoint_interval_steps": "50x360",
    "checkpoint_failures_total": "0x360",
    "checkpoint_free_bytes": "1000000000000x360",
    "checkpoint_bytes": "100000000000x360",
    'gpu_memory_allocated_bytes{role="actor"}': "60000000000x360",
    'gpu_memory_total_bytes{role="actor"}': "80000000000x360",
    'host_memory_available_bytes{role="actor"}': "500000000000x360",
    'host_memory_total_bytes{role="actor"}': "1000000000000x360",
    'up{job="megarl",instance="127.0.0.1:9464"}': "1x360",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Trouble:
    """What is otherwise than in a healthy run, and what is said then."""

    series: Mapping[str, str | None]
    """None is not there."""
    summary: str
    labels: Mapping[str, str] = field(default_factory=dict)


TROUBLES: Mapping[str, Trouble] = {
    "NoProgress": Trouble(
        series={"last_step_timestamp_seconds": "0+60x290 17400x70"},
        summary="no step for 10m 0s, five times the usual",
    ),
    "NeverStarted": Trouble(
        series={"step_seconds": None, "last_step_timestamp_seconds": None},
        summary="no step in the 5h 0m 0s since it was started",
    ),
    "ThroughputDrop": Trouble(
        series={"tokens_per_second": "1000x240 500x120"},
        summary="500 tokens/s, less than 70 % of the three hours before",
    ),
    "StaleWeights": Trouble(
        series={"staleness_max_steps": "1x299 3x60"},
        summary="trained on tokens 3 steps old, more than the recipe allows",
    ),
    "EngineStale": Trouble(
        series={'engine_weight_version{engine="0"}': "0+1x280 280x80"},
        labels={"engine": "0"},
        summary="engine 0 is 20 updates behind and gets no request",
    ),
    "PublishFailed": Trouble(
        series={"publish_failures_total": "0x295 1x60"},
        summary="a version was not published; it is sent again, and its engines wait for it",
    ),
    "PublishSlow": Trouble(
        series={"publish_seconds": "2x270 30x90"},
        summary="a publish takes 30s, three times as long as before",
    ),
    "Mismatch": Trouble(
        series={"engine_mismatch_mean": "0.004x270 0.05x90"},
        summary="trainer and engines differ by 50m, three times as at first",
    ),
    "MismatchSevere": Trouble(
        series={"engine_mismatch_mean": "0.004x299 0.2x60"},
        summary="engines do not serve what is trained, differing by 200m",
    ),
    "KlBlowUp": Trouble(
        series={"update_kl_nats": "0.001x280 0.5x80"},
        summary="the policy moves by 500m nats",
    ),
    "EntropyCollapse": Trouble(
        series={"entropy_nats": "0.5x270 0.1x90"},
        summary="entropy is 100m nats, a third of what it was",
    ),
    "RewardHacking": Trouble(
        series={'eval{number="accuracy"}': "0.6-0.001x360", "response_repetition_ratio": "0.3x360"},
        summary="the reward rises while held-out accuracy falls and responses grow or repeat",
    ),
    "DegenerateResponses": Trouble(
        series={"response_empty_ratio": "0x270 0.9x90"},
        summary="half of what the policy writes is empty or repeats itself",
    ),
    "NonFinite": Trouble(
        series={"skipped_updates_total": "0x295 1x60"},
        summary="an update was skipped, its loss or gradient was not finite",
    ),
    "GradientSpike": Trouble(
        series={"grad_norm": "0.5x290 20x70"},
        summary="the gradient norm is 20, ten times what it was",
    ),
    "CriticUseless": Trouble(
        series={"explained_variance_ratio": "0.6x200 -0.5x160"},
        summary="the critic's explained variance is -500m, a constant's is 0",
    ),
    "ZeroVarianceGroups": Trouble(
        series={"zero_signal_group_ratio": "0.3x250 0.9x110"},
        summary="90% of the groups teach nothing",
    ),
    "Truncation": Trouble(
        series={"response_truncated_ratio": "0.05x250 0.5x110"},
        summary="50% of the responses are cut at the length limit",
    ),
    "EngineDown": Trouble(
        series={'engines{state="healthy"}': "4x290 2x70", 'engines{state="dead"}': "0x290 2x70"},
        summary="50% of the engines are gone",
    ),
    "RestartLoop": Trouble(
        series={'restarts_total{role="rollout"}': "0x280 0+1x80"},
        labels={"role": "rollout"},
        summary="rollout started again 19 times in 30 minutes",
    ),
    "Straggler": Trouble(
        series={'stragglers_total{role="rollout"}': "0x270 1x90"},
        labels={"role": "rollout"},
        summary="a process of rollout was named slow 1 times",
    ),
    "NodeExcluded": Trouble(
        series={"excluded_nodes": "0x270 1x90"}, summary="1 node(s) get no engine any more after repeated faults"
    ),
    "RolloutRetries": Trouble(
        series={'rollout_retries_total{cause="EngineError"}': "0x270 0+100x90"},
        summary="more than 5 % of the requests to engines are sent again",
    ),
    "RewardErrors": Trouble(
        series={'reward_failures_total{cause="late"}': "0x270 0+100x90"},
        summary="more than 1 % of the rollouts get no score",
    ),
    "GroupsDropped": Trouble(
        series={'dropped_groups_total{cause="equal"}': "0+300x360"},
        summary="for each group that is trained on, more than two are thrown away",
    ),
    "QueueStarved": Trouble(
        series={"trainer_wait_ratio": "0.8x360", "queue_groups": "0x360"},
        summary="the trainer waits for rollouts 80% of the time",
    ),
    "QueueFull": Trouble(
        series={"producer_wait_ratio": "0.8x360", "queue_groups": "100x360"},
        summary="the engines wait for the trainer 80% of the time",
    ),
    "CheckpointTooOld": Trouble(
        series={"checkpoint_step": "0x360"},
        summary="300 steps since the newest checkpoint, more than two intervals",
    ),
    "CheckpointFailed": Trouble(
        series={"checkpoint_failures_total": "0x290 1x70"},
        summary="a checkpoint was not saved",
    ),
    "DiskFills": Trouble(
        series={"checkpoint_free_bytes": "150000000000x360"},
        summary="139.7GiB free, less than the next two checkpoints need",
    ),
    "GpuMemoryHigh": Trouble(
        series={'gpu_memory_allocated_bytes{role="actor"}': "78000000000x360"},
        labels={"role": "actor"},
        summary="actor fills its GPUs to 97.5%",
    ),
    "HostMemoryHigh": Trouble(
        series={'host_memory_available_bytes{role="actor"}': "20000000000x360"},
        labels={"role": "actor"},
        summary="2% of actor's host memory is left",
    ),
    "TargetDown": Trouble(
        series={'up{job="megarl",instance="127.0.0.1:9464"}': "1x290 0x70"},
        labels={"job": "megarl", "instance": "127.0.0.1:9464"},
        summary="megarl at 127.0.0.1:9464 does not answer Prometheus",
    ),
}


def test_every_alert_is_tried() -> None:
    assert list(TROUBLES) == [alert.name for alert in ALERTS]


def test_every_name_in_a_rule_is_in_the_catalogue() -> None:
    known = {name for metric in METRICS for name in metric.stored_names}
    assert {name for alert in ALERTS for name in names_in(alert.text, PREFIX)} <= known


def test_every_alert_has_a_chapter_in_the_runbook() -> None:
    text = (ROOT / RUNBOOK).read_text()
    chapters = [line.removeprefix("## ") for line in text.splitlines() if line.startswith("## ")]
    assert chapters == [alert.full_name for alert in ALERTS]
    when = {alert.name: "at once" if alert.lasting == "0s" else f"after {alert.lasting}" for alert in ALERTS}
    begins = [f"## {alert.full_name}\n\n{alert.severity}, {when[alert.name]}\n" for alert in ALERTS]
    assert [begin for begin in begins if begin not in text] == []


def test_the_files_in_the_package_are_what_the_code_writes() -> None:
    assert {path.name: path.read_text() for path in FOLDER.iterdir()} == monitoring_files()


@pytest.mark.needs("prometheus")
def test_prometheus_accepts_the_rules(tmp_path: Path) -> None:
    write_monitoring(tmp_path)
    promtool("check", "rules", str(tmp_path / RULES_FILE))


@pytest.mark.needs("prometheus")
def test_every_alert_fires_when_it_should_and_none_in_a_healthy_run(tmp_path: Path) -> None:
    write_monitoring(tmp_path)
    tests = [healthy(), *(troubled(alert, TROUBLES[alert.name]) for alert in ALERTS)]
    case = {"rule_files": [RULES_FILE], "evaluation_interval": "2m", "tests": tests}
    (tmp_path / "test.yaml").write_text(yaml.safe_dump(case, width=1000))
    promtool("test", "rules", str(tmp_path / "test.yaml"))


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
