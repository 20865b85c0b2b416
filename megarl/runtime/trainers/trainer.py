"""The loop's Trainer: the actor and, where the recipe has them, critic and reference, each with its own packing."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TypeAlias

import numpy as np

from megarl.data.rollout_files import write_samples
from megarl.errors import NumericsError
from megarl.results import CriticResult, RankUsage, TrainingWork, UpdateResult
from megarl.types import Estimates, FloatArray, PolicyVersion, ScoredGroup, TrainBatch, TrainSample

Pack: TypeAlias = Callable[[Sequence[TrainSample]], TrainBatch]


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelQuestion:
    """A number that a model computes for every sampled token."""

    ask: Callable[[TrainBatch], Awaitable[tuple[FloatArray, ...]]]
    pack: Pack

    async def answer(self, samples: Sequence[TrainSample]) -> tuple[FloatArray, ...]:
        return await self.ask(self.pack(samples))


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelQuestions:
    """The questions that an algorithm needs answered before it assigns credit; None is not asked."""

    logprobs: ModelQuestion | None = None
    reference_logprobs: ModelQuestion | None = None
    values: ModelQuestion | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainedActor:
    update: Callable[[TrainBatch], Awaitable[UpdateResult]]
    pack: Pack
    logprobs: ModelQuestion
    measure_work: Callable[[TrainBatch, RankUsage], TrainingWork]


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainedCritic:
    update: Callable[[TrainBatch], Awaitable[CriticResult]]
    pack: Pack
    warmup_steps: int
    """Steps in which the critic alone is updated."""


class ModelsTrainer:
    def __init__(
        self,
        *,
        actor: TrainedActor,
        critic: TrainedCritic | None,
        questions: ModelQuestions,
        num_steps: int,
        version: PolicyVersion,
        skipped_folder: Path,
    ) -> None:
        """The models have taken `num_steps` steps and are at `version`. Samples of skipped updates are written."""
        self._actor = actor
        self._critic = critic
        self._questions = questions
        self._num_steps = num_steps
        self._version = version
        self._skipped_folder = skipped_folder

    async def estimate(self, groups: Sequence[ScoredGroup]) -> Estimates:
        asked = self._questions
        if asked == ModelQuestions():
            return Estimates()
        samples = [
            TrainSample(
                prompt_ids=scored.group.prompt.token_ids,
                rollout=rollout,
                advantages=np.zeros(len(rollout.token_ids), np.float32),
            )
            for scored in groups
            for rollout in scored.group.rollouts
        ]
        logprobs, reference_logprobs, values = await asyncio.gather(
            _answer(asked.logprobs, samples), _answer(asked.reference_logprobs, samples), _answer(asked.values, samples)
        )
        return Estimates(logprobs=logprobs, reference_logprobs=reference_logprobs, values=values)

    async def logprobs(self, samples: Sequence[TrainSample]) -> tuple[FloatArray, ...]:
        """Return the actor's log-probabilities of every token of the samples' responses."""
        return await self._actor.logprobs.answer(samples)

    async def update(self, samples: Sequence[TrainSample]) -> UpdateResult:
        step = self._num_steps + 1
        try:
            result = await self._update(samples)
        except NumericsError as error:
            raise NumericsError(f"{error}; its rollouts are in {self._write_skipped(step, samples)}") from error
        self._num_steps, self._version = step, result.version
        if not result.num_skipped_updates:
            return result
        warning = (
            f"step {step}: {result.num_skipped_updates} updates were skipped, their loss or gradient was not finite; "
            f"the rollouts are in {self._write_skipped(step, samples)}"
        )
        return replace(result, warnings=(*result.warnings, warning))

    async def _update(self, samples: Sequence[TrainSample]) -> UpdateResult:
        critic = self._critic
        if critic is None:
            return await self._update_actor(samples)
        if self._num_steps < critic.warmup_steps:
            learned = await critic.update(critic.pack(samples))
            return _with_critic(UpdateResult(version=self._version, stats=None), learned)
        update, learned = await asyncio.gather(self._update_actor(samples), critic.update(critic.pack(samples)))
        return _with_critic(update, learned)

    async def _update_actor(self, samples: Sequence[TrainSample]) -> UpdateResult:
        batch = self._actor.pack(samples)
        update = await self._actor.update(batch)
        return replace(update, work=self._actor.measure_work(batch, update.usage["actor"]))

    def _write_skipped(self, step: int, samples: Sequence[TrainSample]) -> Path:
        path = self._skipped_folder / f"step_{step:06d}.parquet"
        write_samples(path, samples)
        return path


def _with_critic(update: UpdateResult, critic: CriticResult) -> UpdateResult:
    return replace(
        update,
        critic=critic.stats,
        num_skipped_updates=update.num_skipped_updates + critic.num_skipped_updates,
        usage=update.usage if critic.usage is None else {**update.usage, "critic": critic.usage},
    )


async def _answer(question: ModelQuestion | None, samples: Sequence[TrainSample]) -> tuple[FloatArray, ...] | None:
    return None if question is None else await question.answer(samples)
