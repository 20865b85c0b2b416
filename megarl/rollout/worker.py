"""A rollout worker: samples the rollouts of prompts with its engines, and scores them. Knows neither Ray nor a step.

In the driver's process it uses the fleet of the run; in another process it has a fleet of its own, see `following`.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, field
from typing import cast

from megarl.engine import admin
from megarl.engine.fleet import Engine, Fleet
from megarl.episodes.play import EpisodeScorer, Player
from megarl.rollout.frozen import FrozenEngines, TaughtGenerator
from megarl.rollout.generator import FleetGenerator
from megarl.rollout.task import AnsweredPrompt, RolloutTask, Sampling, Vocabulary, WithGreedyRollout, WithGreedyScore
from megarl.stages import Generator, Scorer
from megarl.system.user_code import load_code
from megarl.types import Prompt, ScoredGroup


async def cache_sizes(engines: Sequence[Engine]) -> list[int | None]:
    """Return how many tokens the KV cache of each engine holds; None for one that does not answer."""
    return await asyncio.gather(*(admin.num_cached_tokens(engine.client) for engine in engines))


@dataclass(eq=False)
class RolloutWorker:
    fleet: Fleet
    _: KW_ONLY
    vocabulary: Vocabulary
    scorer: Scorer
    max_attempts: int
    open_player: Callable[[], Awaitable[Player]] | None = None
    """Called at the first prompt."""
    teachers: Mapping[str, FrozenEngines] = field(default_factory=dict)
    """By their key below `roles`."""
    _opening: asyncio.Lock = field(default_factory=asyncio.Lock, init=False)
    _player: Player | None = field(default=None, init=False)
    _generators: dict[RolloutTask, Generator] = field(default_factory=dict, init=False)

    def __post_init__(self) -> None:
        self._scorer = self.scorer if self.open_player is None else EpisodeScorer(self.scorer)

    async def answer(self, prompt: Prompt, task: RolloutTask) -> AnsweredPrompt:
        async with self._opening:
            if self.open_player is not None and self._player is None:
                self._player = await self.open_player()
        if task not in self._generators:
            self._generators[task] = self._build(task)
        scorer = self._scorer if task.baseline is None else WithGreedyScore(self._scorer)
        began = time.monotonic()
        group = await self._generators[task].generate(prompt)
        seconds = time.monotonic() - began
        return AnsweredPrompt(scored=await scorer.score(group), seconds=seconds)

    async def announce(self) -> None:
        """Return at once: in the driver's process the fleet is the same."""

    async def close(self) -> None:
        """End the processes of environments."""
        if self._player is not None:
            await self._player.close()

    async def lost(self, groups: Sequence[ScoredGroup]) -> list[int]:
        """Return none: the tokens are in the driver's process."""
        return []

    def _build(self, task: RolloutTask) -> Generator:
        generator = self._generator(task, task.sampling, has_routes=task.has_routes)
        if task.baseline is not None:
            generator = WithGreedyRollout(generator, self._generator(task, task.baseline, has_routes=False))
        if task.generator is not None:
            generator = cast("Generator", load_code(task.generator, key="sampling.generator")(generator))
        return generator if task.teaching is None else TaughtGenerator(generator, task.teaching, self.teachers)

    def _generator(self, task: RolloutTask, sampling: Sampling, *, has_routes: bool) -> Generator:
        return FleetGenerator(
            self.fleet,
            sampling=sampling,
            vocabulary=self.vocabulary,
            seed=task.seed,
            policy=task.policy,
            max_attempts=self.max_attempts,
            in_flight=task.in_flight,
            player=self._player,
            has_routes=has_routes,
        )
