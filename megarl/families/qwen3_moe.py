"""Qwen3-MoE: Qwen3 with a mixture in every layer. Refused: layers without experts, normalised weights with one expert
per token.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from megarl.families.blocks import attention, input_norm, mixture, post_norm, router
from megarl.families.fields import Fields
from megarl.families.interface import Block, EngineTraits, Family
from megarl.families.shape import Experts, ModelShape, public_shape


class Qwen3Moe(Family):
    name = "qwen3_moe"
    architecture = "Qwen3MoeForCausalLM"
    engine = EngineTraits(module="qwen3_moe", ties_head=False)

    def read(self, fields: Fields) -> ModelShape:
        fields.refuse_biases(self.name)
        fields.refuse_window("use_sliding_window")
        experts = fields.softmax_experts(is_normalized=fields.has("norm_topk_prob"))
        return fields.shape(self.name, has_qk_norm=True, experts=experts, ffn="moe_intermediate_size")

    def blocks(self, shape: ModelShape) -> Mapping[str, Block]:
        feed_forward = router(shape) + mixture(shape)
        return {"mixture": input_norm(shape) + attention(shape) + post_norm(shape) + feed_forward}

    @property
    def models(self) -> Mapping[str, ModelShape]:
        return {
            "qwen3-30b-a3b": self._public(48, 2048, 768, 32),
            "qwen3-235b-a22b": self._public(94, 4096, 1536, 64),
        }

    def _public(self, layers: int, hidden: int, ffn: int, heads: int) -> ModelShape:
        shape = public_shape(
            self.name, layers=layers, hidden=hidden, ffn=ffn, heads=heads, kv_heads=4, vocab=151936, has_qk_norm=True
        )
        experts = Experts(num=128, per_token=8, is_normalized=True)
        return replace(shape, max_context_tokens=40960, experts=experts)
