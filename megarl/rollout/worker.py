"""A rollout worker: samples the rollouts of prompts with its engines, and scores them. Knows neither Ray nor a step.

In the driver's process it uses the fleet of the run; in another process it has a fleet of its own, see `following`.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, field, replace
from typing import Protocol, cast

from megarl.cluster.tasks import task_group
from megarl.config.recipe import Recipe
from megarl.config.roles import InFlight, Teaching, teaching_of
from megarl.engine import admin
from megarl.engine.fleet import Engine, Fleet
from megarl.episodes.play import EpisodeScorer, Player
from megarl.families.shape import ModelShape
from megarl.rollout.frozen import FrozenEngines, TaughtGenerator
from megarl.rollout.generator import FleetGenerator, Sampling, Vocabulary
from megarl.stages import Generator, Scorer
from megarl.system.user_code import load_code
from megarl.types import Prompt, RolloutGroup, ScoredGroup


@dataclass(frozen=True, slots=True, kw_only=True)
class RolloutTask:
    """How the rollouts of prompts are sampled."""

    sampling: Sampling
    seed: int
    in_flight: InFlight | None = None
    generator: str | None = None
    """The user's code that makes a generator of ours (`sampling.generator`)."""
    baseline: Sampling | None = None
    """Adds a rollout to each group to compare with."""
    has_routes: bool = False
    """The rollouts have the experts that the engines chose."""
    teaching: Teaching | None = None
    """The numbers that teachers on engines compute for the rollouts."""

    @classmethod
    def of(cls, recipe: Recipe, shape: ModelShape) -> RolloutTask:
        """Return how the prompts of a recipe are sampled for training."""
        max_tokens = recipe.sampling.max_response_tokens
        nearly_greedy = Sampling.nearly_greedy(max_response_tokens=max_tokens)
        return cls(
            sampling=Sampling.of(recipe.sampling, max_response_tokens=max_tokens),
            seed=recipe.run.seed,
            in_flight=recipe.in_flight,
            generator=recipe.sampling.generator,
            baseline=nearly_greedy if recipe.algorithm.needs.has_baseline else None,
            has_routes=recipe.replays_routing(shape),
            teaching=teaching_of(recipe.algorithm, recipe.roles, shape.vocab),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class AnsweredPrompt:
    scored: ScoredGroup
    seconds: float
    """Time to generate, with waiting and retries."""


class RolloutSource(Protocol):
    """One rollout worker, or all of a run."""

    async def answer(self, prompt: Prompt, task: RolloutTask) -> AnsweredPrompt:
        """Return all rollouts of one prompt, checked and scored; raise FleetError when no engine is left."""
        ...

    async def announce(self) -> None:
        """Return when every worker knows what the driver's fleet records."""
        ...

    async def lost(self, groups: Sequence[ScoredGroup]) -> list[int]:
        """Return the places of groups whose tokens are lost."""
        ...


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
            max_attempts=self.max_attempts,
            in_flight=task.in_flight,
            player=self._player,
            has_routes=has_routes,
        )


@dataclass(eq=False)
class WithGreedyRollout:
    """A `stages.Generator` that adds a greedy rollout to every group as its baseline."""

    sampled: Generator
    greedy: Generator

    async def generate(self, prompt: Prompt) -> RolloutGroup:
        async with task_group() as tasks:
            group = tasks.create_task(self.sampled.generate(prompt))
            greedy = tasks.create_task(self.greedy.generate(prompt))
        (baseline,) = greedy.result().rollouts
        return replace(group.result(), baseline=baseline)


@dataclass(eq=False)
class WithGreedyScore:
    """A `stages.Scorer` that also scores the baseline of every group."""

    scorer: Scorer

    async def score(self, group: RolloutGroup) -> ScoredGroup:
        assert group.baseline is not None, f"prompt {group.prompt.uid} has no greedy rollout"
        alone = RolloutGroup(prompt=group.prompt, rollouts=(group.baseline,))
        async with task_group() as tasks:
            scored = tasks.create_task(self.scorer.score(group))
            greedy = tasks.create_task(self.scorer.score(alone))
        (baseline,) = greedy.result().scores
        return replace(scored.result(), baseline=baseline)
