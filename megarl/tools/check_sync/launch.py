"""The entry of `megarl check-sync`: settles what Ray reads when it is imported, then runs the check."""

from __future__ import annotations

from typing import TYPE_CHECKING

from megarl.config.model import ModelShape
from megarl.config.recipe import Recipe
from megarl.runtime.launch import private_ray
from megarl.tools.check_sync.small_sync import SmallSync

if TYPE_CHECKING:
    from megarl.tools.check_sync.check import SyncCheck


def rehearse_sync(recipe: Recipe, shape: ModelShape) -> SyncCheck:
    """Check a recipe's own layouts with a tiny shape, within this process."""
    with private_ray():
        from megarl.tools.check_sync.check import rehearse_layouts  # noqa: PLC0415

        return rehearse_layouts(recipe, shape)


def check_sync(small: SmallSync) -> SyncCheck:
    """Start what `small` says on this machine, publish, and compare what the engines then have."""
    with private_ray():
        from megarl.tools.check_sync.check import check_for_real  # noqa: PLC0415

        return check_for_real(small, ray_address=None)
