"""Llama 3 and models like it, such as SmolLM2. Refused: `attention_bias`, `mlp_bias`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from megarl.families.blocks import dense_layer
from megarl.families.fields import Fields
from megarl.families.interface import Block, EngineTraits, Family
from megarl.families.shape import ModelShape, RopeScaling, public_shape


class Llama(Family):
    name = "llama"
    architecture = "LlamaForCausalLM"
    engine = EngineTraits(module="llama", has_cache_scales=True)

    def read(self, fields: Fields) -> ModelShape:
        # With `attention_bias` transformers has a bias on o_proj as well.
        fields.refuse_biases(self.name)
        fields.refuse_window("use_sliding_window")
        return fields.shape(self.name)

    def blocks(self, shape: ModelShape) -> Mapping[str, Block]:
        return {"dense": dense_layer(shape)}

    @property
    def models(self) -> Mapping[str, ModelShape]:
        small = replace(
            self._llama3(30, 576, 1536, 9),
            head_dim=64,
            num_kv_heads=3,
            vocab=49152,
            max_context_tokens=8192,
            rope_theta=1e5,
            rope_scaling=None,
            has_tied_embeddings=True,
        )
        return {
            "llama-3.1-8b": self._llama3(32, 4096, 14336, 32),
            "llama-3.1-70b": self._llama3(80, 8192, 28672, 64),
            "llama-3.1-405b": self._llama3(126, 16384, 53248, 128),
            "smollm2-135m": small,
        }

    def _llama3(self, layers: int, hidden: int, ffn: int, heads: int) -> ModelShape:
        rope = RopeScaling(factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_position=8192)
        shape = public_shape(self.name, layers=layers, hidden=hidden, ffn=ffn, heads=heads, kv_heads=8, vocab=128256)
        return replace(shape, max_context_tokens=131072, norm_eps=1e-5, rope_theta=5e5, rope_scaling=rope)
