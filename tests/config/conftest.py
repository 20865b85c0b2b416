"""A folder with all that a recipe names: a model without weights worth loading, a data file, a reward."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

SHAPE = {
    "architectures": ["Qwen2ForCausalLM"],
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 99,
    "max_position_embeddings": 64,
}


MIXTURE = {
    "architectures": ["Qwen3MoeForCausalLM"],
    "moe_intermediate_size": 96,
    "num_experts": 6,
    "num_experts_per_tok": 2,
    "norm_topk_prob": True,
}


def write_model(folder: Path, **changes: object) -> None:
    """What is looked at before a run starts; a change to None leaves the key out."""
    folder.mkdir()
    shape = {key: value for key, value in {**SHAPE, **changes}.items() if value is not None}
    (folder / "config.json").write_text(json.dumps(shape))
    (folder / "model.safetensors").touch()
    (folder / "tokenizer.json").write_text("{}")
    (folder / "chat_template.jinja").write_text("{{ messages }}")


def write_adapter(folder: Path) -> None:
    """Write an adapter of rank 4 for one matrix of a model with 32 channels; it has a header and no values."""
    folder.mkdir()
    config = {"peft_type": "LORA", "r": 4, "lora_alpha": 8, "target_modules": ["o_proj"]}
    (folder / "adapter_config.json").write_text(json.dumps(config))
    block = "base_model.model.model.layers.0.self_attn.o_proj"
    shapes = {f"{block}.lora_A.weight": [4, 32], f"{block}.lora_B.weight": [32, 4]}
    entries = {name: {"dtype": "F32", "shape": shape, "data_offsets": [0, 0]} for name, shape in shapes.items()}
    header = json.dumps({"__metadata__": {"format": "pt"}, **entries}).encode()
    (folder / "adapter_model.safetensors").write_bytes(len(header).to_bytes(8, "little") + header)


@pytest.fixture(scope="session")
def scratch(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder that the recipes of this directory are started in."""
    folder = tmp_path_factory.mktemp("scratch")
    write_model(folder / "model")
    write_model(folder / "classifier", architectures=["Qwen2ForSequenceClassification"], id2label={"0": "score"})
    write_model(folder / "two_labels", architectures=["Qwen2ForSequenceClassification"])
    write_model(folder / "other_tokens", vocab_size=120)
    (folder / "other_tokens" / "tokenizer.json").write_text('{"model": {"vocab": {"a": 0}}}')
    write_model(folder / "other_family", architectures=["MambaForCausalLM"])
    write_model(folder / "sliding_window", use_sliding_window=True)
    write_model(folder / "no_layers", num_hidden_layers=None)
    write_model(folder / "half_yarn", rope_scaling={"rope_type": "yarn", "factor": 4.0})
    write_model(
        folder / "yarn_that_engines_ignore",
        rope_scaling={
            "rope_type": "yarn",
            "factor": 4.0,
            "original_max_position_embeddings": 64,
            "attention_factor": 1.2,
        },
    )
    write_model(folder / "longrope", rope_scaling={"rope_type": "longrope", "factor": 4.0})
    write_model(folder / "six_kv_heads", num_attention_heads=12, num_key_value_heads=6, intermediate_size=96)
    write_model(folder / "narrow", intermediate_size=130)
    write_model(folder / "in_blocks", hidden_size=256, intermediate_size=512)
    write_model(folder / "mixture", **MIXTURE)
    shared = {**MIXTURE, "architectures": ["Qwen2MoeForCausalLM"], "norm_topk_prob": False}
    write_model(folder / "shared_expert", **shared, shared_expert_intermediate_size=97)
    write_model(folder / "no_shared_expert", **shared)
    write_model(folder / "shared_mixture", **shared, shared_expert_intermediate_size=96)
    write_model(folder / "no_qkv_bias", **shared, shared_expert_intermediate_size=96, qkv_bias=False)
    write_model(folder / "tied_mixture", **MIXTURE, tie_word_embeddings=True)
    write_model(folder / "partly_dense", **{**MIXTURE, "mlp_only_layers": [0]})
    write_model(folder / "one_expert_each", **{**MIXTURE, "num_experts_per_tok": 1})
    latent = {"architectures": ["DeepseekV3ForCausalLM"], "scoring_func": "softmax"}
    write_model(folder / "softmax_router", **{**MIXTURE, **latent})
    grouped = {"architectures": ["DeepseekV2ForCausalLM"], "topk_method": "group_limited_greedy"}
    write_model(folder / "grouped_router", **{**MIXTURE, **grouped})
    write_model(folder / "no_experts", **{**MIXTURE, "num_experts": None})
    for folder_name, missing in (
        ("no_weights", "model.safetensors"),
        ("no_tokenizer", "tokenizer.json"),
        ("no_template", "chat_template.jinja"),
    ):
        write_model(folder / folder_name)
        (folder / folder_name / missing).unlink()
    write_adapter(folder / "adapter")
    write_model(folder / "broken_config")
    (folder / "broken_config" / "config.json").write_text("{")
    (folder / "train.parquet").touch()
    (folder / "eval.parquet").touch()
    (folder / "a_file").touch()
    (folder / "no_function.py").write_text("def score():\n    return 0.0\n")
    (folder / "too_few_arguments.py").write_text("def compute_score(solution_str):\n    return 0.0\n")
    (folder / "does_not_import.py").write_text("import a_package_that_nobody_has\n")
    return folder
