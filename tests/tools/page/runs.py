"""Run folders as a run leaves them, for the tests of the page."""

from __future__ import annotations

from datetime import timedelta
from pathlib import Path

from megarl.data.rollout_files import rollouts_file, write_rollouts
from megarl.observe.events import EVENTS_FILE, Event, EventLog, PhaseEnded, PhaseStarted, Record, RunFinished, RunStatus
from megarl.observe.summary import Phase
from tests.data.test_rollout_files import decode, sampled
from tests.observe.samples import BEGAN, evaluated, run_started, step_finished

HOSTILE = "<img src=x onerror=\"document.title='owned'\"></script>"
"""What a model might write."""


def phase(name: Phase, seconds: float) -> list[Event]:
    return [PhaseStarted(phase=name), PhaseEnded(phase=name, seconds=seconds)]


def events_of(num_steps: int) -> list[Event]:
    events: list[Event] = [run_started(steps=num_steps), *phase("start", 1.0), evaluated(0, 0.25)]
    for step in range(1, num_steps + 1):
        events += [*phase("generate", 1.0), *phase("update", 1.0), *phase("publish", 1.0)]
        events.append(step_finished(step, reward=0.5 + step / (4 * num_steps)))
    return [*events, evaluated(num_steps, 0.75)]


def write_events(folder: Path, events: list[Event]) -> None:
    """One a second; continues what is there."""
    log = EventLog(folder / EVENTS_FILE)
    for event in events:
        number = log.next_sequence
        log.record(Record(sequence=number, time=BEGAN + timedelta(seconds=number), event=event))
        log.next_sequence += 1
    log.close()


def make_run(folder: Path, *, num_steps: int = 4, rollouts_per_step: int = 8, is_finished: bool = True) -> Path:
    end: list[Event] = [RunFinished(status=RunStatus.DONE)] if is_finished else []
    write_events(folder, [*events_of(num_steps), *end])
    for step in range(1, num_steps + 1):
        rows = [
            sampled(
                f"{step} {number} {HOSTILE if number == 0 else 'words'}",
                position=number,
                reward=float(number % 2),
                gap=number / 10,
            )
            for number in range(rollouts_per_step)
        ]
        write_rollouts(rollouts_file(folder, step), rows, decode=decode)
    return folder
