"""What no single step knows: how much of the run's time counted, and how trainer and engines agreed at its beginning.

Folded from all records of a run, those of its earlier processes included.
"""

from __future__ import annotations

from datetime import datetime
from statistics import median

from megarl.observe.events import Record, RunStarted, StepFinished

_NUM_BASELINE_STEPS = 8


class Standing:
    def __init__(self) -> None:
        self._began: datetime | None = None
        self._seconds: dict[int, float] = {}
        """By step; one that was trained again after a crash counts once."""
        self._mismatch: dict[int, float] = {}

    def record(self, record: Record) -> None:
        match record.event:
            case RunStarted(resumed_step=resumed_step):
                self._began = self._began or record.time
                # What was trained after the checkpoint is lost.
                self._seconds = {step: s for step, s in self._seconds.items() if step <= resumed_step}
                self._mismatch = {step: m for step, m in self._mismatch.items() if step <= resumed_step}
            case StepFinished(summary=summary):
                self._seconds[summary.step] = summary.seconds
                # How far the policy has moved on since is no matter of engines.
                mismatch = None if summary.update is None else summary.update.engine_mismatch
                if mismatch is not None and len(self._mismatch) < _NUM_BASELINE_STEPS:
                    self._mismatch[summary.step] = mismatch

    def effective_time_ratio(self, now: datetime) -> float | None:
        """Time of steps that count, over all time since the run was first started."""
        if self._began is None or now <= self._began:
            return None
        return min(1.0, sum(self._seconds.values()) / (now - self._began).total_seconds())

    @property
    def mismatch_baseline(self) -> float | None:
        """None until the first steps are there."""
        return median(self._mismatch.values()) if len(self._mismatch) == _NUM_BASELINE_STEPS else None
