"""Translate the keys of verl's algorithm: estimator, KL, loss, filters and reward."""

from __future__ import annotations

import re
from collections.abc import Mapping

from megarl.config.document import Tree
from megarl.tools.import_verl.translation import ACTOR, KeyVerdict, Translation

ESTIMATORS = {
    "gae": "gae",
    "grpo": "grpo",
    "grpo_vectorized": "grpo",
    "rloo": "rloo",
    "rloo_vectorized": "rloo",
    "opo": "opo",
    "gpg": "gpg",
    "remax": "remax",
    "grpo_passk": "grpo_passk",
    "reinforce_plus_plus": "reinforce_pp",
    "reinforce_plus_plus_baseline": "reinforce_pp_baseline",
}
_DISCOUNTED = ("gae", "reinforce_pp", "remax")
_SCORERS = {
    "gsm8k": ("openai/gsm8k",),
    "math": ("lighteval/MATH", "DigitalLearningGmbH/MATH-lighteval", "HuggingFaceH4/MATH-500"),
    "dapo_math": ("math_dapo", "math", "math_dapo_reasoning", "aime2024", "aime2025", "aime_2024", "aime_2025"),
}
"""The data sources that verl's own scorers know, by the scorer of a recipe."""
THOUGHT = r"(?s)(?><think>.*?</think>)(?>.*?\\boxed\{).*\}.*"
"""The form of verl's scorer, whose three `.*` may take hours of one text; this takes a pass, and matches the same."""
_GEOMETRY: Tree = {
    "kind": "composed",
    "parts": {
        "answer": {"weight": 0.9, "reward": {"kind": "math"}},
        "format": {"weight": 0.1, "reward": {"kind": "regex", "pattern": THOUGHT, "is_format": True}},
    },
}
_KL_ESTIMATES = {
    name + suffix: estimate + suffix
    for suffix in ("", "+")
    for name, estimate in {
        "kl": "k1",
        "k1": "k1",
        "abs": "abs",
        "mse": "k2",
        "k2": "k2",
        "low_var_kl": "k3",
        "k3": "k3",
    }.items()
    if estimate != "k2" or not suffix
}
"""By verl's names; k2 has no `+`: its gradient is already the straight-through one."""
_LOSSES = {"vanilla": "ppo", "gspo": "gspo", "cispo": "cispo", "gpg": "gpg", "sapo": "sapo", "geo_mean": "gmpo"}
_CLIPPED = ("ppo", "gspo", "cispo", "gmpo")
_BY_SEQUENCE = ("gspo", "sapo", "gmpo")
"""Losses that verl averages over sequences, whatever its loss_agg_mode says."""
_WHOLE_SCORE = ("reward", "score", "seq_reward", "seq_final_reward")
_ENGINE_SIZES = {"gpu_memory_utilization": "memory_fraction", "max_num_seqs": "max_running_requests"}
"""Keys of a frozen model's servers, with ours below its role."""
_SHARED_CACHED_TOKENS = 131_072
"""KV cache of a reward model on the GPUs of others: 32 chats of 4,096 tokens at once."""
_REWARD_PREFIXES = ("reward.custom_reward_function.", "custom_reward_function.", "reward_model.reward_fn.")
_OVERLONG_PREFIXES = (
    "reward.reward_kwargs.overlong_buffer_cfg.",
    "reward_model.reward_kwargs.overlong_buffer_cfg.",
    "reward_model.overlong_buffer.",
)


