"""Snapshots of random layouts: a model saved from them and loaded into another layout is bit-equal."""

from __future__ import annotations

from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from math import prod
from pathlib import Path
from tempfile import TemporaryDirectory

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from megarl.checkpoint.save import assign_tensors, contribution, copy_to_host, save_tensors
from megarl.config.model import ModelShape
from megarl.weights.algebra.slices import Index, Layout, Slice
from megarl.weights.executors.group import StoreServer, TransferGroup
from megarl.weights.executors.hf import load_hf
from megarl.weights.executors.tensors import box_of
from megarl.weights.layouts.megatron import MegatronParallel, megatron_layout
from megarl.weights.layouts.pieces import FlatRange, restrict_all
from tests.weights.reference import parallels, shapes

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


@settings(max_examples=40, deadline=None)
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


@settings(max_examples=12, deadline=None)
@given(shape=shapes(), first=FEW, second=FEW, is_sharded=st.booleans())
def test_what_one_layout_saves_another_loads(
    shape: ModelShape, first: MegatronParallel, second: MegatronParallel, *, is_sharded: bool
) -> None:
    source = megatron_layout(shape, first, dtype="float32")
    held = fill(source)
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


def fill(layout: Layout) -> dict[int, Tensors]:
    """Return the tensors of every rank."""
    whole, held = canonical(layout), {}
    for holding in layout.holdings:
        held[holding.rank] = {name: torch.full(spec.shape, -1.0) for name, spec in holding.tensors.items()}
        for piece in holding.pieces:
            box = box_of(held[holding.rank][piece.local_name], piece.local_offsets, piece.slice.shape)
            box.copy_(box_of(whole[piece.slice.name], piece.slice.offsets, piece.slice.shape))
    return held


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
