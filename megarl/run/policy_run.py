"""One policy of a run: what it is trained on, where it resumes, and its groups of the step that is under way."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field
from pathlib import Path

from megarl.checkpoint.mirror import Mirroring
from megarl.errors import DamagedError
from megarl.observe.observer import Observer
from megarl.rollout.journal import GroupJournal
from megarl.run.begin import BegunPolicy
from megarl.run.resume import last_good


@dataclass(eq=False)
class PolicyRun:
    begun: BegunPolicy
    observer: Observer
    saved_steps: list[int] = field(default_factory=list, init=False)
    _damaged: set[Path] = field(default_factory=set, init=False)
    """Checkpoints that ranks found damaged."""

    def __post_init__(self) -> None:
        recipe = self.recipe = self.begun.recipe
        self.name, self.inputs = self.begun.name, self.begun.inputs
        self.first = self.point = self.begun.point
        """Where the driver began, and where the next set of ranks begins."""
        claim = self.begun.mirror_claim
        self.mirroring = Mirroring(recipe.checkpoint, recipe.run_folder, self.observer, claim=claim)
        self.journal = GroupJournal(
            run_folder=recipe.run_folder.absolute(),
            identity=self.inputs.answers_digest(recipe.model_dump_json()),
            warn=self.observer.warned,
        )

    async def go_back(self) -> None:
        """Begin from the newest checkpoint next."""
        notes: list[str] = []
        self.point = await asyncio.to_thread(
            last_good,
            self.recipe,
            first=self.first,
            saved_steps=self.saved_steps,
            warn=notes.append,
            damaged=self._damaged,
        )
        for note in notes:
            self.observer.warned(note)

    async def pass_over(self, error: DamagedError) -> None:
        """Begin from another checkpoint than the one that is damaged."""
        assert self.point is not None, "a run that began anew has read no checkpoint"
        if self.point.folder in self._damaged:
            raise error
        self._damaged.add(self.point.folder)
        if self.saved_steps:
            await self.go_back()
        else:
            self.point = self.first = await asyncio.to_thread(self.begun.choose, self._damaged, self.observer.warned)

    def note_saved(self, step: int) -> None:
        self.saved_steps.append(step)
        self.mirroring.saved()
