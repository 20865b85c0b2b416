"""A generator that tells how long it took: the clock is the run's business, not the fleet's."""

from __future__ import annotations

import time

from megarl.observe.observer import Observer
from megarl.stages import Generator
from megarl.types import Prompt, RolloutGroup


class TimedGenerator:
    def __init__(self, generator: Generator, observer: Observer) -> None:
        self._generator = generator
        self._observer = observer

    async def generate(self, prompt: Prompt) -> RolloutGroup:
        began = time.monotonic()
        group = await self._generator.generate(prompt)
        self._observer.group_generated(
            seconds=time.monotonic() - began,
            num_rollouts=len(group.rollouts),
            num_tokens=sum(len(rollout.token_ids) for rollout in group.rollouts),
        )
        return group
