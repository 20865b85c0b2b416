"""Figures of the GPU benchmark with their recorded ratios. Numbers only, no printing."""

from __future__ import annotations

from dataclasses import dataclass

TOLERANCE = 0.15
"""Share by which a ratio may fall below its record, because runs and machines of one kind differ."""

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
    "publish": 3.0,
    "publish, copy": 0.33,
    "reads, read": 0.66,
    "reads, digested": 0.80,
    "rollouts": 0.97,
}
"""Ratios of one H200, by the key of their figure; docs/performance.md has the date and the versions."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Figure:
    """One measured value and its ratio to a ceiling or a peer that was measured in the same run."""

    key: str
    """Key of its ratio in `RECORDS`."""
    name: str
    value: float
    unit: str
    against: str
    """The ceiling or peer of the ratio."""
    ratio: float
    """Above 1 is better than `against`, for every unit."""

    @property
    def record(self) -> float | None:
        """The recorded ratio; None if there is none."""
        return RECORDS.get(self.key)

    @property
    def has_fallen(self) -> bool:
        return self.record is not None and self.ratio < self.record * (1 - TOLERANCE)


@dataclass(frozen=True, slots=True, kw_only=True)
class Failure:
    """A part of a benchmark that gave no figure, with the reason."""

    part: str
    reason: str
