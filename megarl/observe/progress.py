"""How far a run is, folded from its events: step, phase, pace, the time that is left, and its cost.

The cost is counted from the events of all starts of a run, while one of its drivers runs: GPUs that are reserved
between them are not in it. A run on CPUs has none.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from datetime import datetime

from pydantic import JsonValue

from megarl.observe.events import Evaluated, PhaseStarted, Record, RunFinished, RunStarted, StepFinished
from megarl.observe.summary import Phase, StepSummary
from megarl.results import EvalResult

HOUR_S = 3600.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Usage:
    """The GPUs of a run and the time for which they were used."""

    num_gpus: int = 0
    """0 on CPUs."""
    hour_price: float | None = None
    """The recipe's `cluster.gpu_hour_price`."""
    gpu_hours: float = 0.0
    until: datetime | None = None
    """Time up to which it is counted; None while no driver runs."""

    def started(self, recipe: Mapping[str, JsonValue], at: datetime) -> Usage:
        """Go on counting with the GPUs of a driver's recipe."""
        pools, cluster = _section(recipe, "pools"), _section(recipe, "cluster")
        is_cuda = _section(recipe, "run").get("device") == "cuda"
        sizes = [(_section(pools, name).get("nodes"), _section(pools, name).get("gpus_per_node")) for name in pools]
        counts = [nodes * gpus for nodes, gpus in sizes if isinstance(nodes, int) and isinstance(gpus, int)]
        price = cluster.get("gpu_hour_price")
        return replace(
            self,
            num_gpus=sum(counts) if is_cuda else 0,
            hour_price=float(price) if isinstance(price, int | float) else None,
            until=at,
        )

    def counted(self, at: datetime, *, is_over: bool) -> Usage:
        """Count up to an event; with `is_over` it is the driver's last."""
        if self.until is None:
            return self
        passed = max(0.0, (at - self.until).total_seconds())
        return replace(self, gpu_hours=self.gpu_hours + self.hours(passed), until=None if is_over else at)

    def hours(self, seconds: float) -> float:
        """Return the GPU hours of this many seconds."""
        return self.num_gpus * seconds / HOUR_S

    def money(self, gpu_hours: float) -> float | None:
        return None if self.hour_price is None else gpu_hours * self.hour_price


@dataclass(frozen=True, slots=True, kw_only=True)
class Progress:
    """How far a run is, folded from its records."""

    steps: int = 0
    step: int = 0
    """The last finished step."""
    first_step: int = 0
    """The last step finished before this process; 0 in a new run."""
    phase: Phase | None = None
    phase_began: datetime | None = None
    steps_began: datetime | None = None
    """Start of the first step; the time before it does not count in the pace."""
    summary: StepSummary | None = None
    evaluation: EvalResult | None = None
    eta_s: float | None = None
    """Seconds until the last step ends, at the mean pace so far, evaluations between steps included."""
    usage: Usage = field(default_factory=Usage)
    """GPU time of all starts so far."""

    @property
    def projected_gpu_hours(self) -> float | None:
        """GPU hours at the end of the run, at the pace so far."""
        return None if self.eta_s is None else self.usage.gpu_hours + self.usage.hours(self.eta_s)


def advance(progress: Progress, record: Record) -> Progress:
    usage = progress.usage.counted(record.time, is_over=isinstance(record.event, RunFinished))
    if isinstance(record.event, RunStarted):
        # The time since a driver that was killed is not counted.
        usage = progress.usage.started(record.event.recipe, record.time)
    return replace(_advance(progress, record), usage=usage)


def _advance(progress: Progress, record: Record) -> Progress:
    match record.event:
        case RunStarted(steps=steps, resumed_step=resumed_step):
            return Progress(steps=steps, step=resumed_step, first_step=resumed_step)
        case PhaseStarted(phase=phase):
            began = progress.steps_began or (record.time if phase == "generate" else None)
            return replace(progress, phase=phase, phase_began=record.time, steps_began=began)
        case StepFinished(summary=summary):
            # Behind a damaged checkpoint a process goes on from an earlier step than it began with.
            progress = replace(progress, first_step=min(progress.first_step, summary.step - 1))
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


def describe_cost(gpu_hours: float, hour_price: float | None) -> str:
    """Return `36,460 GPU h` and, with a price, `36,460 GPU h (91,150)`."""
    shown = f"{gpu_hours:,.0f}" if gpu_hours >= 100 else f"{gpu_hours:.3g}"
    return f"{shown} GPU h" if hour_price is None else f"{shown} GPU h ({gpu_hours * hour_price:,.2f})"


def _section(values: Mapping[str, JsonValue], name: str) -> Mapping[str, JsonValue]:
    section = values.get(name)
    return section if isinstance(section, dict) else {}
