"""Translate the models of a verl run: adapters, pools, splits, offloading, and engines that generate ahead."""

from __future__ import annotations

import math
import re
from pathlib import Path

from megarl.config.hub import public_model_name
from megarl.config.lora import ALL_MODULES
from megarl.families import PUBLIC_MODELS
from megarl.tools.import_verl.translation import ACTOR, KeyVerdict, Translation, whole

SIZES = {
    "tensor_model_parallel_size": "tensor",
    "pipeline_model_parallel_size": "pipeline",
    "virtual_pipeline_model_parallel_size": "virtual_pipeline",
    "context_parallel_size": "context",
    "expert_model_parallel_size": "expert",
    "expert_tensor_parallel_size": "expert_tensor",
}
MODEL_KEY = "actor_rollout_ref.model.path"
_UNITS = {"first": "embedding", "last": "loss"}
"""The units that Megatron can count as a layer of the first and of the last pipeline stage."""
_ASYNC = "async_training."
_ENGINES = "rollout."
_MODEL = "actor_rollout_ref.model."
_SPELLINGS = (
    (f"{_MODEL}lora.", "rank", "alpha", "adapter_path", 32),
    (_MODEL, "lora_rank", "lora_alpha", "lora_adapter_path", 16),
    ("model.lora.", "rank", "alpha", "adapter_path", 32),
    ("model.", "lora_rank", "lora_alpha", "lora_adapter_path", 16),
    (f"{ACTOR}peft.", "lora_rank", "lora_alpha", "adapter_path", 16),
    (ACTOR, "lora_rank", "lora_alpha", "adapter_path", 16),
)
"""Prefix, names of rank, alpha and path, and verl's alpha where there is none: of Megatron, of FSDP, both of sft, two
old ones."""
_FUSED_MODULES = {
    "linear_qkv": ("q_proj", "k_proj", "v_proj"),
    "linear_proj": ("o_proj",),
    "linear_fc1": ("gate_proj", "up_proj"),
    "linear_fc2": ("down_proj",),
}

_ATTENTION = tuple(module for name in ("linear_qkv", "linear_proj") for module in _FUSED_MODULES[name])
_OF_EXPERTS = re.compile(r"-A\d+(\.\d+)?B\b|MoE", re.IGNORECASE)
"""Names of mixtures that are not among the public models: Qwen3-30B-A3B-Thinking-2507."""


def put_pools(keys: Translation) -> None:
    target = f"pools.{keys.pool}"
    gpus = whole(keys.take("trainer.n_gpus_per_node", f"{target}.gpus_per_node"), default=1 if keys.is_sft else 8)
    nodes = whole(keys.take("trainer.nnodes", f"{target}.nodes"), default=1)
    keys.put(target, {"nodes": nodes, "gpus_per_node": gpus})
    if nodes > 1:
        keys.put("run.ray_address", "auto")
    keys.put("roles.actor.pool", keys.pool)
    put_split(keys, "engine." if keys.is_sft else f"{ACTOR}megatron.", "roles.actor")
    put_offload(keys, "engine." if keys.is_sft else ACTOR, "roles.actor")


def put_offload(keys: Translation, prefix: str, role: str) -> None:
    """Put what goes to host memory while engines generate; gradients are freed then in any case."""
    target = f"{role}.offload"
    parts = ("megatron.", "fsdp_config.", "")
    weights = [keys.take(f"{prefix}{part}param_offload", target) for part in parts]
    optimizer = [keys.take(f"{prefix}{part}optimizer_offload", target) for part in parts]
    for part in parts:
        keys.take(f"{prefix}{part}grad_offload", f"{target}: gradients are freed while engines generate")
    if keys.is_ahead and (any(weights) or any(optimizer)):
        keys.notes.append(f"{prefix}: nothing is offloaded, since no engine generates on the trainer's GPUs")
    elif not keys.is_sft and (any(weights) or any(optimizer)):
        keys.put(target, "everything" if any(weights) else "optimizer")


