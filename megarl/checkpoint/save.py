"""Writing a model as a Hugging Face folder, all trainer ranks together. Knows layouts and files, not Megatron.

Each rank is given whole canonical tensors, receives their pieces by plan and writes one file; nobody gathers the model.
The folder appears under its name only when every byte of it is on disk.
"""

from __future__ import annotations

import json
import os
import shutil
from collections import defaultdict
from collections.abc import Iterable, Mapping
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import save_file

from megarl.errors import CheckpointError, WeightSyncError
from megarl.weights.fused import whole
from megarl.weights.group import TransferGroup
from megarl.weights.hf import INDEX_FILE
from megarl.weights.plan import plan, same_processes
from megarl.weights.slices import Holding, Layout, TensorSpec
from megarl.weights.tensors import torch_dtype
from megarl.weights.transfer import DEFAULT_BUCKET_BYTES, exchange

_COPIED = (
    "config.json",
    "generation_config.json",
    "tokenizer*",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.*",
    "merges.txt",
    "chat_template*",
    "*.model",
)
"""Files beside the weights without which the folder is not a model that loads."""


def save_hf(
    folder: Path,
    *,
    source_folder: Path,
    layout: Layout,
    tensors: Mapping[str, torch.Tensor],
    group: TransferGroup,
    dtype: str | None = None,
    bucket_bytes: int = DEFAULT_BUCKET_BYTES,
) -> None:
    """Write the model that `layout` spreads over the peers of `group`; every peer calls this with its own tensors.

    Peer r of the (gloo) group is rank r of the layout. Without `dtype` the folder has that of the source folder.
    """
    target = assign_tensors(layout, dtype=dtype)
    partial = folder.with_name(f"{folder.name}.tmp")
    if folder.exists():
        raise CheckpointError(f"{folder} was not saved: it exists already; remove it or choose another name")
    try:
        group.barrier()
        if group.peer == 0:
            _make_fresh(partial)
        group.barrier()
        share = _receive(layout, target, tensors, group, bucket_bytes)
        names = _file_names(target)
        if share:
            path = partial / names[group.peer]
            save_file(share, path, metadata={"format": "pt"})
            _sync(path)
        group.barrier()
        if group.peer == 0:
            _write_index(partial, target, names)
            _copy_companions(source_folder, partial, dtype=dtype)
            _publish(partial, folder)
        group.barrier()
    except (WeightSyncError, OSError, SafetensorError) as error:
        group.abandon(f"{folder} was not saved: {error}")
        raise CheckpointError(f"{folder} was not saved: {error}") from error


def assign_tensors(layout: Layout, *, dtype: str | None = None) -> Layout:
    """Whole canonical tensors for every rank: largest first, to the holder of a part that has least so far."""
    holders: defaultdict[str, set[int]] = defaultdict(set)
    for holding in layout.holdings:
        for piece in holding.pieces:
            holders[piece.slice.name].add(holding.rank)
    load = {holding.rank: 0 for holding in layout.holdings}
    share: defaultdict[int, list[str]] = defaultdict(list)
    for name in sorted(layout.canonical, key=lambda name: (-layout.canonical[name].num_bytes, name)):
        if not holders[name]:
            raise CheckpointError(f"no rank holds any of {name}")
        rank = min(holders[name], key=lambda rank: (load[rank], rank))
        load[rank] += layout.canonical[name].num_bytes
        share[rank].append(name)
    canonical = {
        name: TensorSpec(shape=spec.shape, dtype=dtype or spec.dtype) for name, spec in layout.canonical.items()
    }
    holdings = [_whole_holding(rank, sorted(share[rank]), canonical) for rank in sorted(load)]
    return Layout(canonical=canonical, holdings=tuple(holdings))


def _whole_holding(rank: int, names: Iterable[str], canonical: Mapping[str, TensorSpec]) -> Holding:
    specs = {name: canonical[name] for name in names}
    pieces = tuple(piece for name, spec in specs.items() for piece in whole(name, name, spec).pieces)
    return Holding(rank=rank, tensors=specs, pieces=pieces)


def _receive(
    layout: Layout, target: Layout, tensors: Mapping[str, torch.Tensor], group: TransferGroup, bucket_bytes: int
) -> dict[str, torch.Tensor]:
    """This rank's whole tensors, in host memory."""
    share = {
        name: torch.empty(spec.shape, dtype=torch_dtype(spec.dtype))
        for name, spec in target.by_rank[group.peer].tensors.items()
    }
    moves = plan(layout, target, locality=same_processes)
    exchange(moves, tensors, share, group, bucket_bytes=bucket_bytes)
    return share


def _file_names(target: Layout) -> dict[int, str]:
    writers = [holding.rank for holding in target.holdings if holding.tensors]
    return {
        rank: f"model-{number:05d}-of-{len(writers):05d}.safetensors" for number, rank in enumerate(writers, start=1)
    }


def _make_fresh(partial: Path) -> None:
    # A save that was killed leaves its folder behind; nothing ever reads one.
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)


def _write_index(partial: Path, target: Layout, names: Mapping[int, str]) -> None:
    weight_map = {name: names[holding.rank] for holding in target.holdings for name in holding.tensors}
    total_bytes = sum(spec.num_bytes for spec in target.canonical.values())
    index = {"metadata": {"total_size": total_bytes}, "weight_map": dict(sorted(weight_map.items()))}
    path = partial / INDEX_FILE
    path.write_text(json.dumps(index, indent=2) + "\n")
    _sync(path)


def _copy_companions(source_folder: Path, partial: Path, *, dtype: str | None) -> None:
    for pattern in _COPIED:
        for source in sorted(source_folder.glob(pattern)):
            if source.is_file() and not (partial / source.name).exists():
                shutil.copyfile(source, partial / source.name)
                _sync(partial / source.name)
    if dtype is not None:
        _set_dtype(partial / "config.json", dtype)


def _set_dtype(path: Path, dtype: str) -> None:
    config = json.loads(path.read_text())
    # transformers 5 writes `dtype`; earlier versions read `torch_dtype`.
    config["torch_dtype" if "torch_dtype" in config else "dtype"] = dtype
    path.write_text(json.dumps(config, indent=2) + "\n")
    _sync(path)


def _publish(partial: Path, folder: Path) -> None:
    _sync(partial)
    partial.rename(folder)
    _sync(folder.parent)


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
