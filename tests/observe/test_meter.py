from __future__ import annotations

from prometheus_client import generate_latest

from megarl.observe import catalogue as names
from megarl.observe.meter import Meter


def test_a_gauge_is_absent_before_its_first_value_and_a_counter_is_0() -> None:
    meter = Meter("sample")
    text = generate_latest(meter.registry).decode()
    assert "megarl_loss{" not in text
    assert 'megarl_warnings_total{run="sample"} 0.0' in text
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


def test_what_is_forgotten_makes_room() -> None:
    meter = Meter("sample")
    meter.set(names.ENGINE_VERSION, 3, "0")
    meter.forget(names.ENGINE_VERSION, "0")
    meter.forget(names.ENGINE_VERSION, "7")
    assert not [name for name in meter.values("fleet") if "engine_weight_version" in name]


def test_no_series_tells_when_another_was_made() -> None:
    assert "_created" not in generate_latest(Meter("sample").registry).decode()
