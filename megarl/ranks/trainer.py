"""The loop's Trainer: the actor and, where the recipe has them, critic, reference and teachers."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, TypeAlias, cast

import numpy as np

from megarl.algo.algorithm import PolicyGradient, Sft
from megarl.algo.held_credit import CreditTask
from megarl.config.algorithm import KlRewardConfig
from megarl.config.model import ModelShape, read_model_shape
from megarl.config.recipe import Recipe
from megarl.config.roles import ModelParallelConfig, TeacherRanksConfig
from megarl.config.teaching import teaching_of
from megarl.data.packing import Packing, SequenceCost
from megarl.data.rollout_files import write_samples
from megarl.data.shares import QUESTION, QUESTION_OF_LOSS, Share, make_shares, row_lengths
from megarl.errors import MachineError, NumericsError
from megarl.planner.hardware import gpu_named
from megarl.planner.training_time import forward_flops
from megarl.ranks.ranks import HeldNumbers, RankGroup
from megarl.ranks.start import Teacher, Teachers, Trainers, critic_shape
from megarl.results import CriticResult, PreferenceStats, RankUsage, TrainingWork, UpdateResult
from megarl.tokens import RolloutSums
from megarl.train.interface import ActorCalls, CriticCalls, ImplicitRewardCalls, ReferenceCalls, TeacherCalls
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


SKIPPED_FOLDER = "skipped"
"""In the run's folder: rollouts whose updates were skipped."""
_HELD = ("old_logprobs", "reference_logprobs", "values")
"""Columns that ranks have computed: an update gets them from there, not with the samples."""
_PASSES = 3
"""In units of the forward pass: the backward pass multiplies with weights and with activations."""


