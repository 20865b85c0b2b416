"""Hugging Face folders as holders of weights: the contents of their safetensors files, and filling a rank from them.

Only headers and the boxes that a rank needs are read. Knows no transport and no engine.
"""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Collection, Mapping
from dataclasses import replace
from math import prod
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open

from megarl.errors import CheckpointError
from megarl.weights.algebra.plan import Move, plan
from megarl.weights.algebra.slices import HEADER_DTYPES, Holding, Layout, TensorSpec
from megarl.weights.executors.tensors import box_of
from megarl.weights.layouts.pieces import whole

INDEX_FILE = "model.safetensors.index.json"


def read_hf_layout(folder: Path, canonical: Mapping[str, TensorSpec]) -> Layout:
    """Return which of the `tensor_files` holds which canonical tensor; a missing or misshapen one is a CheckpointError.

    Tensors of other names are ignored: some checkpoints of tied models repeat the embedding as the head.
    """
    headers = [_header(path) for path in tensor_files(folder)]
    specs = {name: spec for header in headers for name, spec in header.items()}
    for name, spec in canonical.items():
        if name not in specs:
            raise CheckpointError(f"{folder}: tensor {name} is in no safetensors file")
        if specs[name].shape != spec.shape:
            shapes = f"{list(specs[name].shape)}, config.json says {list(spec.shape)}"
            raise CheckpointError(f"{folder}: tensor {name} has shape {shapes}")
    holdings = tuple(_holding(rank, header, canonical) for rank, header in enumerate(headers))
    return Layout(canonical=canonical, holdings=holdings)


def load_hf(
    folder: Path,
    holding: Holding,
    canonical: Mapping[str, TensorSpec],
    tensors: Mapping[str, torch.Tensor],
    *,
    may_lack: Collection[str] = (),
) -> None:
    """Fill one rank's tensors in place, in their own dtype; elements that no piece covers (padding) become zero.

    Tensors of `may_lack` that are not in the folder become zero too.
    """
    if may_lack:
        lacking = set(may_lack) - {name for path in tensor_files(folder) for name in _header(path)}
        canonical = {name: spec for name, spec in canonical.items() if name not in lacking}
        holding = replace(holding, pieces=tuple(piece for piece in holding.pieces if piece.slice.name in canonical))
    source = read_hf_layout(folder, canonical)
    moves = plan(source, Layout(canonical=canonical, holdings=(holding,))).moves
    _zero_padding(holding, tensors)
    by_file: defaultdict[int, list[Move]] = defaultdict(list)
    for move in moves:
        by_file[move.source_rank].append(move)
    files = tensor_files(folder)
    for rank, of_file in by_file.items():
        _read(files[rank], of_file, tensors)


def tensor_files(folder: Path) -> tuple[Path, ...]:
    """Return the files that the index names or, without an index, all safetensors files."""
    index = folder / INDEX_FILE
    if not index.exists():
        files = tuple(sorted(folder.glob("*.safetensors")))
        if not files:
            raise CheckpointError(f"{folder}: there is no safetensors file; convert the model to safetensors first")
        return files
    try:
        names = sorted(set(json.loads(index.read_text())["weight_map"].values()))
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise CheckpointError(f"{index}: not an index of safetensors files: {type(error).__name__}") from error
    for name in names:
        if not isinstance(name, str) or Path(name).name != name:
            raise CheckpointError(f"{index}: names {name!r}, which is no file of this folder")
    return tuple(folder / name for name in names)


def _header(path: Path) -> dict[str, TensorSpec]:
    try:
        with safe_open(path, framework="pt") as file:
            slices = {name: file.get_slice(name) for name in file.keys()}  # noqa: SIM118 - not a mapping
            return {
                name: TensorSpec(shape=tuple(view.get_shape()), dtype=HEADER_DTYPES[view.get_dtype()])
                for name, view in slices.items()
                if view.get_dtype() in HEADER_DTYPES
            }
    except (SafetensorError, OSError) as error:
        raise CheckpointError(f"{path}: cannot be read as safetensors: {error}") from error


def _holding(rank: int, header: Mapping[str, TensorSpec], canonical: Mapping[str, TensorSpec]) -> Holding:
    pieces = tuple(piece for name in header if name in canonical for piece in whole(name, name, header[name]).pieces)
    return Holding(rank=rank, tensors=header, pieces=pieces)


def _zero_padding(holding: Holding, tensors: Mapping[str, torch.Tensor]) -> None:
    covered: defaultdict[str, int] = defaultdict(int)
    for piece in holding.pieces:
        covered[piece.local_name] += piece.slice.num_elements
    for name, spec in holding.tensors.items():
        if covered[name] < prod(spec.shape):
            tensors[name].detach().zero_()


def _read(path: Path, moves: list[Move], tensors: Mapping[str, torch.Tensor]) -> None:
    try:
        with safe_open(path, framework="pt") as file:
            for move in moves:
                box = move.slice
                ranges = tuple(slice(start, start + size) for start, size in zip(box.offsets, box.shape, strict=True))
                values = file.get_slice(box.name)[ranges]
                box_of(tensors[move.target_name], move.target_offsets, box.shape).copy_(values)
    except (SafetensorError, OSError) as error:
        raise CheckpointError(f"{path}: cannot be read as safetensors: {error}") from error
