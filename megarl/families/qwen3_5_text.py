"""Qwen3.5 dense, saved without what sees images: Qwen3-Next's layers with a dense block in each. Refused: adapters,
FP8, critics, `context_exchange` other than `gather`.

Files have four projections of the hidden state where Qwen3-Next has two; engines join them, the trainer joins all.
"""

from __future__ import annotations

from collections.abc import Mapping

from megarl.families.blocks import gated
from megarl.families.fields import Fields
from megarl.families.interface import Block, Cut, EngineTraits, Param, Part, Weight
from megarl.families.qwen3_next import ENGINE_OPTIONS, Qwen3Next, delta_rest, delta_widths, projection
from megarl.families.shape import ModelShape


class Qwen35Text(Qwen3Next):
    name = "qwen3_5_text"
    architecture = "Qwen3_5ForCausalLM"
    engine = EngineTraits(module="qwen3_5_text", options=ENGINE_OPTIONS, cpu_options=ENGINE_OPTIONS)

    def read(self, fields: Fields) -> ModelShape:
        return self._complete(fields, fields.shape(self.name))

    def _complete(self, fields: Fields, shape: ModelShape) -> ModelShape:
        if fields.get("output_gate_type") not in (None, "silu", "swish"):
            fields.refuse(f"output_gate_type {fields.get('output_gate_type')} is not supported; supported is silu")
        return super()._complete(fields, shape)

    def _feed_forward(self, shape: ModelShape) -> Block:
        return gated("mlp.", "mlp.", hidden=shape.hidden, width=shape.ffn_hidden)

    def _delta_net(self, shape: ModelShape) -> Block:
        """Return a delta net whose files have all queries, all keys and so on, like SGLang's."""
        widths, a = delta_widths(shape), "linear_attn."
        rows = {
            f"{a}in_proj_qkv.weight": widths.convolved,
            f"{a}in_proj_z.weight": widths.values,
            f"{a}in_proj_b.weight": widths.value_heads,
            f"{a}in_proj_a.weight": widths.value_heads,
        }
        convolved, gate, strength, speed = rows
        qkvz = (
            Part(name=convolved, num_rows=widths.keys),
            Part(name=convolved, start=widths.keys, num_rows=widths.keys),
            Part(name=convolved, start=2 * widths.keys),
            Part(name=gate),
        )
        ba = (Part(name=strength), Part(name=speed))
        served = (
            Param(name=f"{a}in_proj_qkvz.weight", parts=qkvz, cut=Cut.EACH),
            Param(name=f"{a}in_proj_ba.weight", parts=ba, cut=Cut.EACH),
        )
        weights = tuple(Weight(name=name, shape=(count, shape.hidden)) for name, count in rows.items())
        return Block(weights, (projection(qkvz + ba, widths),), served) + delta_rest(shape)

    @property
    def models(self) -> Mapping[str, ModelShape]:
        return {}
