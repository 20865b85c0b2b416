"""The reference for the slice algebra: the layouts, slow and obvious, as whole tensors joined and cut with numpy.

Every canonical element has a number of its own; -1 is padding.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace
from math import prod

import numpy as np
import numpy.typing as npt
from hypothesis import strategies as st

from megarl.families import BY_NAME, FAMILIES
from megarl.families.shape import DeltaWidths, Experts, ModelShape
from megarl.weights.algebra.plan import Move
from megarl.weights.algebra.slices import Holding, Index, TensorSpec
from megarl.weights.layouts.canonical import canonical_tensors
from megarl.weights.layouts.megatron import MegatronParallel, padded_vocab
from megarl.weights.layouts.transfer_spec import TransferSpec

Array = npt.NDArray[np.int64]
Arrays = dict[str, Array]

PADDING = -1
HYBRIDS = ("qwen3_next", "qwen3_5", "qwen3_5_moe", "qwen3_5_moe_text", "qwen3_5_text")
TOWERS = ("qwen2_5_vl", "qwen3_vl")
UNLIKE_LLAMA = ("deepseek_v2", "deepseek_v3", "gemma3_text", "gpt_oss", *HYBRIDS, *TOWERS)
"""Families that this reference does not know; `test_families.py` and engines compare them."""
_BIAS = "e_score_correction_bias"

_SIGMOID = Experts(
    num=4,
    per_token=2,
    is_normalized=True,
    shared=64,
    is_shared_gated=False,
    score="sigmoid",
    has_bias=True,
    scale=2.5,
    num_dense_layers=1,
)
_EXPERTS = {
    "deepseek_v2": Experts(
        num=4, per_token=2, is_normalized=False, shared=64, is_shared_gated=False, num_dense_layers=1
    ),
    "deepseek_v3": _SIGMOID,
    "glm4_moe": _SIGMOID,
    "gpt_oss": Experts(num=4, per_token=2, is_normalized=True),
    "mixtral": Experts(num=4, per_token=2, is_normalized=True),
    "qwen2_moe": Experts(num=4, per_token=2, is_normalized=False, shared=96),
    "qwen3_moe": Experts(num=4, per_token=2, is_normalized=True),
    **dict.fromkeys(
        ("qwen3_next", "qwen3_5_moe", "qwen3_5_moe_text"), Experts(num=4, per_token=2, is_normalized=True, shared=32)
    ),
}


def make_shape(
    family: str = "qwen2",
    *,
    layers: int = 4,
    heads: int = 4,
    kv_heads: int = 2,
    tied: bool = False,
    vocab: int = 99,
    ffn: int = 64,
) -> ModelShape:
    shape = ModelShape(
        family=family,
        num_layers=layers,
        hidden=8,
        ffn_hidden=ffn,
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=2,
        vocab=vocab,
        max_context_tokens=128,
        norm_eps=1e-6,
        rope_theta=1e4,
        rope_scaling=None,
        has_tied_embeddings=tied,
        has_qkv_bias=family in ("glm4_moe", "gpt_oss", "qwen2", "qwen2_moe", "qwen2_5_vl"),
        has_qk_norm=family in ("gemma3_text", "glm4_moe", "qwen3", "qwen3_moe", "qwen3_vl"),
        dtype="float32",
        experts=_EXPERTS.get(family),
        dense_hidden=2 * ffn if family == "glm4_moe" else 0,
        rotary_dim=1 if family == "glm4_moe" else None,
        delta=DeltaWidths(key_heads=4, value_heads=8, key=2, value=2, kernel=4) if family in HYBRIDS else None,
        vision=next(iter(BY_NAME[family].models.values())).vision if family in TOWERS else None,
    )
    return BY_NAME[family].tiny(shape) if family in UNLIKE_LLAMA else shape


def block_shape(family: str, *, layers: int = 2) -> ModelShape:
    """Return a model whose matrices consist of whole blocks, with cuts for two ranks."""
    small = make_shape(family, heads=4, kv_heads=2, layers=layers, ffn=512)
    experts = small.experts
    if experts is not None and experts.shared:
        experts = replace(experts, shared=768)
    return replace(small, hidden=256, head_dim=128, experts=experts, dtype="bfloat16")


def transfer_spec(*, tensor: int = 2, num_engines: int = 1) -> TransferSpec:
    return TransferSpec(
        shape=make_shape(),
        parallel=MegatronParallel(tensor=2, pipeline=2, data=2),
        trainer_dtype="float32",
        num_engines=num_engines,
        tensor=tensor,
        engine_dtype="bfloat16",
        is_cpu_engine=False,
    )


def placed_transfer() -> TransferSpec:
    """Two engines of two ranks on the first rollout node, one on the second."""
    return replace(
        transfer_spec(tensor=2, num_engines=3),
        trainer_gpus=tuple((0, rank) for rank in range(8)),
        engine_gpus=((1, 0), (1, 1), (1, 2), (1, 3), (2, 0), (2, 1)),
        relays=True,
    )


@st.composite
def shapes(draw: st.DrawFn) -> ModelShape:
    return make_shape(
        draw(st.sampled_from([family.name for family in FAMILIES if family.name not in UNLIKE_LLAMA])),
        layers=4,
        heads=8,
        kv_heads=draw(st.sampled_from([1, 2, 4, 8])),
        tied=draw(st.booleans()),
        vocab=draw(st.sampled_from([64, 99, 130])),
    )


@st.composite
def parallels(draw: st.DrawFn) -> MegatronParallel:
    pipeline, virtual_pipeline, first, last = draw(
        st.sampled_from(
            [
                (1, 1, None, None),
                (2, 1, None, None),
                (2, 2, None, None),
                (4, 1, None, None),
                (2, 1, 1, None),
                (2, 1, None, 1),
                (3, 1, 1, 1),
            ]
        )
    )
    tensor, data = draw(st.sampled_from([1, 2, 4])), draw(st.integers(1, 3))
    expert, expert_tensor = draw(
        st.sampled_from(
            [
                (expert, expert_tensor)
                for expert in (1, 2, 4)
                for expert_tensor in (None, 1, 2)
                if tensor * data % (expert * (expert_tensor or tensor)) == 0
            ]
        )
    )
    return MegatronParallel(
        tensor=tensor,
        pipeline=pipeline,
        virtual_pipeline=virtual_pipeline,
        data=data,
        expert=expert,
        expert_tensor=expert_tensor,
        first_stage_layers=first,
        last_stage_layers=last,
    )


def numbered(shape: ModelShape) -> Arrays:
    """Return a model in which every element is different."""
    return numbered_tensors(canonical_tensors(shape))


def numbered_tensors(canonical: Mapping[str, TensorSpec]) -> Arrays:
    arrays: Arrays = {}
    start = 0
    for name, spec in canonical.items():
        size = prod(spec.shape)
        arrays[name] = np.arange(start, start + size).reshape(spec.shape)
        start += size
    return arrays


def empty(holding: Holding) -> Arrays:
    return {name: np.full(spec.shape, PADDING) for name, spec in holding.tensors.items()}


def box(array: Array, offsets: Index, extent: Index) -> Array:
    """Dimensions that the box lacks come first, as indices."""
    indices, starts = offsets[: -len(extent)], offsets[-len(extent) :]
    inner: Array = array[indices]
    return inner[tuple(slice(start, start + size) for start, size in zip(starts, extent, strict=True))]


def fill_from_canonical(holding: Holding, model: Mapping[str, Array]) -> Arrays:
    """Return the arrays that the pieces of a holding describe."""
    arrays = empty(holding)
    for piece in holding.pieces:
        local = box(arrays[piece.local_name], piece.local_offsets, piece.slice.shape)
        assert (local == PADDING).all(), f"{piece} overlaps another piece"
        local[...] = box(model[piece.slice.name], piece.slice.offsets, piece.slice.shape)
    return arrays


def apply(moves: Iterable[Move], sources: Mapping[int, Arrays], targets: Mapping[int, Arrays]) -> None:
    """Carry out a plan, hop after hop; fail where an element is written twice, or forwarded too early."""
    for move in sorted(moves, key=lambda move: move.hop):
        extent = move.slice.shape
        target = box(targets[move.target_rank][move.target_name], move.target_offsets, extent)
        assert target.shape == extent, f"{move} leaves its target"
        assert (target == PADDING).all(), f"{move} writes what was written"
        holders = targets if move.hop else sources
        given = box(holders[move.source_rank][move.source_name], move.source_offsets, extent)
        assert (given != PADDING).all(), f"{move} gives what its holder has not"
        target[...] = given


_OTHERS = {
    "block_sparse_moe.": "mlp.",
    ".w1.": ".gate_proj.",
    ".w3.": ".up_proj.",
    ".w2.": ".down_proj.",
    ".shared_experts.": ".shared_expert.",
}
_FUSED = {"qkv_proj": ("q_proj", "k_proj", "v_proj"), "gate_up_proj": ("gate_proj", "up_proj")}


def _renamed(shape: ModelShape, model: Mapping[str, Array]) -> Arrays:
    """Return the model with the names of Qwen2's families, and with one matrix for each projection."""
    queries, keys = shape.num_heads * shape.head_dim, shape.num_kv_heads * shape.head_dim
    cuts = {"qkv_proj": [queries, queries + keys], "gate_up_proj": [shape.ffn_hidden]}
    arrays: Arrays = {}
    for name, array in model.items():
        for own, other in _OTHERS.items():
            name = name.replace(own, other)
        module = name.split(".")[-2]
        if module in _FUSED:
            parts = zip(_FUSED[module], np.split(array, cuts[module]), strict=True)
            arrays |= {name.replace(module, part): rows for part, rows in parts}
        else:
            arrays[name] = array
    return arrays


