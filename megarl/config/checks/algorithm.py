"""What an algorithm section can get wrong together with the rest of a recipe: combinations that make no sense."""

from __future__ import annotations

from collections.abc import Iterator

from megarl.config.algorithm import (
    GaeConfig,
    GdpoConfig,
    GmpoLossConfig,
    GpgLossConfig,
    GspoLossConfig,
    IcepopConfig,
    KlRewardConfig,
    MaskConfig,
    MismatchBaselineConfig,
    MismatchConfig,
    PolicyGradientConfig,
    ReinforcePpConfig,
    RemaxConfig,
    SftConfig,
)
from megarl.config.recipe import Recipe
from megarl.config.reward import (
    ExactRewardConfig,
    Gsm8kRewardConfig,
    MathRewardConfig,
    MultipleChoiceRewardConfig,
    RegexRewardConfig,
)
from megarl.errors import Problem

_WITHOUT_COMPONENTS = (
    ExactRewardConfig,
    RegexRewardConfig,
    MultipleChoiceRewardConfig,
    Gsm8kRewardConfig,
    MathRewardConfig,
)


def check_algorithm(recipe: Recipe) -> list[Problem]:
    """Every problem of the algorithm, in the order of its keys."""
    algorithm = recipe.algorithm
    if isinstance(algorithm, SftConfig):
        return list(_imitation(recipe))
    return [
        *_rollouts(recipe),
        *_models(algorithm, recipe),
        *_loss(algorithm, recipe),
        *_correction(algorithm),
        *_mismatch(algorithm, recipe),
        *_filter(algorithm, recipe),
        *_overlong(algorithm, recipe),
        *_components(algorithm, recipe),
    ]


def _imitation(recipe: Recipe) -> Iterator[Problem]:
    if recipe.train.prompts_per_update is not None:
        yield Problem(key="train.prompts_per_update", message="has no use in sft; remove it")
    for name, role in (("critic", recipe.roles.critic), ("reference", recipe.roles.reference)):
        if role is not None:
            yield Problem(key=f"roles.{name}", message="has no use in sft; remove it")
    if recipe.roles.rollout is not None and recipe.evaluation is None:
        yield Problem(key="roles.rollout", message="sft generates only for an evaluation; remove one, add the other")


def _rollouts(recipe: Recipe) -> Iterator[Problem]:
    kind = recipe.algorithm.kind
    if recipe.roles.rollout is None:
        yield Problem(key="roles.rollout", message=f"missing; {kind} needs engines that generate")
    judges_alone = GaeConfig | ReinforcePpConfig | RemaxConfig
    if recipe.sampling.rollouts_per_prompt == 1 and not isinstance(recipe.algorithm, judges_alone):
        yield Problem(
            key="sampling.rollouts_per_prompt",
            message=f"1 leaves nothing to compare in a group; {kind} needs at least 2",
        )


def _models(algorithm: PolicyGradientConfig, recipe: Recipe) -> Iterator[Problem]:
    """Critic and reference are there where they are needed, and nowhere else."""
    roles = recipe.roles
    if isinstance(algorithm, GaeConfig) and roles.critic is None:
        yield Problem(key="roles.critic", message="missing; gae needs a critic: name a pool for it, or choose grpo")
    if not isinstance(algorithm, GaeConfig) and roles.critic is not None:
        yield Problem(key="roles.critic", message="only gae has a use for it; remove it or set algorithm.kind to gae")
    if algorithm.kl is not None and roles.reference is None:
        yield Problem(
            key="roles.reference",
            message="missing; algorithm.kl needs it: `reference: {}` keeps it in host memory of the actor's ranks",
        )
    if algorithm.kl is None and roles.reference is not None:
        yield Problem(key="roles.reference", message="only algorithm.kl has a use for it; remove one or add the other")
    if isinstance(algorithm.kl, KlRewardConfig) and isinstance(algorithm, GdpoConfig):
        yield Problem(
            key="algorithm.kl.kind",
            message="reward changes the score, which gdpo does not use; set it to loss",
        )


def _loss(algorithm: PolicyGradientConfig, recipe: Recipe) -> Iterator[Problem]:
    loss, aggregation = algorithm.loss, algorithm.aggregation
    if isinstance(loss, GspoLossConfig | GmpoLossConfig) and aggregation != "seq_mean_token_mean":
        yield Problem(
            key="algorithm.aggregation",
            message=f"{aggregation} does not weigh sequences alike, as {loss.kind} does; set seq_mean_token_mean",
        )
    if isinstance(loss, GpgLossConfig) and recipe.train.updates_per_step > 1:
        yield Problem(
            key="algorithm.loss.kind",
            message=f"gpg has no ratio to the policy that sampled, but train.prompts_per_update and train.epochs make "
            f"{recipe.train.updates_per_step} updates a step; remove them or choose ppo",
        )
    if (aggregation == "seq_mean_token_sum_norm") != (algorithm.horizon_tokens is not None):
        yield Problem(
            key="algorithm.horizon_tokens",
            message=f"missing; seq_mean_token_sum_norm divides by it, {recipe.sampling.max_response_tokens} "
            "(sampling.max_response_tokens) is usual"
            if algorithm.horizon_tokens is None
            else f"{algorithm.horizon_tokens} has no use with {aggregation}; remove it or set seq_mean_token_sum_norm",
        )


