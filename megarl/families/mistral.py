"""Mistral 7B and Nemo: Llama's layers, with heads of any width. Refused: sliding windows."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import ClassVar

from megarl.families.blocks import dense_layer
from megarl.families.fields import Fields
from megarl.families.interface import Block, EngineTraits, Family, Feature
from megarl.families.shape import ModelShape, public_shape


class Mistral(Family):
    name = "mistral"
    architecture = "MistralForCausalLM"
    engine = EngineTraits(module="mistral")
    refuses: ClassVar[Mapping[Feature, str]] = {"fp8": "fp8 has not been tried with mistral engines; use bf16"}

    def read(self, fields: Fields) -> ModelShape:
        fields.refuse_biases(self.name)
        # SGLang attends to everything, transformers to the window.
        fields.refuse_window("sliding_window")
        return fields.shape(self.name)

    def blocks(self, shape: ModelShape) -> Mapping[str, Block]:
        return {"dense": dense_layer(shape)}

    @property
    def models(self) -> Mapping[str, ModelShape]:
        return {
            "mistral-7b": self._public(32, 4096, 32768),
            "mistral-nemo-12b": replace(self._public(40, 5120, 131072), max_context_tokens=131072),
        }

    def _public(self, layers: int, hidden: int, vocab: int) -> ModelShape:
        shape = public_shape(self.name, layers=layers, hidden=hidden, ffn=14336, heads=32, kv_heads=8, vocab=vocab)
        return replace(shape, norm_eps=1e-5)
