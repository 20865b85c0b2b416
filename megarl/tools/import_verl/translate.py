"""Translate the keys of a verl run, section by section, into a recipe that does the same.

A key that the user left out has verl's default, not megarl's: the recipe is what verl would have run.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path

from megarl.config.document import Tree
from megarl.config.hub import public_model_name
from megarl.config.roles import FP8_TOKENS
from megarl.families import PUBLIC_MODELS
from megarl.tools.import_verl.algorithm import (
    put_distillation,
    put_estimator,
    put_filters,
    put_kl,
    put_loss,
    put_preference,
    put_process_rewards,
    put_reward,
)
from megarl.tools.import_verl.models import (
    MODEL_KEY,
    SIZES,
    num_step_prompts,
    put_ahead,
    put_dispatcher,
    put_engine_precision,
    put_lora,
    put_offload,
    put_optimizer_on_host,
    put_pools,
    put_split,
    put_stages,
)
from megarl.tools.import_verl.translation import (
    ACTOR,
    ROLLOUT,
    Imported,
    KeyVerdict,
    Translation,
    Treatment,
    engine_options,
    read_verl,
    rule_for,
    whole,
    without_outside,
)

_EPOCHS, _SFT_EPOCHS = 30, 4
_MODEL = "~/models/deepseek-llm-7b-chat"
"""verl's own defaults."""

_DEFAULTS: Mapping[str, Tree] = {
    "data.train_batch_size": 1024,
    "data.max_prompt_length": 512,
    "data.max_response_length": 512,
    f"{ROLLOUT}n": 1,
    f"{ROLLOUT}tensor_model_parallel_size": 2,
    f"{ROLLOUT}gpu_memory_utilization": 0.5,
    f"{ROLLOUT}max_num_seqs": 256,
}
"""verl's defaults of renamed keys, where megarl has another one."""

DECAYS = ("constant", "linear", "cosine")
_DECAY_NAMES = ("lr_decay_style", "lr_scheduler_type", "lr_scheduler", "warmup_style")
_SHARE_NAMES = ("lr_warmup_steps_ratio", "warmup_steps_proportion")
LOGGERS = ("wandb", "tensorboard", "mlflow")
_VALIDATION = f"{ROLLOUT}val_kwargs."
_TURNS = f"{ROLLOUT}multi_turn."
_LOOP = f"{ROLLOUT}agent.default_agent_loop"
_PROMPTS = "~/data/rlhf/gsm8k/"
_DEMONSTRATIONS = "~/data/gsm8k/train.parquet"
_MAX_LENGTH = 1024
_BATCH = 256
"""verl's own defaults."""
_OWN_FILE = "environment.py"
_RESULT_CHARACTERS = 256
"""verl's limit of a tool's result where none is given."""
_PROCESSOR = "data.mm_processor_kwargs."
_FROZEN = "the tower that sees images is not trained, and verl trains it unless freeze_vision_tower is set"
_FORMATS = {"hermes": "hermes", "llama3_json": "llama"}


def translate_file(path: Path, arguments: Sequence[str] = ()) -> Imported:
    """Return the recipe of a verl configuration; raise a ConfigError where the file is none."""
    keys = Translation(read_verl(path, arguments), name=path.stem)
    _renames(keys)
    _model(keys)
    put_lora(keys)
    _run_section(keys)
    _checkpoint(keys)
    put_pools(keys)
    put_images(keys)
    _loggers(keys)
    if keys.is_sft:
        keys.put("algorithm.kind", "sft")
        put_demonstrations(keys)
        _optimizer(keys, "optim.", "train.optimizer")
        _native(keys)
    else:
        put_prompts(keys)
        _optimizer(keys, f"{ACTOR}optim.", "train.optimizer")
        _batch(keys)
        _engines(keys)
        _algorithm(keys)
        put_filters(keys)
        put_reward(keys)
        put_environment(keys)
        _native(keys)
    return keys.imported()


