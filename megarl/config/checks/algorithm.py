"""Combinations of algorithm, reward, staleness and the rest of a recipe that make no sense.

Starts no reward worker and opens no file.
"""

from __future__ import annotations

import re
from collections.abc import Iterator

from megarl.config.algorithm import (
    AlgorithmConfig,
    DpoConfig,
    EstimatorConfig,
    GdpoConfig,
    GivenPairsConfig,
    GpgLossConfig,
    IcepopConfig,
    KlRewardConfig,
    MaskConfig,
    MismatchBaselineConfig,
    MismatchConfig,
    PairConfig,
    PolicyGradientConfig,
    PreferenceConfig,
    PrimeConfig,
    RewardModelConfig,
    SftConfig,
    SpinConfig,
    SppoConfig,
    SppoLossConfig,
)
from megarl.config.recipe import DataConfig, ModelConfig, Recipe, RunConfig, SamplingConfig, TrainConfig
from megarl.config.reward import (
    BySourceRewardConfig,
    ComposedRewardConfig,
    ExactRewardConfig,
    QuestionConfig,
    RegexRewardConfig,
    RewardConfig,
    ScorerRewardConfig,
    SingleRewardConfig,
    single_rewards,
)
from megarl.config.roles import RolesConfig
from megarl.errors import Problem


def check_algorithm(recipe: Recipe) -> list[Problem]:
    """Return every problem of the algorithm, in the order of its keys."""
    algorithm, sampling = recipe.algorithm, recipe.sampling
    if isinstance(algorithm, SftConfig):
        problems = _imitation(recipe.train, recipe.roles, is_evaluated=bool(recipe.data.eval))
        return [*problems, *_held_out_answers(recipe.data, algorithm)]
    return [
        *_held_out_answers(recipe.data, algorithm),
        *(
            _scorer(algorithm, recipe.data, recipe.model, recipe.roles)
            if isinstance(algorithm, RewardModelConfig)
            else ()
        ),
        *(
            _given_pairs(algorithm, recipe.roles, is_evaluated=bool(recipe.data.eval))
            if isinstance(algorithm, GivenPairsConfig)
            else _rollouts(algorithm, recipe.roles, sampling)
        ),
        *_models(algorithm, recipe.roles),
        *_distillation(algorithm, recipe.roles, recipe.sampling.temperature),
        *_loss(algorithm, recipe.train, sampling),
        *_correction(algorithm),
        *_mismatch(algorithm, recipe.run),
        *_filter(algorithm, sampling),
        *_reward_clip(algorithm),
        *_overlong(algorithm, sampling),
        *_components(algorithm, recipe.reward),
        *(_self_play(recipe, algorithm) if isinstance(algorithm, SpinConfig) else ()),
        *(_process_rewards(algorithm, recipe.model, recipe.roles) if isinstance(algorithm, PrimeConfig) else ()),
        *(_pair_loss(algorithm) if isinstance(algorithm, PairConfig) else ()),
    ]


def check_rewards(config: RewardConfig) -> Iterator[Problem]:
    for key, single in single_rewards(config):
        yield from _reward(single, key)
    named = config.sources.items() if isinstance(config, BySourceRewardConfig) else ()
    for key, each in (("reward", config), *((f"reward.sources.{name}", source) for name, source in named)):
        if isinstance(each, ComposedRewardConfig):
            yield from _composed(each, key)


