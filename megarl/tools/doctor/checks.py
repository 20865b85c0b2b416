"""One thing looked at: what was found, whether that is good, and what to do where it is not."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum


class CheckStatus(StrEnum):
    OK = "ok"
    NOTE = "note"
    """Not there or not to be known here, and nothing this recipe needs."""
    WARNING = "warning"
    ERROR = "error"


@dataclass(frozen=True, slots=True, kw_only=True)
class Check:
    area: str
    name: str
    found: str
    verdict: CheckStatus
    remedy: str = ""