def _algorithm(keys: Translation) -> None:
    kind = put_preference(keys)
    if kind is not None:
        if kind == "online_dpo":
            _reference(keys)
            keys.put("train.prompts_per_update", None)
            keys.put("train.epochs", 1)
            keys.notes.append("train: online_dpo takes one update a step, of all its prompts")
        return
    if put_process_rewards(keys):
        path = keys.path("reward_model.model.path", "roles.critic.path")
        if path is not None and path != keys.path(MODEL_KEY, "model.path", default=_MODEL):
            keys.put("roles.critic.path", path)
        keys.put("roles.critic.pool", keys.pool)
        put_split(keys, f"{ACTOR}megatron.", "roles.critic")
        put_loss(keys)
        return
    put_estimator(keys)
    put_distillation(keys)
    if keys.has_critic:
        _critic(keys)
    if put_kl(keys):
        _reference(keys)
    put_loss(keys)


def _renames(keys: Translation) -> None:
    defaults = {} if keys.is_sft else _DEFAULTS
    for key, value in {**defaults, **keys.given}.items():
        rule = rule_for(key)
        if rule is not None and rule.treatment is Treatment.RENAME and value is not None:
            keys.put(rule.text, value)
            keys.mapped(key, rule.text)


def _model(keys: Translation) -> None:
    names = ("model.path", "model.partial_pretrain") if keys.is_sft else (MODEL_KEY,)
    given = [path for name in names if (path := keys.path(name, "model.path")) is not None]
    if not given:
        keys.notes.append(f"model.path: not in the file; {_MODEL} is verl's default")
    keys.put("model.path", given[-1] if given else str(Path(_MODEL).expanduser()))
    _recomputation(keys, "model." if keys.is_sft else "actor_rollout_ref.model.", ACTOR, "roles.actor")


def _recomputation(keys: Translation, model: str, prefix: str, role: str) -> None:
    """Put the recomputation of all layers, unless options of Megatron say which."""
    own = f"{'engine.' if keys.is_sft else f'{prefix}megatron.'}override_transformer_config.recompute_granularity"
    is_asked = keys.take(f"{model}enable_gradient_checkpointing", f"{role}.megatron.recompute_granularity")
    if keys.given.get(own) == "full" or (is_asked and keys.given.get(own) is None):
        keys.put(f"{role}.megatron.recompute_granularity", "full")
        keys.put(f"{role}.megatron.recompute_method", "uniform")
        keys.put(f"{role}.megatron.recompute_num_layers", 1)


def _run_section(keys: Translation) -> None:
    name = without_outside(str(keys.written.get("trainer.experiment_name") or "")).strip("-_.") or keys.name
    keys.mapped("trainer.experiment_name", "run.name")
    keys.put("run.name", re.sub(r"[^A-Za-z0-9._-]", "_", name))
    keys.move_path("trainer.default_local_dir", "run.folder")
    keys.move_count("trainer.total_training_steps", "run.steps")
    keys.move("trainer.total_epochs", "run.epochs", default=_SFT_EPOCHS if keys.is_sft else _EPOCHS)
    for key in ("data.seed", "trainer.seed"):
        keys.move(key, "run.seed")


def _checkpoint(keys: Translation) -> None:
    every = keys.take("trainer.save_freq", "checkpoint.save_every_steps")
    if every is not None:
        keys.put("checkpoint.save_every_steps", every if isinstance(every, int) and every > 0 else None)
    if isinstance(every, str):
        text = f"{every}: set checkpoint.save_every_steps; only the last step is saved"
        keys.report("trainer.save_freq", KeyVerdict.NOT_SUPPORTED, text)
    for key in ("trainer.max_actor_ckpt_to_keep", "trainer.max_ckpt_to_keep"):
        keys.move_count(key, "checkpoint.keep_last")


