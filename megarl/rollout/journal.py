"""The journal of a step: its groups are written to the run's folder as they are finished, for the next driver."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path

from megarl.checkpoint.carried import remove_open_step, take_open_step, write_open_step
from megarl.cluster.tasks import beside
from megarl.errors import WorkerError
from megarl.rollout.groups import RetainedGroups
from megarl.types import PolicyVersion, Prompt

JOURNAL_EVERY_S = 2.0
"""Answers of so long are lost with a driver that is killed, and as much as a write takes."""


@dataclass(eq=False, kw_only=True)
class GroupJournal:
    run_folder: Path
    identity: str
    """Digest of all that answers depend on: groups with another one are not taken."""
    warn: Callable[[str], None]
    retained: RetainedGroups = field(default_factory=RetainedGroups)
    _num_steps: int = field(default=0, init=False)
    """Steps that were begun or forgotten when `_written` began."""
    _written: set[int] = field(default_factory=set, init=False)
    """Positions of the groups of the step that are in the folder."""
    _writing: asyncio.Lock = field(default_factory=asyncio.Lock, init=False)

    @asynccontextmanager
    async def kept(self) -> AsyncIterator[None]:
        """Write groups as they are finished inside the block: a driver that is killed takes none with it."""
        async with beside(self._keep):
            yield
        remove_open_step(self.run_folder)  # all steps are taken

    async def write(self, version: PolicyVersion) -> None:
        """Write the finished groups of this version, but for those that are written."""
        async with self._writing:
            num_steps = self.retained.num_steps
            if num_steps != self._num_steps:
                self._num_steps, self._written = num_steps, set()
            finished = self.retained.finished(version)
            groups = [each for each in finished if each.group.prompt.position not in self._written]
            if not groups:
                return
            writing = asyncio.ensure_future(
                asyncio.to_thread(
                    write_open_step,
                    self.run_folder,
                    groups,
                    version=version,
                    identity=self.identity,
                    is_continued=bool(self._written),
                )
            )
            try:
                await asyncio.shield(writing)
            finally:
                await asyncio.wait([writing])  # a thread cannot be cancelled
            self._written |= {each.group.prompt.position for each in groups}

    async def _keep(self) -> None:
        pause_s, has_warned = JOURNAL_EVERY_S, False
        while True:
            await asyncio.sleep(pause_s)
            if self.retained.version is None:
                continue
            began = time.monotonic()
            try:
                await self.write(self.retained.version)
            except (OSError, WorkerError) as error:
                if not has_warned:
                    self.warn(f"answers of this step would be lost with the driver: {error}")
                has_warned = True
            # Tokens are fetched from their nodes for it: at most a tenth of the time.
            pause_s = max(JOURNAL_EVERY_S, 9 * (time.monotonic() - began))

    def take_left(self, version: PolicyVersion, *, prompt_at: Callable[[int], Prompt]) -> int:
        """Begin with the groups that a driver before left, unless something was asked already; return how many."""
        if self.retained.version is not None:
            return 0
        left = take_open_step(
            self.run_folder, version=version, identity=self.identity, prompt_at=prompt_at, warn=self.warn
        )
        if left:
            self.retained.begin(version, left)
        return len(left)
