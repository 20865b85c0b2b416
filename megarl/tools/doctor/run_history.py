"""The history of a run, read from its events: its series, its recipe, its failures and its end."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from datetime import datetime, timedelta

from pydantic import JsonValue, ValidationError

from megarl.config.recipe import Recipe
from megarl.errors import DataError
from megarl.observe.events import (
    CheckpointFailed,
    EngineChanged,
    PhaseStarted,
    Record,
    RunFinished,
    RunStarted,
    RunStatus,
    StepFinished,
)
from megarl.observe.history import History, Series, fold_history
from megarl.observe.summary import Phase

_MAX_WINDOW = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class RunHistory:
    recipe: Recipe
    history: History
    phase_seconds: Mapping[int, Mapping[Phase, float]]
    """By step."""
    failed_saves: tuple[CheckpointFailed, ...]
    lost_engines: tuple[EngineChanged, ...]
    """Engines that ended while the run went on, each time with the reason."""
    last_phase: Phase | None
    end: RunFinished | None
    """None while the run goes on, and where it was killed."""
    silence: timedelta
    """Since the last event."""

    @property
    def failure(self) -> str:
        """The message that a failed run ended with, else an empty text."""
        return self.end.reason if self.end is not None and self.end.status is RunStatus.FAILED else ""

    @property
    def last_step(self) -> int:
        return self.history.summaries[-1].step if self.history.summaries else 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Trend:
    """Medians of the beginning and the end of a series: a single odd step does not change them."""

    early: float
    late: float
    before: float
    """The median of all values before `late`."""
    late_steps: tuple[int, int]


def read_run_history(records: Iterable[Record], *, now: datetime) -> RunHistory:
    """Raise a DataError where no run has begun, or where its recipe is of another version of megarl."""
    all_records = tuple(records)
    recipe: Mapping[str, JsonValue] | None = None
    phase_seconds: dict[int, Mapping[Phase, float]] = {}
    failed_saves: list[CheckpointFailed] = []
    lost_engines: list[EngineChanged] = []
    last_phase: Phase | None = None
    end: RunFinished | None = None
    for record in all_records:
        match record.event:
            case RunStarted() as started:
                recipe = started.recipe
                end = None
                last_phase = None
            case PhaseStarted(phase=phase):
                last_phase = phase
            case StepFinished(summary=summary, phase_seconds=seconds):
                phase_seconds[summary.step] = seconds
            case CheckpointFailed() as failed:
                failed_saves.append(failed)
            case EngineChanged(is_running=False, reason=reason) as lost if reason:
                lost_engines.append(lost)
            case RunFinished() as finished:
                end = finished
    if recipe is None:
        raise DataError("no run has begun")
    return RunHistory(
        recipe=_recipe_of(recipe),
        history=fold_history(all_records),
        phase_seconds=phase_seconds,
        failed_saves=tuple(failed_saves),
        lost_engines=tuple(lost_engines),
        last_phase=last_phase,
        end=end,
        silence=now - all_records[-1].time,
    )


def _recipe_of(recipe: Mapping[str, JsonValue]) -> Recipe:
    try:
        return Recipe.model_validate(recipe)
    except ValidationError as error:
        detail = error.errors()[0]
        key = ".".join(str(part) for part in detail["loc"])
        raise DataError(f"the recipe is of another version of megarl: {key}: {detail['msg']}") from None


def trend(series: Series, *, min_steps: int = 6) -> Trend | None:
    """Return None where fewer than `min_steps` values are finite."""
    points = [(step, value) for step, value in zip(series.steps, series.values, strict=True) if math.isfinite(value)]
    if len(points) < min_steps:
        return None
    window = max(2, min(_MAX_WINDOW, len(points) // 4))
    values = [value for _, value in points]
    return Trend(
        early=statistics.median(values[:window]),
        late=statistics.median(values[-window:]),
        before=statistics.median(values[:-window]),
        late_steps=(points[-window][0], points[-1][0]),
    )


def mostly_at_end(series: Series, holds: Callable[[float], bool], *, min_steps: int = 3) -> tuple[int, int] | None:
    """Return in how many of how many last steps a condition holds, or None where that is less than half of them."""
    values = series.values[-_MAX_WINDOW:]
    num_steps = sum(map(holds, values))
    if len(values) < min_steps or not num_steps or num_steps * 2 < len(values):
        return None
    return num_steps, len(values)
