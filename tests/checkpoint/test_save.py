"""Saves by several ranks, and snapshots of random layouts: saved and loaded into another layout they are bit-equal."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from math import prod
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from megarl.checkpoint.save import assign_tensors, contribution, copy_to_host, save_hf, save_tensors
from megarl.config.model import read_model_shape
from megarl.errors import CheckpointError
from megarl.families.shape import ModelShape
from megarl.weights.algebra.slices import Index, Layout, Slice
from megarl.weights.executors.group import TransferGroup
from megarl.weights.executors.hf import load_hf
from megarl.weights.executors.meeting import StoreServer
from megarl.weights.executors.tensors import box_of
from megarl.weights.layouts.megatron import MegatronParallel, megatron_layout
from megarl.weights.layouts.pieces import FlatRange, restrict_all
from tests.checkpoint.save_peers import load_and_save
from tests.tiny_models import write_tiny_model
from tests.weights.reference import make_shape, parallels, shapes
from tests.weights.transfer_peers import cut

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


@pytest.mark.parametrize(
    ("family", "parallel"),
    [
        ("phi3", PARALLEL),
        ("gemma3_text", PARALLEL),
        ("glm4_moe", MegatronParallel(tensor=2, data=2, expert=2)),
        ("deepseek_v3", MegatronParallel(pipeline=2, data=2, expert=2)),
        ("gpt_oss", MegatronParallel(tensor=2, data=2, expert=2, expert_tensor=1)),
    ],
)
def test_ranks_write_the_tensors_that_transformers_wrote(
    family: str, parallel: MegatronParallel, tmp_path: Path
) -> None:
    """Fused matrices, buffers, and experts that are stacked and transposed in the files."""
    write_tiny_model(tmp_path / "source", family)
    load_and_save(parallel, tmp_path / "source", tmp_path / "saved")
    before, after = weights_of(tmp_path / "source"), weights_of(tmp_path / "saved")
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


FEW = st.sampled_from([(1, 1), (2, 1), (2, 2)]).flatmap(
    lambda pipeline: st.builds(
        MegatronParallel,
        tensor=st.sampled_from([1, 2]),
        pipeline=st.just(pipeline[0]),
        virtual_pipeline=st.just(pipeline[1]),
        data=st.sampled_from([1, 2]),
    )
)
"""Layouts of at most eight ranks: each is a thread."""

Tensors = dict[str, torch.Tensor]


@given(shapes(), parallels())
def test_every_element_is_copied_by_one_rank_and_written_where_it_would_have_been(
    shape: ModelShape, parallel: MegatronParallel
) -> None:
    layout = megatron_layout(shape, parallel, dtype="float32")
    given_layout = contribution(layout, 0).layout
    num_copied = sum(piece.slice.num_elements for holding in given_layout.holdings for piece in holding.pieces)
    assert num_copied == sum(prod(spec.shape) for spec in layout.canonical.values())
    boxes: set[Slice] = {piece.slice for holding in given_layout.holdings for piece in holding.pieces}
    assert len(boxes) == sum(len(holding.pieces) for holding in given_layout.holdings)
    assert assign_tensors(given_layout) == assign_tensors(layout)


@pytest.mark.patient
@settings(max_examples=5)
@given(shape=shapes(), first=FEW, second=FEW, is_sharded=st.booleans())
def test_what_one_layout_saves_another_loads(
    shape: ModelShape, first: MegatronParallel, second: MegatronParallel, *, is_sharded: bool
) -> None:
    source = megatron_layout(shape, first, dtype="float32")
    held = {holding.rank: cut(holding, canonical(source), padding=-1.0) for holding in source.holdings}
    with TemporaryDirectory() as name:
        folder = Path(name) / "saved"
        if is_sharded:
            save(folder, shard(source, first), held)
        else:
            save(folder, source, held)
        target = megatron_layout(shape, second, dtype="float32")
        for holding in target.holdings:
            tensors = {local: torch.full(spec.shape, -1.0) for local, spec in holding.tensors.items()}
            load_hf(folder, holding, target.canonical, tensors)
            for piece in holding.pieces:
                found = box_of(tensors[piece.local_name], piece.local_offsets, piece.slice.shape)
                assert torch.equal(found, box_of(canonical(source)[piece.slice.name], piece.slice.offsets, found.shape))


def canonical(layout: Layout) -> Tensors:
    """Return tensors whose elements are all different."""
    start, tensors = 0, {}
    for name, spec in layout.canonical.items():
        tensors[name] = torch.arange(start, start + prod(spec.shape), dtype=torch.float32).view(spec.shape)
        start += prod(spec.shape)
    return tensors


def shard(layout: Layout, parallel: MegatronParallel) -> Layout:
    """Give each data-parallel rank a range of every tensor, cut anywhere, as in the distributed optimizer."""
    ranges: dict[int, dict[str, FlatRange]] = {}
    for holding in layout.holdings:
        place = (holding.rank // parallel.tensor) % parallel.data
        ranges[holding.rank] = {
            name: (prod(spec.shape) * place // parallel.data, prod(spec.shape) * (place + 1) // parallel.data)
            for name, spec in holding.tensors.items()
        }
    return restrict_all(layout, ranges, dtype="float32")


def save(folder: Path, layout: Layout, held: Mapping[int, Tensors]) -> None:
    """Save with every rank in a thread of its own."""
    server, num_peers = StoreServer(), len(layout.holdings)

    def write(rank: int) -> None:
        group = TransferGroup.join(server.address, name="save", peer=rank, num_peers=num_peers, timeout_s=300)
        mine = contribution(layout, rank)
        taken = copy_to_host(mine, rank, partial(_box, held[rank]))
        save_tensors(folder, layout=mine.layout, tensors=taken, group=group)
        group.close()

    with ThreadPoolExecutor(num_peers) as pool:
        list(pool.map(write, range(num_peers)))


def _box(tensors: Tensors, name: str, offsets: Index, shape: Index) -> torch.Tensor:
    return box_of(tensors[name], offsets, shape)
