"""Combinations of keys that make no sense for algorithms that compare answers. Opens no file."""

from __future__ import annotations

from collections.abc import Iterator

from megarl.config.algorithm import (
    AlgorithmConfig,
    DpoConfig,
    GivenPairsConfig,
    KlRewardConfig,
    PairConfig,
    PreferenceConfig,
    PrimeConfig,
    RewardModelConfig,
    SftConfig,
    SpinConfig,
)
from megarl.config.recipe import DataConfig, ModelConfig, Recipe
from megarl.config.roles import RolesConfig
from megarl.errors import Problem


def check_given_answers(data: DataConfig, algorithm: AlgorithmConfig) -> Iterator[Problem]:
    """Yield held-out answers that the algorithm does not look at."""
    if data.eval_demonstrations and not isinstance(algorithm, SftConfig):
        yield Problem(key="data.eval_demonstrations", message="only sft measures the loss of answers; remove it")
    if data.eval_pairs and not isinstance(algorithm, GivenPairsConfig):
        yield Problem(key="data.eval_pairs", message="only dpo and reward_model compare pairs; remove it")


def check_scorer(
    algorithm: RewardModelConfig, data: DataConfig, model: ModelConfig, roles: RolesConfig
) -> Iterator[Problem]:
    """Yield what a model without a language head cannot do."""
    if roles.rollout is not None:
        message = "a reward model writes no answers; remove it, and hold out pairs in data.eval_pairs"
        yield Problem(key="roles.rollout", message=message)
    if model.lora is not None:
        yield Problem(key="model.lora", message="reward_model trains whole models; remove it")
    if data.template == "raw":
        message = "raw has no end of an answer; a reward model reads chats: use chat, or a template of your own"
        yield Problem(key="data.template", message=message)
    if algorithm.kl is not None:
        yield Problem(key="algorithm.kl", message="a reward model has no reference; remove it")


def check_self_play(recipe: Recipe, algorithm: SpinConfig) -> Iterator[Problem]:
    """Yield what `spin` cannot do: its reference is the policy of an earlier step, in the actor's own ranks."""
    reference = recipe.roles.reference
    if reference is not None and (reference.pool is not None or reference.path is not None):
        message = "spin refreshes its reference from the actor: keep it in the actor's ranks, `reference: {}`"
        yield Problem(key="roles.reference", message=message)
    if algorithm.preference == "simpo":
        yield Problem(key="algorithm.preference", message="simpo has no reference, which spin needs; choose sigmoid")
    if recipe.model.lora is not None:
        yield Problem(key="model.lora", message="spin trains whole models; remove it")
    if recipe.environment is not None:
        yield Problem(key="environment", message="spin compares single answers with demonstrations; remove it")
    if recipe.train.max_staleness:
        yield Problem(
            key="train.max_staleness", message="spin needs answers of the policy before the step; set it to 0"
        )
    for name in ("filter", "overlong", "reward_clip", "correction"):
        if getattr(algorithm, name) is not None:
            yield Problem(key=f"algorithm.{name}", message="has no effect in spin, which uses no rewards; remove it")


def check_process_rewards(algorithm: PrimeConfig, model: ModelConfig, roles: RolesConfig) -> Iterator[Problem]:
    """Yield what `prime` cannot do: its reward model takes one update a step, of whole models."""
    critic = roles.critic
    if isinstance(algorithm.kl, KlRewardConfig):
        yield Problem(
            key="algorithm.kl.kind", message="reward is not part of prime's rewards of tokens; set it to loss"
        )
    if model.lora is not None:
        yield Problem(key="model.lora", message="prime trains whole models; remove it")
    if critic is None:
        return
    for name in sorted(critic.model_dump(exclude_defaults=True, include={"clip", "epochs", "prompts_per_update"})):
        message = "has no effect on prime's reward model, which takes one update a step; remove it"
        yield Problem(key=f"roles.critic.{name}", message=message)


def check_given_pairs(algorithm: GivenPairsConfig, roles: RolesConfig, *, is_evaluated: bool) -> Iterator[Problem]:
    if roles.rollout is not None and not is_evaluated and isinstance(algorithm, DpoConfig):
        yield Problem(key="roles.rollout", message="dpo generates only for an evaluation; remove it or add evaluation")
    for name in ("filter", "overlong", "reward_clip", "correction"):
        if getattr(algorithm, name) is not None:
            yield Problem(key=f"algorithm.{name}", message="has no effect on pairs of the data; remove it")


def check_pair_loss(algorithm: PairConfig) -> Iterator[Problem]:
    """Yield the keys that would make something else of the loss of a pair."""
    kind = algorithm.kind  # type: ignore[attr-defined]
    if algorithm.loss.kind != "gpg" or algorithm.aggregation != "seq_mean_token_sum":
        yield Problem(key="algorithm.loss", message=f"{kind} has its own loss; remove loss and aggregation")
    if isinstance(algorithm, PreferenceConfig):
        yield from _preference(algorithm, kind)
    if algorithm.overlong is not None and algorithm.overlong.is_filtered:
        message = "would take a side of a pair out of the loss; use buffer_tokens, which lowers its reward"
        yield Problem(key="algorithm.overlong.is_filtered", message=message)


def _preference(algorithm: PreferenceConfig, kind: str) -> Iterator[Problem]:
    is_simpo = algorithm.preference == "simpo"
    match algorithm.kl:
        case KlRewardConfig(estimate="k1", adaptive=None) if not is_simpo:
            pass
        case None if is_simpo:
            pass
        case _:
            needed = "{kind: reward, coef: ...}, coef being its beta, without other keys"
            message = "simpo has no reference; set kl: null" if is_simpo else f"{kind} needs {needed}"
            yield Problem(key="algorithm.kl", message=message)
    if algorithm.filter is None and kind == "online_dpo":
        yield Problem(key="algorithm.filter", message="null would keep groups without a best and a worst; remove it")
    unused = {"label_smoothing": algorithm.preference != "sigmoid", "simpo": not is_simpo}
    for name in (
        name for name, has_no_effect in unused.items() if has_no_effect and name in algorithm.model_fields_set
    ):
        message = f"has no effect with preference {algorithm.preference}; remove it"
        yield Problem(key=f"algorithm.{name}", message=message)