def _is_mixture(shape: ModelShape, layer: int) -> bool:
    return shape.experts is not None and layer >= shape.experts.num_dense_layers


def megatron_rank(
    shape: ModelShape, parallel: MegatronParallel, model: Mapping[str, Array], *, tensor: int, data: int, stage: int
) -> Arrays:
    """Return the parameters of one Megatron rank, from the joined ones of all tensor-parallel ranks."""
    model = _renamed(shape, model)
    size, num_chunks = parallel.tensor, parallel.pipeline * parallel.virtual_pipeline
    first, last = parallel.first_stage_layers, parallel.last_stage_layers
    fixed = (first or 0) + (last or 0)
    equal = (shape.num_layers - fixed) // max(1, num_chunks - (first is not None) - (last is not None))
    sizes = [equal] * num_chunks
    sizes[0], sizes[-1] = first or equal, last or equal if num_chunks > 1 else equal
    layers = np.split(np.arange(shape.num_layers), np.cumsum(sizes)[:-1])
    # Megatron's second numbering of a stage's ranks: [replica, expert set, part of an expert].
    grid = np.arange(size * parallel.data).reshape(-1, parallel.expert, parallel.expert_tensor or size)
    ((_, expert_set, part),) = np.argwhere(grid == tensor + size * data)
    arrays: Arrays = {}

    def vocab_shard(name: str) -> Array:
        rows = padded_vocab(shape.vocab, size)
        padding = np.full((rows - shape.vocab, shape.hidden), PADDING)
        return np.split(np.concatenate([model[name], padding]), size)[tensor]

    for chunk in range(parallel.virtual_pipeline):
        position = chunk * parallel.pipeline + stage
        if position == 0:
            arrays[f"chunk{chunk}.embedding.word_embeddings.weight"] = vocab_shard("model.embed_tokens.weight")
        for index, layer in enumerate(layers[position]):
            hf, local = f"model.layers.{layer}.", f"chunk{chunk}.decoder.layers.{index}."
            arrays |= {local + name: array for name, array in _megatron_layer(shape, model, hf, tensor, size).items()}
            blocks = {f"{local}mlp.": f"{hf}mlp."}
            is_mixture = _is_mixture(shape, layer)
            if shape.experts is not None and is_mixture:
                around = _megatron_around(shape.experts, model, hf, tensor, size)
                arrays |= {f"{local}mlp.{key}": array for key, array in around.items()}
                of_set = np.split(np.arange(shape.experts.num), parallel.expert)[expert_set]
                blocks = {
                    f"{local}mlp.experts.local_experts.{i}.": f"{hf}mlp.experts.{expert}."
                    for i, expert in enumerate(of_set)
                }
            split = (part, grid.shape[2]) if is_mixture else (tensor, size)
            for name, block in blocks.items():
                arrays |= {name + key: array for key, array in _megatron_block(model, block, *split).items()}
        if position == num_chunks - 1:
            arrays[f"chunk{chunk}.decoder.final_layernorm.weight"] = model["model.norm.weight"]
            if not shape.has_tied_embeddings:
                arrays[f"chunk{chunk}.output_layer.weight"] = vocab_shard("lm_head.weight")
            elif position != 0:
                arrays[f"chunk{chunk}.output_layer.weight"] = vocab_shard("model.embed_tokens.weight")
    return arrays


