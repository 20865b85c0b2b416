from __future__ import annotations

from collections.abc import Iterator
from dataclasses import fields
from pathlib import Path

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families

from megarl.observe.catalogue import METRICS
from megarl.observe.events import Event, StepFinished
from megarl.observe.meter import Meter
from megarl.observe.metrics import Metrics
from megarl.observe.prometheus import MetricsEndpoint
from megarl.observe.summary import RewardOutlier
from megarl.results import CriticStats, PreferenceStats, RankUsage, UpdateStats
from tests.observe.samples import (
    checkpoint_saved,
    engine_changed,
    evaluated,
    grades,
    one_of_each,
    published,
    records,
    run_started,
    step_finished,
    step_summary,
)
from tests.observe.scripted_run import ScriptedRun


@pytest.fixture
def meter() -> Meter:
    return Meter("sample")


@pytest.fixture
def metrics(meter: Meter) -> Metrics:
    return Metrics(meter)


@pytest.fixture
def endpoint(meter: Meter) -> Iterator[MetricsEndpoint]:
    endpoint = MetricsEndpoint(meter.registry, port=0)
    yield endpoint
    endpoint.close()


def scrape(url: str) -> dict[str, float]:
    """Values by name and labels, as Prometheus reads them; `run` is checked and left out."""
    text = httpx.get(url, timeout=60).raise_for_status().text
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
    assert values["megarl_reward_component_mean{format}"] == 0.9
    assert values["megarl_zero_signal_group_ratio"] == 0.25
    assert values["megarl_response_mean_tokens"] == 3.5
    assert values["megarl_response_truncated_ratio"] == 0.0625
    assert values["megarl_actor_weight_version"] == 2
    assert values["megarl_rollout_weight_version"] == 2
    assert values["megarl_publish_seconds"] == 0.25
    assert values["megarl_publish_total_bytes"] == 4096
    assert values["megarl_publish_bytes"] == 2048
    assert values["megarl_publish_floor_bytes"] == 1024
    assert values["megarl_train_flops_per_second"] == 2e9
    assert values["megarl_mfu_ratio"] == 0.2
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


def fields_with_a_metric(prefix: str) -> dict[str, str]:
    """Names of the metrics whose source begins with `prefix`, by the field that follows it."""
    sourced = [metric for metric in METRICS if metric.source.startswith(prefix)]
    return {metric.source.removeprefix(prefix): metric.full_name for metric in sourced}


def test_every_float_of_an_update_is_a_metric(metrics: Metrics, endpoint: MetricsEndpoint) -> None:
    finished = step_finished(1)
    for record in records([finished]):
        metrics.record(record)
    values = scrape(endpoint.url)
    of_update = fields_with_a_metric("step.update.")
    by_layer = of_update.pop("routing_disagreement.*")
    assert values[f"{by_layer}{{0}}"] == 0.03125
    assert set(of_update) == {field.name for field in fields(UpdateStats)} - {"num_sequences", "routing_disagreement"}
    assert {field: values[name] for field, name in of_update.items()} == {
        field: getattr(finished.summary.update, field) for field in of_update
    }


def test_every_number_of_a_critic_of_pairs_and_of_a_rank_is_a_metric() -> None:
    assert set(fields_with_a_metric("step.critic.")) == {field.name for field in fields(CriticStats)}
    assert set(fields_with_a_metric("step.preference.")) == {field.name for field in fields(PreferenceStats)}
    assert set(fields_with_a_metric("step.usage.*.")) == {field.name for field in fields(RankUsage)} - {"gpu_name"}


def test_every_source_gives_its_metric_a_value(tmp_path: Path) -> None:
    run = ScriptedRun(tmp_path)
    run.step()
    exported = {sample.name for family in run.meter.registry.collect() for sample in family.samples}
    assert {metric.full_name for metric in METRICS if metric.source} - exported == set()


def test_memory_is_shown_by_role(metrics: Metrics, endpoint: MetricsEndpoint) -> None:
    for record in records([step_finished(1)]):
        metrics.record(record)
    values = scrape(endpoint.url)
    assert values["megarl_resident_memory_bytes{actor}"] == 1 << 30
    assert values["megarl_gpu_memory_reserved_bytes{actor}"] == 60 << 30


def test_engines_are_counted_by_state_and_forgotten_when_they_go(metrics: Metrics, endpoint: MetricsEndpoint) -> None:
    told: list[Event] = [engine_changed(0), engine_changed(1), published(3), engine_changed(1, "stale", version=3)]
    for record in records([*told, published(4)]):
        metrics.record(record)
    values = scrape(endpoint.url)
    assert (values["megarl_engines{healthy}"], values["megarl_engines{stale}"]) == (1, 1)
    assert values["megarl_engine_weight_version{0}"] == 4
    assert values["megarl_engine_weight_version{1}"] == 3
    for record in records([engine_changed(1, "dead")]):
        metrics.record(record)
    values = scrape(endpoint.url)
    assert {state: values[f"megarl_engines{{{state}}}"] for state in ("healthy", "stale", "dead")} == {
        "healthy": 1,
        "stale": 0,
        "dead": 1,
    }
    assert "megarl_engine_weight_version{1}" not in values


def test_age_and_waiting_are_shown(metrics: Metrics, endpoint: MetricsEndpoint) -> None:
    for record in records([step_finished(1)]):
        metrics.record(record)
    values = scrape(endpoint.url)
    assert (values["megarl_staleness_mean_steps"], values["megarl_staleness_max_steps"]) == (0.5, 1)
    assert (values["megarl_trainer_wait_ratio"], values["megarl_producer_wait_ratio"]) == (0.75, 0.25)


def test_time_that_was_lost_lowers_the_effective_time(meter: Meter, endpoint: MetricsEndpoint) -> None:
    # Two seconds each: steps 1 and 2, a crash, step 2 again; the four records before take 10 s each.
    earlier = records([run_started(), step_finished(1), step_finished(2)])
    metrics = Metrics(meter, earlier=earlier)
    for record in records([run_started(), *[run_started(resumed_step=1)] * 4, step_finished(2)])[4:]:
        metrics.record(record)
    assert scrape(endpoint.url)["megarl_effective_time_ratio"] == pytest.approx(4 / 50)


def test_the_first_steps_are_what_a_mismatch_is_compared_with(metrics: Metrics, endpoint: MetricsEndpoint) -> None:
    for record in records([run_started(), *(step_finished(step) for step in range(1, 8))]):
        metrics.record(record)
    assert "megarl_mismatch_baseline" not in scrape(endpoint.url)
    for record in records([step_finished(8)]):
        metrics.record(record)
    assert scrape(endpoint.url)["megarl_mismatch_baseline"] == 5e-7


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
