"""`megarl doctor`: what is wrong with a machine, a cluster or a run, and what to do about it. Changes nothing."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

UPDATE = "update"
STAGES = ("nodes", "machines", "devices", "node links", "node pairs", "all nodes", "network", "storage", UPDATE)
"""The stages of `megarl doctor --cluster`, in their order."""


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

    @classmethod
    def of(
        cls,
        area: str,
        name: str,
        found: str,
        *,
        is_ok: bool,
        remedy: str,
        otherwise: CheckStatus = CheckStatus.ERROR,
    ) -> Check:
        """Return a check that is OK, or else has another status and a remedy."""
        status = CheckStatus.OK if is_ok else otherwise
        return cls(area=area, name=name, found=found, status=status, remedy="" if is_ok else remedy)
