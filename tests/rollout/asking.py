"""Loops that ask scripted engines for groups, one loop after the other."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from pathlib import Path

import httpx
import pytest

from megarl.observe.observer import Observer
from megarl.rollout.groups import RetainedGroups, SampledGroups
from megarl.rollout.journal import GroupJournal
from megarl.rollout.task import AnsweredPrompt, RolloutTask, Sampling
from megarl.types import ONE_POLICY, PolicyVersion, Prompt, ScoredGroup
from tests.engine.engines import scripted_fleet
from tests.values import versioned_group

TASK = RolloutTask(sampling=Sampling.greedy(max_response_tokens=4), seed=1)


class Engines:
    """A `RolloutSource` that answers when it may, with the version that it serves."""

    def __init__(self) -> None:
        self.fleet = scripted_fleet(lambda _: httpx.Response(500))
        self.version = PolicyVersion(3)
        self.asked: list[int] = []
        self.failures: dict[int, Exception] = {}
        self.may_answer = asyncio.Event()

    @property
    def version(self) -> PolicyVersion:
        return self.fleet.committed_version()

    @version.setter
    def version(self, version: PolicyVersion) -> None:
        self.fleet._committed[ONE_POLICY] = version

    async def answer(self, prompt: Prompt, task: RolloutTask) -> AnsweredPrompt:
        self.asked.append(prompt.position)
        await self.may_answer.wait()
        if prompt.position in self.failures:
            raise self.failures[prompt.position]
        return AnsweredPrompt(scored=versioned_group(prompt.position, self.version), seconds=0.0)

    async def announce(self) -> None: ...

    async def lost(self, groups: Sequence[ScoredGroup]) -> list[int]:
        return []


class Asking:
    """One loop after the other."""

    def __init__(self) -> None:
        self.engines = Engines()
        self.retained = RetainedGroups()

    async def ask(self, *positions: int) -> list[ScoredGroup | BaseException | None]:
        source = SampledGroups(self.engines, TASK, Observer(()), retained=self.retained, fleet=self.engines.fleet)
        prompts = [versioned_group(position, 0).group.prompt for position in positions]
        return await asyncio.gather(*map(source.scored_group, prompts), return_exceptions=True)

    def journal(self, folder: Path, *, warn: Callable[[str], None] = pytest.fail) -> GroupJournal:
        return GroupJournal(retained=self.retained, run_folder=folder, identity="a run", warn=warn)

    def take_left(self, folder: Path) -> int:
        """Begin with what another driver left for version 3."""
        return self.journal(folder).take_left(
            PolicyVersion(3), prompt_at=lambda position: versioned_group(position, 0).group.prompt
        )

    async def lose(self, *positions: int) -> None:
        """Ask in a loop whose ranks are lost before an answer comes."""
        loop = asyncio.create_task(self.ask(*positions))
        while len(self.engines.asked) < len(positions):
            await asyncio.sleep(0)
        loop.cancel()
        with pytest.raises(asyncio.CancelledError):
            await loop