def _correction(algorithm: PolicyGradientConfig) -> Iterator[Problem]:
    match algorithm.correction:
        case IcepopConfig(min_weight=low, max_weight=high) if low >= high:
            yield Problem(key="algorithm.correction.min_weight", message=f"{low} is not below max_weight {high}")
        case MaskConfig(lowest=low, highest=high) if low is not None and low >= high:
            yield Problem(key="algorithm.correction.lowest", message=f"{low} is not below highest {high}")


def _mismatch(algorithm: PolicyGradientConfig, recipe: Recipe) -> Iterator[Problem]:
    mismatch = algorithm.mismatch
    if mismatch.baseline is not None:
        yield from _baseline(mismatch, mismatch.baseline, recipe)
    elif mismatch.warn_above >= mismatch.act_above:
        yield Problem(
            key="algorithm.mismatch.warn_above",
            message=f"{mismatch.warn_above} is not below act_above {mismatch.act_above}",
        )
    if mismatch.action == "correct" and algorithm.correction is not None:
        yield Problem(
            key="algorithm.mismatch.action",
            message=f"correct switches a correction on, but {algorithm.correction.kind} is on from the start; "
            "choose warn or stop, or remove algorithm.correction",
        )


def _baseline(mismatch: MismatchConfig, baseline: MismatchBaselineConfig, recipe: Recipe) -> Iterator[Problem]:
    key = "algorithm.mismatch.baseline"
    for name in sorted(mismatch.model_fields_set & {"warn_above", "act_above"}):
        yield Problem(key=f"algorithm.mismatch.{name}", message="has no use with a baseline; remove one of the two")
    if baseline.warn_times >= baseline.act_times:
        yield Problem(
            key=f"{key}.warn_times", message=f"{baseline.warn_times:g} is not below act_times {baseline.act_times:g}"
        )
    if baseline.steps >= recipe.run.steps:
        yield Problem(
            key=f"{key}.steps",
            message=f"{baseline.steps} leaves none of the run's {recipe.run.steps} steps to compare with it",
        )


def _filter(algorithm: PolicyGradientConfig, recipe: Recipe) -> Iterator[Problem]:
    if algorithm.filter is None:
        return
    low, high = algorithm.filter.lowest_mean, algorithm.filter.highest_mean
    if low is not None and high is not None and low >= high:
        yield Problem(key="algorithm.filter.lowest_mean", message=f"{low} is not below highest_mean {high}")
    if recipe.sampling.rollouts_per_prompt == 1:
        yield Problem(
            key="algorithm.filter",
            message="drops every group of one; remove it or raise sampling.rollouts_per_prompt",
        )


def _overlong(algorithm: PolicyGradientConfig, recipe: Recipe) -> Iterator[Problem]:
    overlong, limit = algorithm.overlong, recipe.sampling.max_response_tokens
    if overlong is None:
        return
    if overlong.buffer_tokens is None and not overlong.is_filtered:
        yield Problem(
            key="algorithm.overlong", message="does nothing; set buffer_tokens or is_filtered, or remove the section"
        )
    if overlong.buffer_tokens is not None and overlong.buffer_tokens >= limit:
        yield Problem(
            key="algorithm.overlong.buffer_tokens",
            message=f"{overlong.buffer_tokens} leaves no response unpunished; "
            f"it must be below sampling.max_response_tokens {limit}",
        )
    if overlong.buffer_tokens is not None and isinstance(algorithm, GdpoConfig):
        yield Problem(
            key="algorithm.overlong.buffer_tokens",
            message="changes the score, which gdpo does not use; remove it, or make length a component of the reward",
        )


def _components(algorithm: PolicyGradientConfig, recipe: Recipe) -> Iterator[Problem]:
    if not isinstance(recipe.reward, _WITHOUT_COMPONENTS):
        return
    keys = []
    if isinstance(algorithm, GdpoConfig):
        keys.append("algorithm.weights")
    if algorithm.filter is not None and algorithm.filter.component is not None:
        keys.append("algorithm.filter.component")
    for key in keys:
        yield Problem(key=key, message=f"the {recipe.reward.kind} reward has no components; set reward.kind function")