def put_preference(keys: Translation) -> str | None:
    """Put SPPO or SPIN of verl's recipes, which have losses of their own; return the kind, None without one."""
    eta = [keys.take(key, "algorithm.eta") for key in ("algorithm.sppo_eta", f"{ACTOR}sppo_eta")]
    if any(value is not None for value in eta):
        keys.put("algorithm", {"kind": "sppo", "eta": next(value for value in eta if value is not None)})
        keys.mapped("algorithm.adv_estimator", "algorithm.kind sppo")
        return "sppo"
    beta = [keys.take(key, "algorithm.kl.coef") for key in ("algorithm.dpo_beta", f"{ACTOR}dpo_beta")]
    if all(value is None for value in beta):
        return None
    coef = next(value for value in beta if value is not None)
    keys.put("algorithm", {"kind": "online_dpo", "kl": {"kind": "reward", "coef": coef}})
    keys.mapped("algorithm.adv_estimator", "algorithm.kind online_dpo")
    for key in ("algorithm.dpo_label_smoothing", f"{ACTOR}dpo_label_smoothing"):
        if smoothing := keys.take(key, "algorithm.label_smoothing"):
            keys.put("algorithm.label_smoothing", smoothing)
    if keys.given.get("trainer.ref_update_freq") not in (None, -1, 0):
        text = "the reference of online_dpo stays; `kind: spin` refreshes its reference, and learns from demonstrations"
        keys.report("trainer.ref_update_freq", KeyVerdict.NOT_SUPPORTED, text)
        keys.notes.append(f"trainer.ref_update_freq: {text}")
    return "online_dpo"


def put_process_rewards(keys: Translation) -> bool:
    """Put the algorithm of verl's PRIME; return whether the file is of that recipe."""
    beta = keys.take("reward_model.model.beta_train", "algorithm.beta")
    if beta is None:
        return False
    keys.put("algorithm", {"kind": "prime", "beta": beta})
    keys.mapped("algorithm.adv_estimator", "algorithm.kind prime")
    process = keys.take("algorithm.reward_dpo_coef", "algorithm.process_coef", default=5)
    outcome = keys.take("algorithm.reward_gt_coef", "algorithm.process_coef", default=5)
    if isinstance(process, int | float) and isinstance(outcome, int | float) and process > 0 and outcome > 0:
        keys.put("algorithm.process_coef", process / outcome)
    else:
        keys.notes.append("algorithm.process_coef: prime has both rewards, of the outcome and of tokens; 1.0 is taken")
    keys.move("reward_model.model.optim.lr", "roles.critic.optimizer.learning_rate", default=1e-6)
    keys.move("reward_model.model.optim.grad_clip", "roles.critic.optimizer.clip_grad_norm", default=10.0)
    if keys.given.get("algorithm.use_kl_in_reward"):
        text = "prime takes no KL in the reward; set algorithm.kl: {kind: loss} where the policy must stay near"
        keys.report("algorithm.use_kl_in_reward", KeyVerdict.NOT_SUPPORTED, text)
    return True


def put_estimator(keys: Translation) -> None:
    key = "algorithm.adv_estimator"
    name = str(keys.given.get(key, "gae"))
    kind = ESTIMATORS.get(name)
    weights = _component_weights(keys) if name == "gdpo" else {}
    if weights:
        kind = "gdpo"
        keys.put("algorithm.weights", weights)
    if kind is None:
        kind = "grpo" if name == "gdpo" or keys.number("actor_rollout_ref.rollout.n", 1) > 1 else "reinforce_pp"
        remedy = "set algorithm.kind to gdpo and algorithm.weights to those of your reward's components"
        missing = remedy if name == "gdpo" else f"megarl does not have {name}"
        text = f"{missing}: the recipe uses {kind} instead, which is another algorithm"
        keys.report(key, KeyVerdict.NOT_SUPPORTED, text)
        keys.notes.append(f"adv_estimator {name}: {text}")
    else:
        keys.mapped(key, f"algorithm.kind {kind}")
    keys.put("algorithm.kind", kind)
    keys.has_critic = kind == "gae"
    if kind == "grpo" and keys.take("algorithm.norm_adv_by_std_in_grpo", "algorithm.normalize_std") is False:
        keys.put("algorithm.normalize_std", False)
    if kind in _DISCOUNTED:
        keys.move("algorithm.gamma", "algorithm.gamma")
    if keys.has_critic:
        keys.move("algorithm.lam", "algorithm.lam", default=1.0)


def _component_weights(keys: Translation) -> dict[str, Tree]:
    """Return the weight of each component of the reward that gdpo compares; 1 where verl has none."""
    names = keys.take("algorithm.gdpo_reward_keys", "algorithm.weights")
    given = keys.take("algorithm.gdpo_reward_weights", "algorithm.weights")
    weights = given if isinstance(given, list) else []
    return {
        str(name): weights[place] if place < len(weights) else 1.0
        for place, name in enumerate(names if isinstance(names, list) else [])
    }


