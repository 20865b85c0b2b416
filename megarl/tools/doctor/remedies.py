"""The recipe changes that a diagnosis proposes, as values that this run's recipe accepts."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from megarl.config.algorithm import (
    KlRewardConfig,
    PolicyGradientConfig,
    PpoLossConfig,
)
from megarl.tools.doctor.findings import Change
from megarl.tools.doctor.run_history import Story

Changes = Callable[[Story], Sequence[Change]]

_CLIP_HIGHER = 0.28


def none(_story: Story) -> Sequence[Change]:
    return ()


def all_of(*parts: Changes) -> Changes:
    return lambda story: tuple(change for part in parts for change in part(story))


def halve_learning_rate(story: Story) -> Sequence[Change]:
    return (_change("train.optimizer.learning_rate", story.recipe.train.optimizer.learning_rate / 2),)


def tighten_gradient_clip(story: Story) -> Sequence[Change]:
    return (_change("train.optimizer.clip_grad_norm", story.recipe.train.optimizer.clip_grad_norm / 2),)


def warm_up(story: Story) -> Sequence[Change]:
    if story.recipe.train.optimizer.warmup_steps:
        return ()
    return (_change("train.optimizer.warmup_steps", max(1, min(10, story.recipe.run.steps // 10))),)


def hold_to_reference(story: Story) -> Sequence[Change]:
    """A KL term where there is none, five times the coefficient where there is one."""
    algorithm = story.recipe.algorithm
    if not isinstance(algorithm, PolicyGradientConfig):
        return ()
    match algorithm.kl:
        case None:
            has_reference = story.recipe.roles.reference is not None
            reference = () if has_reference else (_change("roles.reference", "{}"),)
            return (*reference, _change("algorithm.kl", "{kind: loss, coef: 0.001}"))
        case KlRewardConfig(adaptive=adaptive) if adaptive is not None:
            return (_change("algorithm.kl.adaptive.target", adaptive.target / 2),)
        case kl:
            return (_change("algorithm.kl.coef", kl.coef * 5),)


def keep_best(story: Story) -> Sequence[Change]:
    evaluation = story.recipe.evaluation
    if story.recipe.checkpoint.keep_best is not None or evaluation is None or evaluation.every_steps is None:
        return ()
    return (_change("checkpoint.keep_best", "{metric: accuracy}"),)


def more_rollouts(story: Story) -> Sequence[Change]:
    return (_change("sampling.rollouts_per_prompt", 2 * story.recipe.sampling.rollouts_per_prompt),)


def filter_groups(story: Story) -> Sequence[Change]:
    algorithm = story.recipe.algorithm
    if not isinstance(algorithm, PolicyGradientConfig) or algorithm.filter is not None:
        return ()
    return (_change("algorithm.filter", "{}"),)


def longer_responses(story: Story) -> Sequence[Change]:
    recipe = story.recipe
    limit = 2 * recipe.sampling.max_response_tokens
    changes = [_change("sampling.max_response_tokens", limit)]
    needed = recipe.data.max_prompt_tokens + limit
    if recipe.train.tokens_per_micro_batch < needed:
        changes.append(_change("train.tokens_per_micro_batch", needed))
    return changes


def penalize_overlong(story: Story) -> Sequence[Change]:
    algorithm = story.recipe.algorithm
    if not isinstance(algorithm, PolicyGradientConfig) or algorithm.overlong is not None:
        return ()
    buffer_tokens = max(1, story.recipe.sampling.max_response_tokens // 4)
    return (_change("algorithm.overlong", f"{{buffer_tokens: {buffer_tokens}}}"),)


def reward_entropy(story: Story) -> Sequence[Change]:
    algorithm = story.recipe.algorithm
    if not isinstance(algorithm, PolicyGradientConfig):
        return ()
    changes = [_change("algorithm.entropy_coef", max(0.001, 2 * algorithm.entropy_coef))]
    if isinstance(algorithm.loss, PpoLossConfig) and algorithm.loss.clip_high < _CLIP_HIGHER:
        changes.append(_change("algorithm.loss", f"{{kind: ppo, clip_high: {_CLIP_HIGHER}}}"))
    return changes


def correct_mismatch(story: Story) -> Sequence[Change]:
    algorithm = story.recipe.algorithm
    changes = []
    if isinstance(algorithm, PolicyGradientConfig) and algorithm.correction is None:
        changes.append(_change("algorithm.correction", "{kind: tis}"))
    rollout = story.recipe.roles.rollout
    if rollout is not None and not rollout.is_deterministic:
        changes.append(_change("roles.rollout.is_deterministic", "true"))
    return changes


def lower_right_from(story: Story) -> Sequence[Change]:
    """To the best score that training has seen, where that is below what counts as right."""
    evaluation = story.recipe.evaluation
    best = max(item.rollouts.reward_max for item in story.history.summaries if item.rollouts is not None)
    if evaluation is None or best >= evaluation.right_from:
        return ()
    return (_change("evaluation.right_from", best),)


def longer_evaluation(story: Story) -> Sequence[Change]:
    recipe = story.recipe
    if recipe.evaluation is None or recipe.evaluation_response_tokens >= recipe.sampling.max_response_tokens:
        return ()
    return (_change("evaluation.max_response_tokens", recipe.sampling.max_response_tokens),)


def less_for_engines(story: Story) -> Sequence[Change]:
    rollout = story.recipe.roles.rollout
    if rollout is None:
        return ()
    return (
        _change("roles.rollout.memory_fraction", round(max(0.3, rollout.memory_fraction - 0.1), 2)),
        _change("roles.rollout.max_running_requests", max(1, rollout.max_running_requests // 2)),
    )


def less_per_micro_batch(story: Story) -> Sequence[Change]:
    """Half the tokens at once, as far as the longest sequence lets; below that, recomputed activations."""
    recipe = story.recipe
    tokens = max(recipe.max_context_tokens, recipe.train.tokens_per_micro_batch // 2)
    if tokens < recipe.train.tokens_per_micro_batch:
        return (_change("train.tokens_per_micro_batch", tokens),)
    if "recompute_granularity" in recipe.roles.actor.megatron:
        return ()
    return (
        _change(
            "roles.actor.megatron",
            "{recompute_granularity: full, recompute_method: uniform, recompute_num_layers: 1}",
        ),
    )


def more_engines(story: Story) -> Sequence[Change]:
    recipe = story.recipe
    rollout = recipe.roles.rollout
    if rollout is None or rollout.pool is None or list(recipe.roles.used_pools.values()).count(rollout.pool) > 1:
        return ()
    pool = recipe.pools[rollout.pool]
    if pool.nodes > 1:
        return (_change(f"pools.{rollout.pool}.nodes", 2 * pool.nodes),)
    return (_change(f"pools.{rollout.pool}.gpus_per_node", 2 * pool.gpus_per_node),)


def longer_deadline(story: Story) -> Sequence[Change]:
    return (_change("train.operation_timeout_s", 2 * story.recipe.train.operation_timeout_s),)


def keep_fewer(story: Story) -> Sequence[Change]:
    return (_change("checkpoint.keep_last", 1),) if story.recipe.checkpoint.keep_last > 1 else ()


def _change(key: str, value: str | float) -> Change:
    return Change(key=key, value=value if isinstance(value, str) else f"{value:.6g}")
