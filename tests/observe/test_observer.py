from __future__ import annotations

import asyncio

import pytest

from megarl.observe.events import PhaseEnded, PhaseStarted, StepFinished, Warned
from megarl.observe.observer import Observer
from megarl.observe.observing import StepFaults
from tests.observe.samples import ListSink, step_summary


def test_phases_are_timed_and_their_seconds_go_to_the_next_step() -> None:
    sink = ListSink()
    observer = Observer([sink])
    for _ in range(2):
        with observer.phase("generate"):
            pass
    with observer.phase("update"):
        asyncio.run(asyncio.sleep(0.05))
    observer.step_summarized(step_summary(1))
    observer.step_summarized(step_summary(2))
    assert [event.phase for event in sink.events if isinstance(event, PhaseStarted)] == [
        "generate",
        "generate",
        "update",
    ]
    ended = [(event.phase, event.seconds) for event in sink.events if isinstance(event, PhaseEnded)]
    assert [phase for phase, _ in ended] == ["generate", "generate", "update"]
    first, second = (event for event in sink.events if isinstance(event, StepFinished))
    assert first.phase_seconds["update"] == ended[-1][1]
    assert 0 <= first.phase_seconds["generate"] < first.phase_seconds["update"]
    assert first.phase_seconds["update"] >= 0.05
    assert second.phase_seconds == {}


def test_the_warnings_of_a_step_come_before_it() -> None:
    sink = ListSink()
    with Observer([sink]) as observer:
        observer.step_summarized(step_summary(1, num_zero_signal_groups=8))
    assert [type(event) for event in sink.events[:2]] == [Warned, StepFinished]


def test_the_fault_points_of_a_step_follow_its_phases(monkeypatch: pytest.MonkeyPatch) -> None:
    reached: list[tuple[str, int]] = []
    monkeypatch.setattr("megarl.observe.observing.reach", lambda point, *, step: reached.append((point, step)))
    observer = Observer([StepFaults()])
    with observer.phase("publish"):
        pass
    assert reached == [], "the first publish belongs to no step"
    for step in (1, 2):
        with observer.phase("generate"):
            pass
        with observer.phase("update"):
            pass
        with observer.phase("publish"):
            pass
        observer.step_summarized(step_summary(step))
        with observer.phase("evaluate"):
            pass
    points = ("step_begun", "step_taken", "step_trained", "step_published")
    assert reached == [(point, step) for step in (1, 2) for point in points]
