"""Remedies: functions that return the changes of a run's recipe, as values which that recipe accepts."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from megarl.config.algorithm import KlRewardConfig, PpoLossConfig
from megarl.tools.doctor.run_history import RunHistory


@dataclass(frozen=True, slots=True, kw_only=True)
class RecipeChange:
    """One key of a recipe, as `--set KEY=VALUE` takes it."""

    key: str
    value: str
    """YAML, in one line."""

    def __str__(self) -> str:
        return f"{self.key}: {self.value}"


Remedy = Callable[[RunHistory], Sequence[RecipeChange]]

_CLIP_HIGHER = 0.28


def none(_run: RunHistory) -> Sequence[RecipeChange]:
    return ()


def all_of(*remedies: Remedy) -> Remedy:
    return lambda run: tuple(change for remedy in remedies for change in remedy(run))


def halve_learning_rate(run: RunHistory) -> Sequence[RecipeChange]:
    return (_change("train.optimizer.learning_rate", run.recipe.train.optimizer.learning_rate / 2),)


def tighten_gradient_clip(run: RunHistory) -> Sequence[RecipeChange]:
    return (_change("train.optimizer.clip_grad_norm", run.recipe.train.optimizer.clip_grad_norm / 2),)


def warm_up(run: RunHistory) -> Sequence[RecipeChange]:
    if run.recipe.train.optimizer.warmup_steps:
        return ()
    return (_change("train.optimizer.warmup_steps", max(1, min(10, run.recipe.run.total_steps // 10))),)


def hold_to_reference(run: RunHistory) -> Sequence[RecipeChange]:
    """Add a KL term, or take five times the coefficient of the one that is there."""
    algorithm = run.recipe.algorithm
    match algorithm.kl:
        case None if not algorithm.needs.has_engines:
            return ()
        case None:
            has_reference = run.recipe.roles.reference is not None
            reference = () if has_reference else (_change("roles.reference", "{}"),)
            return (*reference, _change("algorithm.kl", "{kind: loss, coef: 0.001}"))
        case KlRewardConfig(adaptive=adaptive) if adaptive is not None:
            return (_change("algorithm.kl.adaptive.target", adaptive.target / 2),)
        case kl:
            return (_change("algorithm.kl.coef", kl.coef * 5),)


def keep_best(run: RunHistory) -> Sequence[RecipeChange]:
    evaluation = run.recipe.evaluation
    if run.recipe.checkpoint.keep_best is not None or evaluation is None or evaluation.every_steps is None:
        return ()
    return (_change("checkpoint.keep_best", "{metric: accuracy}"),)


def more_rollouts(run: RunHistory) -> Sequence[RecipeChange]:
    return (_change("sampling.rollouts_per_prompt", 2 * run.recipe.sampling.rollouts_per_prompt),)


def filter_groups(run: RunHistory) -> Sequence[RecipeChange]:
    algorithm = run.recipe.algorithm
    if not algorithm.needs.has_engines or algorithm.filter is not None:
        return ()
    return (_change("algorithm.filter", "{}"),)


def longer_responses(run: RunHistory) -> Sequence[RecipeChange]:
    recipe = run.recipe
    limit = 2 * recipe.sampling.max_response_tokens
    changes = [_change("sampling.max_response_tokens", limit)]
    needed = recipe.data.max_prompt_tokens + limit
    if recipe.train.tokens_per_micro_batch < needed:
        changes.append(_change("train.tokens_per_micro_batch", needed))
    return changes


def penalize_overlong(run: RunHistory) -> Sequence[RecipeChange]:
    algorithm = run.recipe.algorithm
    if not algorithm.needs.has_engines or algorithm.overlong is not None:
        return ()
    buffer_tokens = max(1, run.recipe.sampling.max_response_tokens // 4)
    return (_change("algorithm.overlong", f"{{buffer_tokens: {buffer_tokens}}}"),)


def reward_entropy(run: RunHistory) -> Sequence[RecipeChange]:
    algorithm = run.recipe.algorithm
    if not algorithm.needs.has_engines:
        return ()
    changes = [_change("algorithm.entropy_coef", max(0.001, 2 * algorithm.entropy_coef))]
    if isinstance(algorithm.loss, PpoLossConfig) and algorithm.loss.clip_high < _CLIP_HIGHER:
        changes.append(_change("algorithm.loss", f"{{kind: ppo, clip_high: {_CLIP_HIGHER}}}"))
    return changes


def correct_mismatch(run: RunHistory) -> Sequence[RecipeChange]:
    algorithm = run.recipe.algorithm
    changes = []
    if algorithm.needs.has_engines and algorithm.correction is None:
        changes.append(_change("algorithm.correction", "{kind: tis}"))
    rollout = run.recipe.roles.rollout
    if rollout is not None and not rollout.is_deterministic_on(run.recipe.run.device):
        changes.append(_change("roles.rollout.is_deterministic", "true"))
    return changes


def lower_right_from(run: RunHistory) -> Sequence[RecipeChange]:
    """Lower the limit to the best score of training, where that is below it."""
    evaluation = run.recipe.evaluation
    best = max(item.rollouts.reward_max for item in run.history.summaries if item.rollouts is not None)
    if evaluation is None or best >= evaluation.right_from:
        return ()
    return (_change("evaluation.right_from", best),)


def longer_evaluation(run: RunHistory) -> Sequence[RecipeChange]:
    recipe = run.recipe
    if recipe.evaluation is None or recipe.evaluation_response_tokens >= recipe.sampling.max_response_tokens:
        return ()
    return (_change("evaluation.max_response_tokens", recipe.sampling.max_response_tokens),)


def less_for_engines(run: RunHistory) -> Sequence[RecipeChange]:
    rollout = run.recipe.roles.rollout
    if rollout is None:
        return ()
    return (
        _change("roles.rollout.memory_fraction", round(max(0.3, rollout.memory_fraction - 0.1), 2)),
        _change("roles.rollout.max_running_requests", max(1, rollout.max_running_requests // 2)),
    )


def less_per_micro_batch(run: RunHistory) -> Sequence[RecipeChange]:
    """Halve the tokens of a micro-batch down to the longest sequence; where that is reached, recompute activations."""
    recipe = run.recipe
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


def more_engines(run: RunHistory) -> Sequence[RecipeChange]:
    recipe = run.recipe
    rollout = recipe.roles.rollout
    if rollout is None or rollout.pool is None or list(recipe.roles.used_pools.values()).count(rollout.pool) > 1:
        return ()
    pool = recipe.pools[rollout.pool]
    if pool.nodes > 1:
        return (_change(f"pools.{rollout.pool}.nodes", 2 * pool.nodes),)
    return (_change(f"pools.{rollout.pool}.gpus_per_node", 2 * pool.gpus_per_node),)


def longer_deadline(run: RunHistory) -> Sequence[RecipeChange]:
    return (_change("train.operation_timeout_s", 2 * run.recipe.train.operation_timeout_s),)


def keep_fewer(run: RunHistory) -> Sequence[RecipeChange]:
    return (_change("checkpoint.keep_last", 1),) if run.recipe.checkpoint.keep_last > 1 else ()


def _change(key: str, value: str | float) -> RecipeChange:
    return RecipeChange(key=key, value=value if isinstance(value, str) else f"{value:.6g}")
