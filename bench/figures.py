"""Figures of a benchmark: what was measured, against what, and what was recorded before. Numbers only, no printing."""

from __future__ import annotations

from dataclasses import dataclass

TOLERANCE = 0.15
"""How far below its record a ratio may fall: runs of one machine differ, and machines of one kind do too."""

RECORDS: dict[str, float] = {
    "step 7B": 0.565,
    "step 7B, transformers": 1.11,
    "step 7B, transformers compiled": 1.10,
    "step 1.5B": 0.514,
    "step 1.5B, transformers": 1.29,
    "step 1.5B, transformers compiled": 1.22,
    "step 1.5B 16k": 0.504,
    "scores": 1.39,
    "scores, products": 0.87,
    "scores, memory": 12.2,
    "phase, release": 0.91,
    "phase, reload": 0.91,
    "publish": 1.47,
    "publish, copy": 0.17,
    "rollouts": 0.97,
}
"""Ratios of one H200, by the key of their figure; docs/performance.md says when and with what."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Figure:
    """One measured value and its ratio to a ceiling or a peer that was measured in the same run."""

    key: str
    """Under which its ratio is recorded."""
    name: str
    value: float
    unit: str
    against: str
    """What the ratio is to."""
    ratio: float
    """Above 1 is better than `against`, whatever the unit."""

    @property
    def record(self) -> float | None:
        """None where there is none yet."""
        return RECORDS.get(self.key)

    @property
    def has_fallen(self) -> bool:
        return self.record is not None and self.ratio < self.record * (1 - TOLERANCE)


@dataclass(frozen=True, slots=True, kw_only=True)
class Failure:
    """A part of a benchmark that gave no figure, and why."""

    part: str
    reason: str