def _loggers(keys: Translation) -> None:
    """Put the loggers beside those that every run has."""
    given = keys.take("trainer.logger", "observe")
    names = given if isinstance(given, list) else [given]
    for name in (name for name in LOGGERS if name in names):
        project = keys.take("trainer.project_name", f"observe.{name}", default="verl_examples")
        proxy = keys.take("trainer.wandb_proxy", "observe.wandb.proxy") if name == "wandb" else None
        match name:
            case "wandb":
                keys.put("observe.wandb", {"project": project, **({"proxy": proxy} if proxy else {})})
            case "tensorboard":
                keys.put("observe.tensorboard", {})
            case _:
                keys.notes.append("trainer.logger mlflow: set observe.mlflow.tracking_uri to your server")
    if names != [None] and not any(name in names for name in LOGGERS):
        text = "every run prints its steps and writes events.jsonl, curves.png and Prometheus metrics"
        keys.report("trainer.logger", KeyVerdict.NO_EFFECT, text)


def _optimizer(keys: Translation, prefix: str, target: str) -> None:
    warmup = keys.take(f"{prefix}lr_warmup_steps", f"{target}.warmup_steps")
    shares = [keys.take(f"{prefix}{name}", f"{target}.warmup_share") for name in _SHARE_NAMES]
    share = next((value for value in shares if isinstance(value, int | float) and 0 < value < 1), None)
    if isinstance(warmup, int) and warmup > 0:
        keys.put(f"{target}.warmup_steps", warmup)
    elif share is not None:
        keys.put(f"{target}.warmup_share", share)
    decay = "constant"
    for key in (f"{prefix}{name}" for name in _DECAY_NAMES if f"{prefix}{name}" in keys.given):
        value = keys.take(key, f"{target}.decay", default="constant")
        if value in DECAYS:
            decay = str(value)
        else:
            keys.report(key, KeyVerdict.NOT_SUPPORTED, f"one of {', '.join(DECAYS)}; the recipe has {decay}")
    keys.put(f"{target}.decay", decay)
    lowest = keys.take(f"{prefix}min_lr", f"{target}.min_learning_rate", default=0.0)
    ratio = keys.take(f"{prefix}min_lr_ratio", f"{target}.min_learning_rate")
    peak = keys.given.get(f"{prefix}lr", 1e-6)
    if not lowest and isinstance(ratio, int | float) and isinstance(peak, int | float):
        lowest = ratio * peak
    if lowest and decay in DECAYS[1:]:
        keys.put(f"{target}.min_learning_rate", lowest)
    betas = keys.take(f"{prefix}betas", f"{target}.beta1 and beta2", default=[0.9, 0.999])
    if isinstance(betas, list) and len(betas) == 2:
        keys.put(f"{target}.beta1", betas[0])
        keys.put(f"{target}.beta2", betas[1])


def _batch(keys: Translation) -> None:
    prompts = num_step_prompts(keys)
    keys.put("train.prompts_per_step", prompts)
    context = keys.number("data.max_prompt_length", 512) + keys.number("data.max_response_length", 512)
    target = "train.tokens_per_micro_batch"
    budget = whole(keys.take(f"{ACTOR}ppo_max_token_len_per_gpu", target), default=16384)
    sequences = keys.take(f"{ACTOR}ppo_micro_batch_size_per_gpu", f"{target}: so many of the longest sequences")
    is_dynamic = keys.take(f"{ACTOR}use_dynamic_bsz", f"{target}: micro-batches are always filled by tokens")
    by_count = isinstance(sequences, int) and sequences > 0 and not is_dynamic
    keys.put(target, max(context, whole(sequences, default=1) * context if by_count else budget))
    per_update = keys.take(f"{ACTOR}ppo_mini_batch_size", "train.prompts_per_update", default=256)
    if isinstance(per_update, int) and per_update < prompts:
        keys.put("train.prompts_per_update", per_update)
    epochs = keys.take(f"{ACTOR}ppo_epochs", "train.epochs", default=1)
    if epochs != 1:
        keys.put("train.epochs", epochs)