def put_distillation(keys: Translation) -> None:
    """Put the teachers with their pool, and what is learnt from them."""
    if not keys.take("distillation.enabled", "algorithm.distillation"):
        return
    _put_teachers(keys)
    loss = "distillation.distillation_loss."
    mode = str(keys.take(f"{loss}loss_mode", "algorithm.distillation.kind", default="k3"))
    is_forward = mode == "forward_kl_topk"
    coef = keys.take(f"{loss}distillation_loss_coef", "algorithm.distillation.coef", default=1.0)
    learnt: dict[str, Tree] = {"kind": "forward_topk" if is_forward else "reverse_kl", "coef": coef}
    if is_forward:
        learnt["top_k"] = keys.take(f"{loss}topk", "algorithm.distillation.top_k", default=32)
    is_gradient = keys.take(f"{loss}use_policy_gradient", "algorithm.distillation.kind")
    if not is_forward and not (mode == "k1" and is_gradient):
        keys.notes.append(
            f"{loss}loss_mode {mode}: reverse_kl is estimate k1 as an advantage, whose gradient is unbiased"
        )
    if keys.take(f"{loss}use_task_rewards", "algorithm.kind", default=True):
        keys.put("algorithm.distillation", learnt)
    else:
        keys.put("algorithm", {"kind": "distill", "distillation": learnt})
        keys.has_critic = False


def _put_teachers(keys: Translation) -> None:
    prefix = "distillation."
    for name, ours, default in (("nnodes", "nodes", 1), ("n_gpus_per_node", "gpus_per_node", 8)):
        keys.move(f"{prefix}{name}", f"pools.teacher.{ours}", default=default)
    if keys.take(f"{prefix}teacher_key", "data.source_key", default="data_source") != "data_source":
        keys.put("data.source_key", keys.given[f"{prefix}teacher_key"])
    found = (re.match(r"distillation\.teacher_models\.(\w+)\.", key) for key in keys.written)
    names = list(dict.fromkeys(match[1] for match in found if match)) or ["teacher_model"]
    # verl's teachers are servers. Ours on engines have a pool each.
    is_served = len(names) == 1
    for name in names:
        theirs, role = f"{prefix}teacher_models.{name}.", f"roles.teacher.{name}"
        tensor = keys.take(f"{theirs}inference.tensor_model_parallel_size", f"{role}.tensor", default=1)
        model = keys.path(f"{theirs}model_path", f"{role}.model", default="TEACHER_MODEL")
        kind = "engines" if is_served else "ranks"
        keys.put(role, {"kind": kind, "pool": "teacher", "tensor": tensor, "model": model})
        for key, ours in _ENGINE_SIZES.items() if is_served else ():
            keys.move(f"{theirs}inference.{key}", f"{role}.{ours}")
        source = keys.take(f"{theirs}key", f"{role}.sources")
        if source is not None and len(names) > 1:
            keys.put(f"{role}.sources", [source])


def put_kl(keys: Translation) -> bool:
    """Put the KL term; return whether there is one. verl can have it in loss and reward at once, a recipe in one."""
    in_reward = keys.take("algorithm.use_kl_in_reward", "algorithm.kl")
    in_loss = keys.take(f"{ACTOR}use_kl_loss", "algorithm.kl")
    key = f"{ACTOR}kl_loss_coef" if in_loss else "algorithm.kl_ctrl.kl_coef"
    if (in_loss or in_reward) and keys.given.get(key) == 0:
        keys.report(key, KeyVerdict.NO_EFFECT, "a KL term of weight 0; the recipe has none")
        return False
    if in_loss:
        keys.put("algorithm.kl.kind", "loss")
        estimate = _estimate(keys, f"{ACTOR}kl_loss_type", default="low_var_kl", known=_KL_ESTIMATES)
        keys.put("algorithm.kl.estimate", estimate)
        keys.move(f"{ACTOR}kl_loss_coef", "algorithm.kl.coef", default=0.001)
        if in_reward:
            text = "the KL is in the loss already (use_kl_loss), and a recipe has it in one place"
            keys.report("algorithm.use_kl_in_reward", KeyVerdict.NOT_SUPPORTED, text)
    elif in_reward:
        keys.put("algorithm.kl.kind", "reward")
        in_rewards = {name: estimate for name, estimate in _KL_ESTIMATES.items() if not name.endswith("+")}
        keys.put("algorithm.kl.estimate", _estimate(keys, "algorithm.kl_penalty", default="kl", known=in_rewards))
        keys.move("algorithm.kl_ctrl.kl_coef", "algorithm.kl.coef", default=0.001)
        if keys.take("algorithm.kl_ctrl.type", "algorithm.kl.adaptive", default="fixed") == "adaptive":
            keys.move("algorithm.kl_ctrl.target_kl", "algorithm.kl.adaptive.target", default=0.1)
            keys.move("algorithm.kl_ctrl.horizon", "algorithm.kl.adaptive.horizon", default=10000)
    else:
        for key in ("algorithm.use_kl_in_reward", f"{ACTOR}use_kl_loss"):
            keys.report(key, KeyVerdict.NO_EFFECT, "off, as in megarl")
        return False
    return True


