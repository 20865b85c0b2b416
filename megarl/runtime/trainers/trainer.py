"""All models that are trained or asked, as the loop's Trainer: the actor and, where there are some, critic, reference.

Packs a step for the layout of each, asks only what the algorithm needs, and keeps what was too bad to train on.
"""

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
from megarl.runtime.trainers.ranks import ActorRanks, CriticRanks
from megarl.types import Estimates, FloatArray, PolicyVersion, ScoredGroup, TrainBatch, TrainSample

Pack: TypeAlias = Callable[[Sequence[TrainSample]], TrainBatch]


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelQuestion:
    """Something to ask a model about every sampled token."""

    ask: Callable[[TrainBatch], Awaitable[tuple[FloatArray, ...]]]
    pack: Pack


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelQuestions:
    """None is not asked."""

    logprobs: ModelQuestion | None = None
    reference_logprobs: ModelQuestion | None = None
    values: ModelQuestion | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class CriticTrainer:
    ranks: CriticRanks
    pack: Pack
    warmup_steps: int


class ModelsTrainer:
    def __init__(
        self,
        *,
        actor: ActorRanks,
        pack: Pack,
        ask_actor: ModelQuestion,
        critic: CriticTrainer | None,
        questions: ModelQuestions,
        measure_work: Callable[[TrainBatch, RankUsage], TrainingWork],
        num_steps: int,
        version: PolicyVersion,
        kept_folder: Path,
    ) -> None:
        """`ask_actor` is for its log-probabilities.

        `num_steps` and `version` are where the models stand; what is skipped is kept in `kept_folder`.
        """
        self._actor = actor
        self._pack = pack
        self._ask_actor = ask_actor
        self._critic = critic
        self._questions = questions
        self._measure_work = measure_work
        self._num_steps = num_steps
        self._version = version
        self._kept_folder = kept_folder

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
        """Of the actor as it is now, for every token of the samples' responses."""
        return await self._ask_actor.ask(self._ask_actor.pack(samples))

    async def update(self, samples: Sequence[TrainSample]) -> UpdateResult:
        step = self._num_steps + 1
        try:
            result = await self._update(samples)
        except NumericsError as error:
            raise NumericsError(f"{error}; its rollouts are in {self._keep(step, samples)}") from error
        self._num_steps, self._version = step, result.version
        if not result.num_skipped_updates:
            return result
        warning = (
            f"step {step}: {result.num_skipped_updates} updates were skipped, their loss or gradient was not finite; "
            f"the rollouts are in {self._keep(step, samples)}"
        )
        return replace(result, warnings=(*result.warnings, warning))

    async def _update(self, samples: Sequence[TrainSample]) -> UpdateResult:
        critic = self._critic
        if critic is None:
            return await self._update_actor(samples)
        if self._num_steps < critic.warmup_steps:
            learned = await critic.ranks.update(critic.pack(samples))
            return _with_critic(UpdateResult(version=self._version, stats=None), learned)
        update, learned = await asyncio.gather(self._update_actor(samples), critic.ranks.update(critic.pack(samples)))
        return _with_critic(update, learned)

    async def _update_actor(self, samples: Sequence[TrainSample]) -> UpdateResult:
        batch = self._pack(samples)
        update = await self._actor.update(batch)
        return replace(update, work=self._measure_work(batch, update.usage["actor"]))

    def _keep(self, step: int, samples: Sequence[TrainSample]) -> Path:
        path = self._kept_folder / f"step_{step:06d}.parquet"
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
    return None if question is None else await question.ask(question.pack(samples))
