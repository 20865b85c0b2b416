"""Qwen3: norms of queries and keys, heads of any width. Refused: `attention_bias`, sliding windows."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from megarl.families.blocks import dense_layer
from megarl.families.fields import Fields
from megarl.families.interface import Block, EngineTraits, Family
from megarl.families.shape import ModelShape, YarnScaling, public_shape


class Qwen3(Family):
    name = "qwen3"
    architecture = "Qwen3ForCausalLM"
    engine = EngineTraits(module="qwen3", classifier="qwen3_classification")

    def read(self, fields: Fields) -> ModelShape:
        # With `attention_bias` transformers has a bias on o_proj as well.
        fields.refuse_biases(self.name)
        fields.refuse_window("use_sliding_window")
        return fields.shape(self.name, has_qk_norm=True)

    def blocks(self, shape: ModelShape) -> Mapping[str, Block]:
        return {"dense": dense_layer(shape)}

    @property
    def models(self) -> Mapping[str, ModelShape]:
        large = self._public(64, 5120, 25600, 64)
        yarn = YarnScaling(factor=4.0, original_max_position=32768)
        return {
            "qwen3-0.6b": self._public(28, 1024, 3072, 16, is_tied=True),
            "qwen3-1.7b": self._public(28, 2048, 6144, 16, is_tied=True),
            "qwen3-4b": self._public(36, 2560, 9728, 32, is_tied=True),
            "qwen3-8b": self._public(36, 4096, 12288, 32),
            "qwen3-14b": self._public(40, 5120, 17408, 40),
            "qwen3-32b": large,
            "qwen3-32b-128k": replace(large, max_context_tokens=131072, rope_scaling=yarn),
        }

    def _public(self, layers: int, hidden: int, ffn: int, heads: int, *, is_tied: bool = False) -> ModelShape:
        shape = public_shape(
            self.name,
            layers=layers,
            hidden=hidden,
            ffn=ffn,
            heads=heads,
            kv_heads=8,
            vocab=151936,
            is_tied=is_tied,
            has_qk_norm=True,
        )
        return replace(shape, max_context_tokens=40960)
