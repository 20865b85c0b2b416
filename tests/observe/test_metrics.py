from __future__ import annotations

import socket
from collections.abc import Iterator
from dataclasses import fields

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families

from megarl.errors import MachineError
from megarl.observe.events import Event, StepFinished
from megarl.observe.metrics import Metrics, MetricsEndpoint
from megarl.observe.summary import RewardOutlier
from megarl.types import UpdateStats
from tests.observe.samples import (
    checkpoint_saved,
    evaluated,
    grades,
    one_of_each,
    published,
    records,
    run_started,
    step_finished,
    step_summary,
)


@pytest.fixture
def metrics() -> Metrics:
    return Metrics("sample")


@pytest.fixture
def endpoint(metrics: Metrics) -> Iterator[MetricsEndpoint]:
    endpoint = MetricsEndpoint(metrics.registry, port=0)
    yield endpoint
    endpoint.close()


def scrape(url: str) -> dict[str, float]:
    """Values by name and labels, as Prometheus reads them; `run` is checked and left out."""
    text = httpx.get(url, timeout=10).raise_for_status().text
    values: dict[str, float] = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            labels = dict(sample.labels)
            assert labels.pop("run") == "sample"
            values[sample.name + "".join(f"{{{value}}}" for value in labels.values())] = sample.value
    return values


def test_the_endpoint_serves_what_the_run_told(metrics: Metrics, endpoint: MetricsEndpoint) -> None:
    told: list[Event] = [
        run_started(),
        published(2),
        step_finished(1),
        step_finished(2),
        evaluated(2, 0.875),
        checkpoint_saved(2),
    ]
    for record in records(told):
        metrics.record(record)
    values = scrape(endpoint.url)
    assert values["megarl_step"] == 2
    assert values["megarl_last_step_timestamp_seconds"] == records([run_started()] * 4)[3].time.timestamp()
    assert values["megarl_trained_tokens_total"] == 4800
    assert values["megarl_phase_seconds_total{generate}"] == 3.0
    assert values["megarl_tokens_per_second"] == 1200
    assert values["megarl_reward_mean"] == 0.5
    assert values["megarl_score_mean{format}"] == 0.9
    assert values["megarl_zero_signal_group_ratio"] == 0.25
    assert values["megarl_response_tokens_mean"] == 3.5
    assert values["megarl_response_truncated_ratio"] == 0.0625
    assert values["megarl_actor_weight_version"] == 2
    assert values["megarl_rollout_weight_version"] == 2
    assert values["megarl_publish_seconds"] == 0.25
    assert values["megarl_publish_bytes"] == 4096
    assert values["megarl_eval{accuracy}"] == 0.875
    assert values["megarl_eval_by_source{accuracy}{arithmetic}"] == 0.875
    assert values["megarl_eval_step"] == 2
    assert values["megarl_checkpoint_step"] == 2
    assert values["megarl_checkpoint_blocking_seconds"] == 0.25
    assert values["megarl_checkpoint_seconds"] == 1.5
    assert values["megarl_oldest_trained_version"] == 1
    assert values["megarl_single_rollout_groups"] == 1
    assert values["megarl_zero_signal_steps_total"] == 0


def test_every_number_of_an_evaluation_is_a_metric_overall_and_by_source(
    metrics: Metrics, endpoint: MetricsEndpoint
) -> None:
    sampled = grades(0.5, rollouts_per_prompt=8, pass_at={1: 0.5, 8: 0.75})
    for record in records([evaluated(2, 0.875, sampled=sampled)]):
        metrics.record(record)
    values = scrape(endpoint.url)
    expected = {"accuracy": 0.875, "mean@8": 0.5, "pass@1": 0.5, "pass@8": 0.75, "majority@8": 0.5}
    assert {name: values[f"megarl_eval{{{name}}}"] for name in expected} == expected
    assert {name: values[f"megarl_eval_by_source{{{name}}}{{arithmetic}}"] for name in expected} == expected


def test_what_teaches_nothing_or_does_not_fit_is_counted(metrics: Metrics, endpoint: MetricsEndpoint) -> None:
    outlier = RewardOutlier(prompt_uid="train.parquet:7", reward=-1000)
    for step in (1, 2):
        summary = step_summary(step, num_zero_signal_groups=8, dropped_groups={"equal": 5}, outlier=outlier)
        for record in records([StepFinished(summary=summary, phase_seconds={})]):
            metrics.record(record)
    values = scrape(endpoint.url)
    assert values["megarl_zero_signal_steps_total"] == 2
    assert values["megarl_zero_signal_group_ratio"] == 1
    assert values["megarl_dropped_groups_total{equal}"] == 10
    assert values["megarl_reward_outliers_total"] == 6


def test_every_float_of_an_update_is_a_metric(metrics: Metrics, endpoint: MetricsEndpoint) -> None:
    finished = step_finished(1)
    for record in records([finished]):
        metrics.record(record)
    values = scrape(endpoint.url)
    names = [field.name for field in fields(UpdateStats) if not field.name.startswith("num_")]
    assert {name: values[f"megarl_{name}"] for name in names} == {
        name: getattr(finished.summary.update, name) for name in names
    }


def test_what_is_not_known_is_absent_rather_than_zero(metrics: Metrics, endpoint: MetricsEndpoint) -> None:
    for record in records([run_started(), step_finished(1, reward=None)]):
        metrics.record(record)
    values = scrape(endpoint.url)
    assert "megarl_loss" in values
    assert not {"megarl_reward_mean", "megarl_eval{accuracy}", "megarl_rollout_weight_version"} & set(values)


def test_every_event_can_be_recorded(metrics: Metrics, endpoint: MetricsEndpoint) -> None:
    for record in records(one_of_each()):
        metrics.record(record)
    assert scrape(endpoint.url)["megarl_warnings_total"] == 1


def test_a_port_in_use_is_one_line_that_names_the_key(metrics: Metrics) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(MachineError) as caught:
            MetricsEndpoint(metrics.registry, port=port)
    assert str(caught.value) == (
        f"observe.metrics_port: cannot listen on 127.0.0.1:{port}: Address already in use; "
        "choose another port, 0 for any free one, or null for none"
    )


def test_only_loopback_is_listened_on(endpoint: MetricsEndpoint) -> None:
    assert endpoint.url.startswith("http://127.0.0.1:")


def test_a_closed_endpoint_frees_its_port(metrics: Metrics) -> None:
    endpoint = MetricsEndpoint(metrics.registry, port=0)
    port = httpx.URL(endpoint.url).port
    assert port is not None
    endpoint.close()
    MetricsEndpoint(metrics.registry, port=port).close()
