from __future__ import annotations

import asyncio
from collections.abc import Sequence

from megarl.observe.metrics import Meter
from megarl.observe.observer import Observer
from megarl.rollout.generator import Sampling
from megarl.rollout.groups import SampledGroups
from megarl.rollout.worker import AnsweredPrompt, RolloutTask
from megarl.run.buffer import Buffer
from megarl.types import PolicyVersion, Prompt, ScoredGroup
from tests.observe.samples import scored_group, step_summary


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


def test_groups_whose_tokens_are_lost_are_answered_again() -> None:
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

    async def run() -> list[ScoredGroup]:
        buffer = Buffer(
            prompts_per_step=3,
            max_staleness=0,
            versions=(PolicyVersion(3),),
            replace_lost=SampledGroups(Lossy(), task, Observer(())).replace_lost,
        )
        for scored in groups:
            await buffer.put(await buffer.reserve(), scored)
        return await buffer.take_step()

    taken = asyncio.run(run())
    assert [id(scored) for scored in taken] == [id(groups[0]), id(again), id(groups[2])]
    assert asked == [groups[1].group.prompt]
