"""From the keys of a verl run to a recipe that does the same, and a word about each of them.

A key that the user left out has verl's default, not megarl's: the recipe is what verl would have run.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from megarl.config.document import Document, Tree, override_value
from megarl.tools.import_verl.native import passed_on
from megarl.tools.import_verl.read import read_verl
from megarl.tools.import_verl.rules import KeyRule, KeyVerdict, Treatment, nearest_known, rule_for

_ACTOR = "actor_rollout_ref.actor."
_ROLLOUT = "actor_rollout_ref.rollout."
_VALIDATION = f"{_ROLLOUT}val_kwargs."
_POOL = "shared"
_UNKNOWN_STEPS = 100

_DEFAULTS: Mapping[str, Tree] = {
    "data.train_batch_size": 1024,
    "data.max_prompt_length": 512,
    "data.max_response_length": 512,
    f"{_ROLLOUT}n": 1,
    f"{_ROLLOUT}tensor_model_parallel_size": 2,
    f"{_ROLLOUT}gpu_memory_utilization": 0.5,
    f"{_ROLLOUT}max_num_seqs": 256,
}
"""Of renamed keys, where megarl's own default is another."""

_ESTIMATORS = {
    "gae": "gae",
    "grpo": "grpo",
    "grpo_vectorized": "grpo",
    "rloo": "rloo",
    "rloo_vectorized": "rloo",
    "opo": "opo",
    "gpg": "gpg",
    "grpo_passk": "grpo_passk",
    "reinforce_plus_plus": "reinforce_pp",
    "reinforce_plus_plus_baseline": "reinforce_pp_baseline",
}
_SIZES = {
    "tensor_model_parallel_size": "tensor",
    "pipeline_model_parallel_size": "pipeline",
    "virtual_pipeline_model_parallel_size": "virtual_pipeline",
    "expert_model_parallel_size": "expert",
    "expert_tensor_parallel_size": "expert_tensor",
}
_DISCOUNTED = ("gae", "reinforce_pp")
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
"""By verl's names; k2 is its own gradient."""
_LOSSES = {"vanilla": "ppo", "gspo": "gspo", "cispo": "cispo", "gpg": "gpg", "sapo": "sapo", "geo_mean": "gmpo"}
_CLIPPED = ("ppo", "gspo", "cispo", "gmpo")
_DECAYS = ("constant", "linear", "cosine")
_WHOLE_SCORE = ("reward", "score", "seq_reward", "seq_final_reward")
_REWARD_PREFIXES = ("reward.custom_reward_function.", "custom_reward_function.", "reward_model.reward_fn.")
_OVERLONG_PREFIXES = ("reward.reward_kwargs.overlong_buffer_cfg.", "reward_model.overlong_buffer.")