def _engines(keys: Translation) -> None:
    put_ahead(keys)
    put_engine_precision(keys)
    keys.move_count(f"{ROLLOUT}top_k", "sampling.top_k")
    expert = keys.number(f"{ROLLOUT}expert_parallel_size", 1)
    if expert > keys.number(f"{ROLLOUT}tensor_model_parallel_size", 2):
        # verl's servers have tensor times data-parallel ranks, and the experts are divided over all of them.
        keys.put("roles.rollout.tensor", expert)
        keys.notes.append(f"roles.rollout.tensor: {expert}, so that an engine has a rank for each part of the experts")
    if keys.given.get("trainer.v1.trainer_mode") == "sync":
        keys.report("trainer.v1.trainer_mode", KeyVerdict.NO_EFFECT, "engines and trainer take turns, as in megarl")


def _critic(keys: Translation) -> None:
    role = "roles.critic"
    keys.put(f"{role}.pool", keys.pool)
    path = keys.path("critic.model.path", f"{role}.path")
    if path is not None and path != keys.path(MODEL_KEY, "model.path", default=_MODEL):
        keys.put(f"{role}.path", path)
    put_split(keys, "critic.megatron.", role)
    put_offload(keys, "critic.", role)
    _recomputation(keys, "critic.model.", "critic.", role)
    for name, key, default in (
        ("lr", "learning_rate", 1e-5),
        ("weight_decay", "weight_decay", 0.01),
        ("clip_grad", "clip_grad_norm", 1.0),
    ):
        keys.move(f"critic.optim.{name}", f"{role}.optimizer.{key}", default=default)
    _optimizer(keys, "critic.optim.", f"{role}.optimizer")
    per_update = keys.take("critic.ppo_mini_batch_size", f"{role}.prompts_per_update")
    if isinstance(per_update, int) and per_update != keys.given.get(f"{ACTOR}ppo_mini_batch_size", 256):
        keys.put(f"{role}.prompts_per_update", min(per_update, keys.number("data.train_batch_size", 1024)))
    epochs = keys.take("critic.ppo_epochs", f"{role}.epochs", default=keys.number(f"{ACTOR}ppo_epochs", 1))
    if epochs != 1:
        keys.put(f"{role}.epochs", epochs)
    keys.move("critic.cliprange_value", f"{role}.clip", default=0.5)
    warmup = keys.take("trainer.critic_warmup", f"{role}.warmup_steps", default=0)
    if warmup:
        keys.put(f"{role}.warmup_steps", warmup)


def _reference(keys: Translation) -> None:
    """Put the reference in the actor's ranks, as verl does, unless it is split differently."""
    sizes = [f"megatron.{size}" for size in SIZES]
    prefix = "actor_rollout_ref.ref."
    differs = any(
        keys.given.get(f"{prefix}{size}") not in (None, keys.given.get(f"{ACTOR}{size}", 1)) for size in sizes
    )
    if differs:
        keys.put("roles.reference.pool", keys.pool)
        put_split(keys, f"{prefix}megatron.", "roles.reference")
        return
    keys.put("roles.reference", {})
    for size in (*sizes, "megatron.sequence_parallel"):
        keys.report(f"{prefix}{size}", KeyVerdict.MAPPED, "roles.reference: in the actor's ranks, split as the actor")


def _native(keys: Translation) -> None:
    for key, verdict, text in engine_options(keys.given, has_critic=keys.has_critic):
        if verdict is KeyVerdict.MAPPED:
            keys.put(text, keys.given[key])
        keys.report(key, verdict, text)
    parts = {"roles.actor": "engine." if keys.is_sft else f"{ACTOR}megatron."}
    for role, prefix in {**parts, "roles.critic": "critic.megatron."}.items() if keys.has_critic else parts.items():
        put_stages(keys, prefix, role)
        _precision(keys, f"{prefix}override_transformer_config.", role)
        put_dispatcher(keys, f"{prefix}override_transformer_config.", role)
        put_optimizer_on_host(keys, f"{prefix.removesuffix('megatron.')}optim.", role)


