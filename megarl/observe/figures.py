"""Figures of a benchmark: what was measured, against what, and what was recorded before. Numbers only, no printing."""

from __future__ import annotations

from dataclasses import dataclass

TOLERANCE = 0.15
"""How far below its record a ratio may fall: runs of one machine differ, and machines of one kind do too."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Figure:
    """One measured value and its ratio to a ceiling or a peer that was measured in the same run."""

    name: str
    value: float
    unit: str
    against: str
    """What the ratio is to."""
    ratio: float
    """Above 1 is better than `against`, whatever the unit."""
    record: float | None = None
    """The ratio that docs/performance.md states; None where there is none yet."""

    @property
    def has_fallen(self) -> bool:
        return self.record is not None and self.ratio < self.record * (1 - TOLERANCE)
