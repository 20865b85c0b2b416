"""Where a run stands, folded from its records. Pure: drawing it is the business of the command line."""

from __future__ import annotations

from dataclasses import dataclass, replace
from datetime import datetime

from megarl.observe.events import Evaluated, PhaseStarted, Record, RunStarted, StepFinished
from megarl.observe.summary import Phase, StepSummary
from megarl.results import EvalResult


@dataclass(frozen=True, slots=True, kw_only=True)
class Progress:
    steps: int = 0
    step: int = 0
    """The last one finished."""
    first_step: int = 0
    """Where the run began, or went on: the last step finished before it."""
    phase: Phase | None = None
    phase_began: datetime | None = None
    steps_began: datetime | None = None
    """When the first step began; starting up tells nothing about how long the rest takes."""
    summary: StepSummary | None = None
    evaluation: EvalResult | None = None
    eta_s: float | None = None
    """Seconds until the last step ends, at the mean pace so far; evaluations between steps count."""


def advance(progress: Progress, record: Record) -> Progress:
    match record.event:
        case RunStarted(steps=steps, resumed_step=resumed_step):
            return Progress(steps=steps, step=resumed_step, first_step=resumed_step)
        case PhaseStarted(phase=phase):
            began = progress.steps_began or (record.time if phase == "generate" else None)
            return replace(progress, phase=phase, phase_began=record.time, steps_began=began)
        case StepFinished(summary=summary):
            eta_s = _eta_s(progress, record.time, step=summary.step)
            return replace(progress, step=summary.step, summary=summary, eta_s=eta_s)
        case Evaluated(result=result):
            return replace(progress, evaluation=result)
        case _:
            return progress


def _eta_s(progress: Progress, now: datetime, *, step: int) -> float | None:
    if progress.steps_began is None:
        return None
    return (now - progress.steps_began).total_seconds() / (step - progress.first_step) * (progress.steps - step)
