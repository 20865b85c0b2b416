"""The packing of each model of a recipe: how the samples of a step are divided among its ranks."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from megarl.config.model import read_model_shape
from megarl.config.recipe import Recipe
from megarl.config.roles import ModelParallelConfig, teaching_of
from megarl.data.packing import Packing
from megarl.data.shares import ModelPacking
from megarl.families.shape import ModelShape
from megarl.planner.flops import sequence_cost
from megarl.planner.sharing import sharing_obstacle
from megarl.ranks.start import critic_shape, draft_folder


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelPackings:
    """The packing of every model of a run."""

    actor: ModelPacking
    reference: ModelPacking
    """On its own ranks, or on the actor's."""
    critic: ModelPacking | None = None
    drafter: ModelPacking | None = None
    teachers: Mapping[str, ModelPacking] = field(default_factory=dict)


def packings_of(recipe: Recipe, shape: ModelShape) -> ModelPackings:
    """Return the packings of a recipe's models; `shape` is the policy's."""
    actor = _actor_packing(recipe, shape)
    return ModelPackings(
        actor=actor,
        critic=_critic_packing(recipe, shape),
        drafter=_drafter_packing(recipe),
        reference=_reference_packing(recipe, shape, actor),
        # As the update is packed: a teacher that is split like the actor then computes the same sums.
        teachers={
            role: _packing(
                recipe, teacher, teacher.pool, read_model_shape(teacher.model), recipe.train.prompts_per_update
            )
            for role, teacher in recipe.roles.teacher_ranks.items()
        },
    )


def _actor_packing(recipe: Recipe, shape: ModelShape) -> ModelPacking:
    role = recipe.roles.actor
    teaching = teaching_of(recipe.algorithm, recipe.roles, shape.vocab)
    return replace(
        _packing(recipe, role, role.pool, shape, recipe.train.prompts_per_update),
        has_routes=recipe.replays_routing(shape),
        teacher_width=0 if teaching is None else teaching.width,
    )


def _critic_packing(recipe: Recipe, shape: ModelShape) -> ModelPacking | None:
    role = recipe.roles.critic
    if role is None:
        return None
    # An implicit reward model takes one update per step.
    is_single = recipe.algorithm.needs.implicit_reward_beta is not None
    per_update = None if is_single else role.prompts_per_update or recipe.train.prompts_per_update
    return _packing(recipe, role, role.pool, critic_shape(role, shape, recipe.algorithm), per_update)


def _drafter_packing(recipe: Recipe) -> ModelPacking | None:
    role = recipe.roles.drafter
    if role is None:
        return None
    shape = read_model_shape(draft_folder(recipe))
    return replace(_packing(recipe, role, role.pool, shape, recipe.train.prompts_per_update), has_versions=False)


def _reference_packing(recipe: Recipe, shape: ModelShape, actor: ModelPacking) -> ModelPacking:
    role = recipe.roles.reference
    if role is not None and role.pool is not None:
        return _packing(recipe, role, role.pool, shape, prompts_per_update=None)
    # A reference chooses its own experts: its numbers must not depend on the policy that it is compared with.
    return replace(actor, has_routes=False)


def _packing(
    recipe: Recipe, split: ModelParallelConfig, pool: str, shape: ModelShape, prompts_per_update: int | None
) -> ModelPacking:
    """Return the packing of a model; without `prompts_per_update` the whole step is one mini-batch."""
    needs = recipe.algorithm.needs
    packing = Packing(
        data_parallel=recipe.pools[pool].gpus // split.model_parallel,
        tokens_per_micro_batch=recipe.train.micro_batch_tokens,
        samples_per_update=None if prompts_per_update is None else prompts_per_update * recipe.samples_per_prompt,
        pad_multiple=split.pack_multiple,
        sequence_multiple=split.sequence_multiple,
        micro_batch_multiple=split.pipeline if split.virtual_pipeline > 1 else 1,
        cost=sequence_cost(shape),
        keeps_episodes=needs.sums_over_episodes,
        tokens_per_tree=recipe.train.tokens_per_tree or 0,
        bubble=(split.pipeline - 1) / split.virtual_pipeline,
    )
    return ModelPacking(
        packing=packing,
        temperature=recipe.sampling.temperature if needs.has_engines else 1.0,
        # In self-play groups have demonstrations among the rollouts.
        has_versions=recipe.train.max_staleness > 0 or needs.self_play_steps is not None,
        shares_prefixes=sharing_obstacle(recipe.train, split, shape) is None,
    )
