"""Qwen1.5-MoE and Qwen2-MoE: a mixture in every layer, and a shared expert with a gate of its own. Refused: layers
without experts, sliding windows, `qkv_bias: false`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from megarl.families.blocks import attention, gated, input_norm, mixture, post_norm, router, same
from megarl.families.fields import Fields
from megarl.families.interface import Block, EngineTraits, Family
from megarl.families.shape import Experts, ModelShape, public_shape


class Qwen2Moe(Family):
    name = "qwen2_moe"
    architecture = "Qwen2MoeForCausalLM"
    engine = EngineTraits(module="qwen2_moe", ties_head=False, has_cache_scales=True, adapts_shared_expert=True)

    def read(self, fields: Fields) -> ModelShape:
        if fields.get("qkv_bias") is False:
            fields.refuse("qkv_bias false is not supported; choose a model with these biases")
        fields.refuse_window("use_sliding_window")
        shared = fields.integer("shared_expert_intermediate_size")
        experts = fields.softmax_experts(is_normalized=fields.has("norm_topk_prob"), shared=shared)
        return fields.shape(self.name, has_qkv_bias=True, experts=experts, ffn="moe_intermediate_size")

    def blocks(self, shape: ModelShape) -> Mapping[str, Block]:
        assert shape.experts is not None, f"a {self.name} without experts"
        hidden, shared = shape.hidden, shape.experts.shared
        # A token's share of the shared expert's output is the sigmoid of this row times the token.
        gate = same("mlp.shared_expert_gate.weight", (1, hidden), "mlp.shared_experts.gate_weight")
        experts = mixture(shape) + gated("mlp.shared_expert.", "mlp.shared_experts.", hidden=hidden, width=shared)
        return {
            "mixture": input_norm(shape) + attention(shape) + post_norm(shape) + router(shape) + gate + experts,
        }

    @property
    def models(self) -> Mapping[str, ModelShape]:
        small = Experts(num=60, per_token=4, is_normalized=False, shared=5632)
        large = Experts(num=64, per_token=8, is_normalized=False, shared=20480)
        return {
            "qwen1.5-moe-a2.7b": replace(self._public(24, 2048, 1408, 16, 16, small), max_context_tokens=8192),
            "qwen2-57b-a14b": self._public(28, 3584, 2560, 28, 4, large),
        }

    def _public(self, layers: int, hidden: int, ffn: int, heads: int, kv_heads: int, experts: Experts) -> ModelShape:
        shape = public_shape(
            self.name,
            layers=layers,
            hidden=hidden,
            ffn=ffn,
            heads=heads,
            kv_heads=kv_heads,
            vocab=151936,
            has_qkv_bias=True,
        )
        return replace(shape, head_dim=hidden // heads, experts=experts)