def _megatron_layer(shape: ModelShape, model: Mapping[str, Array], hf: str, tensor: int, size: int) -> Arrays:
    def interleaved(suffix: str) -> Array:
        parts = []
        for group in range(shape.num_kv_heads):
            for projection in "qkv":
                whole = model[f"{hf}self_attn.{projection}_proj.{suffix}"]
                parts.append(np.split(whole, shape.num_kv_heads)[group])
        return np.split(np.concatenate(parts), size)[tensor]

    def split(name: str, axis: int) -> Array:
        return np.split(model[hf + name], size, axis=axis)[tensor]

    arrays = {
        "input_layernorm.weight": model[f"{hf}input_layernorm.weight"],
        "self_attention.linear_qkv.weight": interleaved("weight"),
        "self_attention.linear_proj.weight": split("self_attn.o_proj.weight", 1),
        "pre_mlp_layernorm.weight": model[f"{hf}post_attention_layernorm.weight"],
    }
    if shape.has_qkv_bias:
        arrays["self_attention.linear_qkv.bias"] = interleaved("bias")
    if shape.has_qk_norm:
        arrays["self_attention.q_layernorm.weight"] = model[f"{hf}self_attn.q_norm.weight"]
        arrays["self_attention.k_layernorm.weight"] = model[f"{hf}self_attn.k_norm.weight"]
    return arrays


