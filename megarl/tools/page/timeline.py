"""The phases of a run as spans for the page and as a trace for Perfetto, from the run's events."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from typing import Literal, TypeAlias

from megarl.observe.events import PhaseEnded, PhaseStarted, Record, RunFinished, RunStarted, StepFinished
from megarl.observe.summary import Phase
from megarl.types import JsonValue

Role: TypeAlias = Literal["driver", "rollout", "trainer"]

ROLES: Mapping[Phase, tuple[Role, ...]] = {
    "start": ("driver",),
    "generate": ("rollout",),
    "assign": ("trainer",),
    "update": ("trainer",),
    "publish": ("trainer", "rollout"),
    "evaluate": ("rollout",),
    "save": ("trainer",),
}
"""The roles that are busy in each phase."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Span:
    phase: Phase
    step: int
    """The step it belongs to; 0 is before the first."""
    began: datetime
    seconds: float
    is_open: bool = False
    """It has not ended, or its end was not recorded; `seconds` is until the last record."""


def fold_spans(records: Iterable[Record]) -> list[Span]:
    """Return all phases in the order they began; a phase in which the run died ends with its last record."""
    spans: list[Span] = []
    running: dict[Phase, int] = {}
    """Indices in `spans`."""
    step = 0
    for record in records:
        for place in running.values():
            spans[place] = replace(spans[place], seconds=(record.time - spans[place].began).total_seconds())
        match record.event:
            case RunStarted(resumed_step=resumed_step):
                running.clear()
                step = resumed_step + 1 if resumed_step else 0
            case RunFinished():
                running.clear()
            case PhaseStarted(phase=phase):
                if phase == "generate" and step == 0:
                    step = 1
                running[phase] = len(spans)
                spans.append(Span(phase=phase, step=step, began=record.time, seconds=0.0, is_open=True))
            case PhaseEnded(phase=phase, seconds=seconds):
                place = running.pop(phase, -1)
                if place >= 0:
                    spans[place] = replace(spans[place], seconds=seconds, is_open=False)
            case StepFinished(summary=summary):
                step = summary.step + 1
    return spans


def to_trace(
    spans: Sequence[Span], *, run: str, others: Sequence[Mapping[str, JsonValue]] = ()
) -> dict[str, JsonValue]:
    """Return Chrome's trace format with a track per role, in microseconds since the epoch; `others` are added to it."""
    process: JsonValue = "megarl"
    tracks = {
        role: number for number, role in enumerate(dict.fromkeys(role for roles in ROLES.values() for role in roles))
    }
    events: list[JsonValue] = [
        {"ph": "M", "name": "process_name", "pid": process, "tid": 0, "args": {"name": f"megarl {run}"}}
    ]
    events += [
        {"ph": "M", "name": "thread_name", "pid": process, "tid": number, "args": {"name": role}}
        for role, number in tracks.items()
    ]
    events += [
        {
            "ph": "X",
            "name": span.phase,
            "cat": "phase",
            "pid": process,
            "tid": tracks[role],
            "ts": span.began.timestamp() * 1e6,
            "dur": span.seconds * 1e6,
            "args": {"step": span.step, "is_open": span.is_open},
        }
        for span in spans
        for role in ROLES[span.phase]
    ]
    events += [dict(event) for event in others]
    return {"traceEvents": events, "displayTimeUnit": "ms"}
