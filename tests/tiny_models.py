"""Tiny random models in Hugging Face format, written by transformers itself. For the tests of several packages.

peft is imported where it is used: few of the processes that import this write adapters.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt
import torch
from transformers import (
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    AutoModelForSequenceClassification,
    DeepseekV2Config,
    DeepseekV2ForCausalLM,
    DeepseekV3Config,
    DeepseekV3ForCausalLM,
    Gemma3ForCausalLM,
    Gemma3TextConfig,
    Glm4MoeConfig,
    Glm4MoeForCausalLM,
    GptOssConfig,
    GptOssForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    MixtralConfig,
    MixtralForCausalLM,
    Phi3Config,
    Phi3ForCausalLM,
    Qwen2_5_VLConfig,
    Qwen2_5_VLForConditionalGeneration,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen2MoeConfig,
    Qwen2MoeForCausalLM,
    Qwen3_5Config,
    Qwen3_5ForCausalLM,
    Qwen3_5ForConditionalGeneration,
    Qwen3_5MoeConfig,
    Qwen3_5MoeForCausalLM,
    Qwen3_5MoeForConditionalGeneration,
    Qwen3_5MoeTextConfig,
    Qwen3_5TextConfig,
    Qwen3Config,
    Qwen3ForCausalLM,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
    Qwen3NextConfig,
    Qwen3NextForCausalLM,
    Qwen3VLConfig,
    Qwen3VLForConditionalGeneration,
)

from megarl.config.model import read_model_shape
from megarl.families.shape import ModelShape

if TYPE_CHECKING:
    from peft import PeftModel

_MODELS = {
    "deepseek_v2": (DeepseekV2Config, DeepseekV2ForCausalLM),
    "deepseek_v3": (DeepseekV3Config, DeepseekV3ForCausalLM),
    "gemma3_text": (Gemma3TextConfig, Gemma3ForCausalLM),
    "glm4_moe": (Glm4MoeConfig, Glm4MoeForCausalLM),
    "gpt_oss": (GptOssConfig, GptOssForCausalLM),
    "llama": (LlamaConfig, LlamaForCausalLM),
    "mistral": (MistralConfig, MistralForCausalLM),
    "mixtral": (MixtralConfig, MixtralForCausalLM),
    "phi3": (Phi3Config, Phi3ForCausalLM),
    "qwen2": (Qwen2Config, Qwen2ForCausalLM),
    "qwen2_5_vl": (Qwen2_5_VLConfig, Qwen2_5_VLForConditionalGeneration),
    "qwen2_moe": (Qwen2MoeConfig, Qwen2MoeForCausalLM),
    "qwen3": (Qwen3Config, Qwen3ForCausalLM),
    "qwen3_moe": (Qwen3MoeConfig, Qwen3MoeForCausalLM),
    "qwen3_next": (Qwen3NextConfig, Qwen3NextForCausalLM),
    "qwen3_vl": (Qwen3VLConfig, Qwen3VLForConditionalGeneration),
    "qwen3_5": (Qwen3_5Config, Qwen3_5ForConditionalGeneration),
    "qwen3_5_moe": (Qwen3_5MoeConfig, Qwen3_5MoeForConditionalGeneration),
    "qwen3_5_moe_text": (Qwen3_5MoeTextConfig, Qwen3_5MoeForCausalLM),
    "qwen3_5_text": (Qwen3_5TextConfig, Qwen3_5ForCausalLM),
}

FAMILIES = tuple(_MODELS)
VARIANTS = {"moonlight": "deepseek_v3"}
"""Models of a family that have other tensors, by name: Moonlight's queries come from the hidden state."""
SEEING = ("qwen3_5", "qwen3_5_moe")
"""Families whose files have tensors for images as well, which are not read."""
HYBRIDS = ("qwen3_next", "qwen3_5_moe_text", "qwen3_5_text", *SEEING)
"""Families with gated delta nets."""
TOWERS = ("qwen2_5_vl", "qwen3_vl")
"""Families that see images, by a tower that is not trained."""
QWEN2 = (Qwen2Config, Qwen2ForCausalLM)
NUM_EXPERTS = 8
_LATENT_ROPE = {
    "rope_type": "yarn",
    "rope_theta": 10000.0,
    "factor": 4.0,
    "original_max_position_embeddings": 32,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "mscale": 1.0,
    "mscale_all_dim": 1.0,
}
_TRUNCATED_YARN = {
    "rope_type": "yarn",
    "rope_theta": 150000.0,
    "factor": 4.0,
    "original_max_position_embeddings": 128,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "truncate": False,
}
_WIDTHS: dict[str, dict[str, object]] = {
    "mixtral": {"num_local_experts": NUM_EXPERTS, "num_experts_per_tok": 2, "sliding_window": None},
    "mistral": {"head_dim": 32, "sliding_window": None},  # as in Nemo
}
_UNWRITTEN: dict[str, dict[str, object]] = {
    "gpt_oss": {"swiglu_limit": 7.0},
    "deepseek_v2": {"scoring_func": "softmax", "moe_layer_freq": 1},
    "deepseek_v3": {"topk_method": "noaux_tc", "scoring_func": "sigmoid", "moe_layer_freq": 1},
    **{key: {"full_attention_interval": 2} for key in ("qwen3_next", "qwen3_5_moe_text", "qwen3_5_text")},
}
"""Fields that SGLang reads and transformers does not write."""
_IMAGES: dict[str, object] = {
    "depth": 1,
    "hidden_size": 16,
    "intermediate_size": 32,
    "num_heads": 2,
    "patch_size": 4,
    "out_hidden_size": 64,
    "num_position_embeddings": 16,
}


