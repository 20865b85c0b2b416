"""Mixtral: a mixture in every layer, with names of its own. Refused: sliding windows, `head_dim`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import ClassVar

from megarl.families.blocks import attention, input_norm, mixture, post_norm, router
from megarl.families.fields import Fields
from megarl.families.interface import Block, EngineTraits, Family, Feature
from megarl.families.shape import Experts, ModelShape, public_shape

_BLOCK = "block_sparse_moe."


class Mixtral(Family):
    name = "mixtral"
    architecture = "MixtralForCausalLM"
    engine = EngineTraits(module="mixtral", ties_head=False, unnumbered="block_sparse_moe.topk")
    refuses: ClassVar[Mapping[Feature, str]] = {"fp8": "fp8 has not been tried with mixtral engines; use bf16"}

    def read(self, fields: Fields) -> ModelShape:
        fields.refuse_biases(self.name)
        fields.refuse_window("use_sliding_window", "sliding_window")
        # It always normalises, and has no key for it.
        shape = fields.shape(self.name, experts=fields.softmax_experts(is_normalized=True))
        if shape.head_dim * shape.num_heads != shape.hidden:
            fields.refuse(f"SGLang does not read head_dim {shape.head_dim} of {self.name}; choose a model without it")
        return shape

    def blocks(self, shape: ModelShape) -> Mapping[str, Block]:
        feed_forward = router(shape, block=_BLOCK) + mixture(shape, block=_BLOCK, names=("w1", "w3", "w2"))
        return {"mixture": input_norm(shape) + attention(shape) + post_norm(shape) + feed_forward}

    @property
    def models(self) -> Mapping[str, ModelShape]:
        shape = public_shape(self.name, layers=32, hidden=4096, ffn=14336, heads=32, kv_heads=8, vocab=32000)
        experts = Experts(num=8, per_token=2, is_normalized=True)
        return {"mixtral-8x7b": replace(shape, norm_eps=1e-5, experts=experts)}