def check_staleness(recipe: Recipe) -> Iterator[Problem]:
    """Yield what does not go together with generating while training, or with the lack of it."""
    rollout = recipe.roles.rollout
    staleness = recipe.train.max_staleness
    algorithm = recipe.algorithm
    if not algorithm.needs.has_engines and recipe.train.routing is not None:
        message = f"has no effect in {algorithm.kind}, which trains on tokens of no engine; remove it"
        yield Problem(key="train.routing", message=message)
    if staleness == 0:
        if rollout is not None and rollout.in_flight is not None and recipe.model.served_lora is None:
            yield Problem(
                key="roles.rollout.in_flight",
                message="has no effect with train.max_staleness 0, where no request runs during a publish; remove it",
            )
        return
    if not algorithm.needs.has_engines:
        message = f"{staleness} has no effect in {algorithm.kind}, which generates nothing to train on; remove it"
        yield Problem(key="train.max_staleness", message=message)
    if sharing := recipe.roles.beside_engines:
        yield Problem(
            key="train.max_staleness",
            message=f"{staleness} generates while {sharing[0]} works, but both have pool "
            f"{recipe.roles.used_pools['rollout']}; "
            "give roles.rollout a pool of its own or set it to 0",
        )
    filtering = algorithm.filter
    if filtering is not None and filtering.oversampling > 1:
        yield Problem(
            key="algorithm.filter.oversampling",
            message=f"{filtering.oversampling:g} has no effect with train.max_staleness {staleness}, which lets "
            f"{1 + staleness} steps' worth of prompts be under way; remove it",
        )
    if recipe.checkpoint.keep_best is not None:
        yield Problem(
            key="checkpoint.keep_best",
            message=f"with train.max_staleness {staleness} an evaluation ends when the weights it began with are "
            "trained on; remove it or set train.max_staleness to 0",
        )


def _imitation(train: TrainConfig, roles: RolesConfig, *, is_evaluated: bool) -> Iterator[Problem]:
    if train.prompts_per_update is not None:
        yield Problem(key="train.prompts_per_update", message="has no effect in sft; remove it")
    for name, role in (("critic", roles.critic), ("reference", roles.reference), ("teacher", roles.teacher or None)):
        if role is not None:
            yield Problem(key=f"roles.{name}", message="has no effect in sft; remove it")
    if roles.rollout is not None and not is_evaluated:
        yield Problem(key="roles.rollout", message="sft generates only for an evaluation; remove it or add evaluation")


def _rollouts(algorithm: EstimatorConfig, roles: RolesConfig, sampling: SamplingConfig) -> Iterator[Problem]:
    if roles.rollout is None:
        yield Problem(key="roles.rollout", message=f"missing; {algorithm.kind} needs engines that generate")
    if sampling.rollouts_per_prompt == 1 and algorithm.needs.compares_group:
        yield Problem(
            key="sampling.rollouts_per_prompt",
            message=f"1 leaves nothing to compare in a group; {algorithm.kind} needs at least 2",
        )
    cuts = {"top_p": sampling.top_p if sampling.top_p < 1 else None, "top_k": sampling.top_k}
    for name, value in cuts.items():
        if value is not None and algorithm.correction is None:
            yield Problem(
                key=f"sampling.{name}",
                message=f"{value:g} samples from a part of the distribution that is trained; "
                "leave it out, or set algorithm.correction: {kind: tis}",
            )
    if roles.rollout is not None and algorithm.correction is None and not isinstance(algorithm, PairConfig):
        is_fp8 = {"precision": roles.rollout.fp8_keep is not None, "sglang.kv_cache_dtype": roles.rollout.has_fp8_cache}
        for name in (name for name, is_set in is_fp8.items() if is_set):
            message = "FP8 samples from another distribution than the one that is trained; "
            message += "use bf16, or set algorithm.correction: {kind: tis}"
            yield Problem(key=f"roles.rollout.{name}", message=message)


def _models(algorithm: EstimatorConfig, roles: RolesConfig) -> Iterator[Problem]:
    """Yield a critic or reference that is missing, or that nothing uses."""
    uses_critic = algorithm.needs.has_critic
    if uses_critic and roles.critic is None:
        message = f"missing; {algorithm.kind} needs a critic: name a pool for it, or choose grpo"
        yield Problem(key="roles.critic", message=message)
    if not uses_critic and roles.critic is not None:
        yield Problem(key="roles.critic", message="only gae and prime use it; remove it or set algorithm.kind to gae")
    if algorithm.kl is not None and roles.reference is None:
        yield Problem(
            key="roles.reference",
            message="missing; algorithm.kl needs it: `reference: {}` keeps it in host memory of the actor's ranks",
        )
    if algorithm.kl is None and roles.reference is not None:
        yield Problem(key="roles.reference", message="only algorithm.kl uses it; remove it or add algorithm.kl")
    if isinstance(algorithm.kl, KlRewardConfig) and isinstance(algorithm, GdpoConfig):
        yield Problem(
            key="algorithm.kl.kind",
            message="reward changes the score, which gdpo does not use; set it to loss",
        )


