from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from megarl.config.model import ModelShape
from megarl.errors import CheckpointError
from megarl.weights.algebra.slices import Layout
from megarl.weights.executors.hf import load_hf, read_hf_folder
from megarl.weights.executors.tensors import box_of, specs_of, torch_dtype
from megarl.weights.layouts.canonical import canonical_tensors
from megarl.weights.layouts.megatron import MegatronParallel, megatron_layout
from megarl.weights.layouts.sglang import sglang_layout
from tests.tiny_models import write_tiny_model


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
        expected = {name: torch.zeros_like(tensor) for name, tensor in tensors.items()}
        for piece in holding.pieces:
            box = box_of(model[piece.slice.name], piece.slice.offsets, piece.slice.shape)
            box_of(expected[piece.local_name], piece.local_offsets, piece.slice.shape).copy_(box)
        for name, tensor in tensors.items():
            assert torch.equal(tensor, expected[name]), name


def test_the_model_spans_several_files(folder: Path, shape: ModelShape) -> None:
    source = read_hf_folder(folder, canonical_tensors(shape))
    assert len(source.files) > 2
    assert sum(len(holding.pieces) for holding in source.layout.holdings) == len(canonical_tensors(shape))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_megatron_ranks_are_filled_and_their_padding_is_zero(folder: Path, shape: ModelShape, dtype: str) -> None:
    check_loads_into(folder, shape, megatron_layout(shape, MegatronParallel(tensor=2, pipeline=2), dtype=dtype))


def test_engine_ranks_are_filled(folder: Path, shape: ModelShape) -> None:
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


@pytest.fixture
def small(tmp_path: Path) -> tuple[Path, ModelShape]:
    return tmp_path, write_tiny_model(tmp_path, "llama", layers=1)


def load_whole(folder: Path, shape: ModelShape) -> None:
    holding = megatron_layout(shape, MegatronParallel(), dtype="float32").holdings[0]
    tensors = {name: torch.empty(spec.shape) for name, spec in holding.tensors.items()}
    load_hf(folder, holding, canonical_tensors(shape), tensors)


def test_a_missing_tensor_is_named(small: tuple[Path, ModelShape]) -> None:
    path = small[0] / "model.safetensors"
    tensors = load_file(path)
    del tensors["model.norm.weight"]
    save_file(tensors, path)
    with pytest.raises(CheckpointError, match=r"tensor model.norm.weight is in no safetensors file"):
        load_whole(*small)


def test_a_misshapen_tensor_is_named(small: tuple[Path, ModelShape]) -> None:
    path = small[0] / "model.safetensors"
    save_file({**load_file(path), "model.norm.weight": torch.ones(63)}, path)
    with pytest.raises(CheckpointError, match=r"model.norm.weight has shape \[63\], config.json says \[64\]"):
        load_whole(*small)


def test_a_truncated_file_is_named(small: tuple[Path, ModelShape]) -> None:
    path = small[0] / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-100])
    with pytest.raises(CheckpointError, match=r"model.safetensors: cannot be read as safetensors"):
        load_whole(*small)


def test_an_index_that_names_an_absent_file_is_an_error(small: tuple[Path, ModelShape]) -> None:
    index = {"weight_map": {"model.norm.weight": "model-00009-of-00009.safetensors"}}
    (small[0] / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(CheckpointError, match=r"model-00009-of-00009.safetensors"):
        load_whole(*small)


@pytest.mark.parametrize("name", ["../elsewhere.safetensors", "/etc/passwd", 7])
def test_an_index_that_names_a_file_elsewhere_is_an_error(small: tuple[Path, ModelShape], name: object) -> None:
    (small[0] / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"model.norm.weight": name}}))
    with pytest.raises(CheckpointError, match="which is no file of this folder"):
        load_whole(*small)


def test_a_folder_without_weights_is_an_error(small: tuple[Path, ModelShape]) -> None:
    (small[0] / "model.safetensors").unlink()
    with pytest.raises(CheckpointError, match="there is no safetensors file"):
        load_whole(*small)
