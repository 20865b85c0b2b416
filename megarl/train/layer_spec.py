"""Which layers a model has: linear ones of Megatron or of Transformer Engine, `attention`, and those of `layers`.

Transformer Engine's layers compute in FP8, run the experts of a rank as one grouped product, and add the gradients of
weights to the gradient buffers inside the product. The choice is `config.kernels`.
"""

from __future__ import annotations

import torch
from megatron.core.extensions.transformer_engine import TEColumnParallelLinear
from megatron.core.models.gpt.gpt_layer_specs import (
    get_gpt_layer_local_spec,
    get_gpt_layer_with_transformer_engine_spec,
)
from megatron.core.tensor_parallel import ColumnParallelLinear
from megatron.core.transformer.moe import fused_a2a
from megatron.core.transformer.spec_utils import ModuleSpec

from megarl.config.kernels import is_te_installed
from megarl.config.model import ModelShape
from megarl.config.roles import ModelParallelConfig
from megarl.errors import MachineError
from megarl.train.attention import PackedAttention
from megarl.train.layers import GatedActivation, RMSNorm
from megarl.train.lora import with_adapter
from megarl.train.routing import EngineRouter, MixtureLayer


def layer_spec(shape: ModelShape, *, is_te: bool, is_adapted: bool, is_fused: bool = True) -> ModuleSpec:
    """Return the spec of every layer. With `is_adapted` linear layers can have adapters; routed experts have none."""
    num_experts = shape.experts.num if shape.experts else None
    if is_te:
        if not is_te_installed():
            raise MachineError("transformer_engine is not installed here; install it, or set roles.*.kernels to local")
        spec = get_gpt_layer_with_transformer_engine_spec(
            num_experts=num_experts, moe_grouped_gemm=num_experts is not None, qk_layernorm=shape.has_qk_norm
        )
    else:
        spec = get_gpt_layer_local_spec(
            num_experts=num_experts, normalization="RMSNorm", qk_layernorm=shape.has_qk_norm
        )
        spec.submodules.input_layernorm = RMSNorm
    feed_forward = spec.submodules.mlp.submodules
    activation = ModuleSpec(module=GatedActivation, params={"is_fused": is_fused})
    if num_experts is not None:
        spec.module, feed_forward.router = MixtureLayer, EngineRouter
        feed_forward.shared_experts.submodules.activation_func = activation
        feed_forward = feed_forward.experts.submodules
    feed_forward.activation_func = activation
    if num_experts is not None or not is_te:
        # Elsewhere the norms are inside Transformer Engine's linear layers.
        spec.submodules.pre_mlp_layernorm = RMSNorm
    attention = spec.submodules.self_attention.submodules
    attention.core_attention = PackedAttention
    if shape.has_qk_norm:
        attention.q_layernorm = RMSNorm
        attention.k_layernorm = RMSNorm
    if is_adapted:
        columns = ColumnParallelLinear
        if is_te:
            # An adapter has the norm's output as its input, and Transformer Engine's norms are inside its layers.
            columns = TEColumnParallelLinear
            spec.submodules.input_layernorm = spec.submodules.pre_mlp_layernorm = RMSNorm
        attention.linear_qkv, attention.linear_proj = with_adapter(columns), with_adapter(attention.linear_proj)
        if num_experts is not None:
            feed_forward = spec.submodules.mlp.submodules.shared_experts.submodules
        feed_forward.linear_fc1 = with_adapter(columns)
        feed_forward.linear_fc2 = with_adapter(feed_forward.linear_fc2)
    return spec


def precision_fields(split: ModelParallelConfig) -> dict[str, object]:
    """Return Megatron's options for the products of linear layers."""
    if split.precision != "fp8":
        return {}
    return {
        # Activations and weights with four bits of exponent, gradients with five.
        "fp8": "hybrid",
        "fp8_recipe": split.fp8_scaling,
        # Delayed scaling has one context for all layers.
        "first_last_layers_bf16": split.fp8_scaling != "delayed",
    }


def mixture_fields(shape: ModelShape, split: ModelParallelConfig, *, is_te: bool) -> dict[str, object]:
    """Return Megatron's options for experts; none in a dense model."""
    experts = shape.experts
    if experts is None:
        return {}
    return {
        "num_moe_experts": experts.num,
        "moe_ffn_hidden_size": shape.ffn_hidden,
        "moe_router_topk": experts.per_token,
        "moe_shared_expert_intermediate_size": experts.shared or None,
        "moe_shared_expert_gate": experts.shared > 0,
        # A softmax over the chosen logits equals the softmax over all, divided by its sum over the chosen.
        "moe_router_pre_softmax": not experts.is_normalized,
        # An auxiliary loss would pull the policy away from the reward, by an amount that depends on how tokens are
        # packed. At the learning rates of this stage the balance learnt in pre-training holds.
        "moe_router_load_balancing_type": "none",
        "moe_aux_loss_coeff": 0.0,
        "moe_token_dispatcher_type": "alltoall" if split.dispatcher == "alltoall" else "flex",
        "moe_flex_dispatcher_backend": "deepep",
        "moe_grouped_gemm": is_te,
        "expert_model_parallel_size": split.expert,
        "expert_tensor_parallel_size": split.ranks_per_expert,
    }


def accumulate_in_products(chunk: torch.nn.Module) -> None:
    """Let Transformer Engine's layers add their weights' gradients to the buffers, which exist now, in float32.

    The frozen base of an adapter has neither.

    Set here and not by Megatron's `gradient_accumulation_fusion`, which asks for Apex on behalf of an output layer that
    megarl does not run.
    """
    for module in chunk.modules():
        is_trained = all(parameter.requires_grad for parameter in module.parameters(recurse=False))
        if is_trained and hasattr(module, "fuse_wgrad_accumulation"):
            module.fuse_wgrad_accumulation = True  # type: ignore[assignment]  # an attribute of Transformer Engine's


def drop_fp8_weights(chunk: torch.nn.Module) -> None:
    """Free the FP8 copies of weights, which Transformer Engine keeps between passes; the next pass makes them again."""
    for module in chunk.modules():
        copies = getattr(module, "_fp8_workspaces", None)
        if isinstance(copies, dict):
            copies.clear()


def forget_scales() -> None:
    """Drop the FP8 state of the process, which names groups of ranks: they are about to end."""
    from transformer_engine.pytorch.quantization import FP8GlobalStateManager  # noqa: PLC0415 - on GPU machines only

    FP8GlobalStateManager.reset()


def forget_buffers() -> None:
    """Drop DeepEP's buffers, which name groups of ranks: they are about to end. All ranks do it together."""
    fused_a2a._buffer = None
