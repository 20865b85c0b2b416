"""Completes a recipe with what it leaves to its plan: tokens of a micro-batch, and an engine's requests and memory."""

from __future__ import annotations

from bisect import bisect_left
from dataclasses import dataclass, replace
from functools import cached_property

from megarl.config.recipe import Recipe
from megarl.planner.deployment import Deployment, PlannedModel, RoleShapes, deploy
from megarl.planner.flops import forward_work
from megarl.planner.hardware import ATTENTION_EFFICIENCY, DENSE_EFFICIENCY, EXPERT_EFFICIENCY, LAYER_START_S, GpuModel
from megarl.planner.ledger import SPARE_SHARE, ledgers, with_release
from megarl.planner.sharing import sharing_obstacle

_FEWEST_TOKENS = 8192
"""Rows with which the products of any model fill a GPU; more are needed where its layers are small."""
_BUSY = 4
"""A GPU computes for this many times as long as the host needs to start its work."""
_HALVES = 2
"""An update that is a little longer than a micro-batch has two of half the length."""
_TREE = 8
"""Micro-batches whose tokens one tree may have: all of an update are as long as the longest."""
_PER_STAGE = 4
"""Micro-batches per pipeline stage, at least, that keep its bubble small."""


def complete(recipe: Recipe, shapes: RoleShapes, gpu: GpuModel) -> tuple[Recipe, Deployment]:
    """Return the recipe with every value that it leaves to the plan, and its deployment."""
    draft = _with_micro_batch(recipe, shapes, gpu)
    recipe = _with_tree(draft)
    return recipe.model_copy(update={"roles": draft.deployment.roles}), draft.deployment


@dataclass(frozen=True, kw_only=True)
class _Draft:
    """A recipe with the tokens of a micro-batch, on its GPUs."""

    recipe: Recipe
    shapes: RoleShapes
    deployed: Deployment

    @cached_property
    def deployment(self) -> Deployment:
        return with_release(self.deployed, self.recipe.algorithm)

    @cached_property
    def has_room(self) -> bool:
        assert self.deployment.capacity_bytes is not None, "a GPU has a memory"
        spare = min(each.margin_bytes or 0 for each in ledgers(self.deployment, self.recipe.algorithm))
        return spare >= SPARE_SHARE * self.deployment.capacity_bytes

    def with_tokens(self, tokens: int) -> _Draft:
        recipe = _with_tokens(self.recipe, tokens)
        return replace(self, recipe=recipe, deployed=self.deployed.with_micro_batch(recipe, self.shapes))

    def has_room_for(self, larger: _Draft) -> bool:
        """Return whether another one with more tokens fits, while engines give up no more for an update: that takes
        seconds of every step to come back."""
        return larger.has_room and self._released == larger._released

    @property
    def _released(self) -> str | None:
        rollout = self.deployment.roles.rollout
        return None if rollout is None else rollout.release


def _with_micro_batch(recipe: Recipe, shapes: RoleShapes, gpu: GpuModel) -> _Draft:
    """Return the recipe with the tokens of a micro-batch, where it does not say: many, as far as memory is left."""

    def draft(recipe: Recipe) -> _Draft:
        return _Draft(recipe=recipe, shapes=shapes, deployed=deploy(recipe, shapes, gpu))

    if recipe.train.tokens_per_micro_batch is not None:
        return draft(recipe)
    smallest = max(
        -(-recipe.max_context_tokens // split.sequence_multiple) * split.sequence_multiple
        for split in recipe.roles.megatron_roles.values()
    )
    if recipe.run.device == "cpu":
        return draft(_with_tokens(recipe, max(smallest, _FEWEST_TOKENS)))
    least = draft(_with_tokens(recipe, smallest))
    tokens = _wanted_tokens(recipe, least.deployment.models["actor"], gpu)
    # Without room for these tokens there is none for more.
    while tokens > smallest and least.has_room:
        larger = least.with_tokens(tokens)
        if least.has_room_for(larger):
            return larger
        tokens //= 2
    return least


def _with_tree(draft: _Draft) -> Recipe:
    """Return the recipe with the tokens of a tree, where it does not say: as many as leave the same reserve.

    A tree that is cut repeats its trunk in each part. Keeping the trunk's keys and values instead, for parts that come
    later, would need the gradients of all of them before the trunk's own backward pass: another order of passes than a
    pipeline's, and a second forward pass of every part. Memory is what a GPU has left where rows are short.
    """
    recipe = draft.recipe
    tokens, split = recipe.train.micro_batch_tokens, recipe.roles.actor
    obstacle = sharing_obstacle(recipe.train, split, draft.shapes.policy)
    is_tree = recipe.environment is not None or recipe.samples_per_prompt > 1
    if recipe.train.tokens_per_tree is not None or obstacle is not None or not is_tree or recipe.run.device == "cpu":
        return recipe
    if not draft.has_room:
        return recipe
    candidates = range(9, 8 * _TREE + 1)
    most = 8 + bisect_left(
        candidates, 1, key=lambda eighths: int(not draft.has_room_for(draft.with_tokens(tokens * eighths // 8)))
    )
    if most == 8:
        return recipe
    train = recipe.train.model_copy(update={"tokens_per_tree": tokens * most // 8})
    return recipe.model_copy(update={"train": train})


def _with_tokens(recipe: Recipe, tokens: int) -> Recipe:
    train = recipe.train.model_copy(update={"tokens_per_micro_batch": tokens})
    return recipe.model_copy(update={"train": train})


def _wanted_tokens(recipe: Recipe, actor: PlannedModel, gpu: GpuModel) -> int:
    """Return a power of two whose half keeps a GPU busy, but no more than an update has for it."""
    shape, parallel = actor.work.shape, actor.placement.parallel
    context = recipe.max_context_tokens
    work = forward_work(shape, num_tokens=context, num_squared_tokens=context**2)
    forward = work.dense / DENSE_EFFICIENCY + work.expert / EXPERT_EFFICIENCY + work.attention / ATTENTION_EFFICIENCY
    token_s = 3 * forward / context / gpu.flops / (parallel.tensor * parallel.context * parallel.pipeline)
    busy = _HALVES * _BUSY * LAYER_START_S * shape.num_layers / parallel.pipeline / token_s
    prompts = recipe.train.prompts_per_update or recipe.train.prompts_per_step
    own = prompts * recipe.samples_per_prompt * context // parallel.data
    if parallel.pipeline > 1:
        own //= _PER_STAGE * parallel.pipeline
    wanted = min(max(int(busy), _FEWEST_TOKENS), max(own, 1))
    return 1 << (wanted.bit_length() - 1)
