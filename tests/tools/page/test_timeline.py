"""Phases to spans to a trace: nothing overlaps on a track, and a run that died leaves no bar without end."""

from __future__ import annotations

import json
from collections import Counter
from datetime import timedelta
from itertools import pairwise
from pathlib import Path
from typing import Any

from megarl.cli.run_folder import _write_trace
from megarl.observe.event_file import read_events
from megarl.observe.events import Event, PhaseEnded, PhaseStarted, Record
from megarl.tools.page.timeline import Span, fold_spans, to_trace
from megarl.types import JsonValue
from tests.observe.samples import BEGAN, run_started, step_finished
from tests.tools.page.runs import make_episodes, make_run


def spans_of(events: list[Event]) -> list[Span]:
    """One event a second."""
    return fold_spans(
        Record(sequence=number, time=BEGAN + timedelta(seconds=number), event=event)
        for number, event in enumerate(events)
    )


def test_a_phase_knows_its_step_and_its_seconds() -> None:
    spans = spans_of(
        [
            run_started(),
            PhaseStarted(phase="start"),
            PhaseEnded(phase="start", seconds=0.5),
            PhaseStarted(phase="generate"),
            PhaseEnded(phase="generate", seconds=0.75),
            step_finished(1),
            PhaseStarted(phase="generate"),
        ]
    )
    assert [(span.phase, span.step, span.seconds, span.is_open) for span in spans] == [
        ("start", 0, 0.5, False),
        ("generate", 1, 0.75, False),
        ("generate", 2, 0.0, True),
    ]


def test_phases_may_run_side_by_side() -> None:
    spans = spans_of(
        [
            run_started(),
            PhaseStarted(phase="generate"),
            PhaseStarted(phase="evaluate"),
            PhaseEnded(phase="generate", seconds=2.0),
            PhaseEnded(phase="evaluate", seconds=2.0),
        ]
    )
    assert [(span.phase, span.seconds) for span in spans] == [("generate", 2.0), ("evaluate", 2.0)]


def test_what_a_run_died_in_ends_with_its_last_word() -> None:
    dead: list[Event] = [run_started(), PhaseStarted(phase="update"), step_finished(1)]
    (update, start) = spans_of([*dead, run_started(resumed_step=1), PhaseStarted(phase="start")])
    assert (update.seconds, update.is_open) == (2.0, True)
    assert start.step == 2


def test_turns_of_episodes_are_tracks_of_the_trace(tmp_path: Path) -> None:
    run, path = make_episodes(tmp_path / "run"), tmp_path / "trace.json"
    _write_trace(run, path)
    events = [event for event in json.loads(path.read_text())["traceEvents"] if event.get("cat") == "episode"]
    assert Counter(event["name"] for event in events) == {"model": 24, "environment": 9}
    # An episode takes 2.5 to 4 seconds and one begins every half second.
    assert 5 <= len({event["tid"] for event in events}) <= 8
    for track in {event["tid"] for event in events}:
        times = sorted((event["ts"], event["ts"] + event["dur"]) for event in events if event["tid"] == track)
        assert all(end <= begin + 1 for (_, end), (begin, _) in pairwise(times))
    assert {event["args"]["ending"] for event in events} == {"answered"}


def test_idle_shares_are_counters_of_the_trace(tmp_path: Path) -> None:
    run, path = make_run(tmp_path / "run", num_steps=2), tmp_path / "trace.json"
    _write_trace(run, path)
    counters = [event for event in json.loads(path.read_text())["traceEvents"] if event["ph"] == "C"]
    assert [set(event["args"]) for event in counters] == [{"rollout", "trainer"}] * 2
    assert all(0 < share < 100 for event in counters for share in event["args"].values())


def test_a_trace_is_what_perfetto_reads(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run")
    other: dict[str, JsonValue] = {"ph": "X", "name": "task", "pid": "node", "tid": "worker", "ts": 1.0, "dur": 2.0}
    trace: dict[str, Any] = json.loads(
        json.dumps(to_trace(fold_spans(read_events(run / "events.jsonl")), run="run", others=[other]))
    )
    events = trace["traceEvents"]
    assert other in events
    names = {
        event["tid"]: event["args"]["name"] for event in events if event["ph"] == "M" and event["name"] == "thread_name"
    }
    assert set(names.values()) == {"driver", "rollout", "trainer"}
    bars = [event for event in events if event["ph"] == "X" and event.get("cat") == "phase"]
    assert {event["name"] for event in bars} == {"start", "generate", "update", "publish"}
    assert all(event["dur"] >= 0 and event["pid"] == "megarl" and event["tid"] in names for event in bars)
    for track in names:
        of_track = sorted((event["ts"], event["ts"] + event["dur"]) for event in bars if event["tid"] == track)
        assert all(end <= begin + 1 for (_, end), (begin, _) in pairwise(of_track))
