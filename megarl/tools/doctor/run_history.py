"""A run as its diagnosis sees it: the series, the recipe it ran with, its failures and its end, from its events."""

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
class Story:
    """Everything the rules look at."""

    recipe: Recipe
    history: History
    phase_seconds: Mapping[int, Mapping[Phase, float]]
    """By step."""
    failed_saves: tuple[CheckpointFailed, ...]
    lost_engines: tuple[EngineChanged, ...]
    """Engines that ended while the run went on, each time with the reason."""
    last_phase: Phase | None
    end: RunFinished | None
    """None while it runs, and where it was killed."""
    silence: timedelta
    """Since the last event."""

    @property
    def failure(self) -> str:
        """The sentence a failed run ended with."""
        return self.end.reason if self.end is not None and self.end.status is RunStatus.FAILED else ""

    @property
    def last_step(self) -> int:
        return self.history.summaries[-1].step if self.history.summaries else 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Trend:
    """A series at its beginning and at its end; medians, so that one odd step says nothing."""

    early: float
    late: float
    before: float
    """Of all but the end."""
    late_steps: tuple[int, int]


def tell(records: Iterable[Record], *, now: datetime) -> Story:
    """Raises a DataError where the records are not those of a run, or of another version's recipe."""
    kept = tuple(records)
    recipe: Mapping[str, JsonValue] | None = None
    phase_seconds: dict[int, Mapping[Phase, float]] = {}
    failed_saves: list[CheckpointFailed] = []
    lost_engines: list[EngineChanged] = []
    last_phase: Phase | None = None
    end: RunFinished | None = None
    for record in kept:
        match record.event:
            case RunStarted() as started:
                recipe, end, last_phase = started.recipe, None, None
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
        raise DataError("no run has begun in these events")
    return Story(
        recipe=_recipe_of(recipe),
        history=fold_history(kept),
        phase_seconds=phase_seconds,
        failed_saves=tuple(failed_saves),
        lost_engines=tuple(lost_engines),
        last_phase=last_phase,
        end=end,
        silence=now - kept[-1].time,
    )


def _recipe_of(recipe: Mapping[str, JsonValue]) -> Recipe:
    try:
        return Recipe.model_validate(recipe)
    except ValidationError as error:
        detail = error.errors()[0]
        key = ".".join(str(part) for part in detail["loc"])
        raise DataError(f"the run's recipe is not one of this version of megarl: {key}: {detail['msg']}") from None


def trend(series: Series, *, min_steps: int = 6) -> Trend | None:
    """None where there are too few steps to call anything a trend. What is not finite is another rule's business."""
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


def at_end(series: Series, holds: Callable[[float], bool], *, min_steps: int = 3) -> tuple[int, int, int] | None:
    """In how many of the last steps something holds: how many, of how many, and since which step; None if none."""
    points = list(zip(series.steps, series.values, strict=True))[-_MAX_WINDOW:]
    found = [step for step, value in points if holds(value)]
    if len(points) < min_steps or not found:
        return None
    return len(found), len(points), found[0]
