"""What a diagnosis says: the evidence, the likely cause, and the change of the recipe that helps."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import StrEnum

from megarl.tools.doctor.run_history import Story


class Severity(StrEnum):
    ERROR = "error"
    WARNING = "warning"


@dataclass(frozen=True, slots=True, kw_only=True)
class Change:
    """One key of a recipe, as `--set KEY=VALUE` takes it."""

    key: str
    value: str
    """YAML, in one line."""

    def __str__(self) -> str:
        return f"{self.key}: {self.value}"


@dataclass(frozen=True, slots=True, kw_only=True)
class FindingRule:
    """One thing that goes wrong with runs. `megarl.tools.doctor.rules` has them all."""

    name: str
    severity: Severity
    sign: Callable[[Story], str | None]
    """The evidence, with numbers and steps; None where there is none."""
    cause: str
    changes: Callable[[Story], Sequence[Change]]
    advice: str
    """What to do besides, or to find out whether that was it. `RUN` stands for the run's folder."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    rule: str
    severity: Severity
    evidence: str
    cause: str
    changes: tuple[Change, ...]
    advice: str
