"""`megarl doctor`: what is wrong with a machine, a cluster or a run, and what to do about it. Changes nothing."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum


class CheckStatus(StrEnum):
    OK = "ok"
    NOTE = "note"
    """Missing or unknown here, and not needed by this recipe."""
    WARNING = "warning"
    ERROR = "error"


@dataclass(frozen=True, slots=True, kw_only=True)
class Check:
    """One row of the doctor's table."""

    area: str
    name: str
    found: str
    status: CheckStatus
    remedy: str = ""
    """The remedy, where the status is not OK."""