def _precision(keys: Translation, options: str, role: str) -> None:
    """Put products in FP8 with their scaling; Megatron's own is delayed."""
    if keys.given.get(f"{options}fp8") is None:
        return
    scaling = keys.take(f"{options}fp8_recipe", f"{role}.fp8_scaling", default="delayed")
    if scaling in FP8_TOKENS:
        keys.put(f"{role}.precision", "fp8")
        keys.put(f"{role}.fp8_scaling", scaling)
        keys.mapped(f"{options}fp8", f"{role}.precision fp8: activations in e4m3, gradients in e5m2")
    else:
        text = f"one of {', '.join(FP8_TOKENS)}; the recipe computes in bfloat16"
        keys.report(f"{options}fp8_recipe", KeyVerdict.NOT_SUPPORTED, text)


def put_prompts(keys: Translation) -> None:
    keys.put("data.train", keys.paths("data.train_files", "data.train", default=f"{_PROMPTS}train.parquet"))
    if keys.written.get("data.val_files"):
        keys.put("data.eval", keys.paths("data.val_files", "data.eval and evaluation"))
        _evaluation(keys)
    if keys.take("data.filter_overlong_prompts", "data.overlong_prompts"):
        keys.put("data.overlong_prompts", "drop")
    truncation = keys.given.get("data.truncation", "error")
    if truncation == "error":
        keys.report("data.truncation", KeyVerdict.NO_EFFECT, "a prompt that is too long is refused, as with error")
    else:
        keys.report("data.truncation", KeyVerdict.NOT_SUPPORTED, "prompts are never cut: data.overlong_prompts: drop")


def put_images(keys: Translation) -> None:
    """Put the size of images; what sees them is not trained, unlike in verl where nothing freezes it."""
    keys.move_count(f"{_PROCESSOR}max_pixels", "data.max_image_pixels")
    key = f"{ACTOR}freeze_vision_tower"
    model = public_model_name(Path(str(keys.written.get("model.path" if keys.is_sft else MODEL_KEY))))
    if keys.given.get(key) is True:
        keys.report(key, KeyVerdict.NO_EFFECT, "the tower that sees images is not trained")
    elif keys.given.get(key) is False:
        keys.report(key, KeyVerdict.NOT_SUPPORTED, _FROZEN)
    elif model is not None and PUBLIC_MODELS[model].vision is not None:
        keys.notes.append(f"model.path: {_FROZEN}")


def _evaluation(keys: Translation) -> None:
    every = keys.take("trainer.test_freq", "evaluation.every_steps")
    keys.put("evaluation", {"every_steps": every} if isinstance(every, int) and every > 0 else {})
    if keys.take("trainer.val_before_train", "evaluation.runs_before_training", default=True) is False:
        keys.put("evaluation.runs_before_training", False)
    keys.move_count("data.val_max_samples", "evaluation.max_prompts")
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


def put_demonstrations(keys: Translation) -> None:
    keys.put("data.train", keys.paths("data.train_files", "data.train", default=_DEMONSTRATIONS))
    _columns(keys)
    _lengths(keys)
    if "data.train_batch_size" not in keys.given:
        keys.put("train.prompts_per_step", _BATCH)
    if keys.written.get("data.val_files"):
        target = "data.eval_demonstrations"
        keys.put(target, keys.paths("data.val_files", f"{target} and evaluation"))
        every = keys.take("trainer.test_freq", "evaluation.every_steps")
        keys.put("evaluation", {"every_steps": every} if isinstance(every, int) and every > 0 else {})
        keys.move_count("data.val_max_samples", "evaluation.max_prompts")
        if isinstance(every, str):
            text = f"{every}: set evaluation.every_steps; the loss is measured before the first and after the last step"
            keys.report("trainer.test_freq", KeyVerdict.NOT_SUPPORTED, text)


def _columns(keys: Translation) -> None:
    """Put the columns: two with prompt and response, perhaps inside a struct, or one with messages."""
    messages = [
        keys.take(key, "data.prompt_key", default=None)
        for key in ("data.messages_key", "data.multiturn.messages_key", "data.multiturn.enable")
    ]
    if "data.prompt_key" not in keys.given and "data.response_key" not in keys.given:
        keys.put("data.prompt_key", next((name for name in messages if isinstance(name, str)), "messages"))
        return
    for name in ("prompt", "response"):
        column = keys.take(f"data.{name}_key", f"data.{name}_key", default=name)
        inner = keys.take(f"data.{name}_dict_keys", f"data.{name}_key")
        field = inner[0] if isinstance(inner, list) and inner else None
        keys.put(f"data.{name}_key", f"{column}.{field}" if field is not None else column)


