"""Qwen3-Next: gated delta nets in three of four layers, attention with an output gate in the others; a mixture with a
gated shared expert in every layer. Refused: layers without experts, adapters, FP8, critics, `context_exchange` other
than `gather`.

The layer that predicts a further token (`mtp.*`) is neither trained nor served nor saved.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import ClassVar

from megarl.families.blocks import gated, input_norm, mixture, post_norm, router, same
from megarl.families.fields import Fields
from megarl.families.interface import (
    AttentionCost,
    Block,
    Cut,
    EngineTraits,
    Family,
    Feature,
    Param,
    Part,
    Recurrence,
    Weight,
)
from megarl.families.shape import DeltaWidths, Experts, ModelShape, public_shape

_DELTA, _FULL = "linear_attention", "full_attention"
_INTERVAL = 4
ENGINE_OPTIONS = ("--disable-shared-experts-fusion", "--disable-radix-cache")
"""Fused, the shared expert would be one more of the routed ones. With a cache of prefixes SGLang has several states for
each request, which take memory that the plan does not grant."""
_CHUNK = 64
"""Tokens that a delta net computes at a time; engines have as many."""
_STATE_BYTES, _CONVOLVED_BYTES = 4, 2
"""Sizes of an element of an engine's states, and of the channels that its convolutions have read."""