@dataclass(frozen=True, slots=True, kw_only=True)
class Entry:
    """What became of one key."""

    key: str
    value: Tree
    verdict: KeyVerdict
    text: str
    """The recipe's key, or why there is none, or what to do instead."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Imported:
    tree: dict[str, Tree]
    entries: tuple[Entry, ...]
    """One per key of the file, in its order."""
    notes: tuple[str, ...]
    """What the recipe had to assume."""


def import_verl(path: Path) -> Imported:
    """Raises ConfigError when the file is no verl configuration at all."""
    translation = _Translation(read_verl(path), name=path.stem)
    translation.run()
    return translation.imported()


class _Translation:
    def __init__(self, given: Mapping[str, Tree], *, name: str) -> None:
        self._given = given
        self._name = name
        self._document = Document(tree={}, origins={})
        self._entries: dict[str, Entry] = {}
        self._notes: list[str] = []
        self._has_critic = False
        self._is_sft = not any(key.startswith("actor_rollout_ref.") for key in given)

    def run(self) -> None:
        self._renames()
        self._run_section()
        self._checkpoint()
        self._data()
        self._pools()
        self._optimizer(f"{_ACTOR}optim.", "train.optimizer")
        self._batch()
        if self._is_sft:
            self._put("algorithm.kind", "sft")
        else:
            self._engines()
            self._estimator()
            if self._has_critic:
                self._critic()
            self._kl()
            self._loss()
            self._extras()
            self._reward()
            self._native()
        for key, value in self._given.items():
            if key not in self._entries:
                self._entries[key] = _judge(key, value)

    def imported(self) -> Imported:
        entries = tuple(self._entries[key] for key in self._given)
        return Imported(tree=self._document.tree, entries=entries, notes=tuple(self._notes))

    def _renames(self) -> None:
        for key, value in {**_DEFAULTS, **self._given}.items():
            rule = rule_for(key)
            is_of_engine = key.startswith(_ROLLOUT)
            if rule is None or rule.treatment is not Treatment.RENAME or (self._is_sft and is_of_engine):
                continue
            if _is_interpolation(value):
                self._report(key, KeyVerdict.NOT_SUPPORTED, "an interpolation; write the value out")
                continue
            value = str(Path(value).expanduser()) if rule.text == "model.path" and isinstance(value, str) else value
            self._put(rule.text, value)
            self._mapped(key, rule.text)

    def _run_section(self) -> None:
        name = self._take("trainer.experiment_name", "run.name")
        self._put("run.name", re.sub(r"[^A-Za-z0-9._-]", "_", str(name or self._name)))
        folder = self._take("trainer.default_local_dir", "run.folder")
        if folder is not None:
            self._put("run.folder", str(Path(str(folder)).expanduser()))
        steps = self._take("trainer.total_training_steps", "run.steps")
        if steps is None:
            steps = _UNKNOWN_STEPS
            text = f"run.steps counts steps, not epochs: {steps} is written; set epochs * rows / prompts_per_step"
            self._report("trainer.total_epochs", KeyVerdict.NOT_SUPPORTED, text)
            self._notes.append(text)
        else:
            self._report("trainer.total_epochs", KeyVerdict.NO_EFFECT, "trainer.total_training_steps is given")
        self._put("run.steps", steps)
        seed = self._take("data.seed", "run.seed")
        if seed is not None:
            self._put("run.seed", seed)

    def _checkpoint(self) -> None:
        every = self._take("trainer.save_freq", "checkpoint.save_every_steps")
        if every is not None:
            self._put("checkpoint.save_every_steps", every if isinstance(every, int) and every > 0 else None)
        keep_last = self._take("trainer.max_actor_ckpt_to_keep", "checkpoint.keep_last")
        if keep_last is not None:
            self._put("checkpoint.keep_last", keep_last)

    def _data(self) -> None:
        self._put("data.train", _paths(self._take("data.train_files", "data.train")))
        if self._given.get("data.val_files") and not self._is_sft:
            self._put("data.eval", _paths(self._take("data.val_files", "data.eval and evaluation")))
            self._evaluation()
        elif self._is_sft:
            self._report("data.val_files", KeyVerdict.NOT_SUPPORTED, "sft is evaluated by generating, not by its loss")
        if self._take("data.filter_overlong_prompts", "data.overlong_prompts"):
            self._put("data.overlong_prompts", "drop")
        truncation = self._given.get("data.truncation", "error")
        if truncation == "error":
            self._report("data.truncation", KeyVerdict.NO_EFFECT, "a prompt that is too long is refused, as with error")
        else:
            self._report(
                "data.truncation", KeyVerdict.NOT_SUPPORTED, "prompts are never cut: data.overlong_prompts: drop"
            )

    def _evaluation(self) -> None:
        every = self._take("trainer.test_freq", "evaluation.every_steps")
        self._put("evaluation", {"every_steps": every} if isinstance(every, int) and every > 0 else {})
        if self._take("trainer.val_before_train", "evaluation.runs_before_training", default=True) is False:
            self._put("evaluation.runs_before_training", False)
        num_prompts = self._take("data.val_max_samples", "evaluation.max_prompts")
        if isinstance(num_prompts, int) and num_prompts > 0:
            self._put("evaluation.max_prompts", num_prompts)
        is_sampled = self._take(f"{_VALIDATION}do_sample", "evaluation.sampled", default=False)
        temperature = self._take(f"{_VALIDATION}temperature", "evaluation.sampled.temperature", default=0)
        if not is_sampled or temperature == 0:
            # Several greedy answers to a prompt are one and the same.
            return
        sampled: dict[str, Tree] = {"temperature": temperature}
        for name, ours, default in (("n", "rollouts_per_prompt", 1), ("top_p", "top_p", 1.0), ("top_k", "top_k", -1)):
            value = self._take(f"{_VALIDATION}{name}", f"evaluation.sampled.{ours}", default=default)
            if value != -1:
                sampled[ours] = value
        self._put("evaluation.is_greedy", False)
        self._put("evaluation.sampled", sampled)

    def _pools(self) -> None:
        gpus = self._take("trainer.n_gpus_per_node", f"pools.{_POOL}.gpus_per_node", default=8)
        nodes = self._take("trainer.nnodes", f"pools.{_POOL}.nodes", default=1)
        self._put(f"pools.{_POOL}", {"nodes": nodes, "gpus_per_node": gpus})
        if isinstance(nodes, int) and nodes > 1:
            self._put("run.ray_address", "auto")
        self._put("roles.actor.pool", _POOL)
        self._split(f"{_ACTOR}megatron.", "roles.actor")

    def _split(self, prefix: str, role: str) -> None:
        """What is not 1 already."""
        for size, key in _SIZES.items():
            value = self._take(f"{prefix}{size}", f"{role}.{key}")
            if isinstance(value, int) and (value > 1 or key == "expert_tensor"):
                self._put(f"{role}.{key}", value)
        is_parallel = self._take(f"{prefix}sequence_parallel", f"{role}.is_sequence_parallel", default=not self._is_sft)
        tensor = self._given.get(f"{prefix}tensor_model_parallel_size", 1)
        if is_parallel and isinstance(tensor, int) and tensor > 1:
            self._put(f"{role}.is_sequence_parallel", True)

    def _optimizer(self, prefix: str, target: str) -> None:
        warmup = self._take(f"{prefix}lr_warmup_steps", f"{target}.warmup_steps")
        ratio = self._take(f"{prefix}lr_warmup_steps_ratio", f"{target}.warmup_steps", default=0.0)
        steps = self._given.get("trainer.total_training_steps") or _UNKNOWN_STEPS
        if not isinstance(warmup, int) or warmup < 0:
            warmup = int(float(str(ratio)) * int(str(steps)))
        if warmup:
            self._put(f"{target}.warmup_steps", warmup)
        decay = self._given.get(f"{prefix}lr_decay_style", "constant")
        if decay in _DECAYS:
            self._take(f"{prefix}lr_decay_style", f"{target}.decay")
            self._put(f"{target}.decay", decay)
        else:
            self._report(f"{prefix}lr_decay_style", KeyVerdict.NOT_SUPPORTED, f"one of {', '.join(_DECAYS)}")
        lowest = self._take(f"{prefix}min_lr", f"{target}.min_learning_rate", default=0.0)
        if lowest and decay in _DECAYS[1:]:
            self._put(f"{target}.min_learning_rate", lowest)
        betas = self._take(f"{prefix}betas", f"{target}.beta1 and beta2", default=[0.9, 0.999])
        if isinstance(betas, list) and len(betas) == 2:
            self._put(f"{target}.beta1", betas[0])
            self._put(f"{target}.beta2", betas[1])

    def _batch(self) -> None:
        prompts = self._number("data.train_batch_size", 1024)
        context = self._number("data.max_prompt_length", 512) + self._number("data.max_response_length", 512)
        target = "train.tokens_per_micro_batch"
        budget = self._take(f"{_ACTOR}ppo_max_token_len_per_gpu", target, default=16384)
        sequences = self._take(f"{_ACTOR}ppo_micro_batch_size_per_gpu", f"{target}: so many of the longest sequences")
        is_dynamic = self._take(f"{_ACTOR}use_dynamic_bsz", f"{target}: micro-batches are always filled by tokens")
        by_count = isinstance(sequences, int) and not is_dynamic
        self._put(target, max(context, sequences * context if by_count else int(str(budget))))  # type: ignore[operator]
        if self._is_sft:
            return
        per_update = self._take(f"{_ACTOR}ppo_mini_batch_size", "train.prompts_per_update", default=256)
        if isinstance(per_update, int) and per_update < prompts:
            self._put("train.prompts_per_update", per_update)
        epochs = self._take(f"{_ACTOR}ppo_epochs", "train.epochs", default=1)
        if epochs != 1:
            self._put("train.epochs", epochs)

    def _engines(self) -> None:
        self._put("roles.rollout.pool", _POOL)
        top_k = self._take(f"{_ROLLOUT}top_k", "sampling.top_k")
        if isinstance(top_k, int) and top_k > 0:
            self._put("sampling.top_k", top_k)

    def _estimator(self) -> None:
        key = "algorithm.adv_estimator"
        name = str(self._given.get(key, "gae"))
        kind = _ESTIMATORS.get(name)
        if kind is None:
            kind = "reinforce_pp"
            text = f"megarl does not have {name}: the recipe uses {kind} instead, which is another algorithm"
            self._report(key, KeyVerdict.NOT_SUPPORTED, text)
            self._notes.append(f"adv_estimator {name}: {text}")
        else:
            self._mapped(key, f"algorithm.kind {kind}")
        self._put("algorithm.kind", kind)
        self._has_critic = kind == "gae"
        if kind == "grpo" and self._take("algorithm.norm_adv_by_std_in_grpo", "algorithm.normalize_std") is False:
            self._put("algorithm.normalize_std", False)
        if kind in _DISCOUNTED and "algorithm.gamma" in self._given:
            self._put("algorithm.gamma", self._take("algorithm.gamma", "algorithm.gamma"))
        if self._has_critic:
            self._put("algorithm.lam", self._take("algorithm.lam", "algorithm.lam", default=1.0))

    def _critic(self) -> None:
        role = "roles.critic"
        self._put(f"{role}.pool", _POOL)
        path = self._take("critic.model.path", f"{role}.path")
        policy = self._given.get("actor_rollout_ref.model.path")
        if isinstance(path, str) and path != policy:
            self._put(f"{role}.path", str(Path(path).expanduser()))
        self._split("critic.megatron.", role)
        for name, key, default in (
            ("lr", "learning_rate", 1e-5),
            ("weight_decay", "weight_decay", 0.01),
            ("clip_grad", "clip_grad_norm", 1.0),
        ):
            target = f"{role}.optimizer.{key}"
            self._put(target, self._take(f"critic.optim.{name}", target, default=default))
        self._optimizer("critic.optim.", f"{role}.optimizer")
        per_update = self._take("critic.ppo_mini_batch_size", f"{role}.prompts_per_update")
        if isinstance(per_update, int) and per_update != self._given.get(f"{_ACTOR}ppo_mini_batch_size", 256):
            self._put(f"{role}.prompts_per_update", min(per_update, self._number("data.train_batch_size", 1024)))
        epochs = self._take("critic.ppo_epochs", f"{role}.epochs", default=self._number(f"{_ACTOR}ppo_epochs", 1))
        if epochs != 1:
            self._put(f"{role}.epochs", epochs)
        self._put(f"{role}.clip", self._take("critic.cliprange_value", f"{role}.clip", default=0.5))
        warmup = self._take("trainer.critic_warmup", f"{role}.warmup_steps", default=0)
        if warmup:
            self._put(f"{role}.warmup_steps", warmup)

    def _kl(self) -> None:
        """verl can have the distance in the loss and in the reward at once; a recipe has it in one of them."""
        in_reward = self._take("algorithm.use_kl_in_reward", "algorithm.kl")
        if self._take(f"{_ACTOR}use_kl_loss", "algorithm.kl"):
            self._put("algorithm.kl.kind", "loss")
            estimate = self._estimate(f"{_ACTOR}kl_loss_type", default="low_var_kl", known=_KL_ESTIMATES)
            self._put("algorithm.kl.estimate", estimate)
            coef = self._take(f"{_ACTOR}kl_loss_coef", "algorithm.kl.coef", default=0.001)
            self._put("algorithm.kl.coef", coef)
            if in_reward:
                text = "the KL is in the loss already (use_kl_loss), and a recipe has it in one place"
                self._report("algorithm.use_kl_in_reward", KeyVerdict.NOT_SUPPORTED, text)
        elif in_reward:
            self._put("algorithm.kl.kind", "reward")
            in_rewards = {name: estimate for name, estimate in _KL_ESTIMATES.items() if not name.endswith("+")}
            self._put("algorithm.kl.estimate", self._estimate("algorithm.kl_penalty", default="kl", known=in_rewards))
            coef = self._take("algorithm.kl_ctrl.kl_coef", "algorithm.kl.coef", default=0.001)
            self._put("algorithm.kl.coef", coef)
            if self._take("algorithm.kl_ctrl.type", "algorithm.kl.adaptive", default="fixed") == "adaptive":
                target = self._take("algorithm.kl_ctrl.target_kl", "algorithm.kl.adaptive.target", default=0.1)
                horizon = self._take("algorithm.kl_ctrl.horizon", "algorithm.kl.adaptive.horizon", default=10000)
                self._put("algorithm.kl.adaptive", {"target": target, "horizon": horizon})
        else:
            for key in ("algorithm.use_kl_in_reward", f"{_ACTOR}use_kl_loss"):
                self._report(key, KeyVerdict.NO_EFFECT, "off, as in megarl")
            return
        self._reference()

    def _estimate(self, key: str, *, default: str, known: Mapping[str, str]) -> str:
        name = str(self._take(key, "algorithm.kl.estimate", default=default))
        if name not in known:
            self._report(key, KeyVerdict.NOT_SUPPORTED, f"one of {', '.join(known)}; the recipe uses {known[default]}")
        return known.get(name, known[default])

    def _reference(self) -> None:
        """In the actor's ranks, as in verl, unless it is split in another way."""
        sizes = [f"megatron.{size}" for size in _SIZES]
        prefix = "actor_rollout_ref.ref."
        differs = any(
            self._given.get(f"{prefix}{size}") not in (None, self._given.get(f"{_ACTOR}{size}", 1)) for size in sizes
        )
        if differs:
            self._put("roles.reference.pool", _POOL)
            self._split(f"{prefix}megatron.", "roles.reference")
            return
        self._put("roles.reference", {})
        for size in (*sizes, "megatron.sequence_parallel"):
            self._report(
                f"{prefix}{size}", KeyVerdict.MAPPED, "roles.reference: in the actor's ranks, split as the actor"
            )

    def _loss(self) -> None:
        key = f"{_ACTOR}policy_loss.loss_mode"
        mode = str(self._given.get(key, "vanilla"))
        kind = _LOSSES.get(mode)
        if kind is None:
            kind = "ppo"
            self._report(key, KeyVerdict.NOT_SUPPORTED, f"one of {', '.join(_LOSSES)}; the recipe uses ppo")
        else:
            self._mapped(key, f"algorithm.loss.kind {kind}")
        loss: dict[str, Tree] = {"kind": kind}
        if kind in _CLIPPED:
            loss["clip_low"] = self._take(f"{_ACTOR}clip_ratio_low", "algorithm.loss.clip_low", default=0.2)
            loss["clip_high"] = self._take(f"{_ACTOR}clip_ratio_high", "algorithm.loss.clip_high", default=0.2)
        if kind == "ppo":
            loss["clip_dual"] = self._take(f"{_ACTOR}clip_ratio_c", "algorithm.loss.clip_dual", default=3.0)
        if kind == "sapo":
            loss["tau_positive"] = self._take(f"{_ACTOR}tau_pos", "algorithm.loss.tau_positive", default=1.0)
            loss["tau_negative"] = self._take(f"{_ACTOR}tau_neg", "algorithm.loss.tau_negative", default=1.05)
        self._put("algorithm.loss", loss)
        mode = str(self._take(f"{_ACTOR}loss_agg_mode", "algorithm.aggregation", default="token-mean"))
        self._put("algorithm.aggregation", mode.replace("-", "_"))
        if mode == "seq-mean-token-sum-norm":
            horizon = self._take(f"{_ACTOR}loss_scale_factor", "algorithm.horizon_tokens")
            self._put("algorithm.horizon_tokens", horizon or self._number("data.max_response_length", 512))

    def _extras(self) -> None:
        if self._take("algorithm.filter_groups.enable", "algorithm.filter"):
            self._put("algorithm.filter", {})
            metric = self._take("algorithm.filter_groups.metric", "algorithm.filter.component", default="reward")
            if metric not in _WHOLE_SCORE:
                self._put("algorithm.filter.component", metric)
            per_step = self._number("data.train_batch_size", 1024)
            self._take("data.gen_batch_size", "algorithm.filter.oversampling")
            per_round = self._number("data.gen_batch_size", per_step)
            rounds = self._take("algorithm.filter_groups.max_num_gen_batches", "algorithm.filter.max_dropped_groups")
            if isinstance(rounds, int) and rounds > 0:
                self._put("algorithm.filter.max_dropped_groups", rounds * per_round)
            if per_round > per_step:
                self._put("algorithm.filter.oversampling", per_round / per_step)
        for prefix in _OVERLONG_PREFIXES:
            if self._take(f"{prefix}enable", "algorithm.overlong"):
                length = self._take(f"{prefix}len", "algorithm.overlong.buffer_tokens")
                factor = self._take(f"{prefix}penalty_factor", "algorithm.overlong.factor", default=1.0)
                self._put("algorithm.overlong", {"buffer_tokens": length, "factor": factor})
        level = self._take("algorithm.rollout_correction.rollout_is", "algorithm.correction")
        if level is not None:
            bound = self._take("algorithm.rollout_correction.rollout_is_threshold", "algorithm.correction.max_weight")
            self._put("algorithm.correction", {"kind": "tis", "level": level, "max_weight": bound or 2.0})

    def _reward(self) -> None:
        for prefix in _REWARD_PREFIXES:
            path = self._take(f"{prefix}path", "reward.path")
            if path is None:
                continue
            name = self._take(f"{prefix}name", "reward.name", default="compute_score")
            self._put("reward", {"kind": "function", "path": str(Path(str(path)).expanduser()), "name": name})
            for key in ("reward.num_workers", "reward_model.num_workers"):
                if self._given.get(key):
                    self._put("reward.workers", self._take(key, "reward.workers"))
            return
        self._put("reward.kind", "exact")
        self._notes.append("reward: verl chooses a scorer by data_source; the recipe compares with the ground truth")

    def _native(self) -> None:
        for option in passed_on(self._given, has_critic=self._has_critic):
            if option.verdict is KeyVerdict.MAPPED:
                self._put(option.text, self._given[option.key])
            self._report(option.key, option.verdict, option.text)

    def _take(self, key: str, target: str, *, default: Tree = None) -> Tree:
        """The value a user gave, and a note where it went."""
        value = self._given.get(key)
        if key in self._given:
            if _is_interpolation(value):
                self._report(key, KeyVerdict.NOT_SUPPORTED, "an interpolation; write the value out")
                return default
            self._mapped(key, target)
        return default if value is None else value

    def _number(self, key: str, default: int) -> int:
        value = self._given.get(key)
        return value if isinstance(value, int) and not isinstance(value, bool) else default

    def _put(self, key: str, value: Tree) -> None:
        self._document = override_value(self._document, tuple(key.split(".")), value)

    def _mapped(self, key: str, target: str) -> None:
        self._report(key, KeyVerdict.MAPPED, target)

    def _report(self, key: str, verdict: KeyVerdict, text: str) -> None:
        if key in self._given:
            self._entries[key] = Entry(key=key, value=self._given[key], verdict=verdict, text=text)


