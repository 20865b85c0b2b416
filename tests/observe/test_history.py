from __future__ import annotations

from megarl.observe.events import Event, PhaseStarted
from megarl.observe.history import Progress, advance
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
    assert fold(run_started(), step_finished(1), run_started(steps=9)) == Progress(steps=9)
