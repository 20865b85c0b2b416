"""Qwen2.5-VL: Qwen2.5 that sees images, by a tower that is not trained. Refused: adapters, FP8, critics, sliding
windows.

Tokens of an image have a time, a row and a column, each of which turns frequencies of its own (mRoPE). Released files
have the fields of the text beside those of images; transformers writes them apart.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import ClassVar

from megarl.families.blocks import dense_layer
from megarl.families.fields import Fields
from megarl.families.interface import Block, EngineTraits, Family, Feature
from megarl.families.shape import ModelShape, VisionShape, public_shape

REFUSES: Mapping[Feature, str] = {
    "fp8": "not tried with images; set precision and rollout_precision to bf16",
    "lora": "adapters were not tried with images; remove model.lora",
    "critic": "a critic was not tried with images; choose an algorithm without one",
}
TOWER = ("visual.", "model.visual.")
"""Beginnings of its names: in released files and in those that transformers 5 writes, or the other way round."""
UNPLANNED = ("visual.",)
_PATCH_WIDTH = 1176
"""Numbers of a patch in SGLang's class: 14 x 14 pixels in three colours, twice."""
_TINY = {"num_layers": 2, "hidden": 32, "ffn": 64, "heads": 2}


class Qwen25Vl(Family):
    name = "qwen2_5_vl"
    architecture = "Qwen2_5_VLForConditionalGeneration"
    engine = EngineTraits(module="qwen2_5_vl", unplanned=UNPLANNED)
    kept = TOWER
    refuses: ClassVar[Mapping[Feature, str]] = REFUSES

    def read(self, fields: Fields) -> ModelShape:
        text = text_fields(fields)
        text.refuse_window("use_sliding_window")
        if text.rope.get("mrope_interleaved"):
            fields.refuse("mrope_interleaved is not supported for Qwen2.5-VL; it is Qwen3-VL's")
        shape = text.shape(self.name, has_qkv_bias=True)
        return replace(shape, vision=self._vision(fields, text))

    def _vision(self, fields: Fields, text: Fields) -> VisionShape:
        own = vision_fields(fields)
        vision = read_vision(fields, own, text, ffn="intermediate_size", is_gated=True)
        if vision.patch_width != _PATCH_WIDTH:
            fields.refuse(f"patches of {vision.patch_width} numbers are not supported: SGLang takes them for outputs")
        whole = own.get("fullatt_block_indexes")
        layers = tuple(whole) if isinstance(whole, list) else ()
        return replace(vision, window=own.integer("window_size", 112), whole_layers=layers)

    def blocks(self, shape: ModelShape) -> Mapping[str, Block]:
        return {"dense": dense_layer(shape)}

    def tiny(self, shape: ModelShape) -> ModelShape:
        vision = replace(tiny_vision(shape), whole_layers=(1,), window=56)
        return replace(shape, vision=vision)

    def config_json(self, shape: ModelShape) -> dict[str, object]:
        vision = vision_of(shape)
        own = {"window_size": vision.window, "fullatt_block_indexes": list(vision.whole_layers)}
        return around_images(self, shape, super().config_json(shape), own)

    @property
    def models(self) -> Mapping[str, ModelShape]:
        return {
            "qwen2.5-vl-3b": self._public(36, 2048, 11008, 16, 2, vocab=151936, is_tied=True),
            "qwen2.5-vl-7b": self._public(28, 3584, 18944, 28, 4, vocab=152064),
            "qwen2.5-vl-32b": self._public(64, 5120, 27648, 40, 8, vocab=152064, tower_ffn=3456),
            "qwen2.5-vl-72b": self._public(80, 8192, 29568, 64, 8, vocab=152064, tower_ffn=3456),
        }

    def _public(
        self,
        layers: int,
        hidden: int,
        ffn: int,
        heads: int,
        kv_heads: int,
        *,
        vocab: int,
        is_tied: bool = False,
        tower_ffn: int = 3420,
    ) -> ModelShape:
        shape = public_shape(
            self.name,
            layers=layers,
            hidden=hidden,
            ffn=ffn,
            heads=heads,
            kv_heads=kv_heads,
            vocab=vocab,
            is_tied=is_tied,
            has_qkv_bias=True,
        )
        vision = replace(PUBLIC_TOWER, ffn=tower_ffn)
        return replace(shape, max_context_tokens=128000, vision=vision)


PUBLIC_TOWER = VisionShape(
    num_layers=32,
    hidden=1280,
    ffn=3420,
    heads=16,
    patch=14,
    merge=2,
    frames=2,
    is_gated=True,
    image_token=151655,
    video_token=151656,
    start_token=151652,
    end_token=151653,
    sections=(16, 24, 24),
    window=112,
    whole_layers=(7, 15, 23, 31),
)


