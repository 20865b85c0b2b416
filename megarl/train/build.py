"""Builds the chunks of a model from its shape, with the layers that its family describes.

Linear layers are Megatron's or Transformer Engine's, by `config.kernels`; the others those of `attention` and `layers`.
Transformer Engine's layers compute in FP8, run the experts of a rank as one grouped product, and add the gradients of
weights to the gradient buffers inside the product. Weights are zero until they are loaded.
"""

from __future__ import annotations

from functools import partial

import torch
import torch.nn.functional as F
from megatron.core.extensions.transformer_engine import TEColumnParallelLinear
from megatron.core.models.gpt.gpt_layer_specs import (
    get_gpt_layer_local_spec,
    get_gpt_layer_with_transformer_engine_spec,
)
from megatron.core.tensor_parallel import ColumnParallelLinear
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.moe import fused_a2a
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules
from megatron.core.transformer.transformer_config import TransformerConfig

from megarl.config.kernels import adds_gradients_in_products, is_te_installed, uses_te
from megarl.config.roles import ModelParallelConfig
from megarl.config.section import Device
from megarl.errors import ConfigError, MachineError, Problem
from megarl.families import family_of
from megarl.families.shape import ModelShape
from megarl.train.attention import PackedAttention
from megarl.train.delta_net import DeltaSubmodules, GatedDeltaNet
from megarl.train.family_layers import BiasedExpertOutput, with_post_norm
from megarl.train.gated_attention import GatedAttention
from megarl.train.latent_attention import LatentAttention, LatentSubmodules
from megarl.train.layers import GatedActivation, RMSNorm
from megarl.train.lora import with_adapter
from megarl.train.model import Model, PolicyModel
from megarl.train.routing import EngineRouter, MixtureLayer
from megarl.train.topology import Topology
from megarl.train.value_model import ValueModel
from megarl.weights.executors.tensors import torch_dtype
from megarl.weights.layouts.megatron import MegatronParallel


def build_chunks(
    shape: ModelShape,
    topology: Topology,
    split: ModelParallelConfig,
    *,
    device: Device,
    is_adapted: bool = False,
    adapts_experts: bool = False,
    has_float32_head: bool = False,
) -> list[Model]:
    """Return this rank's chunks in the order of their layers, on the device; a shape with a value head is a critic.

    With `is_adapted` adapters can be attached to the linear layers outside of routed experts, with `adapts_experts` to
    those of experts as well.
    """
    is_te = uses_te(split, has_experts=shape.experts is not None, device=device, adapts_experts=adapts_experts)
    try:
        config = transformer_config(shape, split, device=device, is_te=is_te)
    except (ValueError, AssertionError) as error:
        if not split.megatron:
            raise
        problem = Problem(key="roles.actor.megatron", message=f"Megatron refuses {split.megatron}: {error}")
        raise ConfigError(problem.key, (problem,)) from error
    model_class = ValueModel if shape.has_value_head else PolicyModel
    parallel = MegatronParallel.of(split, data=topology.data)
    family, chunks = family_of(shape), list[Model]()
    kinds = family.kinds(shape)
    by_kind = {
        each: layer_spec(family.alone(shape, each), is_te=is_te, is_adapted=is_adapted, is_fused=split.is_fused)
        for each in set(kinds)
    }
    if adapts_experts:
        for spec in by_kind.values():
            adapt_experts(spec)
    for chunk in range(split.virtual_pipeline):
        layers = parallel.chunk_layers(shape.num_layers, stage=topology.pipeline_rank, chunk=chunk)
        specs = [by_kind[kinds[layer]] for layer in layers]
        block = TransformerBlockSubmodules(layer_specs=specs, layer_norm=RMSNorm)
        model = model_class(config, block, shape, topology, chunk)
        model.is_fused = split.is_fused
        if isinstance(model, PolicyModel):
            model.has_float32_head = has_float32_head
        # Megatron makes routers on the host, and its gradient buffers move them only where there are some.
        chunks.append(model.to(topology.device))
    return chunks


def transformer_config(
    shape: ModelShape, split: ModelParallelConfig, *, device: Device, is_te: bool = False
) -> TransformerConfig:
    """Return Megatron's options; the recipe's check refuses those in `split.megatron` that are set here."""
    is_cuda = device == "cuda"
    dtype = torch_dtype(split.dtype_on(device))
    return TransformerConfig(
        num_layers=shape.num_layers,
        hidden_size=shape.hidden,
        ffn_hidden_size=shape.dense_hidden or shape.ffn_hidden,
        num_attention_heads=shape.num_heads,
        num_query_groups=shape.num_kv_heads,
        kv_channels=shape.head_dim,
        normalization="RMSNorm",
        layernorm_epsilon=shape.norm_eps,
        qk_layernorm=shape.has_qk_norm,
        softmax_scale=shape.attention_scale,
        add_bias_linear=shape.has_biases,
        layernorm_zero_centered_gamma=shape.has_centred_norms,
        add_qkv_bias=shape.has_qkv_bias,
        gated_linear_unit=True,
        activation_func=F.silu,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        tensor_model_parallel_size=split.tensor,
        context_parallel_size=split.context,
        cp_comm_type={"gather": None, "ring": "p2p", "all_to_all": "a2a"}[split.context_exchange],
        pipeline_model_parallel_size=split.pipeline,
        virtual_pipeline_model_parallel_size=split.virtual_pipeline if split.virtual_pipeline > 1 else None,
        num_layers_in_first_pipeline_stage=split.first_stage_layers,
        num_layers_in_last_pipeline_stage=split.last_stage_layers,
        sequence_parallel=split.is_sequence_parallel and split.tensor > 1,
        # Interleaved stages exchange activations and gradients at the same time. A batch of transfers between the same
        # two ranks (pipeline 2) would confuse them; one by one, both sides post them in the same order.
        batch_p2p_comm=split.virtual_pipeline == 1,
        overlap_p2p_comm=split.virtual_pipeline > 1,
        bf16=dtype == torch.bfloat16,
        params_dtype=dtype,
        pipeline_dtype=dtype,
        # Gradients are summed over micro-batches and ranks, not averaged: the loss carries its global denominator.
        calculate_per_token_loss=True,
        # Loading does not write the rows that pad the vocabulary, and a NaN there would reach the gradient of the
        # hidden states. Initialisation also marks parameters as split over tensor-parallel ranks; without the mark the
        # gradient norm would leave out most of them.
        init_method=torch.nn.init.zeros_,
        output_layer_init_method=torch.nn.init.zeros_,
        embedding_init_method=torch.nn.init.zeros_,
        use_cpu_initialization=not is_cuda,
        # Makes Megatron take the activation from the layer spec. It is not Transformer Engine's.
        use_te_activation_func=True,
        bias_activation_fusion=False,
        bias_dropout_fusion=False,
        masked_softmax_fusion=False,
        # Transformer Engine's layers have their own: `accumulate_in_products`.
        gradient_accumulation_fusion=is_cuda and not is_te and split.is_fused and adds_gradients_in_products(),
        **precision_fields(split),
        **mixture_fields(shape, split, is_te=is_te),
        **family_of(shape).options(shape),
        **split.megatron,
    )


