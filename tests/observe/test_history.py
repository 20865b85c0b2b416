from __future__ import annotations

from dataclasses import replace
from datetime import timedelta

from megarl.observe.events import Event, PhaseEnded, PhaseStarted, StepFinished
from megarl.observe.history import fold_history
from megarl.observe.progress import Progress, advance
from megarl.observe.summary import Phase
from tests.observe.samples import BEGAN, evaluated, records, run_started, step_finished


def fold(*events: Event) -> Progress:
    progress = Progress()
    for record in records(events, seconds_apart=10):
        progress = advance(progress, record)
    return progress


def test_progress_knows_the_step_the_phase_and_the_last_numbers() -> None:
    progress = fold(run_started(steps=4), evaluated(0, 0.25), step_finished(1), PhaseStarted(phase="update"))
    assert (progress.step, progress.steps, progress.phase) == (1, 4, "update")
    assert progress.phase_began is not None
    assert (progress.phase_began - BEGAN).total_seconds() == 30
    assert progress.evaluation is not None
    assert progress.evaluation.accuracy == 0.25


def test_the_time_left_follows_the_pace_of_the_steps_not_of_the_start() -> None:
    slow_start = [PhaseStarted(phase="start")] * 9
    generate = PhaseStarted(phase="generate")
    # An event every 10 s: the first two of four steps end 30 s after the first began.
    progress = fold(run_started(steps=4), *slow_start, generate, step_finished(1), generate, step_finished(2))
    assert progress.eta_s == 30.0


def test_a_resumed_run_counts_only_its_own_steps_in_its_pace() -> None:
    generate = PhaseStarted(phase="generate")
    progress = fold(run_started(steps=10, resumed_step=6), generate, step_finished(7), generate, step_finished(8))
    assert progress.eta_s == 30.0
    assert fold(run_started(steps=10, resumed_step=6)).step == 6


def test_a_run_that_goes_on_from_an_earlier_step_than_it_began_with_has_a_pace() -> None:
    generate = PhaseStarted(phase="generate")
    progress = fold(run_started(steps=8, resumed_step=6), generate, step_finished(6), generate, step_finished(7))
    assert progress.eta_s == 15.0


def test_a_new_run_starts_from_nothing() -> None:
    progress = fold(run_started(), step_finished(1), run_started(steps=9))
    assert progress == Progress(steps=9, usage=progress.usage)
    assert progress.usage.gpu_hours == 0


def phase(name: Phase) -> list[Event]:
    return [PhaseStarted(phase=name), PhaseEnded(phase=name, seconds=1.0)]


def synchronous(step: int) -> StepFinished:
    """Nothing is under way while the trainer works."""
    event = step_finished(step)
    assert event.summary.flow is not None
    flow = replace(event.summary.flow, num_under_way=0, producer_wait_s=0.0)
    return replace(event, summary=replace(event.summary, flow=flow))


def test_a_role_is_idle_while_no_phase_uses_it() -> None:
    # An event every 10 s. A step: generate, 10 s of nothing, update, 10 s of nothing, publish, 10 s of nothing.
    step = [*phase("generate"), *phase("update"), *phase("publish")]
    events = [run_started(), *phase("start"), *step, synchronous(1), *phase("evaluate"), *step, synchronous(2)]
    first, second = fold_history(records(events, seconds_apart=10)).idle
    assert (first.step, first.seconds, first.roles) == (1, 60.0, {"rollout": 40 / 60, "trainer": 40 / 60})
    assert first.began == BEGAN + timedelta(seconds=30), "the start of the run is no step"
    assert (second.step, second.seconds) == (2, 90.0)
    assert second.roles == {"rollout": 60 / 90, "trainer": 70 / 90}, "an evaluation keeps the engines busy"


def test_engines_that_work_beside_the_trainer_are_idle_only_while_nothing_may_be_asked() -> None:
    events = [run_started(), *phase("generate"), *phase("update"), step_finished(1)]
    (share,) = fold_history(records(events, seconds_apart=10)).idle
    assert share.roles == {"rollout": 0.5 / 40, "trainer": 30 / 40}


def test_a_run_without_engines_has_no_idle_engine_and_a_repeated_step_counts_once() -> None:
    lost = [run_started(), *phase("generate"), step_finished(1), step_finished(2)]
    again = [
        run_started(resumed_step=1),
        PhaseStarted(phase="update"),
        *phase("generate"),
        step_finished(2, reward=None),
    ]
    history = fold_history(records([*lost, *again], seconds_apart=10))
    assert [share.step for share in history.idle] == [1, 2]
    assert history.idle[1].roles == {"trainer": 0.0}, "the update went on all the time"
    assert history.of_idle("rollout").steps == (1,)
