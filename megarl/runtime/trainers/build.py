"""From a recipe and its trainer ranks to the loop's Trainer: which model is asked what, and how each packs a step."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import cast

import numpy as np

from megarl.algo.algorithm import PolicyGradient, Sft
from megarl.algo.held_credit import CreditTask
from megarl.config.algorithm import KlRewardConfig, OfflineConfig, PolicyGradientConfig, PrimeConfig, SpinConfig
from megarl.config.model import ModelShape, read_model_shape
from megarl.config.recipe import Recipe
from megarl.config.roles import ModelParallelConfig, TeacherRanksConfig
from megarl.data.packing import Packing, SequenceCost
from megarl.data.shares import QUESTION, QUESTION_OF_LOSS, Share, make_shares
from megarl.planner.hardware import gpu_named
from megarl.planner.training_time import forward_flops
from megarl.results import RankUsage, TrainingWork
from megarl.rollout.teacher import teaching_of
from megarl.runtime.trainers.ranks import RankGroup
from megarl.runtime.trainers.start import Trainers, critic_shape
from megarl.runtime.trainers.teachers import Teacher, Teachers
from megarl.runtime.trainers.trainer import (
    HeldCredit,
    ModelQuestion,
    ModelQuestions,
    ModelsTrainer,
    Pack,
    ReferenceRefresh,
    TrainedActor,
    TrainedCritic,
)
from megarl.train.interface import ActorCalls, CriticCalls, ImplicitRewardCalls, ReferenceCalls, TeacherCalls
from megarl.types import PolicyVersion, ScoredGroup

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
        if isinstance(self.recipe.algorithm, PrimeConfig):
            models = cast("RankGroup[ImplicitRewardCalls]", ranks)
            per_update, update = None, partial(models.compute_shares, ImplicitRewardCalls.learn)
        return TrainedCritic(
            update=update,
            pack=self._pack(config, config.pool, self._critic_shape, prompts_per_update=per_update),
            warmup_steps=config.warmup_steps,
        )

    def refresh(self) -> ReferenceRefresh | None:
        algorithm = self.recipe.algorithm
        if not isinstance(algorithm, SpinConfig):
            return None
        take = self.trainers.actor.computing(ActorCalls.refresh_reference)
        return ReferenceRefresh(take=take, every_steps=algorithm.iteration_steps)

    def questions(self, credit_task: Callable[[Sequence[ScoredGroup]], CreditTask | None]) -> ModelQuestions:
        algorithm, teachers = self.recipe.algorithm, self.recipe.roles.teacher_ranks
        kl = algorithm.kl if isinstance(algorithm, PolicyGradientConfig) else None
        critic, actor = self.trainers.critic, self.trainers.actor
        return ModelQuestions(
            credit=HeldCredit(
                task=credit_task,
                assign=actor.credit if critic is None else critic.credit,
                name="logprobs" if critic is None else "values",
            ),
            logprobs=self._actor_logprobs()
            if isinstance(algorithm, PolicyGradientConfig) and algorithm.needs_logprobs
            else None,
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
        if isinstance(self.recipe.algorithm, PrimeConfig):
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
        algorithm = self.recipe.algorithm
        return isinstance(algorithm, PolicyGradientConfig) and algorithm.estimator is not None

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
        recipe = self.recipe
        is_offline, num_rollouts = isinstance(recipe.algorithm, OfflineConfig), recipe.samples_per_prompt
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
            keeps_episodes=isinstance(recipe.algorithm, PolicyGradientConfig) and recipe.algorithm.sums_over_episodes,
        )
        return partial(
            make_shares,
            packing=packing,
            temperature=1.0 if is_offline else recipe.sampling.temperature,
            # Groups of `spin` have demonstrations among the rollouts.
            has_versions=(recipe.train.max_staleness > 0 or isinstance(recipe.algorithm, SpinConfig))
            and not is_question,
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