def _lengths(keys: Translation) -> None:
    """Put the lengths; where there is only one for the whole sequence, prompt and answers get half of it each."""
    whole = keys.number("data.max_length", _MAX_LENGTH)
    lengths: dict[str, int] = {}
    for name, target in (("prompt", "data.max_prompt_tokens"), ("response", "sampling.max_response_tokens")):
        lengths[target] = keys.number(f"data.max_{name}_length", whole // 2)
        keys.put(target, lengths[target])
    if "data.max_length" in keys.given:
        keys.mapped("data.max_length", "data.max_prompt_tokens and sampling.max_response_tokens")
        keys.notes.append("data.max_length: prompt and answers have a limit each, half of it; change them as needed")
    context = sum(lengths.values())
    sequences = keys.take("data.micro_batch_size_per_gpu", "train.tokens_per_micro_batch")
    budget = keys.take("data.max_token_len_per_gpu", "train.tokens_per_micro_batch")
    keys.put("train.tokens_per_micro_batch", max(context, _tokens(budget, sequences, context)))
    truncation: Tree = keys.given.get("data.truncation", "error")
    if truncation != "error":
        keys.report("data.truncation", KeyVerdict.NOT_SUPPORTED, "rows are never cut: data.overlong_prompts: drop")
    else:
        keys.report("data.truncation", KeyVerdict.NO_EFFECT, "a row that is too long is refused, as with error")


def _tokens(budget: Tree, sequences: Tree, context: int) -> int:
    if isinstance(budget, int) and budget > 0:
        return budget
    return context * (sequences if isinstance(sequences, int) and sequences > 0 else 4)


def put_environment(keys: Translation) -> None:
    """Put a class of tools where the run has turns; its `score` has to be written by hand."""
    loop = keys.given.get(_LOOP)
    if not keys.given.get(f"{_TURNS}enable") and loop in (None, "single_turn_agent"):
        keys.report(_LOOP, KeyVerdict.NO_EFFECT, "one response per prompt, as without environment")
        return
    for key in (f"{_TURNS}enable", _LOOP):
        keys.mapped(key, "environment")
    if loop not in (None, "tool_agent", "single_turn_agent"):
        keys.report(_LOOP, KeyVerdict.NOT_SUPPORTED, "write your own loop as environment.kind function or chat")
    keys.put("environment.kind", "class")
    path = keys.path(f"{_TURNS}function_tool_path", "environment.path")
    path = path or keys.path("data.function_tool_path", "environment.path")
    keys.put("environment.path", path or _OWN_FILE)
    keys.notes.append(
        f"environment.path {path or _OWN_FILE}: make the tools methods of a class with score(self, transcript)"
    )
    turns = keys.take(f"{_TURNS}max_assistant_turns", "environment.max_turns")
    if isinstance(turns, int):
        keys.put("environment.max_turns", turns)
    else:
        keys.notes.append("environment.max_turns: verl sets no limit; the default is 8")
    keys.move(f"{_TURNS}max_user_turns", "environment.max_calls")
    length = keys.take(f"{_TURNS}max_tool_response_length", "environment.max_result_tokens", default=_RESULT_CHARACTERS)
    keys.put("environment.max_result_tokens", length)
    keys.notes.append(f"environment.max_result_tokens {length}: verl counts characters, megarl tokens")
    written = str(keys.given.get(f"{_TURNS}format", "hermes"))
    if written in _FORMATS:
        keys.put("environment.call_format", _FORMATS[written])
        keys.mapped(f"{_TURNS}format", "environment.call_format")
    else:
        known = ", ".join(_FORMATS)
        keys.report(f"{_TURNS}format", KeyVerdict.NOT_SUPPORTED, f"calls are read as {known}: environment.call_format")
