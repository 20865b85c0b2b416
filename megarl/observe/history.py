"""The numbers of a run by step, and the idle time of its roles, folded from its records for reports. Pure."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from datetime import datetime
from typing import Literal, TypeAlias

from megarl.observe.events import Evaluated, PhaseEnded, PhaseStarted, Record, RunStarted, StepFinished
from megarl.observe.summary import Phase, RolloutSummary, StepSummary
from megarl.results import EvalResult, UpdateStats

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
