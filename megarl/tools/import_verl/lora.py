"""verl's keys of LoRA, in all their spellings, as the recipe's `model.lora`."""

from __future__ import annotations

import re

from megarl.config.lora import ALL_MODULES
from megarl.tools.import_verl.placement import MODEL_KEY
from megarl.tools.import_verl.rules import KeyVerdict
from megarl.tools.import_verl.translation import ACTOR, Translation

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
"""Names of mixtures: Qwen3-30B-A3B, Qwen1.5-MoE-A2.7B."""


def put_lora(keys: Translation) -> None:
    """Take the first spelling that has a rank."""
    for prefix, rank, alpha, path, default in _SPELLINGS:
        if keys.number(f"{prefix}{rank}", 0) <= 0:
            continue
        keys.put("model.lora.rank", keys.take(f"{prefix}{rank}", "model.lora.rank"))
        keys.put("model.lora.alpha", keys.take(f"{prefix}{alpha}", "model.lora.alpha", default=default))
        folder = keys.path(f"{prefix}{path}", "model.lora.path")
        if folder is not None:
            keys.put("model.lora.path", folder)
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
    wanted = keys.take(key, "model.lora.modules")
    if wanted is None or wanted in ("all-linear", ["all-linear"]):
        if _OF_EXPERTS.search(str(keys.written.get("model.path" if keys.is_sft else MODEL_KEY))):
            keys.put("model.lora.modules", [name for name in ALL_MODULES if name in _ATTENTION])
            keys.notes.append("model.lora.modules: those of the attention; experts have no adapters")
        return
    names = wanted if isinstance(wanted, list) else [wanted]
    modules = [module for name in names for module in _FUSED_MODULES.get(str(name), (str(name),))]
    unknown = [module for module in modules if module not in ALL_MODULES]
    if unknown:
        known = ", ".join(ALL_MODULES)
        keys.report(key, KeyVerdict.NOT_SUPPORTED, f"{unknown[0]} has no adapter; supported are {known}")
    else:
        keys.put("model.lora.modules", [module for module in ALL_MODULES if module in modules])
