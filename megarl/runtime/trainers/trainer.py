"""The loop's Trainer: the actor and, where the recipe has them, critic, reference and teachers."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np

from megarl.algo.held_credit import CreditTask
from megarl.data.rollout_files import write_samples
from megarl.data.shares import Share, row_lengths
from megarl.errors import MachineError, NumericsError
from megarl.results import CriticResult, PreferenceStats, RankUsage, TrainingWork, UpdateResult
from megarl.runtime.trainers.ranks import HeldNumbers
from megarl.runtime.trainers.teachers import Teachers
from megarl.tokens import RolloutSums
from megarl.types import Estimates, FloatArray, PolicyVersion, ScoredGroup, TrainSample

Pack: TypeAlias = Callable[[Sequence[TrainSample]], Iterator[Share]]
"""Yields one share per data-parallel rank."""
Held: TypeAlias = Mapping[str, HeldNumbers]
"""Columns of an update that ranks have computed before it, by name."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelQuestion:
    """A number that a model computes for every sampled token."""

    ask: Callable[[Iterator[Share]], Awaitable[HeldNumbers]]
    pack: Pack
    is_for_credit: bool = True
    """Whether the driver needs the numbers to assign credit; otherwise they stay with the ranks."""

    async def hold(self, samples: Sequence[TrainSample]) -> HeldNumbers:
        return await self.ask(self.pack(samples))