def _distillation(algorithm: EstimatorConfig, roles: RolesConfig, temperature: float) -> Iterator[Problem]:
    """Yield a teacher that is missing or unused, and losses that have no place for its part."""
    key = "algorithm.distillation"
    if algorithm.distillation is None:
        for role in roles.teachers:
            yield Problem(key=f"roles.{role}", message=f"only {key} uses it; remove it, or add {key}")
        return
    if not roles.teacher:
        yield Problem(key="roles.teacher", message=f"missing; {key} needs a teacher")
    if len({role.kind for role in roles.teacher.values()}) > 1:
        yield Problem(key="roles.teacher", message="some are on ranks and some on engines; give all the same kind")
    at_endpoints = [role for role, config in roles.teachers.items() if config.kind == "engines" and config.endpoints]
    if temperature != 1 and at_endpoints:
        message = f"score at temperature 1, not {temperature:g}; set sampling.temperature to 1, or give it a pool"
        yield Problem(key=f"roles.{at_endpoints[0]}.endpoints", message=message)
    if isinstance(algorithm, PairConfig):
        yield Problem(key=key, message=f"the loss of pairs has no place for a teacher; remove it from {algorithm.kind}")
    elif algorithm.distillation.kind == "reverse_kl" and algorithm.loss.averages_advantages:
        message = f"reverse_kl is an advantage of each token, and {algorithm.loss.kind} has one of a sequence; "
        yield Problem(key=f"{key}.kind", message=f"{message}use forward_topk or another loss")
    named = [source for role in roles.teacher.values() for source in role.sources]
    for source in sorted({source for source in named if named.count(source) > 1}):
        yield Problem(key="roles.teacher", message=f"source {source} has two teachers; name it once")
    others = [role for role, config in roles.teachers.items() if not config.sources]
    if len(others) > 1:
        message = f"{' and '.join(others)} teach every source; give all but one the sources of their prompts"
        yield Problem(key="roles.teacher", message=message)


def _loss(algorithm: EstimatorConfig, train: TrainConfig, sampling: SamplingConfig) -> Iterator[Problem]:
    loss, aggregation = algorithm.loss, algorithm.aggregation
    if loss.weighs_sequences_equally and aggregation != "seq_mean_token_mean":
        yield Problem(
            key="algorithm.aggregation",
            message=f"{aggregation} weighs sequences by their length, but {loss.kind} weighs them equally; "
            "set seq_mean_token_mean",
        )
    if isinstance(algorithm, SppoConfig) != isinstance(loss, SppoLossConfig):
        message = f"{loss.kind} and algorithm.kind {algorithm.kind}: the loss sppo and the kind sppo need each other"
        yield Problem(key="algorithm.loss.kind", message=message)
    if isinstance(loss, GpgLossConfig) and train.updates_per_step > 1:
        yield Problem(
            key="algorithm.loss.kind",
            message=f"gpg has no ratio to the policy that sampled, but train.prompts_per_update and train.epochs make "
            f"{train.updates_per_step} updates a step; remove them or choose ppo",
        )
    horizon, key = algorithm.horizon_tokens, "algorithm.horizon_tokens"
    if aggregation == "seq_mean_token_sum_norm" and horizon is None:
        usual = f"{sampling.max_response_tokens} (sampling.max_response_tokens) is usual"
        yield Problem(key=key, message=f"missing; seq_mean_token_sum_norm divides by it, {usual}")
    if aggregation != "seq_mean_token_sum_norm" and horizon is not None:
        message = f"{horizon} has no effect with {aggregation}; remove it or set seq_mean_token_sum_norm"
        yield Problem(key=key, message=message)


