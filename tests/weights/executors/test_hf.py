from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from megarl.errors import CheckpointError
from megarl.families.shape import ModelShape
from megarl.weights.algebra.slices import Layout
from megarl.weights.executors.hf import load_hf, read_hf_layout
from megarl.weights.executors.tensors import specs_of, torch_dtype
from megarl.weights.layouts.canonical import canonical_tensors
from megarl.weights.layouts.megatron import MegatronParallel, megatron_layout
from megarl.weights.layouts.sglang import sglang_layout
from tests.tiny_models import write_tiny_model
from tests.weights.transfer_peers import cut


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, ModelShape]:
    path = tmp_path_factory.mktemp("model")
    return path, write_tiny_model(path, "qwen2", layers=2, max_shard_size="60KB")


@pytest.fixture
def folder(written: tuple[Path, ModelShape]) -> Path:
    return written[0]


@pytest.fixture
def shape(written: tuple[Path, ModelShape]) -> ModelShape:
    return written[1]


def whole_model(folder: Path) -> dict[str, torch.Tensor]:
    return {name: tensor for path in folder.glob("*.safetensors") for name, tensor in load_file(path).items()}


def check_loads_into(folder: Path, shape: ModelShape, layout: Layout) -> None:
    model = whole_model(folder)
    canonical = canonical_tensors(shape)
    for holding in layout.holdings:
        tensors = {
            name: torch.full(spec.shape, 7.0, dtype=torch_dtype(spec.dtype)) for name, spec in holding.tensors.items()
        }
        load_hf(folder, holding, canonical, tensors)
        for name, expected in cut(holding, model).items():
            assert torch.equal(tensors[name], expected), name


def test_the_model_spans_several_files(folder: Path, shape: ModelShape) -> None:
    source = read_hf_layout(folder, canonical_tensors(shape))
    assert len(source.holdings) > 2
    assert sum(len(holding.pieces) for holding in source.holdings) == len(canonical_tensors(shape))


def test_ranks_are_filled_and_their_padding_is_zero(folder: Path, shape: ModelShape) -> None:
    for dtype in ("float32", "bfloat16"):
        check_loads_into(folder, shape, megatron_layout(shape, MegatronParallel(tensor=2, pipeline=2), dtype=dtype))
    check_loads_into(folder, shape, sglang_layout(shape, tensor=4, dtype="float32"))


def test_parameters_that_require_gradients_are_filled_in_place(folder: Path, shape: ModelShape) -> None:
    holding = megatron_layout(shape, MegatronParallel(), dtype="float32").holdings[0]
    tensors = {name: torch.nn.Parameter(torch.empty(spec.shape)) for name, spec in holding.tensors.items()}
    load_hf(folder, holding, canonical_tensors(shape), tensors)
    norm = tensors["chunk0.decoder.final_layernorm.weight"]
    assert torch.equal(norm.detach(), whole_model(folder)["model.norm.weight"])
    assert norm.grad_fn is None
    assert specs_of(tensors.items()) == dict(holding.tensors)


def test_a_tied_model_with_a_repeated_head_loads(tmp_path: Path) -> None:
    shape = write_tiny_model(tmp_path, "qwen2", tied=True, layers=1)
    path = tmp_path / "model.safetensors"
    tensors = load_file(path)
    save_file({**tensors, "lm_head.weight": tensors["model.embed_tokens.weight"].clone()}, path)
    check_loads_into(tmp_path, shape, megatron_layout(shape, MegatronParallel(), dtype="float32"))


def _change(change: Callable[[dict[str, torch.Tensor]], object]) -> Callable[[Path], object]:
    def damage(path: Path) -> None:
        tensors = load_file(path)
        change(tensors)
        save_file(tensors, path)

    return damage


def _name_in_index(name: object) -> Callable[[Path], object]:
    text = json.dumps({"weight_map": {"model.norm.weight": name}})
    return lambda path: path.with_name("model.safetensors.index.json").write_text(text)


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (_change(lambda tensors: tensors.pop("model.norm.weight")), "model.norm.weight is in no safetensors file"),
        (
            _change(lambda tensors: tensors.update({"model.norm.weight": torch.ones(63)})),
            r"model.norm.weight has shape \[63\], config.json says \[64\]",
        ),
        (
            lambda path: path.write_bytes(path.read_bytes()[:-100]),
            r"model.safetensors: cannot be read as safetensors",
        ),
        (lambda path: path.unlink(), "there is no safetensors file"),
        (_name_in_index("model-00009-of-00009.safetensors"), "model-00009-of-00009.safetensors"),
        (_name_in_index("../elsewhere.safetensors"), "which is no file of this folder"),
        (_name_in_index("/etc/passwd"), "which is no file of this folder"),
        (_name_in_index(7), "which is no file of this folder"),
    ],
    ids=["missing", "misshapen", "truncated", "no file", "absent", "above", "outside", "no name"],
)
def test_a_damaged_folder_is_an_error_that_names_the_fault(
    tmp_path: Path, damage: Callable[[Path], object], message: str
) -> None:
    shape = write_tiny_model(tmp_path, "llama", layers=1)
    damage(tmp_path / "model.safetensors")
    holding = megatron_layout(shape, MegatronParallel(), dtype="float32").holdings[0]
    tensors = {name: torch.empty(spec.shape) for name, spec in holding.tensors.items()}
    with pytest.raises(CheckpointError, match=message):
        load_hf(tmp_path, holding, canonical_tensors(shape), tensors)
