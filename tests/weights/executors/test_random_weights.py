"""Models without bytes: the same values whatever the box, and no space on the disk."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from megarl.weights.executors.hf import load_hf, random_box, write_random_folder
from megarl.weights.layouts.canonical import canonical_tensors
from megarl.weights.layouts.megatron import MegatronParallel, megatron_layout
from tests.weights.reference import make_shape


def loaded(folder: Path, parallel: MegatronParallel, rank: int, family: str) -> dict[str, torch.Tensor]:
    shape = make_shape(family)
    layout = megatron_layout(shape, parallel, dtype="float32")
    holding = layout.by_rank[rank]
    tensors = {name: torch.full(spec.shape, float("nan")) for name, spec in holding.tensors.items()}
    load_hf(folder, holding, canonical_tensors(shape), tensors)
    return tensors


@pytest.mark.parametrize("family", ["qwen2", "qwen3_moe", "gpt_oss"])
def test_ranks_of_every_split_read_finite_weights(family: str, tmp_path: Path) -> None:
    write_random_folder(tmp_path, make_shape(family))
    for rank in range(2):
        tensors = loaded(tmp_path, MegatronParallel(tensor=2, expert_tensor=1), rank, family)
        assert all(torch.isfinite(tensor).all() for tensor in tensors.values())
        assert any(tensor.std() > 0.01 for tensor in tensors.values() if tensor.dim() > 1)


def test_a_box_has_the_values_of_the_whole_tensor() -> None:
    whole = random_box("mlp.up_proj.weight", (slice(0, 40), slice(0, 30)))
    box = random_box("mlp.up_proj.weight", (slice(10, 20), slice(5, 30)))
    assert torch.equal(box, whole[10:20, 5:30])
    assert whole.std().item() == pytest.approx(0.02, rel=0.1)
    assert not torch.equal(whole, random_box("mlp.down_proj.weight", (slice(0, 40), slice(0, 30))))
    assert random_box("final_norm.weight", (slice(0, 99),)).mean().item() == pytest.approx(1.0, abs=0.01)


def test_a_large_model_takes_no_space(tmp_path: Path) -> None:
    shape = replace(make_shape("qwen2"), hidden=8192, ffn_hidden=28672, vocab=152064, dtype="bfloat16")
    write_random_folder(tmp_path, shape)
    status = (tmp_path / "model.safetensors").stat()
    assert status.st_size > 1e10
    assert status.st_blocks * 512 < 1e6