def _megatron_block(model: Mapping[str, Array], block: str, rank: int, size: int) -> Arrays:
    gate, up = (np.split(model[f"{block}{name}_proj.weight"], size)[rank] for name in ("gate", "up"))
    down = np.split(model[f"{block}down_proj.weight"], size, axis=1)[rank]
    return {"linear_fc1.weight": np.concatenate([gate, up]), "linear_fc2.weight": down}


def _megatron_around(experts: Experts, model: Mapping[str, Array], hf: str, tensor: int, size: int) -> Arrays:
    """Return the parameters of a mixture outside of its routed experts."""
    arrays = {"router.weight": model[f"{hf}mlp.gate.weight"]}
    if experts.has_bias:
        arrays["router.expert_bias"] = model[f"{hf}mlp.gate.{_BIAS}"]
    if not experts.shared:
        return arrays
    if experts.is_shared_gated:
        arrays["shared_experts.gate_weight"] = model[f"{hf}mlp.shared_expert_gate.weight"]
    shared = _megatron_block(model, f"{hf}mlp.shared_expert.", tensor, size)
    return arrays | {f"shared_experts.{key}": array for key, array in shared.items()}


def sglang_rank(shape: ModelShape, model: Mapping[str, Array], *, tensor: int, size: int, expert: int = 1) -> Arrays:
    """Return the parameters of one SGLang rank on a GPU: whole heads, KV heads repeated where there are too few."""
    model = _renamed(shape, model)
    kv_rows = np.arange(shape.num_kv_heads).repeat(max(1, size // shape.num_kv_heads))
    kv_heads = np.split(kv_rows, size)[tensor]

    def split(name: str, axis: int) -> Array:
        return np.split(model[name], size, axis=axis)[tensor]

    def vocab_shard(name: str) -> Array:
        padding = np.full((-shape.vocab % 64, shape.hidden), PADDING)
        return np.split(np.concatenate([model[name], padding]), size)[tensor]

    def qkv(prefix: str, suffix: str) -> Array:
        parts = [split(f"{prefix}q_proj.{suffix}", 0)]
        for projection in "kv":
            heads = np.split(model[f"{prefix}{projection}_proj.{suffix}"], shape.num_kv_heads)
            parts += [heads[head] for head in kv_heads]
        return np.concatenate(parts)

    arrays = {name: array for name, array in model.items() if "norm" in name}
    for name in ("model.embed_tokens.weight", "lm_head.weight"):
        if name in model:
            arrays[name] = vocab_shard(name)
    for index in range(shape.num_layers):
        prefix = f"model.layers.{index}."
        for suffix in ("weight", "bias") if shape.has_qkv_bias else ("weight",):
            arrays[f"{prefix}self_attn.qkv_proj.{suffix}"] = qkv(f"{prefix}self_attn.", suffix)
        arrays[f"{prefix}self_attn.o_proj.weight"] = split(f"{prefix}self_attn.o_proj.weight", 1)
        if shape.experts is not None and _is_mixture(shape, index):
            arrays |= _sglang_experts(shape.experts, model, f"{prefix}mlp.", tensor, size, expert)
        else:
            arrays |= _sglang_block(model, f"{prefix}mlp.", tensor, size)
    block = ".block_sparse_moe." if shape.family == "mixtral" else ".mlp."
    shared = ".shared_expert." if shape.experts is None or shape.experts.is_shared_gated else ".shared_experts."
    return {name.replace(".mlp.", block).replace(".shared_expert.", shared): array for name, array in arrays.items()}


def _sglang_block(model: Mapping[str, Array], block: str, tensor: int, size: int) -> Arrays:
    gate, up = (np.split(model[f"{block}{name}_proj.weight"], size)[tensor] for name in ("gate", "up"))
    down = np.split(model[f"{block}down_proj.weight"], size, axis=1)[tensor]
    return {f"{block}gate_up_proj.weight": np.concatenate([gate, up]), f"{block}down_proj.weight": down}


def _sglang_experts(
    experts: Experts, model: Mapping[str, Array], mlp: str, tensor: int, size: int, expert: int
) -> Arrays:
    expert_set, part = divmod(tensor, size // expert)

    def stack(projection: str, axis: int) -> Array:
        matrices = np.stack([model[f"{mlp}experts.{index}.{projection}.weight"] for index in range(experts.num)])
        return np.split(np.split(matrices, expert)[expert_set], size // expert, axis=axis)[part]

    shared: Arrays = {}
    if experts.shared:
        whole = ["shared_expert_gate.weight"] if experts.is_shared_gated else []
        whole += [f"gate.{_BIAS}"] if experts.has_bias else []
        shared = {mlp + name: model[mlp + name] for name in whole}
        shared |= _sglang_block(model, f"{mlp}shared_expert.", tensor, size)
    return shared | {
        f"{mlp}gate.weight": model[f"{mlp}gate.weight"],
        f"{mlp}experts.w13_weight": np.concatenate([stack("gate_proj", 1), stack("up_proj", 1)], axis=1),
        f"{mlp}experts.w2_weight": stack("down_proj", 2),
    }


def assert_equal(actual: Mapping[str, Array], expected: Mapping[str, Array]) -> None:
    assert set(actual) == set(expected)
    for name, array in expected.items():
        np.testing.assert_array_equal(actual[name], array, err_msg=name)
