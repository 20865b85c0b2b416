"""GLM-4.5 and 4.6: dense layers, then mixtures with sigmoid routers, a bias and a shared expert; half of a head turns.
Refused: `n_group` above 1, `norm_topk_prob: false`.

Layers for the prediction of further tokens (`num_nextn_predict_layers`) are neither trained nor published, and a saved
model has none.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import ClassVar

from megarl.families.blocks import attention, dense_and_mixture, input_norm, post_norm
from megarl.families.fields import Fields
from megarl.families.interface import Block, EngineTraits, Family, Feature
from megarl.families.shape import ModelShape, public_shape, sigmoid_experts

_ROPE = {"rope_type": "default"}


class Glm4Moe(Family):
    name = "glm4_moe"
    architecture = "Glm4MoeForCausalLM"
    # Fused, the shared expert would be one more of the routed ones.
    engine = EngineTraits(module="glm4_moe", ties_head=False, options=("--disable-shared-experts-fusion",))
    refuses: ClassVar[Mapping[Feature, str]] = {
        "fp8": "fp8 has not been tried with glm4_moe engines; use bf16",
        "critic": "transformers has no glm4_moe with one output per token; choose grpo",
    }

    def read(self, fields: Fields) -> ModelShape:
        if (num_groups := fields.integer("n_group", 1)) != 1:
            fields.refuse(f"n_group {num_groups} is not supported for {self.name}; choose a model with one group")
        shape = fields.shape(
            self.name,
            has_qkv_bias=fields.has("attention_bias"),
            has_qk_norm=fields.has("use_qk_norm"),
            experts=fields.sigmoid_experts(num_dense=1),
            ffn="moe_intermediate_size",
        )
        partial = fields.rope.get("partial_rotary_factor", fields.number("partial_rotary_factor", 0.5))
        return replace(
            shape,
            dense_hidden=fields.integer("intermediate_size"),
            rotary_dim=int(shape.head_dim * float(str(partial))),
        )

    def blocks(self, shape: ModelShape) -> Mapping[str, Block]:
        base = input_norm(shape) + attention(shape) + post_norm(shape)
        return dense_and_mixture(shape, base, router_dtype="float32")

    def options(self, shape: ModelShape) -> dict[str, object]:
        return {"moe_router_dtype": "fp32"}  # as in SGLang

    def tiny(self, shape: ModelShape) -> ModelShape:
        assert shape.experts is not None, f"a {self.name} without experts"
        # At least one layer of each kind, where there are two.
        num_dense, shared = min(1, shape.experts.num_dense_layers), shape.ffn_hidden if shape.experts.shared else 0
        experts = replace(shape.experts, num_dense_layers=num_dense, shared=shared)
        return replace(shape, experts=experts, rotary_dim=shape.head_dim // 2)

    def config_json(self, shape: ModelShape) -> dict[str, object]:
        experts, config = shape.experts, super().config_json(shape)
        assert experts is not None, f"a {self.name} without experts"
        partial = (shape.rotary_dim or shape.head_dim) / shape.head_dim
        return config | {
            "intermediate_size": shape.dense_hidden,
            "n_routed_experts": experts.num,
            "n_shared_experts": experts.shared // shape.ffn_hidden,
            "first_k_dense_replace": experts.num_dense_layers,
            "routed_scaling_factor": experts.scale,
            "norm_topk_prob": True,
            "n_group": 1,
            "topk_group": 1,
            "attention_bias": shape.has_qkv_bias,
            "use_qk_norm": shape.has_qk_norm,
            "partial_rotary_factor": partial,
            "rope_parameters": {**_ROPE, "rope_theta": shape.rope_theta, "partial_rotary_factor": partial},
        }

    @property
    def models(self) -> Mapping[str, ModelShape]:
        air = self._public(46, 4096, 1408, num_experts=128, num_dense=1, dense=10944, scale=1.0)
        large = self._public(92, 5120, 1536, num_experts=160, num_dense=3, dense=12288, scale=2.5)
        large = replace(large, has_qk_norm=True)
        return {"glm-4.5-air": air, "glm-4.5": large, "glm-4.6": replace(large, max_context_tokens=202752)}

    def _public(
        self, layers: int, hidden: int, ffn: int, *, num_experts: int, num_dense: int, dense: int, scale: float
    ) -> ModelShape:
        shape = public_shape(
            self.name, layers=layers, hidden=hidden, ffn=ffn, heads=96, kv_heads=8, vocab=151552, has_qkv_bias=True
        )
        experts = sigmoid_experts(num=num_experts, per_token=8, shared=ffn, scale=scale, num_dense=num_dense)
        return replace(
            shape, max_context_tokens=131072, norm_eps=1e-5, experts=experts, dense_hidden=dense, rotary_dim=64
        )
