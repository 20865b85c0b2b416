"""Where the loop gets scored groups from: rollout workers, or answers of the data set."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager
from dataclasses import replace
from functools import partial

import numpy as np

from megarl.cluster.tasks import beside
from megarl.data.prompts import Demonstrations
from megarl.errors import QuarantineError
from megarl.observe.observer import Observer
from megarl.rollout.worker import Answering, RolloutTask
from megarl.stages import Generator, GroupSource, Scorer
from megarl.types import DEMONSTRATION, PolicyVersion, Prompt, Score, ScoredGroup


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


_WATCH_EVERY_S = 0.5


class KeptGroups:
    """For synchronous runs: all groups that are open were asked for with the version that is served."""

    def __init__(self) -> None:
        self._is_used = False
        self._version: PolicyVersion | None = None
        self._answers: dict[int, asyncio.Future[ScoredGroup]] = {}
        """By the position of the prompt in the stream."""

    async def get(self, prompt: Prompt, version: PolicyVersion, groups: GroupSource) -> ScoredGroup:
        """Return the group of a prompt. A caller that is cancelled leaves the answer under way."""
        if version != self._version:
            await self.cancel()
            self._version, self._answers = version, {}
        answer = self._answers.get(prompt.position)
        if answer is None:
            answer = self._answers[prompt.position] = asyncio.create_task(groups.scored_group(prompt))
        return await asyncio.shield(answer)

    def answered(self, version: PolicyVersion) -> tuple[ScoredGroup, ...]:
        """The groups that this version has answered until now, in the order of their prompts."""
        if version != self._version:
            return ()
        done = [answer for _, answer in sorted(self._answers.items()) if answer.done() and not answer.cancelled()]
        return tuple(answer.result() for answer in done if answer.exception() is None and self._is_served(answer))

    def forget(self) -> None:
        """Forget what is answered: it was trained on. The next step may have the same version, as while a critic warms
        up."""
        self._answers = {position: answer for position, answer in self._answers.items() if not answer.done()}

    @property
    def is_new(self) -> bool:
        """Whether nothing was asked yet."""
        return self._version is None

    def restore(self, groups: Sequence[ScoredGroup], version: PolicyVersion) -> None:
        """Begin with groups that an earlier driver was answered."""
        self._version = version
        self._answers = {scored.group.prompt.position: _answer(scored) for scored in groups}

    async def finish(self) -> int:
        """Wait for what is under way, and forget what failed; return how many groups there are.

        A prompt that was quarantined stays so: it would cost more engines.
        """
        if self._answers:
            await asyncio.wait(self._answers.values())
        for position, answer in list(self._answers.items()):
            is_lost = answer.cancelled() or not isinstance(answer.exception(), QuarantineError | None)
            if is_lost or not self._is_served(answer):
                del self._answers[position]
        return len(self._answers)

    @contextmanager
    def used(self) -> Iterator[None]:
        """A loop asks for groups inside the block, and decides how long it waits."""
        self._is_used = True
        try:
            yield
        finally:
            self._is_used = False

    @asynccontextmanager
    async def watched(self, can_answer: Callable[[], bool]) -> AsyncIterator[None]:
        """Cancel what is under way at the end of the block; and earlier, between two loops, when no engine can answer:
        they get weights only from the ranks that start, which would wait for it."""
        try:
            async with beside(partial(self._watch, can_answer)):
                yield
        finally:
            await self.cancel()

    async def _watch(self, can_answer: Callable[[], bool]) -> None:
        while True:
            if not self._is_used and not can_answer():
                await self.cancel()
            await asyncio.sleep(_WATCH_EVERY_S)

    async def cancel(self) -> None:
        """Cancel what is under way."""
        open_answers = [answer for answer in self._answers.values() if not answer.done()]
        for answer in open_answers:
            answer.cancel()
        if open_answers:
            await asyncio.wait(open_answers)

    def _is_served(self, answer: asyncio.Future[ScoredGroup]) -> bool:
        """Whether all tokens were chosen by the version that it was asked for."""
        if answer.exception() is not None:
            return True
        served = {self._version, DEMONSTRATION}
        return all(served.issuperset(np.unique(rollout.versions)) for rollout in answer.result().group.rollouts)


def _answer(scored: ScoredGroup) -> asyncio.Future[ScoredGroup]:
    answer: asyncio.Future[ScoredGroup] = asyncio.get_running_loop().create_future()
    answer.set_result(scored)
    return answer


class KeptSource:
    """The groups of one loop (a `stages.GroupSource`)."""

    def __init__(self, kept: KeptGroups, groups: GroupSource, *, version: Callable[[], PolicyVersion]) -> None:
        """`version` returns the one that the engines serve."""
        self._kept = kept
        self._groups = groups
        self._version = version

    async def scored_group(self, prompt: Prompt) -> ScoredGroup:
        return await self._kept.get(prompt, self._version(), self._groups)
