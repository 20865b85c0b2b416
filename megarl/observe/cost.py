"""The cost of a run: the hours of its GPUs, and money where the recipe names a price.

Counted from the events of all starts of a run, while one of its drivers runs: GPUs that are reserved between them are
not in it. A run on CPUs has no cost.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from datetime import datetime

from pydantic import JsonValue

HOUR_S = 3600.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Usage:
    """The GPUs of a run and the time for which they were used."""

    num_gpus: int = 0
    """0 on CPUs."""
    hour_price: float | None = None
    """The recipe's `cluster.gpu_hour_price`."""
    gpu_hours: float = 0.0
    until: datetime | None = None
    """Time up to which it is counted; None while no driver runs."""

    def started(self, recipe: Mapping[str, JsonValue], at: datetime) -> Usage:
        """Go on counting with the GPUs of a driver's recipe."""
        pools, cluster = _section(recipe, "pools"), _section(recipe, "cluster")
        is_cuda = _section(recipe, "run").get("device") == "cuda"
        sizes = [(_section(pools, name).get("nodes"), _section(pools, name).get("gpus_per_node")) for name in pools]
        counts = [nodes * gpus for nodes, gpus in sizes if isinstance(nodes, int) and isinstance(gpus, int)]
        price = cluster.get("gpu_hour_price")
        return replace(
            self,
            num_gpus=sum(counts) if is_cuda else 0,
            hour_price=float(price) if isinstance(price, int | float) else None,
            until=at,
        )

    def counted(self, at: datetime, *, is_over: bool) -> Usage:
        """Count up to an event; with `is_over` it is the driver's last."""
        if self.until is None:
            return self
        passed = max(0.0, (at - self.until).total_seconds())
        return replace(self, gpu_hours=self.gpu_hours + self.hours(passed), until=None if is_over else at)

    def hours(self, seconds: float) -> float:
        """Return the GPU hours of this many seconds."""
        return self.num_gpus * seconds / HOUR_S

    def money(self, gpu_hours: float) -> float | None:
        return None if self.hour_price is None else gpu_hours * self.hour_price


def describe_cost(gpu_hours: float, hour_price: float | None) -> str:
    """Return `36,460 GPU h` and, with a price, `36,460 GPU h (91,150)`."""
    shown = f"{gpu_hours:,.0f}" if gpu_hours >= 100 else f"{gpu_hours:.3g}"
    return f"{shown} GPU h" if hour_price is None else f"{shown} GPU h ({gpu_hours * hour_price:,.2f})"


def _section(values: Mapping[str, JsonValue], name: str) -> Mapping[str, JsonValue]:
    section = values.get(name)
    return section if isinstance(section, dict) else {}
