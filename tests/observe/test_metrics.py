from __future__ import annotations

import json
import socket
from collections.abc import Iterator, Sequence
from dataclasses import fields
from pathlib import Path

import httpx
import pytest
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.parser import text_string_to_metric_families

from megarl.errors import DataError, MachineError
from megarl.observe import catalogue as names
from megarl.observe.catalogue import METRICS
from megarl.observe.endpoint import LINKS_FOLDER, TARGETS_FILE, MetricsEndpoint, read_targets
from megarl.observe.events import Event, StepFinished
from megarl.observe.metrics import Meter, Metrics, Targets
from megarl.observe.summary import RewardOutlier
from megarl.results import CriticStats, DraftStats, PreferenceStats, RankUsage, UpdateStats
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


def tell(metrics: Metrics, events: Sequence[Event]) -> None:
    for record in records(events):
        metrics.record(record)


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
    tell(metrics, told)
    values = scrape(endpoint.url)
    assert values["megarl_step"] == 2
    assert values["megarl_last_step_timestamp_seconds"] == records([run_started()] * 4)[3].time.timestamp()
    assert values["megarl_trained_tokens_total"] == 4800
    assert values["megarl_phase_seconds_total{generate}"] == 3.0
    assert values["megarl_tokens_per_second"] == 1200
    assert values["megarl_computed_tokens_ratio"] == 0.75
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
    assert values["megarl_resident_memory_bytes{actor}"] == 1 << 30
    assert values["megarl_gpu_memory_reserved_bytes{actor}"] == 60 << 30
    assert (values["megarl_staleness_mean_steps"], values["megarl_staleness_max_steps"]) == (0.5, 1)
    assert (values["megarl_trainer_wait_ratio"], values["megarl_producer_wait_ratio"]) == (0.75, 0.25)


def test_every_number_of_an_evaluation_is_a_metric_overall_and_by_source(
    metrics: Metrics, endpoint: MetricsEndpoint
) -> None:
    sampled = grades(0.5, rollouts_per_prompt=8, pass_at={1: 0.5, 8: 0.75})
    tell(metrics, [evaluated(2, 0.875, sampled=sampled)])
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
    tell(metrics, [finished])
    values = scrape(endpoint.url)
    of_update = fields_with_a_metric("step.update.")
    by_layer = of_update.pop("routing_disagreement.*")
    assert values[f"{by_layer}{{0}}"] == 0.03125
    assert set(of_update) == {field.name for field in fields(UpdateStats)} - {"num_sequences", "routing_disagreement"}
    assert {field: values[name] for field, name in of_update.items()} == {
        field: getattr(finished.summary.update, field) for field in of_update
    }


def test_every_number_of_a_critic_a_draft_pairs_and_a_rank_is_a_metric() -> None:
    assert set(fields_with_a_metric("step.critic.")) == {field.name for field in fields(CriticStats)}
    assert set(fields_with_a_metric("step.draft.")) == {field.name for field in fields(DraftStats)}
    assert set(fields_with_a_metric("step.preference.")) == {field.name for field in fields(PreferenceStats)}
    assert set(fields_with_a_metric("step.usage.*.")) == {field.name for field in fields(RankUsage)} - {"gpu_name"}


def test_every_source_gives_its_metric_a_value(tmp_path: Path) -> None:
    run = ScriptedRun(tmp_path)
    run.step()
    exported = {sample.name for family in run.meter.registry.collect() for sample in family.samples}
    assert {metric.full_name for metric in METRICS if metric.source} - exported == set()


def test_engines_are_counted_by_state_and_forgotten_when_they_go(metrics: Metrics, endpoint: MetricsEndpoint) -> None:
    told: list[Event] = [engine_changed(0), engine_changed(1), published(3), engine_changed(1, "stale", version=3)]
    tell(metrics, [*told, published(4)])
    values = scrape(endpoint.url)
    assert (values["megarl_engines{healthy}"], values["megarl_engines{stale}"]) == (1, 1)
    assert values["megarl_engine_weight_version{0}"] == 4
    assert values["megarl_engine_weight_version{1}"] == 3
    tell(metrics, [engine_changed(1, "dead")])
    values = scrape(endpoint.url)
    assert {state: values[f"megarl_engines{{{state}}}"] for state in ("healthy", "stale", "dead")} == {
        "healthy": 1,
        "stale": 0,
        "dead": 1,
    }
    assert "megarl_engine_weight_version{1}" not in values


def test_time_that_was_lost_lowers_the_effective_time(meter: Meter, endpoint: MetricsEndpoint) -> None:
    # Two seconds each: steps 1 and 2, a crash, step 2 again; the four records before take 10 s each.
    earlier = records([run_started(), step_finished(1), step_finished(2)])
    metrics = Metrics(meter, earlier=earlier)
    for record in records([run_started(), *[run_started(resumed_step=1)] * 4, step_finished(2)])[4:]:
        metrics.record(record)
    assert scrape(endpoint.url)["megarl_effective_time_ratio"] == pytest.approx(4 / 50)


def test_the_first_steps_are_what_a_mismatch_is_compared_with(metrics: Metrics, endpoint: MetricsEndpoint) -> None:
    tell(metrics, [run_started(), *(step_finished(step) for step in range(1, 8))])
    assert "megarl_mismatch_baseline" not in scrape(endpoint.url)
    tell(metrics, [step_finished(8)])
    assert scrape(endpoint.url)["megarl_mismatch_baseline"] == 5e-7


