"""Write a Hugging Face model of any supported family with random weights, from its shape alone, without transformers.

Neighbouring elements differ, also in norms and biases, so that a misplaced one is seen.
"""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path

import torch
from safetensors.torch import save_file

from megarl.config.model import Family, ModelShape
from megarl.weights.executors.tensors import torch_dtype
from megarl.weights.layouts.canonical import canonical_tensors

_ARCHITECTURES = {
    Family.LLAMA: ("LlamaForCausalLM", "llama"),
    Family.QWEN2: ("Qwen2ForCausalLM", "qwen2"),
    Family.QWEN3: ("Qwen3ForCausalLM", "qwen3"),
    Family.QWEN3_MOE: ("Qwen3MoeForCausalLM", "qwen3_moe"),
}
_STD = 0.05


def write_random_model(folder: Path, shape: ModelShape, *, seed: int) -> None:
    """Write config.json and model.safetensors; an engine that gets token ids needs no tokenizer."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config_of(shape), indent=2) + "\n")
    save_file(random_tensors(shape, seed=seed), folder / "model.safetensors", metadata={"format": "pt"})


def random_tensors(shape: ModelShape, *, seed: int) -> dict[str, torch.Tensor]:
    """Return every canonical tensor."""
    generator = torch.Generator().manual_seed(seed)
    return {
        name: torch.empty(spec.shape)
        .normal_(1.0 if "norm" in name else 0.0, _STD, generator=generator)
        .to(torch_dtype(spec.dtype))
        for name, spec in canonical_tensors(shape).items()
    }


def config_of(shape: ModelShape) -> dict[str, object]:
    """Return the content of `config.json`."""
    architecture, model_type = _ARCHITECTURES[shape.family]
    config: dict[str, object] = {
        "architectures": [architecture],
        "model_type": model_type,
        "dtype": shape.dtype,
        "vocab_size": shape.vocab,
        "hidden_size": shape.hidden,
        "intermediate_size": shape.ffn_hidden,
        "num_hidden_layers": shape.num_layers,
        "num_attention_heads": shape.num_heads,
        "num_key_value_heads": shape.num_kv_heads,
        "head_dim": shape.head_dim,
        "max_position_embeddings": shape.max_context_tokens,
        "hidden_act": "silu",
        "rms_norm_eps": shape.norm_eps,
        "rope_theta": shape.rope_theta,
        "rope_parameters": _rope(shape),
        "tie_word_embeddings": shape.has_tied_embeddings,
        "use_sliding_window": False,
        "bos_token_id": None,
        "eos_token_id": 0,
    }
    if shape.experts is not None:
        config |= {
            "moe_intermediate_size": shape.ffn_hidden,
            "num_experts": shape.experts.num,
            "num_experts_per_tok": shape.experts.per_token,
            "norm_topk_prob": shape.experts.is_normalized,
            "decoder_sparse_step": 1,
            "mlp_only_layers": [],
        }
    return config


def _rope(shape: ModelShape) -> dict[str, object]:
    if shape.rope_scaling is None:
        return {"rope_type": "default", "rope_theta": shape.rope_theta}
    scaling = asdict(shape.rope_scaling)
    scaling["original_max_position_embeddings"] = scaling.pop("original_max_position")
    return {"rope_type": "llama3", "rope_theta": shape.rope_theta, **scaling}