def put_split(keys: Translation, prefix: str, role: str) -> None:
    """Put the sizes that are not 1."""
    for size, key in SIZES.items():
        value = keys.take(f"{prefix}{size}", f"{role}.{key}")
        if key == "expert_tensor":
            divides = keys.number(f"{prefix}expert_model_parallel_size", 1) > 1
            if not divides:
                text = "without expert ranks tensor divides experts like everything else"
                keys.report(f"{prefix}{size}", KeyVerdict.NO_EFFECT, text)
        else:
            divides = isinstance(value, int) and value > 1
        if divides and value is not None:
            keys.put(f"{role}.{key}", value)
    is_parallel = keys.take(f"{prefix}sequence_parallel", f"{role}.is_sequence_parallel", default=True)
    tensor = keys.given.get(f"{prefix}tensor_model_parallel_size", 1)
    if is_parallel and isinstance(tensor, int) and tensor > 1:
        keys.put(f"{role}.is_sequence_parallel", True)


def put_stages(keys: Translation, prefix: str, role: str) -> None:
    """Put the layers of the first and the last pipeline stage: given, or one fewer beside embedding or head."""
    stages, options = keys.number(f"{prefix}pipeline_model_parallel_size", 1), f"{prefix}override_transformer_config."
    counted = {end: f"{options}account_for_{unit}_in_pipeline_split" for end, unit in _UNITS.items()}
    model = public_model_name(Path(str(keys.written.get("model.path" if keys.is_sft else MODEL_KEY))))
    units = sum(keys.given.get(key) is True for key in counted.values())
    units += PUBLIC_MODELS[model].num_layers if model is not None else 0
    for end, key in counted.items():
        target = f"{role}.{end}_stage_layers"
        layers = keys.take(f"{options}num_layers_in_{end}_pipeline_stage", target)
        if isinstance(layers, int) and stages > 1:
            keys.put(target, layers)
        elif keys.given.get(key) is not True:
            keys.report(key, KeyVerdict.NO_EFFECT, "off, as in megarl")
        elif model is not None and units % stages == 0:
            keys.put(target, units // stages - 1)
            keys.mapped(key, target)
        else:
            keys.report(key, KeyVerdict.NOT_SUPPORTED, f"set {target}: one fewer than the other stages have")


def put_engine_precision(keys: Translation) -> None:
    """Put FP8 weights of engines, by verl's present and former keys, and the experts that they choose."""
    target = "roles.rollout.precision"
    for name in ("quantization", "quantization.weight_dtype", "dtype"):
        key = f"actor_rollout_ref.rollout.{name}"
        match keys.given.get(key):
            case "fp8" if "model.lora" in keys:
                text = "with model.lora the base stays as loaded; engines compute in bfloat16"
                keys.report(key, KeyVerdict.NOT_SUPPORTED, text)
            case "fp8":
                keys.put(target, "fp8")
                keys.mapped(key, target)
                keys.has_fp8_engines = True
            case "bfloat16" | "auto":
                keys.report(key, KeyVerdict.NO_EFFECT, "engines compute in bfloat16, as in megarl")
    if keys.given.get(f"{ACTOR}router_replay.mode") == "R3":
        text = "the engine's choice of experts is replayed, unless train.routing is live"
        keys.report(f"{ACTOR}router_replay.mode", KeyVerdict.NO_EFFECT, text)


def put_dispatcher(keys: Translation, options: str, role: str) -> None:
    """Put how tokens reach the ranks of their experts; Megatron names the way and, within `flex`, the library."""
    kind, library = (f"{options}{name}" for name in ("moe_token_dispatcher_type", "moe_flex_dispatcher_backend"))
    is_deepep = keys.given.get(f"{options}moe_enable_deepep") is True or keys.given.get(library) == "deepep"
    target = f"{role}.dispatcher"
    if keys.given.get(kind) == "alltoall":
        keys.report(kind, KeyVerdict.NO_EFFECT, "alltoall, as in megarl")
    elif keys.given.get(kind) == "flex" and is_deepep:
        for key in (kind, library, f"{options}moe_enable_deepep"):
            keys.mapped(key, target)
        if f"{role}.expert" in keys:
            keys.put(target, "deepep")


def put_optimizer_on_host(keys: Translation, optimizer: str, role: str) -> None:
    """Put the optimizer in host memory where Megatron's own options ask for it."""
    options = f"{optimizer}override_optimizer_config."
    if keys.given.get(f"{options}optimizer_cpu_offload") is not True or keys.is_ahead or keys.is_sft:
        return
    target = f"{role}.offload"
    if target not in keys:
        keys.put(target, "optimizer")
    for name in ("optimizer_cpu_offload", "optimizer_offload_fraction", "overlap_cpu_optimizer_d2h_h2d"):
        keys.mapped(f"{options}{name}", target)


def num_step_prompts(keys: Translation) -> int:
    """Return the prompts of a step; trainers that run behind their engines count updates between two publishes."""
    prompts = keys.number("data.train_batch_size", 1024)
    if prompts > 0:
        return prompts
    keys.mapped("data.train_batch_size", "train.prompts_per_step, from async_training")
    return keys.number(f"{ACTOR}ppo_mini_batch_size", 256) * math.prod(
        whole(keys.take(f"{_ASYNC}{name}", "train.prompts_per_step"), default=default)
        for name, default in (("require_batches", 1), ("trigger_parameter_sync_step", 4))
    )


def put_ahead(keys: Translation) -> None:
    """Put the engines' pool and how far they run ahead: verl's asynchronous trainers give them GPUs of their own."""
    keys.put("roles.rollout.pool", keys.engine_pool)
    if not keys.is_ahead:
        return
    target = f"pools.{keys.engine_pool}"
    gpus = whole(keys.take(f"{_ENGINES}n_gpus_per_node", f"{target}.gpus_per_node"), default=8)
    nodes = whole(keys.take(f"{_ENGINES}nnodes", f"{target}.nodes"), default=1)
    keys.put(target, {"nodes": nodes, "gpus_per_node": gpus})
    ahead = keys.take(f"{_ASYNC}staleness_threshold", "train.max_staleness", default=1)
    if isinstance(ahead, int | float) and ahead > 0:
        keys.put("train.max_staleness", math.ceil(ahead))
    every = keys.take(f"{_ENGINES}test_freq", "evaluation.every_steps")
    if isinstance(every, int) and every > 0 and keys.written.get("data.val_files"):
        keys.put("evaluation.every_steps", every)
    total = keys.take(f"{_ENGINES}total_rollout_steps", "run.steps: so many prompts in all")
    if isinstance(total, int) and keys.given.get("trainer.total_training_steps") is None:
        keys.put("run.steps", max(1, total // num_step_prompts(keys)))


def put_lora(keys: Translation) -> None:
    """Take the first spelling that has a rank."""
    for prefix, rank, alpha, path, default in _SPELLINGS:
        if keys.number(f"{prefix}{rank}", 0) <= 0:
            continue
        keys.move(f"{prefix}{rank}", "model.lora.rank")
        keys.move(f"{prefix}{alpha}", "model.lora.alpha", default=default)
        keys.move_path(f"{prefix}{path}", "model.lora.path")
        for name in ("type", "peft_type"):
            if str(keys.given.get(f"{prefix}{name}", "lora")).lower() == "lora":
                keys.mapped(f"{prefix}{name}", "model.lora")
            else:
                keys.report(f"{prefix}{name}", KeyVerdict.NOT_SUPPORTED, "LoRA is the only method")
        if keys.is_sft and (dropout := keys.take(f"{prefix}dropout", "model.lora.dropout")):
            keys.put("model.lora.dropout", dropout)
        _put_modules(keys, f"{prefix}target_modules")
        return


def _put_modules(keys: Translation, key: str) -> None:
    """Translate the names of Megatron and of Hugging Face; all linear layers are the recipe's default."""
    chosen = keys.take(key, "model.lora.modules")
    if chosen is None or chosen in ("all-linear", ["all-linear"]):
        if _has_experts(str(keys.written.get("model.path" if keys.is_sft else MODEL_KEY))):
            keys.put("model.lora.modules", [name for name in ALL_MODULES if name in _ATTENTION])
            keys.notes.append("model.lora.modules: those of the attention; experts have no adapters")
        return
    names = chosen if isinstance(chosen, list) else [chosen]
    modules = [module for name in names for module in _FUSED_MODULES.get(str(name), (str(name),))]
    unknown = [module for module in modules if module not in ALL_MODULES]
    if unknown:
        known = ", ".join(ALL_MODULES)
        keys.report(key, KeyVerdict.NOT_SUPPORTED, f"{unknown[0]} has no adapter; supported are {known}")
    else:
        keys.put("model.lora.modules", [module for module in ALL_MODULES if module in modules])


def _has_experts(path: str) -> bool:
    model = public_model_name(Path(path))
    return bool(_OF_EXPERTS.search(path)) if model is None else PUBLIC_MODELS[model].experts is not None
