"""DeepSeek-V3 and R1, Moonlight, Kimi-K2: latent attention, dense layers in front, sigmoid routers with groups. Files
in FP8 blocks are read. Refused: critics, `context_exchange` other than `gather`.

The layer that predicts a further token (`num_nextn_predict_layers`) is neither trained nor served nor saved.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from typing import ClassVar

from megarl.families.blocks import dense_and_mixture, input_norm, post_norm, same
from megarl.families.fields import Fields
from megarl.families.interface import AttentionCost, Block, Cut, EngineTraits, Family, Feature, Param, Part, Weight
from megarl.families.shape import Experts, LatentWidths, ModelShape, YarnScaling, public_shape, sigmoid_experts

_RANKED = 2
"""Experts whose scores rank a group, in transformers and SGLang."""


class DeepseekV3(Family):
    name = "deepseek_v3"
    architecture = "DeepseekV3ForCausalLM"
    engine = EngineTraits(module="deepseek_v2", options=("--disable-shared-experts-fusion",), is_dequantized=True)
    refuses: ClassVar[Mapping[Feature, str]] = {
        "lora": "adapters of latent projections are not supported",
        "fp8": "FP8 rollouts of latent projections are not supported",
        "critic": "SGLang and transformers have no class with one output",
    }
    router: ClassVar[Mapping[str, str]] = {"topk_method": "noaux_tc", "scoring_func": "sigmoid"}
    """Fields of config.json."""

    def read(self, fields: Fields) -> ModelShape:
        self._refuse(fields)
        widths = LatentWidths(
            query_rank=fields.integer("q_lora_rank") if fields.get("q_lora_rank") is not None else None,
            key_rank=fields.integer("kv_lora_rank"),
            plain=fields.integer("qk_nope_head_dim"),
            rotary=fields.integer("qk_rope_head_dim"),
            value=fields.integer("v_head_dim"),
        )
        shape = fields.shape(self.name, experts=self._experts(fields), ffn="moe_intermediate_size")
        return with_latent(shape, widths, dense=fields.integer("intermediate_size"))

    def _experts(self, fields: Fields) -> Experts:
        experts = fields.sigmoid_experts(num_dense=0)
        if experts.num_groups > 1 and experts.per_token // experts.groups_per_token != _RANKED:
            ranked = experts.per_token // experts.groups_per_token
            fields.refuse(f"Megatron would rank a group by {ranked} experts, SGLang by {_RANKED}; not supported")
        return experts

    def _refuse(self, fields: Fields) -> None:
        fields.refuse_biases(self.name)
        for key, wanted in (*self.router.items(), ("moe_layer_freq", 1), ("rope_interleave", True)):
            if fields.get(key) not in (None, wanted):
                fields.refuse(f"{key} {fields.get(key)} is not supported; supported is {wanted}")
        quantization = fields.get("quantization_config")
        if quantization is not None and (
            not isinstance(quantization, dict)
            or quantization.get("quant_method") != "fp8"
            or list(quantization.get("weight_block_size") or ()) != [128, 128]
        ):
            fields.refuse("quantization_config is not supported but for fp8 in blocks of 128 x 128")

    def blocks(self, shape: ModelShape) -> Mapping[str, Block]:
        return dense_and_mixture(shape, input_norm(shape) + latent_attention(shape) + post_norm(shape))

    def attention(self, shape: ModelShape) -> AttentionCost:
        widths = shape.latent
        assert widths is not None, f"a {self.name} without latent attention"
        keys = shape.num_heads * widths.query
        return AttentionCost(
            queries=keys,
            keys=keys,
            values=shape.num_heads * widths.value,
            outputs=shape.num_heads * widths.value,
            cached_heads=1,
            cached=widths.key_rank + widths.rotary,
        )

    def tiny(self, shape: ModelShape) -> ModelShape:
        assert shape.experts is not None, f"a {self.name} without experts"
        widths = LatentWidths(query_rank=32, key_rank=32, plain=16, rotary=16, value=16)
        if shape.latent is not None and shape.latent.query_rank is None:
            widths = replace(widths, query_rank=None)
        num_dense, shared = min(shape.experts.num_dense_layers, 1), shape.ffn_hidden if shape.experts.shared else 0
        experts = replace(shape.experts, num_dense_layers=num_dense, shared=shared)
        return with_latent(replace(shape, experts=experts), widths, dense=shape.ffn_hidden)

    def config_json(self, shape: ModelShape) -> dict[str, object]:
        experts, widths = shape.experts, shape.latent
        assert experts is not None, f"a {self.name} without experts"
        assert widths is not None, f"a {self.name} without latent attention"
        return {
            **super().config_json(shape),
            "intermediate_size": shape.dense_hidden,
            "head_dim": widths.rotary,
            "q_lora_rank": widths.query_rank,
            "kv_lora_rank": widths.key_rank,
            "qk_nope_head_dim": widths.plain,
            "qk_rope_head_dim": widths.rotary,
            "v_head_dim": widths.value,
            "n_routed_experts": experts.num,
            "n_shared_experts": experts.shared // shape.ffn_hidden,
            "routed_scaling_factor": experts.scale,
            "n_group": experts.num_groups,
            "topk_group": experts.groups_per_token,
            "first_k_dense_replace": experts.num_dense_layers,
            **self.router,
            "norm_topk_prob": experts.is_normalized,
            "moe_layer_freq": 1,
        }

    @property
    def models(self) -> Mapping[str, ModelShape]:
        widths = LatentWidths(query_rank=1536, key_rank=512, plain=128, rotary=64, value=128)
        yarn = YarnScaling(factor=40.0, original_max_position=4096, mscale=1.0, mscale_all_dim=1.0)
        experts = sigmoid_experts(
            num=256, per_token=8, shared=2048, scale=2.5, num_dense=3, num_groups=8, groups_per_token=4
        )
        base = public_shape(self.name, layers=61, hidden=7168, ffn=2048, heads=128, kv_heads=128, vocab=129280)
        v3 = replace(base, max_context_tokens=163840, rope_theta=1e4, rope_scaling=yarn, experts=experts)
        ungrouped = replace(experts, num_groups=1, groups_per_token=1, num_dense_layers=1)
        kimi = replace(v3, num_heads=64, vocab=163840, max_context_tokens=131072, rope_theta=5e4)
        kimi = replace(kimi, rope_scaling=replace(yarn, factor=32.0), experts=replace(ungrouped, num=384, scale=2.827))
        few = replace(ungrouped, num=64, per_token=6, shared=2816, scale=2.446)
        moonlight = replace(kimi, num_layers=27, hidden=2048, ffn_hidden=1408, num_heads=16, experts=few)
        moonlight = replace(moonlight, max_context_tokens=8192, norm_eps=1e-5, rope_scaling=None)
        return {
            "deepseek-v3": with_latent(v3, widths, dense=18432),
            "deepseek-r1": with_latent(v3, widths, dense=18432),
            "kimi-k2": with_latent(kimi, widths, dense=18432),
            "moonlight-16b-a3b": with_latent(moonlight, replace(widths, query_rank=None), dense=11264),
        }


def with_latent(shape: ModelShape, widths: LatentWidths, *, dense: int) -> ModelShape:
    """Return the shape with latent attention, and `dense` as the inner size of the layers in front."""
    scaling, scale = shape.rope_scaling, widths.query**-0.5
    if isinstance(scaling, YarnScaling) and scaling.mscale_all_dim:
        scale *= (0.1 * scaling.mscale_all_dim * math.log(scaling.factor) + 1.0) ** 2
    assert shape.experts is not None, f"a {shape.family} without experts"
    return replace(
        shape,
        num_kv_heads=shape.num_heads,
        head_dim=widths.value,
        rotary_dim=widths.rotary,
        latent=widths,
        attention_scale=scale,
        dense_hidden=dense if shape.experts.num_dense_layers else 0,
    )


def latent_attention(shape: ModelShape) -> Block:
    """Return the projections to the latent vectors, which SGLang has in one parameter, and from them."""
    widths, hidden, heads = shape.latent, shape.hidden, shape.num_heads
    assert widths is not None, f"a {shape.family} without latent attention"
    a, m = "self_attn.", "self_attention."
    key_rows = heads * (widths.plain + widths.value)
    block = (
        same(f"{a}kv_a_layernorm.weight", (widths.key_rank,), f"{m}kv_layernorm.weight")
        + same(f"{a}kv_b_proj.weight", (key_rows, widths.key_rank), f"{m}linear_kv_up_proj.weight", Cut.EACH)
        + same(f"{a}o_proj.weight", (hidden, heads * widths.value), f"{m}linear_proj.weight", Cut.COLUMNS)
    )
    keys = Weight(name=f"{a}kv_a_proj_with_mqa.weight", shape=(widths.key_rank + widths.rotary, hidden))
    down = Param(name=f"{m}linear_kv_down_proj.weight", parts=(Part(name=keys.name),), cut=Cut.EACH)
    rows = heads * widths.query
    if widths.query_rank is None:
        served = Param(name=keys.name, parts=(Part(name=keys.name),), cut=Cut.WHOLE)
        queries = same(f"{a}q_proj.weight", (rows, hidden), f"{m}linear_q_proj.weight", Cut.EACH)
        return block + queries + Block((keys,), (down,), (served,))
    query = Weight(name=f"{a}q_a_proj.weight", shape=(widths.query_rank, hidden))
    query_down = Param(name=f"{m}linear_q_down_proj.weight", parts=(Part(name=query.name),), cut=Cut.EACH)
    both = (Part(name=query.name), Part(name=keys.name))
    served = Param(name=f"{a}fused_qkv_a_proj_with_mqa.weight", parts=both, cut=Cut.WHOLE)
    return (
        block
        + same(f"{a}q_a_layernorm.weight", (widths.query_rank,), f"{m}q_layernorm.weight")
        + same(f"{a}q_b_proj.weight", (rows, widths.query_rank), f"{m}linear_q_up_proj.weight", Cut.EACH)
        + Block((query, keys), (query_down, down), (served,))
    )