def _judge(key: str, value: Tree) -> Entry:
    """A key that nothing was done with."""
    rule = rule_for(key)
    if rule is None:
        near = nearest_known(key)
        text = f"verl has no such key; did you mean {near}?" if near else "verl has no such key"
        return Entry(key=key, value=value, verdict=KeyVerdict.UNKNOWN, text=text)
    verdict, text = _verdict(rule, key, value)
    return Entry(key=key, value=value, verdict=verdict, text=text)


def _verdict(rule: KeyRule, key: str, value: Tree) -> tuple[KeyVerdict, str]:
    is_off = value in (None, False, 0, -1, "") or value in ([], {}) or (value == 1 and key.endswith("_size"))
    match rule.treatment:
        case Treatment.UNSUPPORTED if is_off:
            return KeyVerdict.NO_EFFECT, "off, as in megarl"
        case Treatment.UNSUPPORTED:
            return KeyVerdict.NOT_SUPPORTED, rule.text
        case Treatment.NONE:
            return KeyVerdict.NO_EFFECT, rule.text
        case Treatment.RENAME | Treatment.COMPUTE:
            return KeyVerdict.NO_EFFECT, "has no use with the other keys"


def _paths(value: Tree) -> Tree:
    paths = value if isinstance(value, list) else [] if value is None else [value]
    return [str(Path(str(path)).expanduser()) for path in paths]


def _is_interpolation(value: Tree) -> bool:
    return isinstance(value, str) and "${" in value
