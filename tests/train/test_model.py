from __future__ import annotations

from pathlib import Path
from typing import cast

import pytest
import torch
from megatron.core.transformer.transformer_config import TransformerConfig
from transformers import LlamaConfig, LlamaForCausalLM

from megarl.config.hub import PUBLIC_MODELS
from megarl.config.model import read_model_shape
from megarl.config.native import owned
from megarl.config.roles import ActorConfig, CriticConfig
from megarl.train import model as model_module
from megarl.train.attention import rotary_frequencies, rotary_magnitude
from megarl.train.model import transformer_config

LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 500000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}

YARN = {"rope_type": "yarn", "rope_theta": 1e6, "factor": 4.0, "original_max_position_embeddings": 128}
MAGNIFIED_YARN = {**YARN, "beta_fast": 16.0, "beta_slow": 2.0, "truncate": False, "mscale": 0.8, "mscale_all_dim": 0.4}


def config_with(name: str = "qwen3-8b", **native: object) -> TransformerConfig:
    shape = PUBLIC_MODELS[name]
    return transformer_config(shape, ActorConfig(pool="gpu", megatron=native), device="cpu")


def test_a_critic_can_have_float32_on_a_gpu() -> None:
    critic = CriticConfig(pool="gpu", precision="fp32")
    config = transformer_config(PUBLIC_MODELS["qwen3-8b"], critic, device="cuda")
    assert (config.bf16, config.params_dtype, config.pipeline_dtype) == (False, torch.float32, torch.float32)
    assert transformer_config(PUBLIC_MODELS["qwen3-8b"], ActorConfig(pool="gpu"), device="cuda").bf16


def test_fields_of_the_recipe_reach_megatron() -> None:
    assert config_with().recompute_granularity is None
    config = config_with(recompute_granularity="selective", recompute_modules=["mlp"])
    assert (config.recompute_granularity, config.recompute_modules) == ("selective", ["mlp"])
    assert config.num_layers == PUBLIC_MODELS["qwen3-8b"].num_layers


@pytest.mark.parametrize("name", ["qwen3-8b", "qwen3-30b-a3b"])
def test_no_field_is_set_by_both_megarl_and_a_recipe(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(model_module, "TransformerConfig", lambda **fields: fields)
    own = cast("dict[str, object]", config_with(name))
    assert len(own) > 30
    assert [name for name in own if owned("megatron", name, device="cpu") is None] == []


@pytest.mark.parametrize(
    "rope",
    [{"rope_type": "default", "rope_theta": 1e6}, LLAMA3, YARN, MAGNIFIED_YARN],
    ids=["default", "llama3", "yarn", "magnified yarn"],
)
def test_rotary_frequencies_are_those_of_transformers(rope: dict[str, object], tmp_path: Path) -> None:
    config = LlamaConfig(
        hidden_size=64,
        num_attention_heads=2,
        num_hidden_layers=1,
        intermediate_size=8,
        vocab_size=8,
        max_position_embeddings=512,
        rope_parameters=rope,
    )
    model = LlamaForCausalLM(config)
    model.save_pretrained(tmp_path)
    expected = model.model.rotary_emb.inv_freq
    shape = read_model_shape(tmp_path)
    torch.testing.assert_close(rotary_frequencies(shape), expected, rtol=1e-6, atol=0)
    assert rotary_magnitude(shape) == pytest.approx(model.model.rotary_emb.attention_scaling)
    if rope is LLAMA3 or rope is YARN:
        unstretched = 1 / shape.rope_theta ** (torch.arange(0, 32, 2) / 32)
        assert 0 < (expected == unstretched).sum() < len(expected), "the stretch should reach some channels only"
