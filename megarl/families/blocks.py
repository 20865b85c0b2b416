"""The blocks that families are composed of: tensors of the files with their places in Megatron and in SGLang. Pure."""

from __future__ import annotations

from megarl.families.interface import Block, Cut, Extents, Param, Part, Weight
from megarl.families.shape import ModelShape

GATE_UP_DOWN = ("gate_proj", "up_proj", "down_proj")
_EXPERT = "{e}."


def same(
    name: str,
    shape: Extents,
    megatron: str,
    cut: Cut = Cut.WHOLE,
    *,
    dtype: str | None = None,
    engine_dtype: str | None = None,
    is_trained: bool = True,
) -> Block:
    """Return one tensor that is a parameter of its own on both sides; SGLang has the name of the files."""
    parts = (Part(name=name),)
    return Block(
        (Weight(name=name, shape=shape, dtype=dtype, is_trained=is_trained),),
        (Param(name=megatron, parts=parts, cut=cut, dtype=dtype),),
        (Param(name=name, parts=parts, cut=cut, dtype=engine_dtype or dtype),),
    )


def input_norm(shape: ModelShape) -> Block:
    return same("input_layernorm.weight", (shape.hidden,), "input_layernorm.weight")


def post_norm(shape: ModelShape) -> Block:
    """Return the norm between attention and feed-forward block."""
    return same("post_attention_layernorm.weight", (shape.hidden,), "pre_mlp_layernorm.weight")


def attention(shape: ModelShape) -> Block:
    """Return grouped-query attention with three projections in the files."""
    weights: list[Weight] = []
    rows = (shape.num_heads * shape.head_dim, *2 * (shape.num_kv_heads * shape.head_dim,))
    kinds = ("weight", "bias") if shape.has_qkv_bias else ("weight",)
    for projection, count in zip("qkv", rows, strict=True):
        for kind in kinds:
            columns = (shape.hidden,) if kind == "weight" else ()
            weights.append(Weight(name=f"self_attn.{projection}_proj.{kind}", shape=(count, *columns)))
    parts = {kind: tuple(Part(name=f"self_attn.{projection}_proj.{kind}") for projection in "qkv") for kind in kinds}
    projections = _projections(shape, parts)
    norms = Block()
    if shape.has_qk_norm:
        norms += same("self_attn.q_norm.weight", (shape.head_dim,), "self_attention.q_layernorm.weight")
        norms += same("self_attn.k_norm.weight", (shape.head_dim,), "self_attention.k_layernorm.weight")
    return Block(tuple(weights)) + norms + _attention_output(shape) + projections


def fused_attention(shape: ModelShape) -> Block:
    """Return grouped-query attention with one matrix of queries, keys and values in the files."""
    name = "self_attn.qkv_proj.weight"
    queries, keys = shape.num_heads * shape.head_dim, shape.num_kv_heads * shape.head_dim
    parts = (
        Part(name=name, num_rows=queries),
        Part(name=name, start=queries, num_rows=keys),
        Part(name=name, start=queries + keys),
    )
    weight = Weight(name=name, shape=(queries + 2 * keys, shape.hidden))
    return Block((weight,)) + _projections(shape, {"weight": parts}) + _attention_output(shape)


def _projections(shape: ModelShape, parts: dict[str, tuple[Part, ...]]) -> Block:
    groups, heads = shape.num_kv_heads, (shape.num_heads, shape.num_kv_heads, shape.num_kv_heads)
    return Block(
        megatron=tuple(
            Param(name=f"self_attention.linear_qkv.{kind}", parts=each, cut=Cut.STACK, groups=groups)
            for kind, each in parts.items()
        ),
        sglang=tuple(
            Param(name=f"self_attn.qkv_proj.{kind}", parts=each, cut=Cut.HEADS, heads=heads, groups=groups)
            for kind, each in parts.items()
        ),
    )


def _attention_output(shape: ModelShape) -> Block:
    name, heads, groups = "self_attn.o_proj.weight", (shape.num_heads,), shape.num_kv_heads
    parts = (Part(name=name),)
    return Block(
        (Weight(name=name, shape=(shape.hidden, shape.num_heads * shape.head_dim)),),
        (Param(name="self_attention.linear_proj.weight", parts=parts, cut=Cut.COLUMNS),),
        (Param(name=name, parts=parts, cut=Cut.COLUMNS, heads=heads, groups=groups),),
    )


