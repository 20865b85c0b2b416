"""From recipe and roles to a ModelsTrainer: who is asked what, and how a step is packed for each layout."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

from megarl.config.algorithm import KlRewardConfig, PolicyGradientConfig, SftConfig
from megarl.config.fixed import PAD_MULTIPLE
from megarl.config.model import ModelShape
from megarl.config.recipe import ModelParallelConfig, Recipe
from megarl.data.packing import pack
from megarl.runtime.engines.serving import Roles
from megarl.runtime.trainers.trainer import CriticTrainer, ModelQuestion, ModelQuestions, ModelsTrainer, Pack
from megarl.runtime.trainers.work import training_work
from megarl.types import PolicyVersion

KEPT_FOLDER = "skipped"
"""In the run's folder: rollouts whose updates were skipped."""


def build_trainer(
    recipe: Recipe, shape: ModelShape, roles: Roles, *, num_steps: int, version: PolicyVersion
) -> ModelsTrainer:
    """`num_steps` and `version` are where the models stand."""
    actor, critic, per_update = recipe.roles.actor, recipe.roles.critic, recipe.train.prompts_per_update
    learner = None
    if critic is not None and roles.critic is not None:
        of_critic = critic.prompts_per_update or per_update
        learner = CriticTrainer(
            ranks=roles.critic,
            pack=_pack(recipe, critic, critic.pool, prompts_per_update=of_critic),
            warmup_steps=critic.warmup_steps,
        )
    return ModelsTrainer(
        actor=roles.actor,
        pack=_pack(recipe, actor, actor.pool, prompts_per_update=per_update),
        ask_actor=_ask_actor(recipe, roles),
        critic=learner,
        questions=_questions(recipe, roles),
        measure_work=partial(
            training_work, shape=shape, epochs=recipe.train.epochs, num_ranks=recipe.pools[actor.pool].gpus
        ),
        num_steps=num_steps,
        version=version,
        kept_folder=recipe.run_folder / KEPT_FOLDER,
    )


def _ask_actor(recipe: Recipe, roles: Roles) -> ModelQuestion:
    actor = recipe.roles.actor
    return ModelQuestion(ask=roles.actor.logprobs, pack=_pack(recipe, actor, actor.pool, prompts_per_update=None))


def _questions(recipe: Recipe, roles: Roles) -> ModelQuestions:
    algorithm = recipe.algorithm
    kl = algorithm.kl if isinstance(algorithm, PolicyGradientConfig) else None
    critic, reference = recipe.roles.critic, recipe.roles.reference
    of_actor = _ask_actor(recipe, roles)
    logprobs = reference_logprobs = values = None
    if isinstance(kl, KlRewardConfig):
        logprobs = of_actor
    if kl is not None:
        reference_logprobs = replace(of_actor, ask=roles.actor.reference_logprobs)
        if roles.reference is not None and reference is not None and reference.pool is not None:
            reference_logprobs = ModelQuestion(
                ask=roles.reference.logprobs, pack=_pack(recipe, reference, reference.pool, prompts_per_update=None)
            )
    if roles.critic is not None and critic is not None:
        values = ModelQuestion(
            ask=roles.critic.values, pack=_pack(recipe, critic, critic.pool, prompts_per_update=None)
        )
    return ModelQuestions(logprobs=logprobs, reference_logprobs=reference_logprobs, values=values)


def _pack(recipe: Recipe, split: ModelParallelConfig, pool: str, *, prompts_per_update: int | None) -> Pack:
    is_sft = isinstance(recipe.algorithm, SftConfig)
    num_rollouts = recipe.sampling.rollouts_per_prompt
    return partial(
        pack,
        data_parallel=recipe.pools[pool].gpus // split.model_parallel,
        tokens_per_micro_batch=recipe.train.tokens_per_micro_batch,
        samples_per_update=None if prompts_per_update is None else prompts_per_update * num_rollouts,
        pad_multiple=PAD_MULTIPLE * split.tensor,
        micro_batch_multiple=split.pipeline if split.virtual_pipeline > 1 else 1,
        temperature=1.0 if is_sft else recipe.sampling.temperature,
        has_versions=recipe.train.max_staleness > 0,
    )