class Qwen3Next(Family):
    name = "qwen3_next"
    architecture = "Qwen3NextForCausalLM"
    engine = EngineTraits(module="qwen3_next", ties_head=False, options=ENGINE_OPTIONS, cpu_options=ENGINE_OPTIONS)
    refuses: ClassVar[Mapping[Feature, str]] = {
        "lora": "adapters beside gated delta nets are not supported",
        "fp8": "FP8 rollouts of gated delta nets were not tried",
        "critic": "SGLang has no class with one output",
    }

    def read(self, fields: Fields) -> ModelShape:
        experts = fields.softmax_experts(
            is_normalized=fields.get("norm_topk_prob") is not False,
            shared=fields.integer("shared_expert_intermediate_size"),
        )
        return self._complete(fields, fields.shape(self.name, experts=experts, ffn="moe_intermediate_size"))

    def _complete(self, fields: Fields, shape: ModelShape) -> ModelShape:
        fields.refuse_biases(self.name)
        if fields.get("attn_output_gate") is False:
            fields.refuse("attn_output_gate false is not supported; choose a model with it")
        interval = fields.integer("full_attention_interval", _INTERVAL)
        pattern = [_DELTA if (layer + 1) % interval else _FULL for layer in range(shape.num_layers)]
        # SGLang reads the interval alone.
        if fields.get("layer_types") not in (None, pattern):
            fields.refuse(f"layer_types are not one {_FULL} in {interval} (full_attention_interval); not supported")
        partial = fields.rope.get("partial_rotary_factor", fields.number("partial_rotary_factor", 0.25))
        widths = DeltaWidths(
            key_heads=fields.integer("linear_num_key_heads"),
            value_heads=fields.integer("linear_num_value_heads"),
            key=fields.integer("linear_key_head_dim"),
            value=fields.integer("linear_value_head_dim"),
            kernel=fields.integer("linear_conv_kernel_dim", 4),
        )
        return hybrid(shape, widths, interval=interval, rotary_dim=int(shape.head_dim * float(str(partial))))

    def kinds(self, shape: ModelShape) -> tuple[str, ...]:
        return tuple("delta" if layer in shape.delta_layers else "full" for layer in range(shape.num_layers))

    def alone(self, shape: ModelShape, kind: str) -> ModelShape:
        return replace(shape, delta_layers=tuple(range(shape.num_layers)) if kind == "delta" else ())

    def blocks(self, shape: ModelShape) -> Mapping[str, Block]:
        feed_forward = self._feed_forward(shape)
        of_kind = {"delta": self._delta_net, "full": gated_attention}
        return {
            kind: input_norm(shape) + of_kind[kind](shape) + post_norm(shape) + feed_forward
            for kind in dict.fromkeys(self.kinds(shape))
        }

    def _feed_forward(self, shape: ModelShape) -> Block:
        return gated_mixture(shape)

    def _delta_net(self, shape: ModelShape) -> Block:
        """Return a delta net whose files have the rows of each key head one after the other, like Megatron's."""
        widths = delta_widths(shape)
        both = [
            Weight(name="linear_attn.in_proj_qkvz.weight", shape=(2 * (widths.keys + widths.values), shape.hidden)),
            Weight(name="linear_attn.in_proj_ba.weight", shape=(2 * widths.value_heads, shape.hidden)),
        ]
        parts = tuple(Part(name=weight.name) for weight in both)
        served = tuple(Param(name=part.name, parts=(part,), cut=Cut.EACH) for part in parts)
        return Block(tuple(both), (projection(parts, widths),), served) + delta_rest(shape)

    def attention(self, shape: ModelShape) -> AttentionCost:
        if not shape.delta_layers:
            cost = super().attention(shape)
            return replace(cost, gates=cost.outputs)
        widths = delta_widths(shape)
        return AttentionCost(
            queries=widths.keys,
            keys=widths.keys,
            values=widths.values,
            outputs=widths.values,
            gates=widths.values + 2 * widths.value_heads,
            cached_heads=widths.key_heads,
            cached=0,
            recurrence=recurrence(widths),
        )

    def options(self, shape: ModelShape) -> dict[str, object]:
        return {"attention_output_gate": shape.has_output_gate}

    def tiny(self, shape: ModelShape) -> ModelShape:
        widths = replace(delta_widths(shape), key=8, value=8)
        return hybrid(shape, widths, interval=2, rotary_dim=max(2, shape.head_dim // 4))

    def config_json(self, shape: ModelShape) -> dict[str, object]:
        widths, partial = delta_widths(shape), (shape.rotary_dim or shape.head_dim) / shape.head_dim
        full = [layer for layer in range(shape.num_layers) if layer not in shape.delta_layers]
        interval = full[0] + 1 if full else shape.num_layers + 1
        config = super().config_json(shape)
        rope = config["rope_parameters"]
        assert isinstance(rope, dict), f"rope parameters are {rope}"
        return {
            **config,
            "full_attention_interval": interval,
            "layer_types": [_DELTA if layer in shape.delta_layers else _FULL for layer in range(shape.num_layers)],
            "linear_num_key_heads": widths.key_heads,
            "linear_num_value_heads": widths.value_heads,
            "linear_key_head_dim": widths.key,
            "linear_value_head_dim": widths.value,
            "linear_conv_kernel_dim": widths.kernel,
            "partial_rotary_factor": partial,
            "rope_parameters": {**rope, "partial_rotary_factor": partial},
        }

    @property
    def models(self) -> Mapping[str, ModelShape]:
        experts = Experts(num=512, per_token=10, is_normalized=True, shared=512)
        shape = public_hybrid(self.name, layers=48, hidden=2048, ffn=512, heads=16, kv_heads=2, vocab=151936)
        return {"qwen3-next-80b-a3b": replace(shape, experts=experts)}


def public_hybrid(
    family: str,
    *,
    layers: int,
    hidden: int,
    ffn: int,
    heads: int,
    kv_heads: int,
    vocab: int,
    value_heads: int = 32,
    is_tied: bool = False,
) -> ModelShape:
    """Return a released shape: heads of 256 channels, 16 key heads of delta nets, attention in every fourth layer."""
    shape = public_shape(
        family,
        layers=layers,
        hidden=hidden,
        ffn=ffn,
        heads=heads,
        kv_heads=kv_heads,
        vocab=vocab,
        is_tied=is_tied,
    )
    shape = replace(shape, head_dim=256, max_context_tokens=262144, rope_theta=1e7)
    widths = DeltaWidths(key_heads=16, value_heads=value_heads, key=128, value=128, kernel=4)
    return hybrid(shape, widths, interval=_INTERVAL, rotary_dim=64)


def hybrid(shape: ModelShape, widths: DeltaWidths, *, interval: int, rotary_dim: int) -> ModelShape:
    """Return a shape with attention in one of `interval` layers, and delta nets in the others."""
    return replace(
        shape,
        has_qk_norm=True,
        has_centred_norms=True,
        has_output_gate=True,
        rotary_dim=rotary_dim,
        delta=widths,
        delta_layers=tuple(layer for layer in range(shape.num_layers) if (layer + 1) % interval),
    )


def delta_widths(shape: ModelShape) -> DeltaWidths:
    assert shape.delta is not None, f"a {shape.family} without delta nets"
    return shape.delta


def recurrence(widths: DeltaWidths) -> Recurrence:
    heads, state = widths.value_heads, widths.values * widths.key
    # Products of a state with a query, a key and a value, and those of a chunk's tokens with each other.
    products = 3 * state + _CHUNK * (3 * heads * widths.key + 2 * widths.values)
    # By `train.delta_rule`: what convolutions and chunks keep in float32, and a state for each chunk.
    convolved = (widths.kernel + 4) * widths.convolved
    chunks = 10 * heads * widths.key + 7 * widths.values + 8 * heads * _CHUNK + 2 * state // _CHUNK
    return Recurrence(
        operations=2 * products,
        state_bytes=_STATE_BYTES * state + _CONVOLVED_BYTES * widths.convolved * (widths.kernel - 1),
        working_bytes=4 * (convolved + chunks),
    )


def gated_mixture(shape: ModelShape) -> Block:
    """Return routed experts with their router, and a shared one that a gate weighs."""
    assert shape.experts is not None, f"a {shape.family} without experts"
    gate = same("mlp.shared_expert_gate.weight", (1, shape.hidden), "mlp.shared_experts.gate_weight")
    shared = gated("mlp.shared_expert.", "mlp.shared_experts.", hidden=shape.hidden, width=shape.experts.shared)
    return router(shape) + gate + mixture(shape) + shared


def gated_attention(shape: ModelShape) -> Block:
    """Return attention whose queries are each followed by their gate; SGLang has it without a module of its own."""
    a, m, heads, groups = "self_attn.", "self_attention.", shape.num_heads, shape.num_kv_heads
    rows = {"q": 2 * heads * shape.head_dim, **dict.fromkeys("kv", groups * shape.head_dim)}
    parts = tuple(Part(name=f"{a}{each}_proj.weight") for each in rows)
    output = Part(name=f"{a}o_proj.weight")
    norms = {f"{a}{each}_norm.weight": f"{m}{each}_layernorm.weight" for each in "qk"}
    return Block(
        (
            *(Weight(name=f"{a}{each}_proj.weight", shape=(count, shape.hidden)) for each, count in rows.items()),
            Weight(name=output.name, shape=(shape.hidden, heads * shape.head_dim)),
            *(Weight(name=name, shape=(shape.head_dim,)) for name in norms),
        ),
        (
            Param(name=f"{m}linear_qkv.weight", parts=parts, cut=Cut.STACK, groups=groups),
            Param(name=f"{m}linear_proj.weight", parts=(output,), cut=Cut.COLUMNS),
            *(Param(name=own, parts=(Part(name=name),), cut=Cut.WHOLE) for name, own in norms.items()),
        ),
        (
            Param(name="qkv_proj.weight", parts=parts, cut=Cut.HEADS, heads=(heads, groups, groups), groups=groups),
            Param(name="o_proj.weight", parts=(output,), cut=Cut.COLUMNS, heads=(heads,), groups=groups),
            *(Param(name=name.removeprefix(a), parts=(Part(name=name),), cut=Cut.WHOLE) for name in norms),
        ),
    )


def projection(parts: tuple[Part, ...], widths: DeltaWidths) -> Param:
    """Return Megatron's projection: for each key head its query, key, values, gates, strengths and speeds."""
    return Param(name="self_attention.in_proj.weight", parts=parts, cut=Cut.STACK, groups=widths.key_heads)


def delta_rest(shape: ModelShape) -> Block:
    """Return what delta nets have beside their projections of the hidden state."""
    widths, a, m = delta_widths(shape), "linear_attn.", "self_attention."
    name = f"{a}conv1d.weight"
    channels = (
        Part(name=name, num_rows=widths.keys),
        Part(name=name, start=widths.keys, num_rows=widths.keys),
        Part(name=name, start=2 * widths.keys),
    )
    convolution = Block(
        (Weight(name=name, shape=(widths.convolved, 1, widths.kernel)),),
        (Param(name=f"{m}conv_weight", parts=channels, cut=Cut.EACH),),
        (Param(name=name, parts=channels, cut=Cut.EACH),),
    )
    heads = (widths.value_heads,)
    return (
        convolution
        + same(f"{a}dt_bias", heads, f"{m}dt_bias", Cut.EACH)
        + same(f"{a}A_log", heads, f"{m}A_log", Cut.EACH, dtype="float32")
        + same(f"{a}norm.weight", (widths.value,), f"{m}norm_weight")
        + same(f"{a}out_proj.weight", (shape.hidden, widths.values), f"{m}out_proj.weight", Cut.COLUMNS)
    )
