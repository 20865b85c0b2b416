"""A folder of safetensors files as one set of tensors: which file has which, and where. Headers only."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from megarl.checkpoint.tensor_header import TensorEntry, read_header
from megarl.errors import CheckpointError
from megarl.weights.executors.hf import INDEX_FILE, tensor_files


@dataclass(frozen=True, slots=True, kw_only=True)
class PlacedTensor:
    path: Path
    entry: TensorEntry


def read_tensor_folder(folder: Path) -> Mapping[str, PlacedTensor]:
    """By name. A folder whose index and files disagree, or that has a tensor twice, is a CheckpointError."""
    placed: dict[str, PlacedTensor] = {}
    for path in tensor_files(folder):
        for entry in read_header(path).entries:
            if entry.name in placed:
                raise CheckpointError(
                    f"{folder}: tensor {entry.name} is in {placed[entry.name].path.name} and {path.name}"
                )
            placed[entry.name] = PlacedTensor(path=path, entry=entry)
    _check_index(folder, placed)
    return placed


def _check_index(folder: Path, placed: Mapping[str, PlacedTensor]) -> None:
    index = folder / INDEX_FILE
    if not index.exists():
        return
    promised: dict[str, str] = json.loads(index.read_text())["weight_map"]
    found = {name: tensor.path.name for name, tensor in placed.items()}
    for name in sorted(promised.keys() | found.keys()):
        if promised.get(name) != found.get(name):
            raise CheckpointError(
                f"{index}: tensor {name} should be in {promised.get(name, 'no file')}, it is in "
                f"{found.get(name, 'none')}"
            )
