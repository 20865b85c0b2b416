"""Qwen3-VL: Qwen3 that sees images, by a tower that is not trained. Refused: adapters, FP8, critics, pipeline stages
that end within the first layers.

The tower also has outputs of earlier layers, which are added behind the first layers of the text (deepstack).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import ClassVar

from megarl.families.blocks import dense_layer
from megarl.families.fields import Fields
from megarl.families.interface import Block, EngineTraits, Family, Feature
from megarl.families.qwen2_5_vl import (
    PUBLIC_TOWER,
    REFUSES,
    TOWER,
    UNPLANNED,
    around_images,
    read_vision,
    text_fields,
    tiny_vision,
    vision_fields,
    vision_of,
)
from megarl.families.shape import ModelShape, public_shape


class Qwen3Vl(Family):
    name = "qwen3_vl"
    architecture = "Qwen3VLForConditionalGeneration"
    engine = EngineTraits(module="qwen3_vl", unplanned=UNPLANNED)
    kept = TOWER
    root = "model.language_model."
    refuses: ClassVar[Mapping[Feature, str]] = REFUSES

    def read(self, fields: Fields) -> ModelShape:
        text, own = text_fields(fields), vision_fields(fields)
        text.refuse_biases(self.name)
        if not text.rope.get("mrope_interleaved"):
            fields.refuse("mrope_interleaved is not true: SGLang would turn other frequencies than transformers")
        vision = read_vision(fields, own, text, ffn="intermediate_size", is_gated=False)
        deep = own.get("deepstack_visual_indexes")
        layers = tuple(deep) if isinstance(deep, list) else ()
        vision = replace(vision, num_positions=own.integer("num_position_embeddings"), deep_layers=layers)
        return replace(text.shape(self.name, has_qk_norm=True), vision=vision)

    def blocks(self, shape: ModelShape) -> Mapping[str, Block]:
        return {"dense": dense_layer(shape)}

    def tiny(self, shape: ModelShape) -> ModelShape:
        return replace(shape, vision=replace(tiny_vision(shape), num_positions=16, deep_layers=(0,)))

    def config_json(self, shape: ModelShape) -> dict[str, object]:
        vision = vision_of(shape)
        own: dict[str, object] = {"num_position_embeddings": vision.num_positions}
        own |= {"deepstack_visual_indexes": list(vision.deep_layers)}
        return around_images(self, shape, super().config_json(shape), own)

    @property
    def models(self) -> Mapping[str, ModelShape]:
        return {
            "qwen3-vl-2b": self._public(28, 2048, 6144, 16, tower=(24, 1024, 4096), is_tied=True),
            "qwen3-vl-4b": self._public(36, 2560, 9728, 32, tower=(24, 1024, 4096), is_tied=True),
            "qwen3-vl-8b": self._public(36, 4096, 12288, 32, tower=(27, 1152, 4304)),
            "qwen3-vl-32b": self._public(64, 5120, 25600, 64, tower=(27, 1152, 4304)),
        }

    def _public(
        self, layers: int, hidden: int, ffn: int, heads: int, *, tower: tuple[int, int, int], is_tied: bool = False
    ) -> ModelShape:
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
        depth, width, tower_ffn = tower
        vision = replace(
            PUBLIC_TOWER,
            num_layers=depth,
            hidden=width,
            ffn=tower_ffn,
            patch=16,
            is_gated=False,
            sections=(24, 20, 20),
            is_interleaved=True,
            window=0,
            whole_layers=(),
            num_positions=2304,
            deep_layers=(5, 11, 17) if depth == 24 else (8, 16, 24),
        )
        return replace(shape, max_context_tokens=262144, rope_theta=5e6, vision=vision)