def _correction(algorithm: EstimatorConfig) -> Iterator[Problem]:
    match algorithm.correction:
        case IcepopConfig(min_weight=low, max_weight=high) if low >= high:
            yield Problem(key="algorithm.correction.min_weight", message=f"{low} is not below max_weight {high}")
        case MaskConfig(lowest=low, highest=high) if low is not None and low >= high:
            yield Problem(key="algorithm.correction.lowest", message=f"{low} is not below highest {high}")


def _mismatch(algorithm: EstimatorConfig, run: RunConfig) -> Iterator[Problem]:
    mismatch = algorithm.mismatch
    warn, act = mismatch.limits(run.dtype)
    if mismatch.baseline is not None:
        yield from _baseline(mismatch, mismatch.baseline, run.max_steps)
    elif warn >= act:
        yield Problem(key="algorithm.mismatch.warn_above", message=f"{warn:g} is not below act_above {act:g}")
    if mismatch.action == "correct" and algorithm.correction is not None:
        yield Problem(
            key="algorithm.mismatch.action",
            message=f"correct switches a correction on, but {algorithm.correction.kind} is on from the start; "
            "choose warn or stop, or remove algorithm.correction",
        )


def _baseline(mismatch: MismatchConfig, baseline: MismatchBaselineConfig, steps: int) -> Iterator[Problem]:
    key = "algorithm.mismatch.baseline"
    for name in sorted(mismatch.model_fields_set & {"warn_above", "act_above"}):
        yield Problem(key=f"algorithm.mismatch.{name}", message="has no effect with a baseline; remove one of the two")
    if baseline.warn_times >= baseline.act_times:
        yield Problem(
            key=f"{key}.warn_times", message=f"{baseline.warn_times:g} is not below act_times {baseline.act_times:g}"
        )
    if baseline.steps >= steps:
        yield Problem(
            key=f"{key}.steps",
            message=f"{baseline.steps} leaves none of the run's {steps} steps to compare with it",
        )


def _filter(algorithm: EstimatorConfig, sampling: SamplingConfig) -> Iterator[Problem]:
    if algorithm.filter is None:
        return
    low, high = algorithm.filter.lowest_mean, algorithm.filter.highest_mean
    if low is not None and high is not None and low >= high:
        yield Problem(key="algorithm.filter.lowest_mean", message=f"{low} is not below highest_mean {high}")
    if sampling.rollouts_per_prompt == 1:
        yield Problem(
            key="algorithm.filter",
            message="drops every group of one; remove it or raise sampling.rollouts_per_prompt",
        )


def _reward_clip(algorithm: PolicyGradientConfig) -> Iterator[Problem]:
    if algorithm.reward_clip is not None and algorithm.reward_clip[0] >= algorithm.reward_clip[1]:
        low, high = algorithm.reward_clip
        yield Problem(key="algorithm.reward_clip", message=f"[{low:g}, {high:g}]: write the lower number first")


def _overlong(algorithm: EstimatorConfig, sampling: SamplingConfig) -> Iterator[Problem]:
    overlong, limit = algorithm.overlong, sampling.max_response_tokens
    if overlong is None:
        return
    if overlong.buffer_tokens is None and not overlong.is_filtered:
        yield Problem(
            key="algorithm.overlong", message="does nothing; set buffer_tokens or is_filtered, or remove the section"
        )
    if overlong.buffer_tokens is not None and overlong.buffer_tokens >= limit:
        yield Problem(
            key="algorithm.overlong.buffer_tokens",
            message=f"{overlong.buffer_tokens} penalises every response; "
            f"it must be below sampling.max_response_tokens {limit}",
        )
    if overlong.buffer_tokens is not None and isinstance(algorithm, GdpoConfig):
        yield Problem(
            key="algorithm.overlong.buffer_tokens",
            message="changes the score, which gdpo does not use; remove it, or make length a component of the reward",
        )


