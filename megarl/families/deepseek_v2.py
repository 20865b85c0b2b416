"""DeepSeek-V2-Lite: DeepSeek-V3's layers with softmax routers. Refused: groups of experts (V2 itself),
`norm_topk_prob`, critics, `context_exchange` other than `gather`.

With YaRN transformers leaves out a factor of the logits of attention, which DeepSeek's own code and SGLang have, and
so has the trainer.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import ClassVar

from megarl.families.deepseek_v3 import DeepseekV3, with_latent
from megarl.families.fields import Fields
from megarl.families.shape import Experts, LatentWidths, ModelShape, YarnScaling, public_shape


class DeepseekV2(DeepseekV3):
    name = "deepseek_v2"
    architecture = "DeepseekV2ForCausalLM"
    router: ClassVar[Mapping[str, str]] = {"topk_method": "greedy", "scoring_func": "softmax"}

    def _experts(self, fields: Fields) -> Experts:
        if fields.has("norm_topk_prob"):
            fields.refuse("norm_topk_prob is not supported for deepseek_v2: transformers does not read it")
        return _experts(
            num=fields.integer("n_routed_experts"),
            per_token=fields.integer("num_experts_per_tok"),
            shared=fields.integer("n_shared_experts", 0) * fields.integer("moe_intermediate_size"),
            scale=fields.number("routed_scaling_factor", 1.0),
            num_dense=fields.integer("first_k_dense_replace", 0),
        )

    @property
    def models(self) -> Mapping[str, ModelShape]:
        widths = LatentWidths(query_rank=None, key_rank=512, plain=128, rotary=64, value=128)
        yarn = YarnScaling(factor=40.0, original_max_position=4096, mscale=0.707, mscale_all_dim=0.707)
        lite = public_shape(self.name, layers=27, hidden=2048, ffn=1408, heads=16, kv_heads=16, vocab=102400)
        lite = replace(lite, max_context_tokens=163840, rope_theta=1e4, rope_scaling=yarn)
        lite = replace(lite, experts=_experts(num=64, per_token=6, shared=2816, scale=1.0, num_dense=1))
        return {"deepseek-v2-lite": with_latent(lite, widths, dense=10944)}


def _experts(*, num: int, per_token: int, shared: int, scale: float, num_dense: int) -> Experts:
    return Experts(
        num=num,
        per_token=per_token,
        is_normalized=False,
        shared=shared,
        is_shared_gated=False,
        scale=scale,
        num_dense_layers=num_dense,
    )
