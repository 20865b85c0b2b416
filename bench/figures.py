"""Figures of the GPU benchmark with their recorded ratios. Numbers only, no printing."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

TOLERANCE = 0.15
"""Share by which a ratio may fall below its record, because runs and machines of one kind differ."""

RECORDED = json.loads(Path(__file__).with_name("recorded.json").read_text())
"""The newest measurement of each figure: value, ratio, machine, date, the commit that recorded it and the command that
measures it; and the rows of the README that show them."""

RECORDS: dict[str, float] = {key: each["ratio"] for key, each in RECORDED["figures"].items() if "ratio" in each}
"""Recorded ratios of one H200, by the key of their figure; docs/performance.md has the versions."""


def readme_table() -> list[str]:
    """Return the table of recorded figures in the README."""
    lines = ["| measured | | where |", "|---|---|---|"]
    for row in RECORDED["readme"]:
        figures = [RECORDED["figures"][key] for key in row["figures"]]
        machine = RECORDED["machines"][figures[0]["machine"]]
        lines.append(f"| {row['what']} | {row['result'].format(*figures)} | {machine}, {figures[0]['date']} |")
    return lines


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