_TOWER: dict[str, object] = {"depth": 2, "hidden_size": 32, "intermediate_size": 64, "num_heads": 2}
_TOWER |= {"patch_size": 14, "out_hidden_size": 64}
_OWN_TOWER: dict[str, dict[str, object]] = {
    "qwen2_5_vl": {"window_size": 56, "fullatt_block_indexes": [1]},
    "qwen3_vl": {"num_position_embeddings": 16, "deepstack_visual_indexes": [0]},
}
_PROCESSOR: dict[str, object] = {
    "image_processor_type": "Qwen2VLImageProcessor",
    "patch_size": 14,
    "merge_size": 2,
    "temporal_patch_size": 2,
    "min_pixels": 28 * 28,
    "max_pixels": 28 * 28 * 16,
    "image_mean": [0.48145466, 0.4578275, 0.40821073],
    "image_std": [0.26862954, 0.26130258, 0.27577711],
}
_IMAGE_TOKENS = ("image_token_id", "video_token_id", "vision_start_token_id", "vision_end_token_id")


def write_tiny_model(
    folder: Path,
    family: str,
    *,
    tied: bool = False,
    vocab: int = 99,
    layers: int = 4,
    heads: int = 4,
    kv_heads: int = 2,
    ffn: int = 128,
    seed: int = 0,
    rope: dict[str, object] | None = None,
    max_shard_size: str = "1GB",
) -> ModelShape:
    """Write a model whose every tensor is random, in fp32. The vocabulary is odd, so that padding shows."""
    config_class, model_class = _MODELS[VARIANTS.get(family, family)]
    sizes: dict[str, object] = {
        "vocab_size": vocab,
        "hidden_size": 64,
        "intermediate_size": ffn,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "max_position_embeddings": 512,
    }
    if family.startswith("qwen3"):
        sizes["head_dim"] = 32  # as in the real ones, not hidden_size / num_attention_heads
    if family in ("qwen2_moe", "qwen3_moe"):
        sizes |= {"moe_intermediate_size": ffn, "num_experts": NUM_EXPERTS, "num_experts_per_tok": 2}
        sizes["intermediate_size"] = 3 * ffn  # of layers without experts, of which there are none
        sizes["norm_topk_prob"] = family == "qwen3_moe"  # as in the released ones
    if family == "qwen2_moe":
        sizes["shared_expert_intermediate_size"] = 2 * ffn
    sizes |= _own_sizes(family, layers=layers, heads=heads, ffn=ffn)
    if rope is not None:
        sizes["rope_parameters"] = rope
    sizes |= {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}
    shared: dict[str, object] = {"tie_word_embeddings": tied or family == "gemma3_text", "dtype": "float32"}
    parts: dict[str, object] = sizes
    if family in (*SEEING, *TOWERS):
        parts = {"text_config": sizes | shared, "vision_config": _IMAGES}
    if family in TOWERS:
        parts["vision_config"] = _TOWER | _OWN_TOWER[family]
        parts |= {name: vocab - 4 + index for index, name in enumerate(_IMAGE_TOKENS)}
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "preprocessor_config.json").write_text(json.dumps(_PROCESSOR))
    model = model_class(config_class(**parts, **shared))
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        buffers = [(name, buffer) for name, buffer in model.named_buffers() if name.endswith("correction_bias")]
        for name, parameter in [*model.named_parameters(), *buffers]:
            is_centred = family == "gemma3_text" or (family in HYBRIDS and "linear_attn" not in name)
            mean = 1.0 if "norm" in name and not is_centred else 0.0
            # Queries and keys are divided by their lengths: tiny ones would make the most of rounding.
            std = 0.5 if name.endswith("conv1d.weight") else 0.05
            parameter.normal_(mean=mean, std=std, generator=generator)
            if name.endswith("sinks"):
                parameter.copy_(parameter.bfloat16())  # as engines have them, whatever their dtype
    model.save_pretrained(folder, max_shard_size=max_shard_size)
    path = folder / "config.json"
    config = json.loads(path.read_text())
    text = config["text_config"] if family in (*SEEING, *TOWERS) else config
    text |= _UNWRITTEN.get(text["model_type"], {})
    path.write_text(json.dumps(config))
    return read_model_shape(folder)