def gated(block: str, megatron: str, *, hidden: int, width: int, names: tuple[str, str, str] = GATE_UP_DOWN) -> Block:
    """Return a feed-forward block of three matrices, `block` and `megatron` its prefixes on both sides."""
    gate, up, down = (f"{block}{name}.weight" for name in names)
    weights = (
        Weight(name=gate, shape=(width, hidden)),
        Weight(name=up, shape=(width, hidden)),
        Weight(name=down, shape=(hidden, width)),
    )
    return Block(weights) + _gated_places(block, megatron, (Part(name=gate), Part(name=up)), Part(name=down))


def dense_layer(shape: ModelShape) -> Block:
    """Return a layer of attention and one gated block, each behind its norm: that of Llama."""
    feed_forward = gated("mlp.", "mlp.", hidden=shape.hidden, width=shape.ffn_hidden)
    return input_norm(shape) + attention(shape) + post_norm(shape) + feed_forward


def fused_gated(block: str, megatron: str, *, hidden: int, width: int) -> Block:
    """Return a feed-forward block whose gate and up are one matrix in the files."""
    both, down = f"{block}gate_up_proj.weight", f"{block}down_proj.weight"
    weights = (Weight(name=both, shape=(2 * width, hidden)), Weight(name=down, shape=(hidden, width)))
    halves = (Part(name=both, num_rows=width), Part(name=both, start=width))
    return Block(weights) + _gated_places(block, megatron, halves, Part(name=down))


def _gated_places(block: str, megatron: str, halves: tuple[Part, Part], down: Part) -> Block:
    return Block(
        megatron=(
            Param(name=f"{megatron}linear_fc1.weight", parts=halves, cut=Cut.EACH),
            Param(name=f"{megatron}linear_fc2.weight", parts=(down,), cut=Cut.COLUMNS),
        ),
        sglang=(
            Param(name=f"{block}gate_up_proj.weight", parts=halves, cut=Cut.EACH, is_padded=True),
            Param(name=down.name, parts=(down,), cut=Cut.COLUMNS, is_padded=True),
        ),
    )


def mixture(shape: ModelShape, *, block: str = "mlp.", names: tuple[str, str, str] = GATE_UP_DOWN) -> Block:
    """Return routed experts, without their router."""
    gate, up, down = (f"{block}experts.{_EXPERT}{name}.weight" for name in names)
    width, hidden = shape.ffn_hidden, shape.hidden
    both, columns = (Part(name=gate), Part(name=up)), (Part(name=down),)
    local = "mlp.experts.local_experts.{i}.linear_fc"
    return Block(
        (
            Weight(name=gate, shape=(width, hidden)),
            Weight(name=up, shape=(width, hidden)),
            Weight(name=down, shape=(hidden, width)),
        ),
        (
            Param(name=f"{local}1.weight", parts=both, cut=Cut.EACH, is_expert=True),
            Param(name=f"{local}2.weight", parts=columns, cut=Cut.COLUMNS, is_expert=True),
        ),
        (
            Param(name=f"{block}experts.w13_weight", parts=both, cut=Cut.EACH, is_expert=True, is_padded=True),
            Param(name=f"{block}experts.w2_weight", parts=columns, cut=Cut.COLUMNS, is_expert=True, is_padded=True),
        ),
    )


def router(shape: ModelShape, *, block: str = "mlp.", engine_dtype: str | None = None) -> Block:
    """Return the router of a mixture; its bias is a buffer of Megatron's, and a parameter of SGLang's."""
    experts = shape.experts
    assert experts is not None, f"a router of a {shape.family} without experts"
    extents = (experts.num, shape.hidden)
    weight = same(f"{block}gate.weight", extents, "mlp.router.weight", engine_dtype=engine_dtype)
    if not experts.has_bias:
        return weight
    name = f"{block}gate.e_score_correction_bias"
    return weight + same(name, (experts.num,), "mlp.router.expert_bias", dtype="float32", is_trained=False)


def dense_and_mixture(
    shape: ModelShape, attention_with_norms: Block, *, router_dtype: str | None = None
) -> dict[str, Block]:
    """Return dense layers, and mixtures with a shared expert that has no gate."""
    experts, hidden, blocks = shape.experts, shape.hidden, dict[str, Block]()
    if experts is None or experts.num_dense_layers:
        width = shape.ffn_hidden if experts is None else shape.dense_hidden
        blocks["dense"] = attention_with_norms + gated("mlp.", "mlp.", hidden=hidden, width=width)
    if experts is not None:
        blocks["mixture"] = attention_with_norms + router(shape, engine_dtype=router_dtype) + mixture(shape)
    if experts is not None and experts.shared:
        shared = "mlp.shared_experts."
        blocks["mixture"] += gated(shared, shared, hidden=hidden, width=experts.shared)
    return blocks
