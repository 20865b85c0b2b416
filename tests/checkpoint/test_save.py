from __future__ import annotations

import json
from collections import defaultdict
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from megarl.checkpoint.save import assign_tensors, save_hf
from megarl.config.model import read_model_shape
from megarl.errors import CheckpointError
from megarl.weights.executors.group import StoreServer, TransferGroup
from megarl.weights.layouts.megatron import MegatronParallel, megatron_layout
from tests.checkpoint.save_peers import load_and_save
from tests.tiny_models import write_tiny_model
from tests.weights.reference import make_shape

PARALLEL = MegatronParallel(tensor=2, pipeline=2)


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("source")
    write_tiny_model(folder, "qwen2", tied=True)
    (folder / "tokenizer.json").write_text("{}")
    (folder / "notes.txt").write_text("not part of the model")
    return folder


@pytest.fixture(scope="module")
def saved(source: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The source, loaded into four ranks (TP 2, PP 2) and saved by them."""
    folder = tmp_path_factory.mktemp("saved") / "model"
    load_and_save(PARALLEL, source, folder)
    return folder


def weights_of(folder: Path) -> dict[str, torch.Tensor]:
    return {name: tensor for path in folder.glob("*.safetensors") for name, tensor in load_file(path).items()}


def test_the_saved_model_loads_with_transformers_byte_for_byte(source: Path, saved: Path) -> None:
    before = AutoModelForCausalLM.from_pretrained(source).state_dict()
    after = AutoModelForCausalLM.from_pretrained(saved).state_dict()
    assert before.keys() == after.keys()
    for name, tensor in before.items():
        assert tensor.dtype == after[name].dtype
        assert torch.equal(tensor, after[name]), name


def test_every_rank_writes_a_file_of_its_own_and_the_index_is_right(saved: Path) -> None:
    index = json.loads((saved / "model.safetensors.index.json").read_text())
    files: defaultdict[str, set[str]] = defaultdict(set)
    for name, file in index["weight_map"].items():
        files[file].add(name)
    assert len(files) == PARALLEL.world_size
    assert {path.name for path in saved.glob("*.safetensors")} == set(files)
    for file, names in files.items():
        assert set(load_file(saved / file)) == names
    assert index["metadata"]["total_size"] == sum(tensor.nbytes for tensor in weights_of(saved).values())


def test_configuration_and_tokenizer_come_along_and_nothing_else(saved: Path) -> None:
    names = {path.name for path in saved.iterdir() if path.suffix != ".safetensors"}
    assert names == {"config.json", "generation_config.json", "tokenizer.json", "model.safetensors.index.json"}


def test_an_existing_folder_is_not_overwritten(source: Path, saved: Path) -> None:
    server = StoreServer()
    group = TransferGroup.join(server.address, name="save", peer=0, num_peers=1, timeout_s=60)
    layout = megatron_layout(read_model_shape(source), MegatronParallel(), dtype="float32")
    with pytest.raises(CheckpointError, match="File exists"):
        save_hf(saved, source_folder=source, layout=layout, tensors={}, group=group)


def test_tensors_are_shared_out_evenly_among_those_who_hold_a_part() -> None:
    layout = megatron_layout(make_shape(layers=8), MegatronParallel(tensor=2, pipeline=2, data=2), dtype="float32")
    assigned = assign_tensors(layout)
    names = [name for holding in assigned.holdings for name in holding.tensors]
    assert sorted(names) == sorted(layout.canonical)
    held = {holding.rank: {piece.slice.name for piece in holding.pieces} for holding in layout.holdings}
    assert all(set(holding.tensors) <= held[holding.rank] for holding in assigned.holdings)
    sizes = [holding.num_bytes for holding in assigned.holdings]
    assert max(sizes) - min(sizes) <= max(spec.num_bytes for spec in layout.canonical.values())