def build_trainer(
    recipe: Recipe,
    shape: ModelShape,
    trainers: Trainers,
    *,
    num_steps: int,
    version: PolicyVersion,
    algorithm: Sft | PolicyGradient,
) -> ModelsTrainer:
    """Return the Trainer of models that have taken `num_steps` steps and are at `version`."""
    builder = _Builder(recipe=recipe, shape=shape, trainers=trainers)
    return ModelsTrainer(
        actor=builder.actor(),
        critic=builder.critic(),
        questions=builder.questions(algorithm.credit_task),
        num_steps=num_steps,
        version=version,
        skipped_folder=recipe.run_folder / SKIPPED_FOLDER,
        pairs=lambda: algorithm.pairs,
        refresh=builder.refresh(),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class _Builder:
    recipe: Recipe
    shape: ModelShape
    trainers: Trainers

    def actor(self) -> TrainedActor:
        config, train = self.recipe.roles.actor, self.recipe.train
        num_ranks = self.recipe.pools[config.pool].gpus
        return TrainedActor(
            update=partial(self.trainers.actor.compute_shares, ActorCalls.update),
            pack=self._pack_actor(),
            logprobs=self._actor_logprobs(),
            measure_work=partial(training_work, shape=self.shape, epochs=train.epochs, num_ranks=num_ranks),
        )

    def critic(self) -> TrainedCritic | None:
        config, ranks = self.recipe.roles.critic, self.trainers.critic
        if config is None or ranks is None:
            return None
        per_update = config.prompts_per_update or self.recipe.train.prompts_per_update
        update = partial(ranks.compute_shares, CriticCalls.update)
        if self.recipe.algorithm.needs.implicit_reward_beta is not None:
            models = cast("RankGroup[ImplicitRewardCalls]", ranks)
            per_update, update = None, partial(models.compute_shares, ImplicitRewardCalls.learn)
        return TrainedCritic(
            update=update,
            pack=self._pack(config, config.pool, self._critic_shape, prompts_per_update=per_update),
            warmup_steps=config.warmup_steps,
        )

    def refresh(self) -> ReferenceRefresh | None:
        every_steps = self.recipe.algorithm.needs.self_play_steps
        if every_steps is None:
            return None
        take = self.trainers.actor.computing(ActorCalls.refresh_reference)
        return ReferenceRefresh(take=take, every_steps=every_steps)

    def questions(self, credit_task: Callable[[Sequence[ScoredGroup]], CreditTask | None]) -> ModelQuestions:
        algorithm, teachers = self.recipe.algorithm, self.recipe.roles.teacher_ranks
        kl = algorithm.kl
        critic, actor = self.trainers.critic, self.trainers.actor
        return ModelQuestions(
            credit=HeldCredit(
                task=credit_task,
                assign=actor.credit if critic is None else critic.credit,
                name="logprobs" if critic is None else "values",
            ),
            logprobs=self._actor_logprobs() if algorithm.needs.has_logprobs else None,
            reference_logprobs=None
            if kl is None
            else self._reference_logprobs(is_for_credit=self._is_fetched and isinstance(kl, KlRewardConfig)),
            values=self._values(),
            teachers=Teachers({role: self._teacher(role, each) for role, each in teachers.items()})
            if teachers
            else None,
        )

    def _teacher(self, role: str, config: TeacherRanksConfig) -> Teacher:
        # Packed as the update is: a teacher that is split like the actor then computes the same sums.
        per_update = self.recipe.train.prompts_per_update
        shape = read_model_shape(config.model)
        pack = self._pack(config, config.pool, shape, prompts_per_update=per_update, is_question=True)
        return Teacher(
            ask=partial(self.trainers.teachers[role].ask, TeacherCalls.scores),
            pack=lambda samples, among: pack(samples, among=among, without=QUESTION_OF_LOSS),
            sources=config.sources,
        )

    def _actor_logprobs(self) -> ModelQuestion:
        ask = partial(self.trainers.actor.ask, ActorCalls.logprobs)
        return ModelQuestion(ask=ask, pack=self._pack_actor(is_question=True), is_for_credit=self._is_fetched)

    def _reference_logprobs(self, *, is_for_credit: bool) -> ModelQuestion:
        config, ranks = self.recipe.roles.reference, self.trainers.reference
        if config is None or config.pool is None or ranks is None:
            ask = partial(self.trainers.actor.ask, ActorCalls.reference_logprobs)
            # A reference chooses its own experts: its numbers must not depend on the policy that it is compared with.
            pack = self._pack_actor(is_question=True, is_live=True)
            return ModelQuestion(ask=ask, pack=pack, is_for_credit=is_for_credit)
        pack = self._pack(config, config.pool, self.shape, is_question=True)
        return ModelQuestion(ask=partial(ranks.ask, ReferenceCalls.logprobs), pack=pack, is_for_credit=is_for_credit)

    def _values(self) -> ModelQuestion | None:
        config, ranks = self.recipe.roles.critic, self.trainers.critic
        if config is None or ranks is None:
            return None
        # As the update packs, so that a rank is asked about the samples that it learns from.
        per_update = config.prompts_per_update or self.recipe.train.prompts_per_update
        ask = partial(ranks.ask, CriticCalls.values)
        if self.recipe.algorithm.needs.implicit_reward_beta is not None:
            models = cast("RankGroup[ImplicitRewardCalls]", ranks)
            per_update, ask = None, partial(models.ask, ImplicitRewardCalls.rewards)
        pack = self._pack(config, config.pool, self._critic_shape, prompts_per_update=per_update, is_question=True)
        return ModelQuestion(ask=ask, pack=pack, is_for_credit=self._is_fetched)

    def _pack_actor(self, *, is_question: bool = False, is_live: bool = False) -> Pack:
        """Questions and updates are packed alike, so that a rank is asked about the samples that it learns from."""
        config, per_update = self.recipe.roles.actor, self.recipe.train.prompts_per_update
        routed = not is_live and self.recipe.replays_routing(self.shape)
        return self._pack(
            config, config.pool, self.shape, prompts_per_update=per_update, is_question=is_question, has_routes=routed
        )

    @property
    def _is_fetched(self) -> bool:
        """Whether the driver gets all numbers of tokens: a user's estimator may compare any of them."""
        return self.recipe.algorithm.needs.fetches_columns

    @property
    def _critic_shape(self) -> ModelShape:
        config = self.recipe.roles.critic
        assert config is not None, "a run without a critic"
        return critic_shape(config, self.shape, self.recipe.algorithm)

    def _pack(
        self,
        split: ModelParallelConfig,
        pool: str,
        shape: ModelShape,
        *,
        prompts_per_update: int | None = None,
        is_question: bool = False,
        has_routes: bool = False,
    ) -> partial[Iterator[Share]]:
        """Without `prompts_per_update` the whole step is one mini-batch. A question has only tokens."""
        recipe, needs, num_rollouts = self.recipe, self.recipe.algorithm.needs, self.recipe.samples_per_prompt
        teaching = teaching_of(recipe.algorithm, recipe.roles, self.shape.vocab)
        packing = Packing(
            data_parallel=recipe.pools[pool].gpus // split.model_parallel,
            tokens_per_micro_batch=recipe.train.tokens_per_micro_batch,
            samples_per_update=None if prompts_per_update is None else prompts_per_update * num_rollouts,
            pad_multiple=split.pack_multiple,
            sequence_multiple=split.sequence_multiple,
            micro_batch_multiple=split.pipeline if split.virtual_pipeline > 1 else 1,
            cost=SequenceCost(
                per_token=forward_flops(shape, num_tokens=1, num_squared_tokens=0),
                per_squared_token=forward_flops(shape, num_tokens=0, num_squared_tokens=1),
            ),
            keeps_episodes=needs.sums_over_episodes,
        )
        return partial(
            make_shares,
            packing=packing,
            temperature=recipe.sampling.temperature if needs.has_engines else 1.0,
            # In self-play groups have demonstrations among the rollouts.
            has_versions=(recipe.train.max_staleness > 0 or needs.self_play_steps is not None) and not is_question,
            has_routes=has_routes,
            teacher_width=0 if is_question or teaching is None or split is not recipe.roles.actor else teaching.width,
            without=QUESTION if is_question else _HELD,
        )


def training_work(
    lengths: Sequence[int], usage: RankUsage, *, shape: ModelShape, epochs: int, num_ranks: int
) -> TrainingWork:
    """Return the work of all sequences of a step; padding is not counted."""
    tokens = np.asarray(lengths, np.float64)
    forward = forward_flops(shape, num_tokens=float(tokens.sum()), num_squared_tokens=float(np.square(tokens).sum()))
    gpu = None if usage.gpu_name is None else gpu_named(usage.gpu_name)
    peak = None if gpu is None else num_ranks * gpu.flops
    return TrainingWork(flops=_PASSES * epochs * forward, peak_flops_per_second=peak)
