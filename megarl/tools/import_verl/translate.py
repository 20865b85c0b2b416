"""Translate the keys of a verl run, section by section, into a recipe that does the same.

A key that the user left out has verl's default, not megarl's: the recipe is what verl would have run.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path

from megarl.config.document import Tree
from megarl.tools.import_verl.algorithm import put_estimator, put_filters, put_kl, put_loss, put_reward
from megarl.tools.import_verl.rules import KeyVerdict, Treatment, engine_options, rule_for
from megarl.tools.import_verl.translation import ACTOR, Imported, Translation, is_interpolation, read_verl

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
"""verl's defaults of renamed keys, where megarl has another one."""

_SIZES = {
    "tensor_model_parallel_size": "tensor",
    "pipeline_model_parallel_size": "pipeline",
    "virtual_pipeline_model_parallel_size": "virtual_pipeline",
    "expert_model_parallel_size": "expert",
    "expert_tensor_parallel_size": "expert_tensor",
}
_DECAYS = ("constant", "linear", "cosine")


def translate_file(path: Path) -> Imported:
    """Return the recipe of a verl configuration; raise a ConfigError where the file is none."""
    keys = Translation(read_verl(path), name=path.stem)
    _renames(keys)
    _run_section(keys)
    _checkpoint(keys)
    _data(keys)
    _pools(keys)
    _optimizer(keys, f"{ACTOR}optim.", "train.optimizer")
    _batch(keys)
    if keys.is_sft:
        keys.put("algorithm.kind", "sft")
    else:
        _engines(keys)
        put_estimator(keys)
        if keys.has_critic:
            _critic(keys)
        if put_kl(keys):
            _reference(keys)
        put_loss(keys)
        put_filters(keys)
        put_reward(keys)
        _native(keys)
    return keys.imported()


def _renames(keys: Translation) -> None:
    for key, value in {**_DEFAULTS, **keys.given}.items():
        rule = rule_for(key)
        is_of_engine = key.startswith(_ROLLOUT)
        if rule is None or rule.treatment is not Treatment.RENAME or (keys.is_sft and is_of_engine):
            continue
        if is_interpolation(value):
            keys.report(key, KeyVerdict.NOT_SUPPORTED, "an interpolation; write the value out")
            continue
        value = str(Path(value).expanduser()) if rule.text == "model.path" and isinstance(value, str) else value
        keys.put(rule.text, value)
        keys.mapped(key, rule.text)


def _run_section(keys: Translation) -> None:
    name = keys.take("trainer.experiment_name", "run.name")
    keys.put("run.name", re.sub(r"[^A-Za-z0-9._-]", "_", str(name or keys.name)))
    folder = keys.take("trainer.default_local_dir", "run.folder")
    if folder is not None:
        keys.put("run.folder", str(Path(str(folder)).expanduser()))
    steps = keys.take("trainer.total_training_steps", "run.steps")
    if steps is None:
        steps = _UNKNOWN_STEPS
        text = f"run.steps counts steps, not epochs: {steps} is written; set epochs * rows / prompts_per_step"
        keys.report("trainer.total_epochs", KeyVerdict.NOT_SUPPORTED, text)
        keys.notes.append(text)
    else:
        keys.report("trainer.total_epochs", KeyVerdict.NO_EFFECT, "trainer.total_training_steps is given")
    keys.put("run.steps", steps)
    seed = keys.take("data.seed", "run.seed")
    if seed is not None:
        keys.put("run.seed", seed)


def _checkpoint(keys: Translation) -> None:
    every = keys.take("trainer.save_freq", "checkpoint.save_every_steps")
    if every is not None:
        keys.put("checkpoint.save_every_steps", every if isinstance(every, int) and every > 0 else None)
    keep_last = keys.take("trainer.max_actor_ckpt_to_keep", "checkpoint.keep_last")
    if keep_last is not None:
        keys.put("checkpoint.keep_last", keep_last)


def _data(keys: Translation) -> None:
    keys.put("data.train", _paths(keys.take("data.train_files", "data.train")))
    if keys.given.get("data.val_files") and not keys.is_sft:
        keys.put("data.eval", _paths(keys.take("data.val_files", "data.eval and evaluation")))
        _evaluation(keys)
    elif keys.is_sft:
        keys.report("data.val_files", KeyVerdict.NOT_SUPPORTED, "sft is evaluated by generating, not by its loss")
    if keys.take("data.filter_overlong_prompts", "data.overlong_prompts"):
        keys.put("data.overlong_prompts", "drop")
    truncation = keys.given.get("data.truncation", "error")
    if truncation == "error":
        keys.report("data.truncation", KeyVerdict.NO_EFFECT, "a prompt that is too long is refused, as with error")
    else:
        keys.report("data.truncation", KeyVerdict.NOT_SUPPORTED, "prompts are never cut: data.overlong_prompts: drop")


