"""Phi-4: one matrix of queries, keys and values, and one of gate and up, in the files. Refused: sliding windows,
`longrope`, `partial_rotary_factor`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import ClassVar

from megarl.families.blocks import fused_attention, fused_gated, input_norm, post_norm
from megarl.families.fields import Fields
from megarl.families.interface import Block, EngineTraits, Family, Feature
from megarl.families.shape import ModelShape, public_shape


class Phi3(Family):
    name = "phi3"
    architecture = "Phi3ForCausalLM"
    engine = EngineTraits(module="llama")
    refuses: ClassVar[Mapping[Feature, str]] = {
        "lora": "adapters have not been tried with the fused matrices of phi3; remove model.lora",
        "fp8": "fp8 needs a matrix for each projection in the files, and phi3 has them fused; use bf16",
    }

    def read(self, fields: Fields) -> ModelShape:
        fields.refuse_biases(self.name)
        # SGLang attends to everything, transformers to the window.
        fields.refuse_window("sliding_window")
        partial = fields.rope.get("partial_rotary_factor", fields.get("partial_rotary_factor"))
        if partial not in (None, 1, 1.0):
            fields.refuse(f"partial_rotary_factor {partial} is not supported for {self.name}; choose a model without")
        return fields.shape(self.name)

    def blocks(self, shape: ModelShape) -> Mapping[str, Block]:
        feed_forward = fused_gated("mlp.", "mlp.", hidden=shape.hidden, width=shape.ffn_hidden)
        return {"dense": input_norm(shape) + fused_attention(shape) + post_norm(shape) + feed_forward}

    @property
    def models(self) -> Mapping[str, ModelShape]:
        shape = public_shape(self.name, layers=40, hidden=5120, ffn=17920, heads=40, kv_heads=10, vocab=100352)
        return {"phi-4": replace(shape, max_context_tokens=16384, norm_eps=1e-5, rope_theta=250000.0)}
