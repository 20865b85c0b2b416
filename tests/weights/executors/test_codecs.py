"""Files in other forms than canonical tensors, against the code of transformers that reads the same files."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor
from transformers.integrations.finegrained_fp8 import Fp8Dequantize
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

from megarl.errors import CheckpointError
from megarl.weights.algebra.slices import Holding, Piece, Slice, TensorSpec
from megarl.weights.executors.hf import load_hf

BLOCK = "model.layers.0.mlp.experts"


def read(
    folder: Path, name: str, *, offsets: tuple[int, ...], shape: tuple[int, ...], whole: tuple[int, ...]
) -> Tensor:
    """Read a box of a canonical tensor as a rank does that holds nothing else."""
    piece = Piece(
        slice=Slice(name=name, offsets=offsets, shape=shape), local_name="mine", local_offsets=(0,) * len(shape)
    )
    holding = Holding(rank=0, tensors={"mine": TensorSpec(shape=shape, dtype="float32")}, pieces=(piece,))
    mine = torch.full(shape, torch.nan)
    load_hf(folder, holding, {name: TensorSpec(shape=whole, dtype="bfloat16")}, {"mine": mine})
    return mine


@pytest.mark.parametrize("box", [((0, 0), (6, 96)), ((2, 40), (3, 30)), ((5, 95), (1, 1))])
def test_mxfp4_is_read_as_transformers_reads_it(box: tuple[tuple[int, int], tuple[int, int]], tmp_path: Path) -> None:
    generator = torch.Generator().manual_seed(0)
    blocks = torch.randint(0, 256, (4, 6, 3, 16), generator=generator).to(torch.uint8)
    scales = torch.randint(110, 140, (4, 6, 3), generator=generator).to(torch.uint8)
    save_file({f"{BLOCK}.gate_up_proj_blocks": blocks}, tmp_path / "a.safetensors")
    save_file({f"{BLOCK}.gate_up_proj_scales": scales}, tmp_path / "b.safetensors")
    expected = convert_moe_packed_tensors(blocks, scales).float()
    (row, column), (rows, columns) = box
    for expert in (0, 3):
        found = read(tmp_path, f"{BLOCK}.{expert}.gate_up_proj", offsets=box[0], shape=box[1], whole=(6, 96))
        assert torch.equal(found, expected[expert].t()[row : row + rows, column : column + columns])


@pytest.mark.parametrize("box", [((0, 0), (200, 300)), ((120, 100), (20, 60)), ((199, 299), (1, 1))])
def test_fp8_blocks_are_read_as_transformers_reads_them(
    box: tuple[tuple[int, int], tuple[int, int]], tmp_path: Path
) -> None:
    generator = torch.Generator().manual_seed(0)
    values = torch.randn(200, 300, generator=generator).to(torch.float8_e4m3fn)
    scales = torch.rand(2, 3, generator=generator)
    name = "model.layers.0.mlp.gate_proj.weight"
    save_file({name: values, f"{name}_scale_inv": scales}, tmp_path / "a.safetensors")
    padded = torch.zeros(256, 384, dtype=torch.float8_e4m3fn)  # transformers takes whole blocks only
    padded[:200, :300] = values
    expected = Fp8Dequantize(None)._dequantize_one(padded, scales, torch.float32)[:200, :300]
    (row, column), (rows, columns) = box
    found = read(tmp_path, name, offsets=box[0], shape=box[1], whole=(200, 300))
    assert torch.equal(found, expected[row : row + rows, column : column + columns])


def test_a_stack_of_experts_is_read_transposed_and_its_biases_as_they_are(tmp_path: Path) -> None:
    generator = torch.Generator().manual_seed(0)
    matrices, biases = torch.randn(3, 5, 5, generator=generator), torch.randn(3, 5, generator=generator)
    stacks = {f"{BLOCK}.down_proj": matrices, f"{BLOCK}.down_proj_bias": biases}
    save_file(stacks, tmp_path / "a.safetensors")
    found = read(tmp_path, f"{BLOCK}.1.down_proj", offsets=(1, 2), shape=(4, 2), whole=(5, 5))
    assert torch.equal(found, matrices[1].t()[1:, 2:4])
    found = read(tmp_path, f"{BLOCK}.2.down_proj_bias", offsets=(3,), shape=(2,), whole=(5,))
    assert torch.equal(found, biases[2, 3:])


def test_a_stack_of_another_shape_is_refused(tmp_path: Path) -> None:
    save_file({f"{BLOCK}.down_proj": torch.zeros(3, 4, 5)}, tmp_path / "a.safetensors")
    with pytest.raises(CheckpointError, match=r"down_proj has shape \[5, 4\], config.json says \[4, 5\]"):
        read(tmp_path, f"{BLOCK}.1.down_proj", offsets=(0, 0), shape=(4, 5), whole=(4, 5))
