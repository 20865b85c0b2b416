from __future__ import annotations

from typing import cast
from unittest.mock import patch

import pytest
import torch
from megatron.core.distributed.finalize_model_grads import _update_router_expert_bias
from megatron.core.transformer.transformer_config import TransformerConfig

from megarl.config.native import owned
from megarl.config.roles import ActorConfig, CriticConfig
from megarl.families import PUBLIC_MODELS
from megarl.train import build
from megarl.train.build import transformer_config
from megarl.train.model import named_weights


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


@pytest.mark.parametrize("name", ["qwen3-8b", "qwen3-30b-a3b", "deepseek-v3", "gpt-oss-20b", "gemma-3-1b"])
def test_no_field_is_set_by_both_megarl_and_a_recipe(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(build, "TransformerConfig", lambda **fields: fields)
    own = cast("dict[str, object]", config_with(name))
    assert len(own) > 30
    assert [name for name in own if owned("megatron", name, device="cpu") is None] == []


def test_an_update_does_not_move_the_bias_of_a_router() -> None:
    """Engines get the bias that was loaded; Megatron would balance the experts' load with it after every update."""
    shape, config = PUBLIC_MODELS["deepseek-v3"], config_with("deepseek-v3")
    assert shape.experts is not None
    assert config.moe_router_enable_expert_bias
    router, bias = torch.nn.Module(), torch.randn(shape.experts.num, generator=torch.Generator().manual_seed(0))
    router.register_buffer("expert_bias", bias)
    router.register_buffer("local_tokens_per_expert", torch.arange(float(shape.experts.num)), persistent=False)
    before = bias.clone()
    with (
        patch("torch.distributed.all_reduce"),
        patch("megatron.core.parallel_state.get_tensor_and_data_parallel_group"),
    ):
        _update_router_expert_bias([router], config)
    assert torch.equal(bias, before)


def test_buffers_that_a_checkpoint_has_are_weights_and_others_are_not() -> None:
    router = torch.nn.Linear(4, 2, bias=False)
    router.register_buffer("expert_bias", torch.ones(2))
    router.register_buffer("local_tokens_per_expert", torch.zeros(2), persistent=False)
    weights = named_weights([torch.nn.ModuleDict({"router": router})])
    assert weights.keys() == {"chunk0.router.weight", "chunk0.router.expert_bias"}
    assert weights["chunk0.router.expert_bias"] is router.expert_bias


def test_gradients_are_added_inside_products_where_apex_has_a_kernel_for_it(monkeypatch: pytest.MonkeyPatch) -> None:
    shape, actor = PUBLIC_MODELS["qwen3-8b"], ActorConfig(pool="gpu")
    assert not transformer_config(shape, actor, device="cuda").gradient_accumulation_fusion
    monkeypatch.setattr(build, "adds_gradients_in_products", lambda: True)
    assert transformer_config(shape, actor, device="cuda").gradient_accumulation_fusion
    # Transformer Engine's layers have their own, CPUs none, and `torch` asks for no fused kernel.
    assert not transformer_config(shape, actor, device="cuda", is_te=True).gradient_accumulation_fusion
    assert not transformer_config(shape, actor, device="cpu").gradient_accumulation_fusion
    plain = ActorConfig(pool="gpu", kernels="torch")
    assert not transformer_config(shape, plain, device="cuda").gradient_accumulation_fusion
