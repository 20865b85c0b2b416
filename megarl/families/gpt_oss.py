"""gpt-oss: a mixture in every layer, windows in every other, sinks, a bias in every linear layer. Files in MXFP4 are
read. Refused: `expert_tensor` above 1, critics, `context_exchange` other than `gather`.

Rows of gate and up alternate in the files, in SGLang and in the trainer, whose activation reads them so: a cut is the
same rows everywhere.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import ClassVar

from megarl.families.blocks import attention, input_norm, post_norm, same
from megarl.families.fields import Fields
from megarl.families.interface import Block, Cut, EngineTraits, Family, Feature, Param, Part, Weight
from megarl.families.shape import Experts, ModelShape, YarnScaling

_WINDOW, _FULL = "sliding_attention", "full_attention"
_LIMIT = 7.0


class GptOss(Family):
    name = "gpt_oss"
    architecture = "GptOssForCausalLM"
    engine = EngineTraits(
        module="gpt_oss",
        ties_head=False,
        options=("--attention-backend", "triton"),
        # SGLang takes attention in torch in its place, but does not know of its sinks.
        cpu_options=("--attention-backend", "intel_amx", "--disable-hybrid-swa-memory"),
        is_dequantized=True,
    )
    refuses: ClassVar[Mapping[Feature, str]] = {
        "lora": "adapters beside biases are not supported",
        "fp8": "FP8 rollouts of experts with biases are not supported",
        "critic": "SGLang has no class with one output",
    }

    def read(self, fields: Fields) -> ModelShape:
        if fields.get("attention_bias") is False:
            fields.refuse("attention_bias false is not supported; choose a model with biases")
        if fields.number("swiglu_limit", _LIMIT) != _LIMIT:
            fields.refuse(f"swiglu_limit {fields.get('swiglu_limit')} is not supported; supported is {_LIMIT}")
        quantization = fields.get("quantization_config")
        if quantization is not None and (
            not isinstance(quantization, dict) or quantization.get("quant_method") != "mxfp4"
        ):
            fields.refuse("quantization_config is not supported but for mxfp4")
        experts = Experts(
            num=fields.integer("num_local_experts"), per_token=fields.integer("num_experts_per_tok"), is_normalized=True
        )
        shape = fields.shape(self.name, has_qkv_bias=True, experts=experts)
        kinds = fields.get("layer_types") or [(_WINDOW, _FULL)[layer % 2] for layer in range(shape.num_layers)]
        if not isinstance(kinds, list) or set(kinds) - {_WINDOW, _FULL} or len(kinds) != shape.num_layers:
            fields.refuse(f"layer_types {kinds} are not supported; supported are {_WINDOW} and {_FULL}")
        near = tuple(layer for layer, kind in enumerate(kinds) if kind == _WINDOW)
        return _complete(shape, window=fields.integer("sliding_window") - 1, near=near)

    def kinds(self, shape: ModelShape) -> tuple[str, ...]:
        return tuple("window" if layer in shape.window_layers else "full" for layer in range(shape.num_layers))

    def alone(self, shape: ModelShape, kind: str) -> ModelShape:
        return replace(shape, window_layers=tuple(range(shape.num_layers)) if kind == "window" else ())

    def blocks(self, shape: ModelShape) -> Mapping[str, Block]:
        assert shape.experts is not None, f"a {self.name} without experts"
        num, hidden = shape.experts.num, shape.hidden
        layer = (
            input_norm(shape)
            + attention(shape)
            + same("self_attn.o_proj.bias", (hidden,), "self_attention.linear_proj.bias")
            + _sinks(shape)
            + post_norm(shape)
            + same("mlp.router.weight", (num, hidden), "mlp.router.weight")
            + same("mlp.router.bias", (num,), "mlp.router.bias")
            + _experts(shape)
        )
        return dict.fromkeys(self.kinds(shape), layer)

    def tiny(self, shape: ModelShape) -> ModelShape:
        near = tuple(layer for layer in range(shape.num_layers) if layer % 2 == 0)
        return _complete(shape, window=7, near=near)

    def config_json(self, shape: ModelShape) -> dict[str, object]:
        assert shape.experts is not None, f"a {self.name} without experts"
        assert shape.window is not None, f"a {self.name} without windows"
        near = set(shape.window_layers)
        return {
            **super().config_json(shape),
            "num_local_experts": shape.experts.num,
            "attention_bias": True,
            "swiglu_limit": _LIMIT,
            "sliding_window": shape.window + 1,
            "layer_types": [_WINDOW if layer in near else _FULL for layer in range(shape.num_layers)],
        }

    @property
    def models(self) -> Mapping[str, ModelShape]:
        return {"gpt-oss-20b": self._public(24, 32), "gpt-oss-120b": self._public(36, 128)}

    def _public(self, layers: int, experts: int) -> ModelShape:
        shape = ModelShape(
            family=self.name,
            num_layers=layers,
            hidden=2880,
            ffn_hidden=2880,
            num_heads=64,
            num_kv_heads=8,
            head_dim=64,
            vocab=201088,
            max_context_tokens=131072,
            norm_eps=1e-5,
            rope_theta=150000.0,
            rope_scaling=YarnScaling(factor=32.0, original_max_position=4096, truncate=False),
            has_tied_embeddings=False,
            has_qkv_bias=True,
            has_qk_norm=False,
            dtype="bfloat16",
            experts=Experts(num=experts, per_token=4, is_normalized=True),
        )
        return _complete(shape, window=127, near=tuple(range(0, layers, 2)))


def _complete(shape: ModelShape, *, window: int, near: tuple[int, ...]) -> ModelShape:
    return replace(shape, window=window, window_layers=near, has_sinks=True, has_biases=True, activation="clamped")


def _sinks(shape: ModelShape) -> Block:
    name = "self_attn.sinks"
    parts = (Part(name=name),)
    return Block(
        (Weight(name=name, shape=(shape.num_heads,)),),
        (Param(name="self_attention.core_attention.softmax_offset", parts=parts, cut=Cut.EACH),),
        (Param(name=name, parts=parts, cut=Cut.EACH, dtype="bfloat16"),),  # whatever the engine's is
    )


def _experts(shape: ModelShape) -> Block:
    width, hidden, block = shape.ffn_hidden, shape.hidden, "mlp.experts."
    extents = {
        "gate_up_proj": (2 * width, hidden),
        "gate_up_proj_bias": (2 * width,),
        "down_proj": (hidden, width),
        "down_proj_bias": (hidden,),
    }
    trained = ("linear_fc1.weight", "linear_fc1.bias", "linear_fc2.weight", "linear_fc2.bias")
    served = ("w13_weight", "w13_weight_bias", "w2_weight", "w2_weight_bias")
    cuts = (Cut.EACH, Cut.EACH, Cut.COLUMNS, Cut.WHOLE)
    parts = [(Part(name=f"{block}{{e}}.{leaf}"),) for leaf in extents]
    return Block(
        tuple(Weight(name=f"{block}{{e}}.{leaf}", shape=extent) for leaf, extent in extents.items()),
        tuple(
            Param(name=f"{block}local_experts.{{i}}.{name}", parts=part, cut=cut, is_expert=True)
            for name, part, cut in zip(trained, parts, cuts, strict=True)
        ),
        tuple(
            Param(
                name=block + name,
                parts=part,
                # The products of the ranks are summed: one of them adds the bias.
                cut=Cut.FIRST if cut is Cut.WHOLE else cut,
                is_expert=True,
                dtype="float32" if name.endswith("bias") else None,
            )
            for name, part, cut in zip(served, parts, cuts, strict=True)
        ),
    )
