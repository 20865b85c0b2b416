from __future__ import annotations

import asyncio

from megarl.observe.meter import Meter
from megarl.observe.observer import Observer
from megarl.runtime.build import TimedGenerator
from megarl.types import Prompt, RolloutGroup
from tests.observe.samples import scored_group, step_summary


def test_groups_are_counted_and_the_slowest_is_told_with_the_step() -> None:
    waits = iter([0.01, 0.01, 0.05])

    class Slow:
        async def generate(self, prompt: Prompt) -> RolloutGroup:
            await asyncio.sleep(next(waits))
            return scored_group([0.0, 1.0], lengths=[2, 4]).group

    meter = Meter("sample")
    observer = Observer((), meter=meter)
    generator = TimedGenerator(Slow(), observer)
    prompt = scored_group([0.0, 1.0], lengths=[2, 4]).group.prompt
    for _ in range(3):
        asyncio.run(generator.generate(prompt))
    observer.step_summarized(step_summary(1))
    values = meter.values("rollout")
    assert (values["rollout/generated_rollouts"], values["rollout/generated_tokens"]) == (6, 18)
    assert values["rollout/group_tail_ratio"] > 2
