"""A trainer rank's share of a checkpoint: which tensors go into which folder, and back.

Master weights and moments are described as boxes of canonical tensors, as weights are. So every byte is written once,
by a rank that holds some of its tensor, and is read by whoever needs it in another layout.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

import torch
from torch import Tensor

from megarl.checkpoint.folder import below
from megarl.checkpoint.manifest import MODEL_FOLDER, OPTIMIZER_FOLDER, FileDigest
from megarl.checkpoint.save import save_hf, save_tensors
from megarl.train.optimizer import ModelOptimizer
from megarl.train.shards import MOMENTS, Shard, cut, spread
from megarl.weights.flat import FlatRange, restrict, restrict_all
from megarl.weights.group import TransferGroup
from megarl.weights.hf import load_hf
from megarl.weights.slices import Holding, Layout, TensorSpec

_MASTER = "master"
_DTYPE = "float32"


def weights_of(folder: Path) -> Path:
    """Where a checkpoint has its weights with all their bits."""
    master = folder / OPTIMIZER_FOLDER / _MASTER
    return master if master.exists() else folder / MODEL_FOLDER


def save_weights(
    folder: Path,
    *,
    source_folder: Path,
    layout: Layout,
    tensors: Mapping[str, Tensor],
    group: TransferGroup,
    is_critic: bool,
) -> dict[str, FileDigest]:
    files = save_hf(
        folder / MODEL_FOLDER,
        source_folder=source_folder,
        layout=layout,
        tensors=tensors,
        group=group,
        is_critic=is_critic,
    )
    return below(MODEL_FOLDER, files)


def save_optimizer(
    folder: Path, *, layout: Layout, optimizer: ModelOptimizer, group: TransferGroup
) -> dict[str, FileDigest]:
    """Moments, and master weights where `model/` has fewer bits; one kind after the other, to need little memory."""
    shards = optimizer.shards()
    sharded = restrict_all(layout, _share_ranges(shards, group), dtype=_DTYPE)
    holding = sharded.by_rank[group.peer]
    kinds: dict[str, dict[str, Tensor]] = {
        kind: {name: shard.moment(kind) for name, shard in shards.items()} for kind in MOMENTS
    }
    if any(spec.dtype != _DTYPE for spec in layout.canonical.values()):
        kinds[_MASTER] = {name: shard.master for name, shard in shards.items()}
    files: dict[str, FileDigest] = {}
    for kind, values in kinds.items():
        inner = f"{OPTIMIZER_FOLDER}/{kind}"
        tensors = spread(values, shards, holding)
        files |= below(inner, save_tensors(folder / inner, layout=sharded, tensors=tensors, group=group))
    return files


def load_optimizer(
    folder: Path, *, holding: Holding, layout: Layout, optimizer: ModelOptimizer, num_updates: int
) -> None:
    """Take master weights, where there are some, and moments; the model's weights are already those of `folder`."""
    shards = optimizer.shards()
    mine = restrict(holding, {name: shard.range for name, shard in shards.items()}, dtype=_DTYPE)
    canonical = {name: TensorSpec(shape=spec.shape, dtype=_DTYPE) for name, spec in layout.canonical.items()}

    def load(kind: str) -> dict[str, Tensor]:
        tensors = {name: torch.empty(spec.shape) for name, spec in mine.tensors.items()}
        load_hf(folder / OPTIMIZER_FOLDER / kind, mine, canonical, tensors)
        return cut(tensors, shards)

    if weights_of(folder).name == _MASTER:
        for name, values in load(_MASTER).items():
            shards[name].master.data.copy_(values)
    moments = {kind: load(kind) for kind in MOMENTS}
    for name, shard in shards.items():
        shard.restore({kind: values[name] for kind, values in moments.items()}, num_updates=num_updates)


def _share_ranges(shards: Mapping[str, Shard], group: TransferGroup) -> dict[int, dict[str, FlatRange]]:
    """Every rank's ranges: Megatron decides them where the parameters are."""
    number = group.next_meeting()
    keys = {peer: f"ranges {number} of peer {peer}" for peer in range(group.num_peers)}
    group.report(keys[group.peer], json.dumps({name: shard.range for name, shard in shards.items()}).encode())
    reports = group.collect(list(keys.values()), group.timeout_s)
    return {
        peer: {name: (start, end) for name, (start, end) in json.loads(reports[key]).items()}
        for peer, key in keys.items()
    }
