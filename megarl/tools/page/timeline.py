"""The phases of a run as spans for the page and as a trace for Perfetto, from its events, and the turns of episodes."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from pathlib import Path
from typing import Any

from megarl.observe.events import PhaseEnded, PhaseStarted, Record, RunFinished, RunStarted, StepFinished
from megarl.observe.history import ROLES, IdleShare
from megarl.observe.summary import Phase
from megarl.system.start_log import StartPiece, read_pieces
from megarl.types import JsonValue


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


def idle_events(idle: Iterable[IdleShare]) -> Iterator[dict[str, JsonValue]]:
    """Yield the idle shares of steps as counters of Chrome's trace format."""
    for share in idle:
        shares: dict[str, JsonValue] = {role: 100 * number for role, number in share.roles.items()}
        yield {"ph": "C", "name": "idle share, %", "pid": "megarl", "ts": share.began.timestamp() * 1e6, "args": shares}


def last_start(run_folder: Path, records: Iterable[Record]) -> list[StartPiece]:
    """Return what took how long when the run was last started."""
    starts = [record.time for record in records if isinstance(record.event, RunStarted)]
    return read_pieces(run_folder, since=starts[-1]) if starts else []


def start_events(pieces: Iterable[StartPiece]) -> Iterator[dict[str, JsonValue]]:
    """Yield the pieces of a start as events of Chrome's trace format, with a track per process."""
    for piece in pieces:
        yield {
            "ph": "X",
            "name": piece.what,
            "cat": "start",
            "pid": "start",
            "tid": piece.process,
            "ts": piece.began.timestamp() * 1e6,
            "dur": piece.seconds * 1e6,
        }


_SPEAKERS = {"sampled": "model", "given": "environment"}


def episode_events(episodes: Iterable[Mapping[str, Any]], *, step: int) -> Iterator[dict[str, JsonValue]]:
    """Yield the turns of a step's episodes as events of Chrome's trace format; episodes that overlap have own tracks.

    The episodes are rows of `read_episodes`, in the order in which they began.
    """
    ends: list[float] = []
    for episode in episodes:
        time = float(episode["began"])
        lane = next((number for number, end in enumerate(ends) if end <= time), len(ends))
        ends += [0.0] * (lane == len(ends))
        name = f"{episode['prompt_uid']}, rollout {episode['index']}"
        for number, turn in enumerate(episode["turns"]):
            if turn["seconds"] > 0:
                yield {
                    "ph": "X",
                    "name": _SPEAKERS.get(turn["kind"], turn["kind"]),
                    "cat": "episode",
                    "pid": "episodes",
                    "tid": lane,
                    "ts": time * 1e6,
                    "dur": turn["seconds"] * 1e6,
                    "args": {"episode": name, "step": step, "turn": number, "ending": episode["ending"]},
                }
            time += turn["seconds"]
        ends[lane] = time


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
