"""The source of a loop's groups: groups outlive the loop that asked for them, and prompts without an answer."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import replace

import pytest

from megarl.errors import FleetError, QuarantineError
from megarl.observe.metrics import Meter
from megarl.observe.observer import Observer
from megarl.rollout.groups import LongestFirst, SampledGroups
from megarl.rollout.task import AnsweredPrompt, RolloutTask, Sampling
from megarl.run.buffer import Buffer
from megarl.types import PolicyVersion, Prompt, ScoredGroup
from tests.observe.samples import scored_group, step_summary
from tests.rollout.asking import Asking


@pytest.fixture
def asking() -> Asking:
    return Asking()


async def test_a_step_that_is_taken_again_asks_only_for_what_is_missing(asking: Asking) -> None:
    await asking.lose(7, 8)
    asking.engines.may_answer.set()
    assert await asking.retained.finish() == 2
    groups = await asking.ask(7, 8, 9)
    assert [group.group.prompt.position for group in groups if isinstance(group, ScoredGroup)] == [7, 8, 9]
    assert asking.engines.asked == [7, 8, 9]


async def test_answers_of_another_version_are_not_used(asking: Asking) -> None:
    asking.engines.may_answer.set()
    await asking.ask(7)
    asking.engines.version = PolicyVersion(2)
    await asking.ask(7)
    asking.engines.version = PolicyVersion(3)
    await asking.ask(7)
    assert asking.engines.asked == [7, 7, 7]


async def test_an_answer_of_two_versions_is_asked_for_again(asking: Asking) -> None:
    await asking.lose(7)
    asking.engines.version = PolicyVersion(4)  # an engine that took the next one already
    asking.engines.may_answer.set()
    assert await asking.retained.finish() == 0


async def test_what_failed_is_asked_for_again_and_what_is_quarantined_is_not(asking: Asking) -> None:
    asking.engines.failures = {7: FleetError("no engine is left"), 8: QuarantineError("lost two engines")}
    asking.engines.may_answer.set()
    first = await asking.ask(7, 8)
    assert [type(each) for each in first] == [FleetError, type(None)]
    assert await asking.retained.finish() == 1
    asking.engines.failures.clear()
    answered, quarantined = await asking.ask(7, 8)
    assert isinstance(answered, ScoredGroup)
    assert quarantined is None
    assert asking.engines.asked == [7, 8, 7]


async def test_cancelled_answers_are_asked_for_again(asking: Asking) -> None:
    await asking.lose(7)
    await asking.retained.cancel()
    assert await asking.retained.finish() == 0
    asking.engines.may_answer.set()
    (group,) = await asking.ask(7)
    assert isinstance(group, ScoredGroup)


async def test_between_two_loops_nothing_waits_for_engines_that_wait_for_ranks(asking: Asking) -> None:
    async with asking.retained.watched(lambda: False):
        with asking.retained.used():
            await asking.lose(7)
            await asyncio.sleep(0.7)
            asking.engines.may_answer.set()
            assert await asking.retained.finish() == 1
            asking.engines.may_answer.clear()
            await asking.lose(7, 8)
        assert await asking.retained.finish() == 1
        assert asking.engines.asked == [7, 8]


async def test_nothing_is_under_way_at_the_end(asking: Asking) -> None:
    async with asking.retained.watched(lambda: True):
        await asking.lose(7)
    assert await asking.retained.finish() == 0


async def test_a_step_that_is_trained_is_forgotten(asking: Asking) -> None:
    asking.engines.may_answer.set()
    await asking.ask(7, 8)
    asking.retained.forget()
    assert asking.retained.finished(PolicyVersion(3)) == ()
    await asking.ask(7)
    assert asking.engines.asked == [7, 8, 7]


def test_groups_are_counted_and_the_slowest_is_told_with_the_step() -> None:
    seconds = iter([0.01, 0.01, 0.05])
    scored = scored_group([0.0, 1.0], lengths=[2, 4])

    class Slow:
        async def answer(self, prompt: Prompt, task: RolloutTask) -> AnsweredPrompt:
            return AnsweredPrompt(scored=scored, seconds=next(seconds))

        async def announce(self) -> None: ...

        async def lost(self, groups: Sequence[ScoredGroup]) -> list[int]:
            return []

    meter = Meter("sample")
    observer = Observer((), meter=meter)
    task = RolloutTask(sampling=Sampling.greedy(max_response_tokens=4), seed=1)
    groups = SampledGroups(Slow(), task, observer)
    for _ in range(3):
        assert asyncio.run(groups.scored_group(scored.group.prompt)) is scored
    observer.step_summarized(step_summary(1))
    values = meter.values("rollout")
    assert (values["rollout/generated_rollouts"], values["rollout/generated_tokens"]) == (6, 18)
    assert values["rollout/group_tail_ratio"] > 2


async def test_groups_whose_tokens_are_lost_are_answered_again() -> None:
    groups = [scored_group([0.0, 1.0], lengths=[2, 4]) for _ in range(3)]
    again = scored_group([0.0, 1.0], lengths=[2, 4])
    asked = []

    class Lossy:
        async def answer(self, prompt: Prompt, task: RolloutTask) -> AnsweredPrompt:
            asked.append(prompt)
            return AnsweredPrompt(scored=again, seconds=0.0)

        async def announce(self) -> None: ...

        async def lost(self, groups: Sequence[ScoredGroup]) -> list[int]:
            return [1]

    task = RolloutTask(sampling=Sampling.greedy(max_response_tokens=4), seed=1)

    buffer = Buffer(
        prompts_per_step=3,
        max_staleness=0,
        versions=(PolicyVersion(3),),
        replace_lost=SampledGroups(Lossy(), task, Observer(())).replace_lost,
    )
    for scored in groups:
        await buffer.put(await buffer.reserve(), scored)
    taken = await buffer.take_step()
    assert [id(scored) for scored in taken] == [id(groups[0]), id(again), id(groups[2])]
    assert asked == [groups[1].group.prompt]


async def test_prompts_of_one_moment_are_asked_by_the_length_of_their_answers_before() -> None:
    lengths = {"short": 2, "long": 9, "middle": 5}
    asked: list[str] = []

    class Engines:
        async def answer(self, prompt: Prompt, task: RolloutTask) -> AnsweredPrompt:
            asked.append(prompt.uid)
            num_tokens = lengths.get(prompt.uid, 3)
            return AnsweredPrompt(scored=scored_group([0.0, 1.0], lengths=[num_tokens] * 2), seconds=0.0)

        async def announce(self) -> None: ...

        async def lost(self, groups: Sequence[ScoredGroup]) -> list[int]:
            return []

    task = RolloutTask(sampling=Sampling.greedy(max_response_tokens=16), seed=1)
    groups = SampledGroups(Engines(), task, Observer(()), order=LongestFirst())
    prompt = scored_group([0.0, 1.0], lengths=[1, 1]).group.prompt

    async def ask(*names: str) -> list[str]:
        """Return the order in which these prompts were asked."""
        asked.clear()
        await asyncio.gather(*(groups.scored_group(replace(prompt, uid=name)) for name in names))
        return list(asked)

    # Nothing is known in the first epoch, and what is new counts as the average of those that are known: 5.33.
    assert await ask("short", "long", "middle") == ["short", "long", "middle"]
    assert await ask("short", "new", "middle", "long") == ["long", "new", "middle", "short"]
    lengths["short"] = 20
    await ask("short")
    assert await ask("long", "middle", "short") == ["short", "long", "middle"]


async def test_a_prompt_that_is_given_up_does_not_hold_the_others() -> None:
    order = LongestFirst()
    turns = [asyncio.create_task(order.turn(uid)) for uid in ("one", "other")]
    await asyncio.sleep(0)
    turns[0].cancel()
    async with asyncio.timeout(5):
        await turns[1]