def _evaluation(keys: Translation) -> None:
    every = keys.take("trainer.test_freq", "evaluation.every_steps")
    keys.put("evaluation", {"every_steps": every} if isinstance(every, int) and every > 0 else {})
    if keys.take("trainer.val_before_train", "evaluation.runs_before_training", default=True) is False:
        keys.put("evaluation.runs_before_training", False)
    num_prompts = keys.take("data.val_max_samples", "evaluation.max_prompts")
    if isinstance(num_prompts, int) and num_prompts > 0:
        keys.put("evaluation.max_prompts", num_prompts)
    is_sampled = keys.take(f"{_VALIDATION}do_sample", "evaluation.sampled", default=False)
    temperature = keys.take(f"{_VALIDATION}temperature", "evaluation.sampled.temperature", default=0)
    if not is_sampled or temperature == 0:
        # Greedy answers to one prompt are all equal.
        return
    sampled: dict[str, Tree] = {"temperature": temperature}
    for name, ours, default in (("n", "rollouts_per_prompt", 1), ("top_p", "top_p", 1.0), ("top_k", "top_k", -1)):
        value = keys.take(f"{_VALIDATION}{name}", f"evaluation.sampled.{ours}", default=default)
        if value != -1:
            sampled[ours] = value
    keys.put("evaluation.is_greedy", False)
    keys.put("evaluation.sampled", sampled)


def _pools(keys: Translation) -> None:
    gpus = keys.take("trainer.n_gpus_per_node", f"pools.{_POOL}.gpus_per_node", default=8)
    nodes = keys.take("trainer.nnodes", f"pools.{_POOL}.nodes", default=1)
    keys.put(f"pools.{_POOL}", {"nodes": nodes, "gpus_per_node": gpus})
    if isinstance(nodes, int) and nodes > 1:
        keys.put("run.ray_address", "auto")
    keys.put("roles.actor.pool", _POOL)
    _split(keys, f"{ACTOR}megatron.", "roles.actor")


def _split(keys: Translation, prefix: str, role: str) -> None:
    """Put the sizes that are not 1."""
    for size, key in _SIZES.items():
        value = keys.take(f"{prefix}{size}", f"{role}.{key}")
        if isinstance(value, int) and (value > 1 or key == "expert_tensor"):
            keys.put(f"{role}.{key}", value)
    is_parallel = keys.take(f"{prefix}sequence_parallel", f"{role}.is_sequence_parallel", default=not keys.is_sft)
    tensor = keys.given.get(f"{prefix}tensor_model_parallel_size", 1)
    if is_parallel and isinstance(tensor, int) and tensor > 1:
        keys.put(f"{role}.is_sequence_parallel", True)


def _optimizer(keys: Translation, prefix: str, target: str) -> None:
    warmup = keys.take(f"{prefix}lr_warmup_steps", f"{target}.warmup_steps")
    ratio = keys.take(f"{prefix}lr_warmup_steps_ratio", f"{target}.warmup_steps", default=0.0)
    steps = keys.given.get("trainer.total_training_steps") or _UNKNOWN_STEPS
    if not isinstance(warmup, int) or warmup < 0:
        warmup = int(float(str(ratio)) * int(str(steps)))
    if warmup:
        keys.put(f"{target}.warmup_steps", warmup)
    decay = keys.given.get(f"{prefix}lr_decay_style", "constant")
    if decay in _DECAYS:
        keys.take(f"{prefix}lr_decay_style", f"{target}.decay")
        keys.put(f"{target}.decay", decay)
    else:
        keys.report(f"{prefix}lr_decay_style", KeyVerdict.NOT_SUPPORTED, f"one of {', '.join(_DECAYS)}")
    lowest = keys.take(f"{prefix}min_lr", f"{target}.min_learning_rate", default=0.0)
    if lowest and decay in _DECAYS[1:]:
        keys.put(f"{target}.min_learning_rate", lowest)
    betas = keys.take(f"{prefix}betas", f"{target}.beta1 and beta2", default=[0.9, 0.999])
    if isinstance(betas, list) and len(betas) == 2:
        keys.put(f"{target}.beta1", betas[0])
        keys.put(f"{target}.beta2", betas[1])


