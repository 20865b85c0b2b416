"""Qwen2 and Qwen2.5: biases on queries, keys and values. Refused: sliding windows."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from megarl.families.blocks import dense_layer
from megarl.families.fields import Fields
from megarl.families.interface import Block, EngineTraits, Family
from megarl.families.shape import ModelShape, public_shape


class Qwen2(Family):
    name = "qwen2"
    architecture = "Qwen2ForCausalLM"
    engine = EngineTraits(module="qwen2", classifier="qwen2_classification", has_cache_scales=True)

    def read(self, fields: Fields) -> ModelShape:
        fields.refuse_window("use_sliding_window")
        return fields.shape(self.name, has_qkv_bias=True)

    def blocks(self, shape: ModelShape) -> Mapping[str, Block]:
        return {"dense": dense_layer(shape)}

    @property
    def models(self) -> Mapping[str, ModelShape]:
        return {
            "qwen2.5-0.5b": self._public(24, 896, 4864, 14, 2, is_tied=True),
            "qwen2.5-1.5b": self._public(28, 1536, 8960, 12, 2, is_tied=True),
            "qwen2.5-3b": self._public(36, 2048, 11008, 16, 2, is_tied=True),
            "qwen2.5-7b": self._public(28, 3584, 18944, 28, 4),
            "qwen2.5-14b": self._public(48, 5120, 13824, 40, 8),
            "qwen2.5-32b": self._public(64, 5120, 27648, 40, 8),
            "qwen2.5-72b": self._public(80, 8192, 29568, 64, 8),
        }

    def _public(
        self, layers: int, hidden: int, ffn: int, heads: int, kv_heads: int, *, is_tied: bool = False
    ) -> ModelShape:
        shape = public_shape(
            self.name,
            layers=layers,
            hidden=hidden,
            ffn=ffn,
            heads=heads,
            kv_heads=kv_heads,
            # The releases that tie their embeddings are those with the smaller vocabulary.
            vocab=151936 if is_tied else 152064,
            is_tied=is_tied,
            has_qkv_bias=True,
        )
        return replace(shape, head_dim=hidden // heads)
