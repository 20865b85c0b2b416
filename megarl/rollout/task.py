"""The tasks of rollout workers: how prompts are sampled, and a greedy rollout as baseline beside them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

from megarl.cluster.tasks import task_group
from megarl.config.recipe import Recipe, SampledEvaluationConfig, SamplingConfig
from megarl.config.roles import InFlight, Teaching, teaching_of
from megarl.data.tokenizer import Tokenizer
from megarl.families.shape import ModelShape
from megarl.routes import RouteShape
from megarl.stages import Generator, Scorer
from megarl.types import ONE_POLICY, Prompt, RolloutGroup, ScoredGroup, TokenArray

_NEARLY_ZERO = 1e-4
"""A temperature at which a token 0.01 nats behind is never chosen, and which SGLang does not treat as zero."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Sampling:
    """How responses are sampled, and how many per prompt."""

    num_rollouts: int
    temperature: float
    top_p: float
    top_k: int | None
    max_response_tokens: int

    @classmethod
    def of(cls, config: SamplingConfig | SampledEvaluationConfig, *, max_response_tokens: int) -> Sampling:
        return cls(
            num_rollouts=config.rollouts_per_prompt,
            temperature=config.temperature,
            top_p=config.top_p,
            top_k=config.top_k,
            max_response_tokens=max_response_tokens,
        )

    @classmethod
    def greedy(cls, *, max_response_tokens: int) -> Sampling:
        """One rollout of the likeliest tokens. Must not run beside sampled rollouts: see `nearly_greedy`."""
        return cls(num_rollouts=1, temperature=0.0, top_p=1.0, top_k=None, max_response_tokens=max_response_tokens)

    @classmethod
    def nearly_greedy(cls, *, max_response_tokens: int) -> Sampling:
        """One rollout of the likeliest tokens, except for ties, through SGLang's sampling.

        A single greedy request switches SGLang's whole batch to another path, in which seeds give other tokens: what
        the other requests sample would depend on the batch they are in.
        """
        return replace(cls.greedy(max_response_tokens=max_response_tokens), temperature=_NEARLY_ZERO)


@dataclass(frozen=True, slots=True, kw_only=True)
class Vocabulary:
    """The part of the tokenizer and the model that the generator needs."""

    size: int
    """Rows of the embedding; every token id is smaller."""
    eos_ids: tuple[int, ...]
    max_context_tokens: int
    decode: Callable[[TokenArray], str]
    routes: RouteShape | None = None
    """None in a dense model."""

    @classmethod
    def of(cls, shape: ModelShape, tokenizer: Tokenizer) -> Vocabulary:
        return cls(
            size=shape.vocab,
            eos_ids=tokenizer.eos_ids,
            max_context_tokens=shape.max_context_tokens,
            decode=tokenizer.decode_response,
            routes=shape.routes,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class RolloutTask:
    """How the rollouts of prompts are sampled."""

    sampling: Sampling
    seed: int
    policy: str = ONE_POLICY
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
    def of(cls, recipe: Recipe, shape: ModelShape, *, policy: str = ONE_POLICY) -> RolloutTask:
        """Return how the prompts of a recipe are sampled for training."""
        max_tokens = recipe.sampling.max_response_tokens
        nearly_greedy = Sampling.nearly_greedy(max_response_tokens=max_tokens)
        return cls(
            sampling=Sampling.of(recipe.sampling, max_response_tokens=max_tokens),
            seed=recipe.run.seed,
            policy=policy,
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