def _estimate(keys: Translation, key: str, *, default: str, known: Mapping[str, str]) -> str:
    name = str(keys.take(key, "algorithm.kl.estimate", default=default))
    if name not in known:
        keys.report(key, KeyVerdict.NOT_SUPPORTED, f"one of {', '.join(known)}; the recipe uses {known[default]}")
    return known.get(name, known[default])


def put_loss(keys: Translation) -> None:
    top_p, top_k = (keys.given.get(f"actor_rollout_ref.rollout.{name}") for name in ("top_p", "top_k"))
    if (isinstance(top_p, int | float) and top_p < 1) or (isinstance(top_k, int) and top_k > 0):
        keys.put("algorithm.correction", {"kind": "tis"})
        keys.notes.append("algorithm.correction: tis, which verl lacks: engines sample from a part of the distribution")
    elif keys.has_fp8_engines:
        keys.put("algorithm.correction", {"kind": "tis"})
        keys.notes.append("algorithm.correction: tis: FP8 samples from another distribution than the one trained")
    key = f"{ACTOR}policy_loss.loss_mode"
    mode = str(keys.given.get(key, "vanilla"))
    kind = _LOSSES.get(mode)
    if kind is None:
        kind = "ppo"
        keys.report(key, KeyVerdict.NOT_SUPPORTED, f"one of {', '.join(_LOSSES)}; the recipe uses ppo")
    else:
        keys.mapped(key, f"algorithm.loss.kind {kind}")
    keys.put("algorithm.loss", {"kind": kind})
    if kind in _CLIPPED:
        keys.move(f"{ACTOR}clip_ratio_low", "algorithm.loss.clip_low", default=0.2)
        keys.move(f"{ACTOR}clip_ratio_high", "algorithm.loss.clip_high", default=0.2)
    if kind == "ppo":
        keys.move(f"{ACTOR}clip_ratio_c", "algorithm.loss.clip_dual", default=3.0)
    if kind == "sapo":
        keys.move(f"{ACTOR}tau_pos", "algorithm.loss.tau_positive", default=1.0)
        keys.move(f"{ACTOR}tau_neg", "algorithm.loss.tau_negative", default=1.05)
    mode = str(keys.take(f"{ACTOR}loss_agg_mode", "algorithm.aggregation", default="token-mean"))
    if kind in _BY_SEQUENCE:
        mode = "seq-mean-token-mean"
    keys.put("algorithm.aggregation", mode.replace("-", "_"))
    if mode == "seq-mean-token-sum-norm":
        horizon = keys.take(f"{ACTOR}loss_scale_factor", "algorithm.horizon_tokens")
        keys.put("algorithm.horizon_tokens", horizon or keys.number("data.max_response_length", 512))