@dataclass(frozen=True, slots=True, kw_only=True)
class HeldCredit:
    """Credit that ranks assign from the numbers that they hold."""

    task: Callable[[Sequence[ScoredGroup]], CreditTask | None]
    assign: Callable[[CreditTask, HeldNumbers, Held], Awaitable[tuple[RolloutSums, dict[str, HeldNumbers]]]]
    """Takes the numbers of the ranks that do it, and all others."""
    name: str
    """The question that these ranks answer."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelQuestions:
    """The questions that an algorithm needs answered before it assigns credit; None is not asked."""

    logprobs: ModelQuestion | None = None
    reference_logprobs: ModelQuestion | None = None
    values: ModelQuestion | None = None
    teachers: Teachers | None = None
    credit: HeldCredit | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainedActor:
    update: Callable[[Iterator[Share], Held], Awaitable[UpdateResult]]
    pack: Pack
    logprobs: ModelQuestion
    measure_work: Callable[[Sequence[int], RankUsage], TrainingWork]
    """Takes the lengths of the sequences."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainedCritic:
    update: Callable[[Iterator[Share], Held], Awaitable[CriticResult]]
    pack: Pack
    warmup_steps: int
    """Steps in which the critic alone is updated."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ReferenceRefresh:
    """The reference takes the weights of the actor after every so many steps."""

    take: Callable[[], Awaitable[None]]
    every_steps: int


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
        pairs: Callable[[], PreferenceStats | None] = lambda: None,
        refresh: ReferenceRefresh | None = None,
    ) -> None:
        """The models have taken `num_steps` steps and are at `version`. Samples of skipped updates are written.

        `pairs` returns the statistics of the pairs of the samples. Without `refresh` the reference stays as it is.
        """
        self._pairs = pairs
        self._refresh = refresh
        self._actor = actor
        self._critic = critic
        self._questions = questions
        self._num_steps = num_steps
        self._version = version
        self._skipped_folder = skipped_folder
        self._held: dict[str, HeldNumbers] = {}

    async def estimate(self, groups: Sequence[ScoredGroup]) -> Estimates:
        asked = self._questions
        names = ("logprobs", "reference_logprobs", "values")
        questions = {name: question for name in names if (question := getattr(asked, name)) is not None}
        if not questions and asked.teachers is None:
            return Estimates()
        nothing = np.zeros(0, np.float32)
        samples = [
            TrainSample(prompt_ids=scored.group.prompt.token_ids, rollout=rollout, advantages=nothing)
            for scored in groups
            for rollout in scored.group.rollouts
        ]
        asking = {name: question.hold(samples) for name, question in questions.items()}
        if asked.teachers is not None:
            sources = [scored.group.prompt.data_source for scored in groups for _ in scored.group.rollouts]
            asking["teacher"] = asked.teachers.hold(samples, sources)
        self._held = dict(zip(asking, await asyncio.gather(*asking.values()), strict=True))
        needed = [name for name, question in questions.items() if question.is_for_credit]
        fetched = await asyncio.gather(*(self._held[name].fetch() for name in needed))
        sums = None if asked.credit is None else await self._assign(asked.credit, groups)
        return Estimates(**dict(zip(needed, fetched, strict=True)), sums=sums)

    async def _assign(self, credit: HeldCredit, groups: Sequence[ScoredGroup]) -> RolloutSums | None:
        task = credit.task(groups)
        if task is None:
            return None
        numbers = {name: self._held[name] for name in task.columns}
        sums, columns = await credit.assign(task, self._held[credit.name], numbers)
        self._held |= columns
        return sums

    async def logprobs(self, samples: Sequence[TrainSample]) -> tuple[FloatArray, ...]:
        """Return the actor's log-probabilities of every token of the samples' responses."""
        return await (await self._actor.logprobs.hold(samples)).fetch()

    async def update(self, samples: Sequence[TrainSample]) -> UpdateResult:
        step = self._num_steps + 1
        try:
            result = replace(await self._update(samples), preference=self._pairs())
            if result.num_skipped_updates:
                warning = (
                    f"step {step}: {result.num_skipped_updates} updates were skipped, their loss or gradient was not "
                    f"finite; {await self._write_skipped(step, samples)}"
                )
                result = replace(result, warnings=(*result.warnings, warning))
        except NumericsError as error:
            raise NumericsError(f"{error}; {await self._write_skipped(step, samples)}") from error
        finally:
            self._held = {}
        self._num_steps, self._version = step, result.version
        if self._refresh is not None and step % self._refresh.every_steps == 0:
            await self._refresh.take()
        return result

    async def _update(self, samples: Sequence[TrainSample]) -> UpdateResult:
        critic = self._critic
        if critic is None:
            return await self._update_actor(samples)
        learning = self._update_critic(critic, samples)
        if self._num_steps < critic.warmup_steps:
            return _with_critic(UpdateResult(version=self._version, stats=None), await learning)
        update, learned = await asyncio.gather(self._update_actor(samples), learning)
        return _with_critic(update, learned)

    async def _update_actor(self, samples: Sequence[TrainSample]) -> UpdateResult:
        reference = self._questions.reference_logprobs
        columns = {"old_logprobs": "logprobs", "teacher": "teacher", "advantages": "advantages"}
        if reference is not None and not reference.is_for_credit:
            columns["reference_logprobs"] = "reference_logprobs"
        update = await self._actor.update(self._actor.pack(samples), self._held_as(columns))
        work = self._actor.measure_work(
            [length for sample in samples for length in row_lengths(sample)], update.usage["actor"]
        )
        return replace(update, work=work)

    async def _update_critic(self, critic: TrainedCritic, samples: Sequence[TrainSample]) -> CriticResult:
        return await critic.update(critic.pack(samples), self._held_as({"values": "values", "returns": "returns"}))

    def _held_as(self, columns: Mapping[str, str]) -> Held:
        """Return what is held of these columns, each given with the question that it answers."""
        return {column: self._held[question] for column, question in columns.items() if question in self._held}

    async def _write_skipped(self, step: int, samples: Sequence[TrainSample]) -> str:
        """Return where the rollouts are, or why they are nowhere: a full disk ends no run."""
        path = self._skipped_folder / f"step_{step:06d}.parquet"
        try:
            await asyncio.to_thread(write_samples, path, await self.complete(samples, range(len(samples))))
        except MachineError as error:
            return f"the rollouts are lost: {error}"
        return f"the rollouts are in {path}"

    async def complete(self, samples: Sequence[TrainSample], indices: Sequence[int]) -> list[TrainSample]:
        """Return these samples with all numbers of their tokens that ranks hold."""
        names = {"logprobs": "old_logprobs"}
        held = {names.get(name, name): numbers for name, numbers in self._held.items() if name != "teacher"}
        selected = await asyncio.gather(*(numbers.select(indices) for numbers in held.values()))
        known: dict[str, Any] = dict(zip(held, selected, strict=True))
        return [replace(samples[i], **{name: column[i] for name, column in known.items()}) for i in indices]


def _with_critic(update: UpdateResult, critic: CriticResult) -> UpdateResult:
    return replace(
        update,
        critic=critic.stats,
        num_skipped_updates=update.num_skipped_updates + critic.num_skipped_updates,
        usage=update.usage if critic.usage is None else {**update.usage, "critic": critic.usage},
    )
