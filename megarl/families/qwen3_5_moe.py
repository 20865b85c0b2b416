"""Qwen3.5 and 3.6 mixtures, as released: the text of models that see images, with experts and a gated shared expert in
every layer. Files may stack the experts; a saved model names each. Tensors of images are not read, as in `qwen3_5`.
Refused: layers without experts, adapters, FP8, critics, `context_exchange` other than `gather`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from megarl.families.fields import Fields
from megarl.families.qwen3_5 import ENGINE, ROOT, VOCAB, around_text, text_fields
from megarl.families.qwen3_5_moe_text import Qwen35MoeText
from megarl.families.qwen3_next import public_hybrid
from megarl.families.shape import Experts, ModelShape


class Qwen35Moe(Qwen35MoeText):
    name = "qwen3_5_moe"
    architecture = "Qwen3_5MoeForConditionalGeneration"
    engine = ENGINE
    root = ROOT

    def read(self, fields: Fields) -> ModelShape:
        return replace(super().read(text_fields(fields)), family=self.name)

    def config_json(self, shape: ModelShape) -> dict[str, object]:
        return around_text(self, Qwen35MoeText.name, super().config_json(shape))

    @property
    def models(self) -> Mapping[str, ModelShape]:
        small = self._public(layers=40, hidden=2048, ffn=512, heads=16, value_heads=32, experts=256, per_token=8)
        return {
            "qwen3.5-35b-a3b": small,
            "qwen3.6-35b-a3b": small,
            "qwen3.5-122b-a10b": self._public(
                layers=48, hidden=3072, ffn=1024, heads=32, value_heads=64, experts=256, per_token=8
            ),
            "qwen3.5-397b-a17b": self._public(
                layers=60, hidden=4096, ffn=1024, heads=32, value_heads=64, experts=512, per_token=10
            ),
        }

    def _public(
        self, *, layers: int, hidden: int, ffn: int, heads: int, value_heads: int, experts: int, per_token: int
    ) -> ModelShape:
        shape = public_hybrid(
            self.name,
            layers=layers,
            hidden=hidden,
            ffn=ffn,
            heads=heads,
            kv_heads=2,
            vocab=VOCAB,
            value_heads=value_heads,
        )
        return replace(shape, experts=Experts(num=experts, per_token=per_token, is_normalized=True, shared=ffn))