def _components(algorithm: EstimatorConfig, reward: RewardConfig) -> Iterator[Problem]:
    if isinstance(reward, ComposedRewardConfig) and isinstance(algorithm, GdpoConfig):
        for name in (name for name in algorithm.weights if name.partition(".")[0] not in reward.parts):
            message = f"is no part of the reward; reward.parts has {', '.join(reward.parts)}"
            yield Problem(key=f"algorithm.weights.{name}", message=message)
    if reward.has_components:
        return
    keys = []
    if isinstance(algorithm, GdpoConfig):
        keys.append("algorithm.weights")
    if algorithm.filter is not None and algorithm.filter.component is not None:
        keys.append("algorithm.filter.component")
    for key in keys:
        yield Problem(key=key, message=f"the {reward.kind} reward has no components; set reward.kind function")


def _composed(config: ComposedRewardConfig, key: str) -> Iterator[Problem]:
    for name, part in config.parts.items():
        if part.clip is not None and part.clip[0] >= part.clip[1]:
            yield Problem(
                key=f"{key}.parts.{name}.clip", message=f"{part.clip[0]:g} is not below {part.clip[1]:g}; swap them"
            )
    if "closed_score" in config.model_fields_set and all(part.gate_from is None for part in config.parts.values()):
        yield Problem(key=f"{key}.closed_score", message="has no effect without a part with gate_from; remove it")


def _reward(config: SingleRewardConfig, key: str) -> Iterator[Problem]:
    if isinstance(config, ExactRewardConfig | ScorerRewardConfig):
        return
    if config.on_error == "value" and config.error_value is None:
        yield Problem(key=f"{key}.error_value", message="missing; on_error value needs this score")
    if config.on_error != "value" and config.error_value is not None:
        yield Problem(
            key=f"{key}.error_value", message=f"has no effect with on_error {config.on_error}; remove it or set value"
        )
    if isinstance(config, QuestionConfig) and not re.search(r"\{(response|solution_str)\}", config.template):
        yield Problem(key=f"{key}.template", message="shows the judge no response; put {response} where it belongs")
    if isinstance(config, RegexRewardConfig):
        try:
            re.compile(config.pattern)
        except re.error as error:
            yield Problem(key=f"{key}.pattern", message=f"{config.pattern!r} is not a regular expression: {error}")


def _held_out_answers(data: DataConfig, algorithm: AlgorithmConfig) -> Iterator[Problem]:
    """Yield held-out answers that the algorithm does not look at."""
    if data.eval_demonstrations and not isinstance(algorithm, SftConfig):
        yield Problem(key="data.eval_demonstrations", message="only sft measures the loss of answers; remove it")
    if data.eval_pairs and algorithm.needs.rows != "pairs":
        yield Problem(key="data.eval_pairs", message="only dpo and reward_model compare pairs; remove it")


def _scorer(
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


def _self_play(recipe: Recipe, algorithm: SpinConfig) -> Iterator[Problem]:
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


def _process_rewards(algorithm: PrimeConfig, model: ModelConfig, roles: RolesConfig) -> Iterator[Problem]:
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


def _given_pairs(algorithm: GivenPairsConfig, roles: RolesConfig, *, is_evaluated: bool) -> Iterator[Problem]:
    if roles.rollout is not None and not is_evaluated and isinstance(algorithm, DpoConfig):
        yield Problem(key="roles.rollout", message="dpo generates only for an evaluation; remove it or add evaluation")
    for name in ("filter", "overlong", "reward_clip", "correction"):
        if getattr(algorithm, name) is not None:
            yield Problem(key=f"algorithm.{name}", message="has no effect on pairs of the data; remove it")


def _pair_loss(algorithm: PairConfig) -> Iterator[Problem]:
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
