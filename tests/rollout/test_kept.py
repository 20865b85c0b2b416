"""Groups that outlive the loop that asked for them."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

import pytest

from megarl.errors import FleetError, QuarantineError
from megarl.rollout.groups import KeptGroups, KeptSource
from megarl.types import PolicyVersion, Prompt, ScoredGroup
from tests.run.test_buffer import scored_group


class Engines:
    """Answer when they are told to, with the version that they serve."""

    def __init__(self) -> None:
        self.version = PolicyVersion(3)
        self.asked: list[int] = []
        self.failures: dict[int, Exception] = {}
        self.may_answer = asyncio.Event()

    async def scored_group(self, prompt: Prompt) -> ScoredGroup:
        self.asked.append(prompt.position)
        await self.may_answer.wait()
        if prompt.position in self.failures:
            raise self.failures[prompt.position]
        return scored_group(prompt.position, self.version)


class Asking:
    """One loop after the other."""

    def __init__(self) -> None:
        self.engines = Engines()
        self.kept = KeptGroups()

    async def ask(self, *positions: int) -> list[ScoredGroup | BaseException]:
        source = KeptSource(self.kept, self.engines, version=lambda: self.engines.version)
        prompts = [scored_group(position, 0).group.prompt for position in positions]
        return await asyncio.gather(*map(source.scored_group, prompts), return_exceptions=True)

    async def lose(self, *positions: int) -> None:
        """Ask in a loop whose ranks are lost before an answer comes."""
        loop = asyncio.create_task(self.ask(*positions))
        while len(self.engines.asked) < len(positions):
            await asyncio.sleep(0)
        loop.cancel()
        with pytest.raises(asyncio.CancelledError):
            await loop


def run(scenario: Callable[[Asking], Awaitable[None]]) -> None:
    async def main() -> None:
        await scenario(Asking())

    asyncio.run(main())


def test_a_step_that_is_taken_again_asks_only_for_what_is_missing() -> None:
    async def scenario(asking: Asking) -> None:
        await asking.lose(7, 8)
        asking.engines.may_answer.set()
        assert await asking.kept.finish() == 2
        groups = await asking.ask(7, 8, 9)
        assert [group.group.prompt.position for group in groups if isinstance(group, ScoredGroup)] == [7, 8, 9]
        assert asking.engines.asked == [7, 8, 9]

    run(scenario)


def test_answers_of_another_version_are_not_used() -> None:
    async def scenario(asking: Asking) -> None:
        asking.engines.may_answer.set()
        await asking.ask(7)
        asking.engines.version = PolicyVersion(2)
        await asking.ask(7)
        asking.engines.version = PolicyVersion(3)
        await asking.ask(7)
        assert asking.engines.asked == [7, 7, 7]

    run(scenario)


def test_an_answer_of_two_versions_is_asked_for_again() -> None:
    async def scenario(asking: Asking) -> None:
        await asking.lose(7)
        asking.engines.version = PolicyVersion(4)  # an engine that took the next one already
        asking.engines.may_answer.set()
        assert await asking.kept.finish() == 0

    run(scenario)


def test_what_failed_is_asked_for_again_and_what_is_quarantined_is_not() -> None:
    async def scenario(asking: Asking) -> None:
        asking.engines.failures = {7: FleetError("no engine is left"), 8: QuarantineError("lost two engines")}
        asking.engines.may_answer.set()
        first = await asking.ask(7, 8)
        assert [type(each) for each in first] == [FleetError, QuarantineError]
        assert await asking.kept.finish() == 1
        asking.engines.failures.clear()
        answered, quarantined = await asking.ask(7, 8)
        assert isinstance(answered, ScoredGroup)
        assert isinstance(quarantined, QuarantineError)
        assert asking.engines.asked == [7, 8, 7]

    run(scenario)


def test_cancelled_answers_are_asked_for_again() -> None:
    async def scenario(asking: Asking) -> None:
        await asking.lose(7)
        await asking.kept.cancel()
        assert await asking.kept.finish() == 0
        asking.engines.may_answer.set()
        (group,) = await asking.ask(7)
        assert isinstance(group, ScoredGroup)

    run(scenario)


def test_between_two_loops_nothing_waits_for_engines_that_wait_for_ranks() -> None:
    async def scenario(asking: Asking) -> None:
        async with asking.kept.watched(lambda: False):
            with asking.kept.used():
                await asking.lose(7)
                await asyncio.sleep(0.7)
                asking.engines.may_answer.set()
                assert await asking.kept.finish() == 1
                asking.engines.may_answer.clear()
                await asking.lose(7, 8)
            assert await asking.kept.finish() == 1
            assert asking.engines.asked == [7, 8]

    run(scenario)


def test_nothing_is_under_way_at_the_end() -> None:
    async def scenario(asking: Asking) -> None:
        async with asking.kept.watched(lambda: True):
            await asking.lose(7)
        assert await asking.kept.finish() == 0

    run(scenario)


def test_a_step_that_is_trained_is_forgotten() -> None:
    async def scenario(asking: Asking) -> None:
        asking.engines.may_answer.set()
        await asking.ask(7, 8)
        asking.kept.forget()
        assert asking.kept.answered(PolicyVersion(3)) == ()
        await asking.ask(7)
        assert asking.engines.asked == [7, 8, 7]

    run(scenario)


def test_what_was_answered_is_left_to_another_driver() -> None:
    async def scenario(asking: Asking) -> None:
        asking.engines.may_answer.set()
        await asking.ask(8, 7)
        asking.engines.may_answer.clear()
        under_way = asyncio.create_task(asking.ask(9))
        while 9 not in asking.engines.asked:
            await asyncio.sleep(0)
        under_way.cancel()
        assert asking.kept.answered(PolicyVersion(4)) == ()
        left = asking.kept.answered(PolicyVersion(3))
        assert [scored.group.prompt.position for scored in left] == [7, 8]
        await asking.kept.cancel()

        later = Asking()
        assert later.kept.is_new
        later.kept.restore(left, PolicyVersion(3))
        assert not later.kept.is_new
        later.engines.may_answer.set()
        assert await later.kept.finish() == 2
        await later.ask(7, 8, 9)
        assert later.engines.asked == [9]

    run(scenario)