def _batch(keys: Translation) -> None:
    prompts = keys.number("data.train_batch_size", 1024)
    context = keys.number("data.max_prompt_length", 512) + keys.number("data.max_response_length", 512)
    target = "train.tokens_per_micro_batch"
    budget = keys.take(f"{ACTOR}ppo_max_token_len_per_gpu", target, default=16384)
    sequences = keys.take(f"{ACTOR}ppo_micro_batch_size_per_gpu", f"{target}: so many of the longest sequences")
    is_dynamic = keys.take(f"{ACTOR}use_dynamic_bsz", f"{target}: micro-batches are always filled by tokens")
    by_count = isinstance(sequences, int) and not is_dynamic
    keys.put(target, max(context, sequences * context if by_count else int(str(budget))))  # type: ignore[operator]
    if keys.is_sft:
        return
    per_update = keys.take(f"{ACTOR}ppo_mini_batch_size", "train.prompts_per_update", default=256)
    if isinstance(per_update, int) and per_update < prompts:
        keys.put("train.prompts_per_update", per_update)
    epochs = keys.take(f"{ACTOR}ppo_epochs", "train.epochs", default=1)
    if epochs != 1:
        keys.put("train.epochs", epochs)


def _engines(keys: Translation) -> None:
    keys.put("roles.rollout.pool", _POOL)
    top_k = keys.take(f"{_ROLLOUT}top_k", "sampling.top_k")
    if isinstance(top_k, int) and top_k > 0:
        keys.put("sampling.top_k", top_k)


def _critic(keys: Translation) -> None:
    role = "roles.critic"
    keys.put(f"{role}.pool", _POOL)
    path = keys.take("critic.model.path", f"{role}.path")
    policy = keys.given.get("actor_rollout_ref.model.path")
    if isinstance(path, str) and path != policy:
        keys.put(f"{role}.path", str(Path(path).expanduser()))
    _split(keys, "critic.megatron.", role)
    for name, key, default in (
        ("lr", "learning_rate", 1e-5),
        ("weight_decay", "weight_decay", 0.01),
        ("clip_grad", "clip_grad_norm", 1.0),
    ):
        target = f"{role}.optimizer.{key}"
        keys.put(target, keys.take(f"critic.optim.{name}", target, default=default))
    _optimizer(keys, "critic.optim.", f"{role}.optimizer")
    per_update = keys.take("critic.ppo_mini_batch_size", f"{role}.prompts_per_update")
    if isinstance(per_update, int) and per_update != keys.given.get(f"{ACTOR}ppo_mini_batch_size", 256):
        keys.put(f"{role}.prompts_per_update", min(per_update, keys.number("data.train_batch_size", 1024)))
    epochs = keys.take("critic.ppo_epochs", f"{role}.epochs", default=keys.number(f"{ACTOR}ppo_epochs", 1))
    if epochs != 1:
        keys.put(f"{role}.epochs", epochs)
    keys.put(f"{role}.clip", keys.take("critic.cliprange_value", f"{role}.clip", default=0.5))
    warmup = keys.take("trainer.critic_warmup", f"{role}.warmup_steps", default=0)
    if warmup:
        keys.put(f"{role}.warmup_steps", warmup)


def _reference(keys: Translation) -> None:
    """Put the reference in the actor's ranks, as verl does, unless it is split differently."""
    sizes = [f"megatron.{size}" for size in _SIZES]
    prefix = "actor_rollout_ref.ref."
    differs = any(
        keys.given.get(f"{prefix}{size}") not in (None, keys.given.get(f"{ACTOR}{size}", 1)) for size in sizes
    )
    if differs:
        keys.put("roles.reference.pool", _POOL)
        _split(keys, f"{prefix}megatron.", "roles.reference")
        return
    keys.put("roles.reference", {})
    for size in (*sizes, "megatron.sequence_parallel"):
        keys.report(f"{prefix}{size}", KeyVerdict.MAPPED, "roles.reference: in the actor's ranks, split as the actor")


def _native(keys: Translation) -> None:
    for option in engine_options(keys.given, has_critic=keys.has_critic):
        if option.verdict is KeyVerdict.MAPPED:
            keys.put(option.text, keys.given[option.key])
        keys.report(option.key, option.verdict, option.text)


def _paths(value: Tree) -> Tree:
    paths = value if isinstance(value, list) else [] if value is None else [value]
    return [str(Path(str(path)).expanduser()) for path in paths]