def put_filters(keys: Translation) -> None:
    if keys.take("algorithm.filter_groups.enable", "algorithm.filter"):
        keys.put("algorithm.filter", {})
        metric = keys.take("algorithm.filter_groups.metric", "algorithm.filter.component", default="reward")
        if metric not in _WHOLE_SCORE:
            keys.put("algorithm.filter.component", metric)
        per_step = keys.number("data.train_batch_size", 1024)
        keys.take("data.gen_batch_size", "algorithm.filter.oversampling")
        per_round = keys.number("data.gen_batch_size", per_step)
        rounds = keys.take("algorithm.filter_groups.max_num_gen_batches", "algorithm.filter.max_dropped_groups")
        if isinstance(rounds, int) and rounds > 0:
            keys.put("algorithm.filter.max_dropped_groups", rounds * per_round)
        if per_round > per_step:
            keys.put("algorithm.filter.oversampling", per_round / per_step)
    for prefix in _OVERLONG_PREFIXES:
        if keys.take(f"{prefix}enable", "algorithm.overlong"):
            length = keys.take(f"{prefix}len", "algorithm.overlong.buffer_tokens")
            factor = keys.take(f"{prefix}penalty_factor", "algorithm.overlong.factor", default=1.0)
            if isinstance(length, int) and length <= 0:
                keys.report(f"{prefix}len", KeyVerdict.NO_EFFECT, "a buffer of no tokens has no penalty")
            else:
                longest = keys.number("data.max_response_length", 512)
                if isinstance(length, int) and length >= longest > 1:
                    length = longest - 1
                    keys.notes.append(f"{prefix}len: the buffer is below the {longest} tokens of a response")
                keys.put("algorithm.overlong", {"buffer_tokens": length, "factor": factor})
    level = keys.take("algorithm.rollout_correction.rollout_is", "algorithm.correction")
    if level is not None:
        bound = keys.take("algorithm.rollout_correction.rollout_is_threshold", "algorithm.correction.max_weight")
        keys.put("algorithm.correction", {"kind": "tis", "level": level, "max_weight": bound or 2.0})


def put_reward_model(keys: Translation) -> bool:
    """Put a reward model with its pool; return whether there is one."""
    for prefix, path_key in (("reward.reward_model.", "model_path"), ("reward_model.", "model.path")):
        if not keys.take(f"{prefix}enable", "roles.reward_model"):
            continue
        pool, role = "pools.reward_model", "roles.reward_model.main"
        is_apart = keys.take(f"{prefix}enable_resource_pool", f"{role}.pool")
        nodes = keys.take(f"{prefix}nnodes", f"{pool}.nodes")
        gpus = keys.take(f"{prefix}n_gpus_per_node", f"{pool}.gpus_per_node")
        has_episodes = keys.given.get("actor_rollout_ref.rollout.multi_turn.enable")
        if is_apart or nodes or gpus or keys.is_ahead or has_episodes:
            keys.put(pool, {"nodes": nodes or 1, "gpus_per_node": gpus or 8})
            keys.put(f"{role}.pool", "reward_model")
        else:
            keys.put(f"{role}.pool", keys.pool)
            keys.put(f"{role}.max_cached_tokens", _SHARED_CACHED_TOKENS)
            keys.notes.append(
                f"{role}: scores in turns on the GPUs of the others, as in verl without enable_resource_pool; "
                "`megarl plan` shows whether its max_cached_tokens fit"
            )
        keys.put(f"{role}.model", keys.path(f"{prefix}{path_key}", f"{role}.model", default="REWARD_MODEL"))
        for name, ours in {"tensor_model_parallel_size": "tensor", **_ENGINE_SIZES}.items():
            keys.move(f"{prefix}rollout.{name}", f"{role}.{ours}")
        keys.put("reward", {"kind": "reward_model"})
        return True
    return False


def put_reward(keys: Translation) -> None:
    for prefix in _REWARD_PREFIXES:
        path = keys.path(f"{prefix}path", "reward.path")
        if path is None:
            continue
        name = keys.take(f"{prefix}name", "reward.name", default="compute_score")
        keys.put("reward", {"kind": "function", "path": path, "name": name})
        for key in ("reward.num_workers", "reward_model.num_workers"):
            if keys.given.get(key):
                keys.put("reward.workers", keys.take(key, "reward.workers"))
        return
    if put_reward_model(keys):
        return
    sources: dict[str, Tree] = {source: {"kind": kind} for kind, names in _SCORERS.items() for source in names}
    sources["hiyouga/geometry3k"] = _GEOMETRY
    keys.put("reward", {"kind": "by_source", "sources": sources})
    keys.notes.append(
        "reward: by data_source, as verl chooses its scorer; a row with another data_source is refused: add it to "
        "reward.sources"
    )
