"""Every family: Hugging Face folder -> trainer ranks -> engine ranks -> Hugging Face folder, byte for byte.

A new family is tested by being in `families.FAMILIES` and in `tests/tiny_models.py`.
"""

from __future__ import annotations

import ast
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from megarl import families
from megarl.families import BY_NAME
from megarl.families.shape import ModelShape
from megarl.weights.algebra.plan import plan
from megarl.weights.algebra.slices import Holding, Layout
from megarl.weights.executors.codecs import as_files
from megarl.weights.executors.hf import load_hf
from megarl.weights.executors.tensors import box_of, torch_dtype
from megarl.weights.layouts.canonical import canonical_tensors
from megarl.weights.layouts.megatron import MegatronParallel, megatron_layout
from megarl.weights.layouts.pieces import replicate, whole
from megarl.weights.layouts.sglang import sglang_layout
from tests.repository import ROOT
from tests.tiny_models import FAMILIES, is_read, write_tiny_model

Tensors = dict[str, torch.Tensor]

SPLITS = [
    MegatronParallel(tensor=2, pipeline=2, virtual_pipeline=2),
    MegatronParallel(tensor=4, data=2, expert=4, expert_tensor=1),
    MegatronParallel(pipeline=2, data=2, expert=2, first_stage_layers=1),
]


NAMED = {"megarl/cli/prepare.py", "megarl/tools/quickstart/tiny_model.py"}
"""Modules that make a Qwen2 model, which the quickstart trains."""


@pytest.mark.patient
def test_no_module_outside_of_the_families_goes_by_the_name_of_one() -> None:
    names = {name for family in BY_NAME.values() for name in (family.name, family.architecture)}
    named = {
        str(path.relative_to(ROOT))
        for path in (ROOT / "megarl").rglob("*.py")
        if "families" not in path.parts
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Constant) and node.value in names - {"llama"}  # also a way to write calls of tools
    }
    assert named == NAMED


def test_every_family_has_a_tiny_model() -> None:
    assert set(FAMILIES) == {family.name for family in families.FAMILIES}


@pytest.mark.patient
@pytest.mark.parametrize(("family", "tied"), [*((family, False) for family in FAMILIES), ("qwen2", True)])
def test_a_folder_comes_back_as_it_was(tmp_path: Path, family: str, tied: bool) -> None:
    shape = write_tiny_model(tmp_path, family, tied=tied, layers=4, max_shard_size="100KB")
    files = {name: tensor for path in tmp_path.glob("*.safetensors") for name, tensor in load_file(path).items()}
    model = {name: tensor for name, tensor in files.items() if is_read(name)}
    for index, parallel in enumerate(SPLITS):
        returned = tmp_path / f"returned {index}"
        returned.mkdir()
        travel(tmp_path, shape, parallel, returned)
        returned_tensors = load_file(returned / "model.safetensors")
        assert set(returned_tensors) == set(model)
        for name, tensor in model.items():
            assert raw(returned_tensors[name]) == raw(tensor), name


def travel(folder: Path, shape: ModelShape, parallel: MegatronParallel, returned: Path) -> None:
    canonical = canonical_tensors(shape)
    if shape.has_biases:
        parallel = replace(parallel, expert_tensor=1, data=2)  # experts with biases are whole
    trainer = megatron_layout(shape, parallel, dtype="float32")
    ranks = {holding.rank: zeros(holding) for holding in trainer.holdings}
    for holding in trainer.holdings:
        load_hf(folder, holding, canonical, ranks[holding.rank])
    engines = sglang_layout(shape, tensor=2, expert=2 if shape.experts else 1, dtype="float32")
    file = [whole(name, name, spec) for name, spec in canonical.items()]
    target = Layout(canonical=canonical, holdings=tuple(replicate([0], file, dtype="float32")))
    served = carry(trainer, ranks, engines)
    save_file(as_files(carry(engines, served, target)[0]), returned / "model.safetensors")


def carry(source: Layout, given: dict[int, Tensors], target: Layout) -> dict[int, Tensors]:
    taken = {holding.rank: zeros(holding) for holding in target.holdings}
    for move in plan(source, target).moves:
        values = box_of(given[move.source_rank][move.source_name], move.source_offsets, move.slice.shape)
        box_of(taken[move.target_rank][move.target_name], move.target_offsets, move.slice.shape).copy_(values)
    return taken


def zeros(holding: Holding) -> Tensors:
    return {name: torch.zeros(spec.shape, dtype=torch_dtype(spec.dtype)) for name, spec in holding.tensors.items()}


def raw(tensor: torch.Tensor) -> bytes:
    return tensor.contiguous().numpy().tobytes()
