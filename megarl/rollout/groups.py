"""The source of the loop's scored groups: failing prompts are quarantined, and the groups of a step survive lost ranks.

`SampledGroups` asks engines, `GivenGroups` takes answers of the data set. In a synchronous run `RetainedGroups` holds
the groups of the step by the position of their prompt, and a loop looks there first: so they survive lost trainer ranks
(and with `journal` the end of the driver). Groups whose tokens were lost with a node are sampled again:
the same seeds give the same tokens.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager
from dataclasses import KW_ONLY, dataclass, field, replace
from functools import partial

import numpy as np

from megarl.cluster.tasks import beside
from megarl.data.prompts import Demonstrations
from megarl.engine.fleet import Fleet
from megarl.errors import FleetError, QuarantineError
from megarl.observe.observer import Observer
from megarl.rollout.task import RolloutSource, RolloutTask
from megarl.stages import Generator, Scorer
from megarl.types import DEMONSTRATION, PolicyVersion, Prompt, Score, ScoredGroup

_MAX_QUARANTINED_IN_A_ROW = 16
"""With more, not the prompts are at fault but the engines."""
_MAX_SKIPPED = 4
"""Times that each prompt of the quarantine may be drawn again before any other is answered."""
_WATCH_EVERY_S = 0.5


@dataclass(eq=False)
class SampledGroups:
    """Groups that engines sample for one loop (a `stages.GroupSource`).

    A prompt whose requests fail or lose engines is quarantined: it is not sent again. The run ends only if all prompts
    fail.
    """

    rollouts: RolloutSource
    task: RolloutTask
    observer: Observer
    _: KW_ONLY
    retained: RetainedGroups | None = None
    """Has groups of earlier loops."""
    fleet: Fleet | None = None
    """Serves the version that retained groups must be of."""
    order: LongestFirst | None = None
    """The order of the prompts of a step that are asked at once; None: they are asked as they come."""
    demonstrations: Demonstrations | None = None
    """Adds that of the prompt to each group, as its last and right answer."""
    _quarantined: set[str] = field(default_factory=set, init=False)
    _num_dropped: int = field(default=0, init=False)
    _num_in_a_row: int = field(default=0, init=False)
    _num_skipped: int = field(default=0, init=False)

    async def scored_group(self, prompt: Prompt) -> ScoredGroup | None:
        """Return the group of a prompt; None if the prompt is quarantined, now or since an earlier epoch."""
        if prompt.uid in self._quarantined:
            self._skip()
            return None
        try:
            if self.retained is None or self.fleet is None:
                scored = await self._sample(prompt)
            else:
                scored = await self.retained.get(prompt, self.fleet.committed_version(self.task.policy), self._sample)
        except QuarantineError as error:
            self._quarantine(prompt, error)
            return None
        self._num_in_a_row = self._num_skipped = 0
        return scored

    def take_dropped(self) -> dict[str, int]:
        num_dropped, self._num_dropped = self._num_dropped, 0
        return {"quarantined": num_dropped} if num_dropped else {}

    async def replace_lost(self, groups: Sequence[ScoredGroup]) -> list[ScoredGroup]:
        """Return the groups, with those whose tokens are lost sampled again."""
        replaced = list(groups)
        lost = await self.rollouts.lost(groups)
        if lost:
            text = f"a node was lost with {len(lost)} groups of the step; their prompts are asked again"
            self.observer.warned(text)
        sampled = await asyncio.gather(*(self._sample(groups[place].group.prompt) for place in lost))
        for place, scored in zip(lost, sampled, strict=True):
            replaced[place] = scored
        return replaced

    async def _sample(self, prompt: Prompt) -> ScoredGroup:
        if self.order is not None:
            await self.order.turn(prompt.uid)
        answered = await self.rollouts.answer(prompt, self.task)
        scored, rollouts = answered.scored, answered.scored.group.rollouts
        num_tokens = sum(rollout.num_tokens for rollout in rollouts)
        if self.order is not None:
            self.order.learn(prompt.uid, num_tokens / len(rollouts))
        self.observer.group_generated(seconds=answered.seconds, num_rollouts=len(rollouts), num_tokens=num_tokens)
        if self.demonstrations is None:
            return scored
        (demonstration,) = (await self.demonstrations.generate(prompt)).rollouts
        group = replace(scored.group, rollouts=(*rollouts, demonstration))
        return replace(scored, group=group, scores=(*scored.scores, Score(value=1.0, components={})))

    def _quarantine(self, prompt: Prompt, error: QuarantineError) -> None:
        self._num_in_a_row += 1
        if self._num_in_a_row > _MAX_QUARANTINED_IN_A_ROW:
            raise FleetError(f"{self._num_in_a_row} prompts in a row have no answer; the last: {error}") from error
        self._num_dropped += 1
        self._quarantined.add(prompt.uid)
        self.observer.warned(f"quarantined, its group is dropped: {error}")

    def _skip(self) -> None:
        """Count a prompt that is drawn again in quarantine."""
        self._num_dropped += 1
        self._num_skipped += 1
        num_quarantined = len(self._quarantined)
        if self._num_skipped > _MAX_QUARANTINED_IN_A_ROW + _MAX_SKIPPED * num_quarantined:
            raise FleetError(f"all prompts that are left are in quarantine ({num_quarantined}); see the warnings")


class LongestFirst:
    """The order of the prompts that are asked at one moment: by the answers that each had in the epoch before.

    Requests that engines have no room for begin as others end: a long answer that begins last is alone at the end of
    the step. Prompts without an answer yet count as average ones.
    """

    def __init__(self) -> None:
        self._num_tokens: dict[str, float] = {}
        """Mean of the newest answers to a prompt."""
        self._arrived: list[tuple[str, asyncio.Future[None]]] = []

    async def turn(self, uid: str) -> None:
        """Wait until all prompts that are asked at this moment have come, and those with longer answers have gone."""
        loop = asyncio.get_running_loop()
        if not self._arrived:
            loop.call_soon(self._go)
        turn: asyncio.Future[None] = loop.create_future()
        self._arrived.append((uid, turn))
        await turn

    def learn(self, uid: str, num_tokens: float) -> None:
        self._num_tokens[uid] = num_tokens

    def _go(self) -> None:
        arrived, self._arrived = self._arrived, []
        known = [self._num_tokens[uid] for uid, _ in arrived if uid in self._num_tokens]
        average = sum(known) / len(known) if known else 0.0
        for _, turn in sorted(arrived, key=lambda one: -self._num_tokens.get(one[0], average)):
            if not turn.done():
                turn.set_result(None)


@dataclass(eq=False)
class GivenGroups:
    """Groups of a generator and a scorer that need no engine (a `stages.GroupSource`)."""

    generator: Generator
    scorer: Scorer

    async def scored_group(self, prompt: Prompt) -> ScoredGroup:
        return await self.scorer.score(await self.generator.generate(prompt))

    def take_dropped(self) -> dict[str, int]:
        return {}


class RetainedGroups:
    """The groups of the step that a synchronous run is in, which outlive its loop.

    All of them were asked for with the version that is served.
    """

    def __init__(self) -> None:
        self._is_used = False
        self.version: PolicyVersion | None = None
        """None before anything is asked for."""
        self.num_steps = 0
        """Steps whose groups were begun or forgotten."""
        self._groups: dict[int, asyncio.Future[ScoredGroup]] = {}
        """By the position of the prompt in the stream."""

    async def get(
        self, prompt: Prompt, version: PolicyVersion, sample: Callable[[Prompt], Awaitable[ScoredGroup]]
    ) -> ScoredGroup:
        """Return the group of a prompt, sampled now if there is none. A cancelled caller leaves it under way."""
        if version != self.version:
            await self.cancel()
            self.begin(version)
        group = self._groups.get(prompt.position)
        if group is None:
            group = self._groups[prompt.position] = asyncio.ensure_future(sample(prompt))
        return await asyncio.shield(group)

    def begin(self, version: PolicyVersion, groups: Sequence[ScoredGroup] = ()) -> None:
        """Begin a step with these groups of its version."""
        self.version = version
        self.num_steps += 1
        self._groups = {scored.group.prompt.position: _done(scored) for scored in groups}

    def finished(self, version: PolicyVersion) -> tuple[ScoredGroup, ...]:
        """Return the groups of this version that are there, in the order of their prompts."""
        if version != self.version:
            return ()
        done = [group for _, group in sorted(self._groups.items()) if group.done() and not group.cancelled()]
        return tuple(group.result() for group in done if group.exception() is None and self._is_served(group))

    def forget(self) -> None:
        """Forget the groups that are there: they were trained on. The next step may have the same version, as while a
        critic warms up."""
        self.num_steps += 1
        self._groups = {position: group for position, group in self._groups.items() if not group.done()}

    async def finish(self) -> int:
        """Wait for what is under way, and forget what failed; return how many groups there are.

        A prompt that was quarantined stays so: it would cost more engines.
        """
        if self._groups:
            await asyncio.wait(self._groups.values())
        for position, group in list(self._groups.items()):
            is_lost = group.cancelled() or not isinstance(group.exception(), QuarantineError | None)
            if is_lost or not self._is_served(group):
                del self._groups[position]
        return len(self._groups)

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
        under_way = [group for group in self._groups.values() if not group.done()]
        for group in under_way:
            group.cancel()
        if under_way:
            await asyncio.wait(under_way)

    def _is_served(self, group: asyncio.Future[ScoredGroup]) -> bool:
        """Whether all tokens were chosen by the version that the group was asked for with."""
        if group.exception() is not None:
            return True
        served = {self.version, DEMONSTRATION}
        return all(served.issuperset(np.unique(rollout.versions)) for rollout in group.result().group.rollouts)


def _done(scored: ScoredGroup) -> asyncio.Future[ScoredGroup]:
    group: asyncio.Future[ScoredGroup] = asyncio.get_running_loop().create_future()
    group.set_result(scored)
    return group
