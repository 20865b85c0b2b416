"""Qwen3.5 mixtures, saved without what sees images: Qwen3.5's layers with experts and a gated shared expert in each.
Refused: layers without experts, adapters, FP8, critics, `context_exchange` other than `gather`.
"""

from __future__ import annotations

from megarl.families.fields import Fields
from megarl.families.interface import Block
from megarl.families.qwen3_5_text import Qwen35Text
from megarl.families.qwen3_next import gated_mixture
from megarl.families.shape import ModelShape


class Qwen35MoeText(Qwen35Text):
    name = "qwen3_5_moe_text"
    architecture = "Qwen3_5MoeForCausalLM"

    def read(self, fields: Fields) -> ModelShape:
        # transformers has no such field, and normalises; SGLang reads it.
        if fields.get("norm_topk_prob") is False:
            fields.refuse("norm_topk_prob false is not supported; remove it")
        shared = fields.integer("shared_expert_intermediate_size")
        experts = fields.softmax_experts(is_normalized=True, shared=shared)
        return self._complete(fields, fields.shape(self.name, experts=experts, ffn="moe_intermediate_size"))

    def _feed_forward(self, shape: ModelShape) -> Block:
        return gated_mixture(shape)