def layer_spec(shape: ModelShape, *, is_te: bool, is_adapted: bool, is_fused: bool = True) -> ModuleSpec:
    """Return the spec of every layer. With `is_adapted` linear layers can have adapters, but not routed experts."""
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
    activation = ModuleSpec(module=GatedActivation, params={"is_fused": is_fused, "kind": shape.activation})
    if num_experts is not None:
        spec.module, feed_forward.router = MixtureLayer, EngineRouter
        feed_forward.shared_experts.submodules.activation_func = activation
        feed_forward = feed_forward.experts.submodules
        if shape.has_biases and not is_te:
            feed_forward.linear_fc2 = BiasedExpertOutput
    feed_forward.activation_func = activation
    if num_experts is not None or not is_te:
        # Elsewhere the norms are inside Transformer Engine's linear layers.
        spec.submodules.pre_mlp_layernorm = RMSNorm
    attention = spec.submodules.self_attention.submodules
    if shape.has_post_norms:
        attention.linear_proj = with_post_norm(attention.linear_proj)
        feed_forward.linear_fc2 = with_post_norm(feed_forward.linear_fc2)
    _set_attention(spec, shape, is_te=is_te, is_fused=is_fused)
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


def adapt_experts(spec: ModuleSpec) -> None:
    """Let the routed experts of a layer have adapters, each its own."""
    experts = spec.submodules.mlp.submodules.experts.submodules
    experts.linear_fc1, experts.linear_fc2 = with_adapter(experts.linear_fc1), with_adapter(experts.linear_fc2)


def _set_attention(spec: ModuleSpec, shape: ModelShape, *, is_te: bool, is_fused: bool) -> None:
    """Set the attention of a layer, or what is in its place; all layers of the model are of one kind."""
    attention, is_near = spec.submodules.self_attention.submodules, bool(shape.window_layers)
    attention.core_attention = partial(
        PackedAttention,
        window=shape.window if is_near else None,
        has_sinks=shape.has_sinks,
        base=int(is_near and shape.window_theta is not None),
    )
    if shape.has_qk_norm:
        attention.q_layernorm = attention.k_layernorm = RMSNorm
    linear = TEColumnParallelLinear if is_te else ColumnParallelLinear
    if shape.has_output_gate:
        spec.submodules.self_attention.module = GatedAttention
    if shape.delta_layers:
        assert shape.delta is not None, f"delta nets of a {shape.family} without their widths"
        spec.submodules.input_layernorm = RMSNorm
        spec.submodules.self_attention = ModuleSpec(
            module=GatedDeltaNet,
            params={"widths": shape.delta, "is_fused": is_fused},
            submodules=DeltaSubmodules(in_proj=linear, out_proj=attention.linear_proj),
        )
    if shape.latent is not None:
        spec.submodules.input_layernorm = RMSNorm
        spec.submodules.self_attention = ModuleSpec(
            module=LatentAttention,
            params={"attn_mask_type": AttnMaskType.causal, "widths": shape.latent},
            submodules=LatentSubmodules(
                core_attention=attention.core_attention,
                linear_proj=attention.linear_proj,
                linear=linear,
            ),
        )


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
        "moe_shared_expert_gate": experts.shared > 0 and experts.is_shared_gated,
        # A softmax over the chosen logits equals the softmax over all, divided by its sum over the chosen.
        "moe_router_pre_softmax": experts.score == "softmax" and not experts.is_normalized,
        "moe_router_score_function": experts.score,
        "moe_router_enable_expert_bias": experts.has_bias,
        "moe_router_topk_scaling_factor": experts.scale if experts.scale != 1 else None,
        "moe_router_num_groups": experts.num_groups if experts.num_groups > 1 else None,
        "moe_router_group_topk": experts.groups_per_token if experts.num_groups > 1 else None,
        "moe_layer_freq": [int(layer >= experts.num_dense_layers) for layer in range(shape.num_layers)],
        # An auxiliary loss would pull the policy away from the reward, by an amount that depends on how tokens are
        # packed. At the learning rates of this stage the balance learnt in pre-training holds.
        "moe_router_load_balancing_type": "none",
        "moe_aux_loss_coeff": 0.0,
        # Megatron would add this to a router's bias, or subtract it, with every update; engines get what was loaded.
        "moe_router_bias_update_rate": 0.0,
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
