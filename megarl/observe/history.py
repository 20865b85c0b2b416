"""The state of a run, folded from its records: progress, totals over all its processes, numbers by step. Pure."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from datetime import datetime
from statistics import median
from typing import Literal, TypeAlias

from megarl.observe.events import Evaluated, PhaseEnded, PhaseStarted, Record, RunStarted, StepFinished
from megarl.observe.summary import Phase, RolloutSummary, StepSummary
from megarl.results import EvalResult, UpdateStats

_NUM_BASELINE_STEPS = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class Progress:
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


def advance(progress: Progress, record: Record) -> Progress:
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


class RunTotals:
    """Effective time and mismatch baseline of a run. Needs all its records, those of earlier processes included."""

    def __init__(self) -> None:
        self._began: datetime | None = None
        self._seconds: dict[int, float] = {}
        """By step; a step trained again after a crash counts once."""
        self._mismatch: dict[int, float] = {}

    def record(self, record: Record) -> None:
        match record.event:
            case RunStarted(resumed_step=resumed_step):
                self._began = self._began or record.time
                # Steps after the checkpoint are lost.
                self._seconds = {step: s for step, s in self._seconds.items() if step <= resumed_step}
                self._mismatch = {step: m for step, m in self._mismatch.items() if step <= resumed_step}
            case StepFinished(summary=summary):
                self._seconds[summary.step] = summary.seconds
                # Only tokens of the trained version: the others also differ because the policy has changed since.
                mismatch = None if summary.update is None else summary.update.engine_mismatch
                if mismatch is not None and len(self._mismatch) < _NUM_BASELINE_STEPS:
                    self._mismatch[summary.step] = mismatch

    def effective_time_ratio(self, now: datetime) -> float | None:
        """Time of steps that were not lost, over all time since the run first started."""
        if self._began is None or now <= self._began:
            return None
        return min(1.0, sum(self._seconds.values()) / (now - self._began).total_seconds())

    @property
    def mismatch_baseline(self) -> float | None:
        """Median engine mismatch of the first steps; None before they are done."""
        return median(self._mismatch.values()) if len(self._mismatch) == _NUM_BASELINE_STEPS else None


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
class IdleShare:
    """The idle part of each role's step, from the end of the step before to its own end."""

    step: int
    began: datetime
    seconds: float
    roles: Mapping[Role, float]
    """Shares of `seconds`; without `rollout` in a run without engines."""


class _IdleClock:
    """Adds up the time in which no phase uses a role."""

    def __init__(self) -> None:
        self._began: datetime | None = None
        self._last: datetime | None = None
        self._running: set[Phase] = set()
        self._idle_s: dict[Role, float] = {}

    def record(self, record: Record) -> IdleShare | None:
        """Return the shares of the step that the record finishes."""
        if self._began is not None and self._last is not None:
            busy = {role for phase in self._running for role in ROLES[phase]}
            for role in self._idle_s:
                self._idle_s[role] += 0.0 if role in busy else (record.time - self._last).total_seconds()
        self._last = record.time
        match record.event:
            case RunStarted():
                self._running.clear()
                self._begin(None)
            case PhaseStarted(phase=phase):
                self._running.add(phase)
                if self._began is None and phase == "generate":
                    self._begin(record.time)
            case PhaseEnded(phase=phase):
                self._running.discard(phase)
            case StepFinished(summary=summary) if self._began is not None:
                share = self._share(summary, self._began, (record.time - self._began).total_seconds())
                self._begin(record.time)
                return share
        return None

    def _begin(self, time: datetime | None) -> None:
        self._began = time
        self._idle_s = {"rollout": 0.0, "trainer": 0.0}

    def _share(self, summary: StepSummary, began: datetime, seconds: float) -> IdleShare:
        idle_s = self._idle_s
        if summary.rollouts is None:
            del idle_s["rollout"]
        elif summary.flow is not None and summary.flow.num_under_way:
            # Engines go on while the trainer works, unless nothing more may be asked of them.
            idle_s["rollout"] = min(idle_s["rollout"], summary.flow.producer_wait_s)
        shares = {role: time_s / seconds if seconds > 0 else 0.0 for role, time_s in idle_s.items()}
        return IdleShare(step=summary.step, began=began, seconds=seconds, roles=shares)


@dataclass(frozen=True, slots=True, kw_only=True)
class Series:
    """The values of one number, each with its step."""

    steps: tuple[int, ...]
    values: tuple[float, ...]

    @classmethod
    def of(cls, points: Iterable[tuple[int, float]]) -> Series:
        pairs = tuple(points)
        return cls(steps=tuple(step for step, _ in pairs), values=tuple(value for _, value in pairs))

    def __bool__(self) -> bool:
        return bool(self.steps)


@dataclass(frozen=True, slots=True, kw_only=True)
class History:
    run: str
    summaries: tuple[StepSummary, ...]
    evaluations: tuple[tuple[int, EvalResult], ...]
    """Each with the step after which it ran; 0 is before the first step."""
    idle: tuple[IdleShare, ...] = ()

    def of_steps(self, number: Callable[[StepSummary], float]) -> Series:
        return Series.of((summary.step, number(summary)) for summary in self.summaries)

    def of_updates(self, number: Callable[[UpdateStats], float]) -> Series:
        """Steps that updated only the critic are left out."""
        return Series.of(
            (summary.step, number(summary.update)) for summary in self.summaries if summary.update is not None
        )

    def of_rollouts(self, number: Callable[[RolloutSummary], float]) -> Series:
        """Empty if the run trained on demonstrations."""
        return Series.of(
            (summary.step, number(summary.rollouts)) for summary in self.summaries if summary.rollouts is not None
        )

    @property
    def reward(self) -> Series:
        return self.of_rollouts(lambda rollouts: rollouts.reward_mean)

    @property
    def accuracy(self) -> Series:
        return self.of_evaluations("accuracy")

    def of_evaluations(self, name: str) -> Series:
        """One number, such as `pass@4`, of the evaluations that have it."""
        return Series.of((step, result.numbers[name]) for step, result in self.evaluations if name in result.numbers)

    def of_idle(self, role: Role) -> Series:
        """The share of each step in which a role had nothing to do; empty if the run has no such role."""
        return Series.of((share.step, share.roles[role]) for share in self.idle if role in share.roles)

    @property
    def loss(self) -> Series:
        return self.of_updates(lambda update: update.loss)


def fold_history(records: Iterable[Record]) -> History:
    """Return the run without the steps and evaluations that a resume discarded and repeated."""
    run = ""
    summaries: list[StepSummary] = []
    evaluations: list[tuple[int, EvalResult]] = []
    clock, idle = _IdleClock(), list[IdleShare]()
    for record in records:
        if (share := clock.record(record)) is not None:
            idle.append(share)
        match record.event:
            case RunStarted(name=name, resumed_step=resumed_step):
                run = name
                summaries = [summary for summary in summaries if summary.step <= resumed_step]
                idle = [share for share in idle if share.step <= resumed_step]
                evaluations = [item for item in evaluations if resumed_step > 0 and item[0] <= resumed_step]
            case StepFinished(summary=summary):
                summaries.append(summary)
            case Evaluated(step=step, result=result):
                evaluations.append((step, result))
    return History(run=run, summaries=tuple(summaries), evaluations=tuple(evaluations), idle=tuple(idle))
