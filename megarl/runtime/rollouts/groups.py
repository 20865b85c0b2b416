"""Where the loop gets scored groups from: rollout workers, or answers of the data set."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import replace

from megarl.data.prompts import Demonstrations
from megarl.observe.observer import Observer
from megarl.rollout.worker import Answering, RolloutTask
from megarl.stages import Generator, Scorer
from megarl.types import Prompt, Score, ScoredGroup


class TaskGroups:
    """The groups of prompts that are all answered alike (a `stages.GroupSource`)."""

    def __init__(self, workers: Answering, task: RolloutTask, observer: Observer | None = None) -> None:
        """`observer` counts the groups."""
        self._workers = workers
        self._task = task
        self._observer = observer

    async def scored_group(self, prompt: Prompt) -> ScoredGroup:
        answered = await self._workers.answer(prompt, self._task)
        rollouts = answered.scored.group.rollouts
        if self._observer is not None:
            self._observer.group_generated(
                seconds=answered.seconds,
                num_rollouts=len(rollouts),
                num_tokens=sum(rollout.num_tokens for rollout in rollouts),
            )
        return answered.scored

    async def restore(self, groups: Sequence[ScoredGroup]) -> list[ScoredGroup]:
        """Return the groups, with those whose tokens are lost answered again: the same seeds give the same tokens."""
        restored = list(groups)
        lost = await self._workers.lost(groups)
        if lost and self._observer is not None:
            self._observer.warned(f"a node was lost with {len(lost)} groups of the step; their prompts are asked again")
        answers = await asyncio.gather(*(self.scored_group(groups[place].group.prompt) for place in lost))
        for place, scored in zip(lost, answers, strict=True):
            restored[place] = scored
        return restored


class ContestedGroups(TaskGroups):
    """Groups that have the demonstration of their prompt as the last answer."""

    def __init__(
        self, workers: Answering, task: RolloutTask, observer: Observer, demonstrations: Demonstrations
    ) -> None:
        super().__init__(workers, task, observer)
        self._demonstrations = demonstrations

    async def scored_group(self, prompt: Prompt) -> ScoredGroup:
        scored = await super().scored_group(prompt)
        (given,) = (await self._demonstrations.generate(prompt)).rollouts
        group = replace(scored.group, rollouts=(*scored.group.rollouts, given))
        return replace(scored, group=group, scores=(*scored.scores, Score(value=1.0, components={})))


class GivenGroups:
    """Groups of a generator and a scorer that need no engine (a `stages.GroupSource`)."""

    def __init__(self, generator: Generator, scorer: Scorer) -> None:
        self._generator = generator
        self._scorer = scorer

    async def scored_group(self, prompt: Prompt) -> ScoredGroup:
        return await self._scorer.score(await self._generator.generate(prompt))
