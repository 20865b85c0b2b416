"""Which ranks are profiled in which steps: begun before the passes of a step, ended and written after its update."""

from __future__ import annotations

import logging
from dataclasses import dataclass, field
from pathlib import Path

from megarl.config.recipe import ProfileConfig
from megarl.ranks.calls import ActorCalls
from megarl.ranks.ranks import RankGroup

PROFILES_FOLDER = "profiles"

logger = logging.getLogger(__name__)


@dataclass(kw_only=True)
class Profiling:
    """The profiles of the actor's ranks."""

    config: ProfileConfig
    actor: RankGroup[ActorCalls]
    folder: Path
    """Gets a folder per step."""
    _step: int | None = field(default=None, init=False)
    """The step that is recorded now."""

    async def begin(self, step: int) -> None:
        """Let the chosen ranks record from now on, if the step is one of those to profile."""
        if step not in self.config.steps or self._step is not None:
            return
        self._step = step
        started = [self.actor.workers[rank].begin_profile.remote() for rank in self._ranks]
        await self.actor.gather("begin_profile", started, ranks=self._ranks)

    async def end(self) -> None:
        """Let the ranks write what they have recorded."""
        if self._step is None:
            return
        folder = self.folder / f"step_{self._step}"
        self._step = None
        started = [self.actor.workers[rank].end_profile.remote(folder / f"rank_{rank}") for rank in self._ranks]
        await self.actor.gather("end_profile", started, ranks=self._ranks)
        logger.info("profiled ranks=%s folder=%s", self._ranks, folder)

    @property
    def _ranks(self) -> list[int]:
        return [rank for rank in self.config.ranks if rank < len(self.actor)]