def is_read(name: str) -> bool:
    """Whether a tensor of a file is one of the text."""
    return not name.startswith(("model.visual.", "visual."))


def _own_sizes(family: str, *, layers: int, heads: int, ffn: int) -> dict[str, object]:
    """Return the fields of families whose layers are not those of Llama."""
    near_and_far = ["sliding_attention", "full_attention"] * layers
    windows: dict[str, object] = {"head_dim": 16, "sliding_window": 5, "layer_types": near_and_far[:layers]}
    match family:
        case "deepseek_v3":
            latent = {"q_lora_rank": 24, "kv_lora_rank": 32, "qk_nope_head_dim": 16, "qk_rope_head_dim": 8}
            experts = {"n_routed_experts": NUM_EXPERTS, "n_shared_experts": 1, "num_experts_per_tok": 4}
            groups = {"first_k_dense_replace": 1, "n_group": 4, "topk_group": 2, "moe_intermediate_size": ffn // 2}
            heads_too = {"v_head_dim": 16, "num_key_value_heads": heads, "rope_parameters": _LATENT_ROPE}
            return {**latent, **experts, **groups, **heads_too}
        case "moonlight":
            unlike: dict[str, object] = {"q_lora_rank": None, "n_group": 1, "topk_group": 1, "rope_parameters": None}
            return _own_sizes("deepseek_v3", layers=layers, heads=heads, ffn=ffn) | unlike
        case "deepseek_v2":
            unlike = {"routed_scaling_factor": 1.5, "topk_method": "greedy", "norm_topk_prob": False}
            return _own_sizes("moonlight", layers=layers, heads=heads, ffn=ffn) | unlike
        case "glm4_moe":
            experts = {"n_routed_experts": NUM_EXPERTS, "n_shared_experts": 1, "num_experts_per_tok": 2}
            layers_too = {"first_k_dense_replace": 1, "moe_intermediate_size": ffn // 2, "routed_scaling_factor": 2.5}
            return {**experts, **layers_too, "head_dim": 32, "attention_bias": True, "use_qk_norm": True}
        case "gpt_oss":
            experts = {"num_local_experts": NUM_EXPERTS, "num_experts_per_tok": 2}
            return {**windows, **experts, "rope_parameters": _TRUNCATED_YARN}
        case "qwen2_5_vl" | "qwen3_vl":
            half = 8 if family == "qwen2_5_vl" else 16
            sections = {"mrope_section": [half - 2 * (3 * half // 8), 3 * half // 8, 3 * half // 8]}
            taken = {"mrope_interleaved": True} if family == "qwen3_vl" else {}
            return {"rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, **sections, **taken}}
        case "gemma3_text":
            return {**windows, "query_pre_attn_scalar": 24}
        case _ if family in HYBRIDS:
            return _hybrid_sizes(family, layers=layers, ffn=ffn)
        case _:
            return _WIDTHS.get(family, {})


def _hybrid_sizes(family: str, *, layers: int, ffn: int) -> dict[str, object]:
    """Return the fields of a model with gated delta nets in every other layer."""
    kinds = ["linear_attention", "full_attention"] * layers
    sizes: dict[str, object] = {
        "linear_num_key_heads": 4,
        "linear_num_value_heads": 8,
        "linear_key_head_dim": 8,
        "linear_value_head_dim": 16,
        "layer_types": kinds[:layers],
    }
    rope: dict[str, object] = {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.25}
    if family == "qwen3_next":
        sizes["full_attention_interval"] = 2
    else:
        rope |= {"mrope_section": [2, 1, 1], "mrope_interleaved": True}
    if family not in ("qwen3_5", "qwen3_5_text"):
        sizes |= {
            "num_experts": NUM_EXPERTS,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": ffn // 2,
            "shared_expert_intermediate_size": ffn // 2,
        }
    return {**sizes, "rope_parameters": rope}


def write_random_adapter(
    folder: Path, model_folder: Path, modules: Sequence[str], *, rank: int = 4, alpha: int = 6, seed: int = 0
) -> None:
    """Write an adapter with peft, of which neither matrix is zero."""
    from peft import LoraConfig as PeftConfig
    from peft import get_peft_model

    base = AutoModelForCausalLM.from_pretrained(model_folder, dtype=torch.float32)
    adapted = get_peft_model(base, PeftConfig(r=rank, lora_alpha=alpha, target_modules=list(modules)))
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in adapted.parameters():
            if parameter.requires_grad:
                parameter.normal_(std=0.1, generator=generator)
    adapted.save_pretrained(str(folder))


def load_adapted(model_folder: Path, adapter_folder: Path, *, is_trainable: bool = False) -> PeftModel:
    """Load a model with an adapter as peft does."""
    from peft import PeftModel

    base = AutoModelForCausalLM.from_pretrained(model_folder, dtype=torch.float32, attn_implementation="eager")
    return PeftModel.from_pretrained(base, str(adapter_folder), is_trainable=is_trainable)


def greedy_tokens(folder: Path, prompt: tuple[int, ...], num_tokens: int, *, adapter: Path | None = None) -> list[int]:
    """Return the likeliest continuation, computed by transformers."""
    kind = AutoModelForImageTextToText if read_model_shape(folder).family in TOWERS else AutoModelForCausalLM
    model = kind.from_pretrained(folder) if adapter is None else load_adapted(folder, adapter)
    ids = torch.tensor([prompt])
    with torch.no_grad():
        for _ in range(num_tokens):
            ids = torch.cat([ids, model(ids).logits[:, -1:].argmax(-1)], dim=1)
    tokens: list[int] = ids[0, len(prompt) :].tolist()
    return tokens


def as_classifier(source: Path, folder: Path, family: str, *, seed: int = 0) -> Path:
    """Write a random classifier with one output and the tokenizer of `source`, of whose size it is."""
    sizes = json.loads((source / "config.json").read_text())
    copied = ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads")
    config = _MODELS[family][0](
        **{name: sizes[name] for name in (*copied, "num_key_value_heads", "max_position_embeddings")},
        num_labels=1,
        bos_token_id=None,
        eos_token_id=1,
        pad_token_id=0,
        dtype="float32",
    )
    model = AutoModelForSequenceClassification.from_config(config)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.normal_(mean=1.0 if "norm" in name else 0.0, std=0.1, generator=generator)
    model.save_pretrained(folder)
    for name in ("tokenizer.json", "tokenizer_config.json", "generation_config.json"):
        shutil.copy(source / name, folder / name)
    return folder


def classifier_scores(folder: Path, sequences: Sequence[Sequence[int]]) -> npt.NDArray[np.float64]:
    """Return the output of transformers for each sequence by itself."""
    model = AutoModelForSequenceClassification.from_pretrained(folder, dtype=torch.float32).eval()
    with torch.no_grad():
        return np.array([model(torch.tensor([list(ids)])).logits[0, 0].item() for ids in sequences])


def next_logprobs(folder: Path, token_ids: Sequence[int]) -> torch.Tensor:
    """Return the log-probabilities of the next token, [V], computed by transformers."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    with torch.no_grad():
        logprobs: torch.Tensor = model(torch.tensor([list(token_ids)])).logits[0, -1].log_softmax(-1)
    return logprobs


def answer_logprob(folder: Path, prompt: Sequence[int], answer: Sequence[int]) -> float:
    """Return the log-probability of a whole answer, computed by transformers."""
    model = _loaded(folder)
    with torch.no_grad():
        logits = model(torch.tensor([[*prompt, *answer]])).logits[0, len(prompt) - 1 : -1].log_softmax(-1)
    return float(logits.gather(1, torch.tensor(list(answer))[:, None]).sum())


@cache
def _loaded(folder: Path) -> torch.nn.Module:
    model: torch.nn.Module = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    return model