def test_what_is_not_known_is_absent_rather_than_zero(metrics: Metrics, endpoint: MetricsEndpoint) -> None:
    tell(metrics, [run_started(), step_finished(1, reward=None)])
    values = scrape(endpoint.url)
    assert "megarl_loss" in values
    assert not {"megarl_reward_mean", "megarl_eval{accuracy}", "megarl_rollout_weight_version"} & set(values)


def test_every_event_can_be_recorded(metrics: Metrics, endpoint: MetricsEndpoint) -> None:
    tell(metrics, one_of_each())
    assert scrape(endpoint.url)["megarl_warnings_total"] == 1


def test_a_gauge_is_absent_before_its_first_value_and_a_counter_is_0() -> None:
    meter = Meter("sample")
    text = generate_latest(meter.registry).decode()
    assert "megarl_loss{" not in text
    assert 'megarl_warnings_total{run="sample"} 0.0' in text
    assert "_created" not in text
    meter.set(names.LOSS, 0.5)
    assert 'megarl_loss{run="sample"} 0.5' in generate_latest(meter.registry).decode()


def test_labels_beyond_the_limit_are_refused_and_counted() -> None:
    meter = Meter("sample")
    limit = names.REWARD_COMPONENT.limit
    for index in range(limit + 3):
        meter.set(names.REWARD_COMPONENT, 1.0, f"part{index}")
    meter.set(names.REWARD_COMPONENT, 2.0, "part0")
    values = meter.values("reward", "run")
    assert sum(name.startswith("reward/reward_component_mean/") for name in values) == limit
    assert values["reward/reward_component_mean/part0"] == 2.0
    assert values["run/refused_series"] == 3


def test_what_is_watched_is_read_when_it_is_asked_for() -> None:
    meter = Meter("sample")
    waiting = [1, 2]
    meter.watch(names.QUEUE, lambda: len(waiting))
    assert meter.values("rollout")["rollout/queue_groups"] == 2
    waiting.append(3)
    assert meter.values("rollout")["rollout/queue_groups"] == 3


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "runs" / "sample"


def addresses(folder: Path) -> dict[str, str]:
    """By job and engine, as Prometheus reads the file."""
    entries = json.loads((folder / TARGETS_FILE).read_text())
    assert all(entry["labels"]["run"] == "sample" for entry in entries)
    return {
        entry["labels"]["job"] + entry["labels"].get("engine", ""): address
        for entry in entries
        for address in entry["targets"]
    }


def test_engines_come_and_go_with_their_processes(folder: Path) -> None:
    targets = Targets(folder, run="sample", exporter="127.0.0.1:9464")
    assert addresses(folder) == {"megarl": "127.0.0.1:9464"}
    for record in records([engine_changed(0), engine_changed(1), engine_changed(1, "stale")]):
        targets.record(record)
    everybody = {"megarl": "127.0.0.1:9464", "sglang0": "127.0.0.1:30000", "sglang1": "127.0.0.1:30001"}
    assert addresses(folder) == everybody
    for record in records([engine_changed(0, "dead")]):
        targets.record(record)
    assert addresses(folder) == {key: value for key, value in everybody.items() if key != "sglang0"}
    for record in records([engine_changed(0)]):
        targets.record(record)
    assert addresses(folder) == everybody
    targets.close()
    assert addresses(folder) == {}


def test_a_run_without_an_exporter_names_its_engines_only(folder: Path) -> None:
    targets = Targets(folder, run="sample", exporter=None)
    for record in records([engine_changed(0)]):
        targets.record(record)
    assert addresses(folder) == {"sglang0": "127.0.0.1:30000"}


def test_all_runs_are_found_through_one_folder(folder: Path, tmp_path: Path) -> None:
    for _ in range(2):  # a run of the same name takes the link over
        Targets(folder, run="sample", exporter="127.0.0.1:9464")
    Targets(folder.with_name("other"), run="other", exporter="127.0.0.1:9465")
    links = sorted((folder.parent / LINKS_FOLDER).iterdir())
    assert [path.name for path in links] == ["other.json", "sample.json"]
    moved = folder.parent.rename(tmp_path / "elsewhere")
    assert read_targets(moved / LINKS_FOLDER / "sample.json")[0].targets == ["127.0.0.1:9464"]


def test_a_file_that_is_not_there_or_something_else_is_one_line(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"cannot be read: No such file or directory; a run writes it when it starts$"):
        read_targets(tmp_path / "none.json")
    (tmp_path / "bad.json").write_text('{"targets": []}')
    with pytest.raises(DataError, match=r"bad.json is not a list of Prometheus targets: "):
        read_targets(tmp_path / "bad.json")


def test_a_port_in_use_is_one_line_that_names_the_key() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(MachineError) as caught:
            MetricsEndpoint(CollectorRegistry(), port=port)
    assert str(caught.value) == (
        f"observe.metrics_port: cannot listen on 127.0.0.1:{port}: Address already in use; "
        "choose another port, 0 for any free one, or null for none"
    )


def test_an_endpoint_is_on_loopback_and_frees_its_port() -> None:
    endpoint = MetricsEndpoint(CollectorRegistry(), port=0)
    assert endpoint.url.startswith("http://127.0.0.1:")
    port = httpx.URL(endpoint.url).port
    assert port is not None
    endpoint.close()
    MetricsEndpoint(CollectorRegistry(), port=port).close()
