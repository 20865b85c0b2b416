"""Gemma 3, models of text alone: norms before and behind each block, windows with rotary frequencies of their own.
Refused: models that see images, critics, `context_exchange` other than `gather`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import ClassVar

from megarl.families.blocks import attention, gated, input_norm, same
from megarl.families.fields import Fields
from megarl.families.interface import Block, EngineTraits, Family, Feature
from megarl.families.shape import ModelShape

_WINDOW, _FULL = "sliding_attention", "full_attention"
_PATTERN = 6


class Gemma3(Family):
    name = "gemma3_text"
    architecture = "Gemma3ForCausalLM"
    engine = EngineTraits(module="gemma3_causal", has_whole_embedding=True)
    refuses: ClassVar[Mapping[Feature, str]] = {
        "lora": "adapters before a norm are not supported",
        "fp8": "FP8 rollouts were not tried",
        "critic": "SGLang has no class with one output",
    }

    def read(self, fields: Fields) -> ModelShape:
        fields.refuse_biases(self.name)
        for key in ("attn_logit_softcapping", "final_logit_softcapping", "use_bidirectional_attention"):
            if fields.has(key):
                fields.refuse(f"{key} is not supported; choose a model without")
        if fields.get("tie_word_embeddings") is False:
            fields.refuse("tie_word_embeddings false is not supported: SGLang does not read lm_head.weight")
        if fields.get("hidden_activation") not in (None, "gelu_pytorch_tanh"):
            fields.refuse(f"hidden_activation {fields.get('hidden_activation')} is not supported")
        # transformers 5 has the frequencies of both kinds of layers in `rope_parameters`.
        rope = fields.get("rope_parameters")
        both = rope if isinstance(rope, dict) and _FULL in rope else {}
        far = {"rope_parameters": both[_FULL]} if both else {}
        shape = replace(fields, content={**fields.content, **far}).shape(self.name, has_qk_norm=True)
        near = both.get(_WINDOW, {}).get("rope_theta") or fields.number("rope_local_base_freq", 1e4)
        pattern = fields.integer("sliding_window_pattern", _PATTERN)
        kinds = fields.get("layer_types") or [
            _FULL if (layer + 1) % pattern == 0 else _WINDOW for layer in range(shape.num_layers)
        ]
        assert isinstance(kinds, list), f"{fields.source}: layer_types are {kinds}"
        return _complete(
            replace(shape, has_tied_embeddings=True),
            window=fields.integer("sliding_window") - 1,
            near=tuple(layer for layer, kind in enumerate(kinds) if kind == _WINDOW),
            theta=float(near),
            scalar=fields.number("query_pre_attn_scalar", shape.head_dim),
        )

    def kinds(self, shape: ModelShape) -> tuple[str, ...]:
        return tuple("window" if layer in shape.window_layers else "full" for layer in range(shape.num_layers))

    def alone(self, shape: ModelShape, kind: str) -> ModelShape:
        return replace(shape, window_layers=tuple(range(shape.num_layers)) if kind == "window" else ())

    def blocks(self, shape: ModelShape) -> Mapping[str, Block]:
        hidden, width = shape.hidden, (shape.hidden,)
        layer = (
            input_norm(shape)
            + attention(shape)
            + same("post_attention_layernorm.weight", width, "self_attention.linear_proj.post_layernorm.weight")
            + same("pre_feedforward_layernorm.weight", width, "pre_mlp_layernorm.weight")
            + gated("mlp.", "mlp.", hidden=hidden, width=shape.ffn_hidden)
            + same("post_feedforward_layernorm.weight", width, "mlp.linear_fc2.post_layernorm.weight")
        )
        return dict.fromkeys(self.kinds(shape), layer)

    def tiny(self, shape: ModelShape) -> ModelShape:
        near = tuple(layer for layer in range(shape.num_layers) if layer % 2 == 0)
        return _complete(shape, window=7, near=near, theta=1e4, scalar=shape.head_dim)

    def config_json(self, shape: ModelShape) -> dict[str, object]:
        assert shape.window is not None, f"a {self.name} without windows"
        assert shape.attention_scale is not None, f"a {self.name} without a scale"
        near = set(shape.window_layers)
        far = super().config_json(shape)
        return {
            **far,
            "hidden_activation": "gelu_pytorch_tanh",
            "query_pre_attn_scalar": round(shape.attention_scale**-2),  # transformers takes an integer
            "sliding_window": shape.window + 1,
            "rope_local_base_freq": shape.window_theta,
            "rope_parameters": {
                _FULL: far["rope_parameters"],
                _WINDOW: {"rope_type": "default", "rope_theta": shape.window_theta},
            },
            "layer_types": [_WINDOW if layer in near else _FULL for layer in range(shape.num_layers)],
        }

    @property
    def models(self) -> Mapping[str, ModelShape]:
        shape = ModelShape(
            family=self.name,
            num_layers=26,
            hidden=1152,
            ffn_hidden=6912,
            num_heads=4,
            num_kv_heads=1,
            head_dim=256,
            vocab=262144,
            max_context_tokens=32768,
            norm_eps=1e-6,
            rope_theta=1e6,
            rope_scaling=None,
            has_tied_embeddings=True,
            has_qkv_bias=False,
            has_qk_norm=True,
            dtype="bfloat16",
        )
        near = tuple(layer for layer in range(26) if (layer + 1) % _PATTERN)
        return {"gemma-3-1b": _complete(shape, window=511, near=near, theta=1e4, scalar=256)}


def _complete(shape: ModelShape, *, window: int, near: tuple[int, ...], theta: float, scalar: float) -> ModelShape:
    return replace(
        shape,
        window=window,
        window_layers=near,
        window_theta=theta,
        attention_scale=scalar**-0.5,
        activation="gelu_tanh",
        has_centred_norms=True,
        has_post_norms=True,
        embedding_scale=shape.hidden**0.5,
    )
