"""The layouts of FP8 weights against SGLang's own parameters of an FP8 checkpoint, and their plans."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

from megarl.config.kernels import is_in_fp8, kept_modules
from megarl.families import FAMILIES
from megarl.families.shape import ModelShape
from megarl.weights.algebra.slices import Layout
from megarl.weights.layouts.canonical import canonical_tensors
from megarl.weights.layouts.fp8 import fp8_engine_layout, fp8_tensors, fp8_trainer_layout, quantization_config
from megarl.weights.layouts.megatron import MegatronParallel, megatron_layout
from megarl.weights.layouts.sglang import sglang_layout
from megarl.weights.layouts.transfer_spec import TransferSpec
from tests.weights.reference import block_shape


def engines_in_fp8(shape: ModelShape, *, tensor: int = 1, keep: tuple[str, ...] = ()) -> Layout:
    return fp8_engine_layout(sglang_layout(shape, tensor=tensor, dtype="bfloat16"), shape, keep)


def test_a_dense_model_has_sglangs_parameters_of_an_fp8_checkpoint() -> None:
    tensors = engines_in_fp8(block_shape("qwen3"), tensor=2).by_rank[1].tensors
    found = {name: (spec.shape, spec.dtype) for name, spec in tensors.items() if name.startswith("model.layers.1.")}
    assert found == {
        "model.layers.1.self_attn.qkv_proj.weight": ((512, 256), "float8_e4m3fn"),
        "model.layers.1.self_attn.qkv_proj.weight_scale_inv": ((4, 2), "float32"),
        "model.layers.1.self_attn.o_proj.weight": ((256, 256), "float8_e4m3fn"),
        "model.layers.1.self_attn.o_proj.weight_scale_inv": ((2, 2), "float32"),
        "model.layers.1.self_attn.q_norm.weight": ((128,), "bfloat16"),
        "model.layers.1.self_attn.k_norm.weight": ((128,), "bfloat16"),
        "model.layers.1.input_layernorm.weight": ((256,), "bfloat16"),
        "model.layers.1.post_attention_layernorm.weight": ((256,), "bfloat16"),
        "model.layers.1.mlp.gate_up_proj.weight": ((512, 256), "float8_e4m3fn"),
        "model.layers.1.mlp.gate_up_proj.weight_scale_inv": ((4, 2), "float32"),
        "model.layers.1.mlp.down_proj.weight": ((256, 256), "float8_e4m3fn"),
        "model.layers.1.mlp.down_proj.weight_scale_inv": ((2, 2), "float32"),
    }
    assert tensors["model.embed_tokens.weight"].dtype == tensors["lm_head.weight"].dtype == "bfloat16"


def test_experts_have_stacked_scales_and_the_router_none() -> None:
    tensors = engines_in_fp8(block_shape("qwen3_moe"), tensor=2).by_rank[0].tensors
    mlp = {name.removeprefix("model.layers.0.mlp."): spec for name, spec in tensors.items() if "layers.0.mlp." in name}
    assert {name: (spec.shape, spec.dtype) for name, spec in mlp.items()} == {
        "gate.weight": ((4, 256), "bfloat16"),
        "experts.w13_weight": ((4, 512, 256), "float8_e4m3fn"),
        "experts.w13_weight_scale_inv": ((4, 4, 2), "float32"),
        "experts.w2_weight": ((4, 256, 256), "float8_e4m3fn"),
        "experts.w2_weight_scale_inv": ((4, 2, 2), "float32"),
    }


def test_a_shared_expert_is_in_fp8_and_its_gate_is_not() -> None:
    shape = block_shape("qwen2_moe")
    tensors = engines_in_fp8(shape, tensor=2).by_rank[0].tensors
    prefix = "model.layers.0.mlp.shared_expert"
    shared = {name.removeprefix(prefix): spec for name, spec in tensors.items() if name.startswith(prefix)}
    assert {name: (spec.shape, spec.dtype) for name, spec in shared.items()} == {
        "_gate.weight": ((1, 256), "bfloat16"),
        ".gate_up_proj.weight": ((768, 256), "float8_e4m3fn"),
        ".gate_up_proj.weight_scale_inv": ((6, 2), "float32"),
        ".down_proj.weight": ((256, 384), "float8_e4m3fn"),
        ".down_proj.weight_scale_inv": ((2, 3), "float32"),
    }
    assert kept_modules(shape, ("*.0.mlp.shared_expert.*",)) == tuple(
        f"{prefix}.{name}" for name in ("gate_proj", "up_proj", "down_proj")
    )


@pytest.mark.parametrize("family", ["qwen2", "qwen2_moe", "llama"])
def test_families_with_scales_of_the_cache_have_them_without_a_source(family: str) -> None:
    holding = engines_in_fp8(block_shape(family)).by_rank[0]
    names = {f"model.layers.{index}.self_attn.attn.{name}" for index in (0, 1) for name in ("k_scale", "v_scale")}
    assert {name for name, spec in holding.tensors.items() if spec.shape == ()} == names
    assert not names & {piece.local_name for piece in holding.pieces}


@pytest.mark.parametrize("family", [family.name for family in FAMILIES if "fp8" not in family.refuses])
def test_a_plan_of_fp8_weights_moves_half_the_bytes(family: str) -> None:
    shape = block_shape(family)
    transfer = TransferSpec(
        shape=shape,
        parallel=MegatronParallel(tensor=2, pipeline=2),
        trainer_dtype="bfloat16",
        num_engines=2,
        tensor=2,
        engine_dtype="bfloat16",
        is_cpu_engine=False,
    )
    in_fp8 = replace(transfer, fp8_keep=())
    moved = [sum(each.plan().traffic.received_bytes.values()) for each in (transfer, in_fp8)]
    canonical = canonical_tensors(shape)
    matrices = sum(spec.num_bytes for name, spec in canonical.items() if is_in_fp8(name, ()))
    scales = matrices // 2 // 128 // 128 * 4
    # Each engine gets every matrix once.
    assert moved[0] - moved[1] == 2 * (matrices - matrices // 2 - scales)
    assert in_fp8.plan().hash != transfer.plan().hash


def test_every_target_element_comes_from_a_rank_that_derives_it() -> None:
    shape = block_shape("qwen3_moe")
    parallel = MegatronParallel(tensor=2, data=2, expert=2, expert_tensor=1)
    source = fp8_trainer_layout(megatron_layout(shape, parallel, dtype="bfloat16"), ())
    for holding in source.holdings:
        for piece in holding.pieces:
            assert holding.tensors[piece.local_name].shape == piece.slice.shape or "chunk" in piece.local_name
    experts = {piece.slice.name for piece in source.by_rank[0].pieces if ".experts." in piece.slice.name}
    assert len(experts) == 2 * 2 * 3 * 2, "two layers, two experts, three matrices with scales"


def test_kept_modules_stay_in_bfloat16_on_both_sides() -> None:
    shape, keep = block_shape("qwen3"), ("model.layers.0.*", "*.o_proj")
    canonical = fp8_tensors(canonical_tensors(shape), keep)
    in_fp8 = {name for name, spec in canonical.items() if spec.dtype == "float8_e4m3fn"}
    modules = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "mlp.gate_proj", "mlp.up_proj")
    assert in_fp8 == {f"model.layers.1.{name}.weight" for name in (*modules, "mlp.down_proj")}
    tensors = engines_in_fp8(shape, keep=keep).by_rank[0].tensors
    assert tensors["model.layers.0.self_attn.qkv_proj.weight"].dtype == "bfloat16"
    assert "model.layers.1.self_attn.o_proj.weight_scale_inv" not in tensors


def test_sglang_is_given_the_config_of_an_fp8_checkpoint_with_the_kept_modules_by_name() -> None:
    shape = block_shape("qwen3_moe")
    assert quantization_config(shape, None) is None
    whole = json.loads(quantization_config(shape, ()) or "")["quantization_config"]
    assert whole == {
        "quant_method": "fp8",
        "fmt": "e4m3",
        "activation_scheme": "dynamic",
        "weight_block_size": [128, 128],
    }
    kept = json.loads(quantization_config(shape, ("*.1.mlp.*", "*.0.*.o_proj")) or "")["quantization_config"]
    assert kept["ignored_layers"] == ["model.layers.0.self_attn.o_proj", "model.layers.1.mlp.experts"]
    assert kept_modules(shape, ("*.experts",)) == ("model.layers.0.mlp.experts", "model.layers.1.mlp.experts")


def test_a_cut_through_a_block_is_no_layout() -> None:
    shape = replace(block_shape("qwen3"), head_dim=64)
    with pytest.raises(AssertionError, match="cuts a block of 128"):
        engines_in_fp8(shape, tensor=2)
