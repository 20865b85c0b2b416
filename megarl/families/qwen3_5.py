"""Qwen3.5 and 3.6 dense, as released: the text of models that see images. Tensors of images (`model.visual.*`) are not
read, engines have none, and a saved model has none of them. Refused: adapters, FP8, critics, `context_exchange` other
than `gather`.

Rows of positions are equal where there is text alone, so that its rotary positions (mRoPE) are the usual ones.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from megarl.families.fields import Fields
from megarl.families.interface import EngineTraits, Family
from megarl.families.qwen3_5_text import Qwen35Text
from megarl.families.qwen3_next import ENGINE_OPTIONS, public_hybrid
from megarl.families.shape import ModelShape

ROOT = "model.language_model."
ENGINE = EngineTraits(module="qwen3_5", options=ENGINE_OPTIONS, cpu_options=ENGINE_OPTIONS, is_text_alone=True)
VOCAB = 248320


class Qwen35(Qwen35Text):
    name = "qwen3_5"
    architecture = "Qwen3_5ForConditionalGeneration"
    engine = ENGINE
    root = ROOT

    def read(self, fields: Fields) -> ModelShape:
        return replace(super().read(text_fields(fields)), family=self.name)

    def config_json(self, shape: ModelShape) -> dict[str, object]:
        return around_text(self, Qwen35Text.name, super().config_json(shape))

    @property
    def models(self) -> Mapping[str, ModelShape]:
        sizes = {
            "qwen3.5-0.8b": (24, 1024, 3584, 8, 2, 16),
            "qwen3.5-2b": (24, 2048, 6144, 8, 2, 16),
            "qwen3.5-4b": (32, 2560, 9216, 16, 4, 32),
            "qwen3.5-9b": (32, 4096, 12288, 16, 4, 32),
            "qwen3.5-27b": (64, 5120, 17408, 24, 4, 48),
        }
        return {
            name: public_hybrid(
                self.name,
                layers=layers,
                hidden=hidden,
                ffn=ffn,
                heads=heads,
                kv_heads=kv_heads,
                vocab=VOCAB,
                value_heads=value_heads,
                is_tied=hidden < 4096,
            )
            for name, (layers, hidden, ffn, heads, kv_heads, value_heads) in sizes.items()
        }


def text_fields(fields: Fields) -> Fields:
    """Return the fields of the text; whether embeddings are tied is said beside them."""
    text = fields.get("text_config")
    if not isinstance(text, dict):
        fields.refuse("text_config is missing")
    outside = ("tie_word_embeddings", "dtype", "torch_dtype")
    content = {**text, **{key: fields.get(key) for key in outside if fields.get(key) is not None}}
    return replace(fields, content=content)


def around_text(family: Family, text_name: str, text: dict[str, object]) -> dict[str, object]:
    """Return a config.json around that of the text; `text_name` is the family of models without images."""
    outside = ("architectures", "dtype", "tie_word_embeddings", "bos_token_id", "eos_token_id", "pad_token_id")
    return {
        **{key: text[key] for key in outside},
        "model_type": family.name,
        "text_config": {**text, "model_type": text_name},
        "vision_config": {"model_type": f"{family.name}_vision"},
        "language_model_only": True,
    }
