"""GPU hours and money of a run: counted over its starts, projected to its end, shown where people look."""

from __future__ import annotations

from dataclasses import replace
from datetime import UTC, datetime, timedelta

import pytest

from megarl.cli.lines import progress_lines
from megarl.observe import catalogue as names
from megarl.observe.events import Event, PhaseStarted, Record, RunFinished, RunStarted, RunStatus, StepFinished
from megarl.observe.metrics import Meter, Metrics
from megarl.observe.progress import Progress, Usage, advance, describe_cost
from megarl.types import JsonValue
from tests.observe.samples import run_started, step_finished

BEGAN = datetime(2026, 1, 1, tzinfo=UTC)
ON_GPUS: dict[str, JsonValue] = {
    "run": {"device": "cuda"},
    "pools": {"train": {"nodes": 8, "gpus_per_node": 8}, "rollout": {"nodes": 1, "gpus_per_node": 8}},
    "cluster": {"gpu_hour_price": 2.5},
}


def records(*events: tuple[float, Event]) -> list[Record]:
    return [
        Record(sequence=number, time=BEGAN + timedelta(hours=hour), event=event)
        for number, (hour, event) in enumerate(events)
    ]


def started(**changes: JsonValue) -> RunStarted:
    return replace(run_started(), recipe={**ON_GPUS, **changes})


def step(number: int, hours: float) -> StepFinished:
    finished = step_finished(number)
    return replace(finished, summary=replace(finished.summary, seconds=hours * 3600))


TWO_STARTS = records(
    (0, started()),
    (0, PhaseStarted(phase="generate")),
    (1, step(1, 1)),
    (1.5, PhaseStarted(phase="generate")),
    # Killed here; the next driver starts five hours later.
    (6, replace(started(), resumed_step=1)),
    (6, PhaseStarted(phase="generate")),
    (8, step(2, 2)),
)


def fold(of: list[Record]) -> Progress:
    progress = Progress()
    for record in of:
        progress = advance(progress, record)
    return progress


def test_hours_are_counted_while_a_driver_runs_and_projected_at_its_pace() -> None:
    progress = fold(TWO_STARTS)
    assert progress.usage.num_gpus == 72
    assert progress.usage.gpu_hours == pytest.approx(72 * (1.5 + 2))
    # Two steps are left, of two hours each.
    assert progress.projected_gpu_hours == pytest.approx(72 * (3.5 + 4))
    assert progress_lines(progress)[1].endswith("252 GPU h (630.00) of 540 GPU h (1,350.00)")


def test_nothing_is_counted_after_the_end() -> None:
    over = [*TWO_STARTS, *records((9, RunFinished(status=RunStatus.PREEMPTED)), (20, PhaseStarted(phase="generate")))]
    assert fold(over).usage.gpu_hours == pytest.approx(72 * 4.5)


def test_a_run_on_cpus_costs_nothing_and_says_nothing() -> None:
    on_cpus = [*records((0, started(run={"device": "cpu"}))), *TWO_STARTS[1:4]]
    progress = fold(on_cpus)
    assert progress.usage.gpu_hours == 0
    assert "GPU h" not in "".join(progress_lines(progress))


def test_the_metrics_have_hours_and_money() -> None:
    meter = Meter("run")
    metrics = Metrics(meter)
    for record in TWO_STARTS:
        metrics.record(record)
    shown = {
        metric: meter.registry.get_sample_value(metric.full_name, {names.RUN_LABEL: "run"})
        for metric in (names.GPU_HOURS, names.GPU_HOURS_STEP, names.COST, names.COST_STEP, names.COST_PROJECTED)
    }
    assert list(shown.values()) == pytest.approx([252, 144, 630, 360, 1350])


def test_money_needs_a_price() -> None:
    assert describe_cost(0.25, None) == "0.25 GPU h"
    assert describe_cost(36_460.4, 2.5) == "36,460 GPU h (91,151.00)"
    assert Usage(num_gpus=8).money(1.0) is None