def text_fields(fields: Fields) -> Fields:
    """Return the fields of the text, which are apart or among those of the whole; mRoPE has the usual frequencies."""
    text = fields.get("text_config")
    content = {**fields.content, **(text if isinstance(text, dict) else {})}
    # The outer one is that of the released files; transformers writes both.
    for key in ("tie_word_embeddings", "dtype", "torch_dtype"):
        if fields.get(key) is not None:
            content[key] = fields.get(key)
    for key in ("rope_parameters", "rope_scaling"):
        rope = content.get(key)
        if isinstance(rope, dict) and "mrope" in (rope.get("type"), rope.get("rope_type")):
            content[key] = {**rope, "type": "default", "rope_type": "default"}
    return replace(fields, content=content)


def vision_fields(fields: Fields) -> Fields:
    vision = fields.get("vision_config")
    if not isinstance(vision, dict):
        fields.refuse("vision_config is missing")
    return replace(fields, content=vision)


def read_vision(fields: Fields, own: Fields, text: Fields, *, ffn: str, is_gated: bool) -> VisionShape:
    """Return what towers of the Qwen family have in common."""
    sections = text.rope.get("mrope_section")
    if not isinstance(sections, list) or len(sections) != 3:
        fields.refuse("mrope_section is missing: tokens of images would have no rows and columns")
    head_dim = text.integer("head_dim", text.integer("hidden_size") // text.integer("num_attention_heads"))
    if sum(sections) != head_dim // 2:
        fields.refuse(f"mrope_section {sections} does not add up to {head_dim // 2}, half of a head")
    channels = own.integer("in_channels", own.integer("in_chans", 3))
    if channels != 3:
        fields.refuse(f"images of {channels} channels are not supported; supported are 3")
    out = own.integer("out_hidden_size")
    if out != text.integer("hidden_size"):
        fields.refuse(f"out_hidden_size {out} of the tower is not hidden_size {text.integer('hidden_size')}")
    return VisionShape(
        num_layers=own.integer("depth"),
        hidden=own.integer("hidden_size"),
        ffn=own.integer(ffn),
        heads=own.integer("num_heads"),
        patch=own.integer("patch_size", 14),
        merge=own.integer("spatial_merge_size", 2),
        frames=own.integer("temporal_patch_size", 2),
        is_gated=is_gated,
        image_token=fields.integer("image_token_id"),
        video_token=fields.integer("video_token_id"),
        start_token=fields.integer("vision_start_token_id"),
        end_token=fields.integer("vision_end_token_id"),
        sections=(int(sections[0]), int(sections[1]), int(sections[2])),
        is_interleaved=bool(text.rope.get("mrope_interleaved")),
    )


def vision_of(shape: ModelShape) -> VisionShape:
    assert shape.vision is not None, f"a {shape.family} that sees nothing"
    return shape.vision


def tiny_vision(shape: ModelShape) -> VisionShape:
    """Return a small tower for a shape that was made small, whose tokens are the last of the vocabulary."""
    pairs, last = shape.head_dim // 2, shape.vocab - 1
    rows = pairs * 3 // 8
    return replace(
        vision_of(shape),
        sections=(pairs - 2 * rows, rows, rows),
        image_token=last - 3,
        video_token=last - 2,
        start_token=last - 1,
        end_token=last,
        num_layers=_TINY["num_layers"],
        hidden=_TINY["hidden"],
        ffn=_TINY["ffn"],
        heads=_TINY["heads"],
    )


def around_images(
    family: Family, shape: ModelShape, text: dict[str, object], tower: Mapping[str, object]
) -> dict[str, object]:
    """Return a config.json around that of the text, with the fields that all towers have and those of this one."""
    vision, rope = vision_of(shape), text["rope_parameters"]
    assert isinstance(rope, dict), f"rope parameters are {rope}"
    rope = {**rope, "mrope_section": list(vision.sections)}
    rope |= {"mrope_interleaved": True} if vision.is_interleaved else {}
    outside = ("architectures", "dtype", "tie_word_embeddings", "bos_token_id", "eos_token_id", "pad_token_id")
    return {
        **{key: text[key] for key in outside},
        "model_type": family.name,
        "image_token_id": vision.image_token,
        "video_token_id": vision.video_token,
        "vision_start_token_id": vision.start_token,
        "vision_end_token_id": vision.end_token,
        "text_config": {**text, "rope_parameters": rope, "model_type": f"{family.name}_text"},
        "vision_config": {
            "model_type": f"{family.name}_vision",
            "depth": vision.num_layers,
            "hidden_size": vision.hidden,
            "intermediate_size": vision.ffn,
            "num_heads": vision.heads,
            "patch_size": vision.patch,
            "spatial_merge_size": vision.merge,
            "temporal_patch_size": vision.frames,
            "in_channels": 3,
            "out_hidden_size": shape.hidden,
            **tower,
        },
    }
