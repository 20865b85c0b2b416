"""Differences between two checkpoints or models: tensors by class, other values by key.

Tensors with equal digests in the two manifests are not read; the others are read a chunk at a time.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath
from typing import Any

import numpy as np
from numpy.typing import NDArray
from pydantic import JsonValue

from megarl.checkpoint.folder import CONFIG_FILE, find_checkpoints
from megarl.checkpoint.manifest import (
    ITEM_BYTES,
    MODEL_FOLDER,
    TENSOR_SUFFIX,
    Manifest,
    digest_file,
    inside,
    read_chunks,
    read_manifest,
)
from megarl.checkpoint.tensor_files import PlacedTensor, read_tensor_folder
from megarl.errors import CheckpointError
from megarl.weights.executors.hf import INDEX_FILE

_CHUNK_ITEMS = 1 << 20


@dataclass(slots=True, kw_only=True)
class ClassDiff:
    """Tensors whose names differ only in the number of the layer."""

    folder: str
    name: str
    num_tensors: int = 0
    num_equal: int = 0
    max_abs_diff: float = 0.0
    squared_diff: float = 0.0
    squared_norm: float = 0.0
    """Sum over the first side's tensors that are not equal."""

    @property
    def is_equal(self) -> bool:
        return self.num_equal == self.num_tensors

    @property
    def relative_norm(self) -> float:
        """Norm of the difference divided by the norm of the first side, over the tensors that are not equal."""
        if self.squared_diff == 0:
            return 0.0
        return math.sqrt(self.squared_diff / self.squared_norm) if self.squared_norm else math.inf


@dataclass(frozen=True, slots=True, kw_only=True)
class ValueDiff:
    """One key of a document with its two values; None where a side does not have the key."""

    document: str
    key: str
    first: JsonValue
    second: JsonValue


@dataclass(slots=True, kw_only=True)
class CheckpointDiff:
    classes: list[ClassDiff] = field(default_factory=list)
    values: list[ValueDiff] = field(default_factory=list)
    others: list[str] = field(default_factory=list)
    """All other differences, one sentence each."""

    @property
    def is_equal(self) -> bool:
        return not self.values and not self.others and all(item.is_equal for item in self.classes)


@dataclass(frozen=True, slots=True, kw_only=True)
class Side:
    """One side of a comparison: a checkpoint, or a model folder, which stands for `model/` of a checkpoint."""

    root: Path
    tensor_folders: Mapping[str, Path]
    files: Mapping[str, Path]
    """All files but tensor files and their index."""
    digests: Mapping[str, Mapping[str, str]]
    """Digests of the manifest, by folder and tensor."""
    recipe: JsonValue
    is_checkpoint: bool


def open_side(path: Path) -> Side:
    """Return the checkpoint, the newest checkpoint of the run, or the Hugging Face folder at `path`."""
    if not path.exists():
        raise CheckpointError(f"{path}: does not exist; name a run's folder, a checkpoint or a Hugging Face model")
    if (path / CONFIG_FILE).exists():
        files = {f"{MODEL_FOLDER}/{file.name}": file for file in sorted(path.iterdir()) if file.is_file()}
        return _side(path, files, manifest=None)
    folder = find_checkpoints(path)[0]
    manifest = read_manifest(folder)
    return _side(folder, {name: inside(folder, name) for name in manifest.files}, manifest=manifest)


def compare(first: Side, second: Side) -> CheckpointDiff:
    """Return the differences; a model folder has no optimizer, state and recipe, and these are then not compared."""
    diff = CheckpointDiff()
    for folder in sorted(first.tensor_folders.keys() & second.tensor_folders.keys()):
        _compare_tensors(first, second, folder, diff)
    if first.is_checkpoint and second.is_checkpoint:
        diff.values += _value_diffs("recipe", first.recipe, second.recipe)
        for folder in sorted(first.tensor_folders.keys() ^ second.tensor_folders.keys()):
            diff.others.append(f"{folder}: only in {_owner(folder in first.tensor_folders, first, second)}")
    for name in sorted(first.files.keys() | second.files.keys()):
        _compare_files(first, second, name, diff)
    return diff


def _side(root: Path, files: Mapping[str, Path], *, manifest: Manifest | None) -> Side:
    folders = {
        name: PurePosixPath(name).parent.as_posix() for name, path in files.items() if path.suffix == TENSOR_SUFFIX
    }
    digests: dict[str, dict[str, str]] = {folder: {} for folder in folders.values()}
    for name, folder in folders.items():
        if manifest is not None:
            digests[folder] |= {tensor.name: tensor.xxh3_128 for tensor in manifest.files[name].tensors}
    return Side(
        root=root,
        tensor_folders={folder: files[name].parent for name, folder in folders.items()},
        files={name: path for name, path in files.items() if name not in folders and path.name != INDEX_FILE},
        digests=digests,
        recipe=dict(manifest.recipe) if manifest is not None else None,
        is_checkpoint=manifest is not None,
    )


def _compare_tensors(first: Side, second: Side, folder: str, diff: CheckpointDiff) -> None:
    ours = read_tensor_folder(first.tensor_folders[folder])
    theirs = read_tensor_folder(second.tensor_folders[folder])
    classes: dict[str, ClassDiff] = {}
    for name in sorted(ours.keys() | theirs.keys()):
        if name not in ours or name not in theirs:
            diff.others.append(f"{folder}: {name}: only in {_owner(name in ours, first, second)}")
            continue
        one, other = ours[name], theirs[name]
        if one.entry.shape != other.entry.shape:
            shapes = f"{list(one.entry.shape)} and {list(other.entry.shape)}"
            diff.others.append(f"{folder}: {name}: shapes {shapes}")
            continue
        tensor_class = re.sub(r"(?<=\.)\d+(?=\.)", "*", name)
        total = classes.setdefault(tensor_class, ClassDiff(folder=folder, name=tensor_class))
        total.num_tensors += 1
        digests = [side.digests[folder].get(name) for side in (first, second)]
        if one.entry.dtype == other.entry.dtype and digests[0] is not None and digests[0] == digests[1]:
            total.num_equal += 1
        else:
            _add(total, one, other)
    dtypes = {(ours[name].entry.dtype, theirs[name].entry.dtype) for name in ours.keys() & theirs.keys()}
    for one_dtype, other_dtype in sorted(dtypes):
        if one_dtype != other_dtype:
            diff.others.append(f"{folder}: dtypes {one_dtype} and {other_dtype}")
    diff.classes += classes.values()


def _add(total: ClassDiff, one: PlacedTensor, other: PlacedTensor) -> None:
    squared_diff, squared_norm, max_abs_diff = 0.0, 0.0, 0.0
    is_equal = True
    for ours, theirs in zip(_values(one), _values(other), strict=True):
        if np.array_equal(ours, theirs):
            squared_norm += float(np.vdot(ours, ours))
            continue
        is_equal = False
        # Infinity minus infinity is NaN, and every figure of the class then is NaN.
        with np.errstate(invalid="ignore", over="ignore"):
            difference = ours - theirs
            max_abs_diff = float(np.maximum(max_abs_diff, np.abs(difference).max()))
            squared_diff += float(np.vdot(difference, difference))
            squared_norm += float(np.vdot(ours, ours))
    if is_equal:
        total.num_equal += 1
        return
    total.max_abs_diff = float(np.maximum(total.max_abs_diff, max_abs_diff))
    total.squared_diff += squared_diff
    total.squared_norm += squared_norm


def _values(tensor: PlacedTensor) -> Iterator[NDArray[np.float64]]:
    entry = tensor.entry
    items = _numpy_dtype(entry.dtype)
    if items is None:
        raise CheckpointError(f"{tensor.path}: tensor {entry.name} has dtype {entry.dtype}, which cannot be compared")
    with tensor.path.open("rb", buffering=0) as file:
        file.seek(entry.start)
        for chunk in read_chunks(file, entry.num_bytes, chunk_bytes=_CHUNK_ITEMS * items.itemsize):
            values = np.frombuffer(chunk, dtype=items)
            if entry.dtype == "BF16":
                # A bfloat16 is the upper half of a float32.
                values = (values.astype(np.uint32) << 16).view(np.float32)
            yield values.astype(np.float64)


def _numpy_dtype(name: str) -> np.dtype[Any] | None:
    """Return the items of a tensor by their dtype in a header; None for FP8."""
    bits = {"BF16": "U16", "BOOL": "U8"}.get(name, name)
    is_plain = re.fullmatch(r"[FIU]\d+", bits) is not None
    return np.dtype(f"<{bits[0].lower()}{ITEM_BYTES[bits]}") if is_plain else None


def _compare_files(first: Side, second: Side, name: str, diff: CheckpointDiff) -> None:
    if name not in first.files or name not in second.files:
        # A model folder has no state, and may have a README.
        if first.is_checkpoint and second.is_checkpoint:
            diff.others.append(f"{name}: only in {_owner(name in first.files, first, second)}")
        return
    ours, theirs = first.files[name], second.files[name]
    if digest_file(ours) == digest_file(theirs):
        return
    try:
        values = list(_value_diffs(name, json.loads(ours.read_text()), json.loads(theirs.read_text())))
    except ValueError:
        diff.others.append(f"{name}: differs")
        return
    diff.values += values


def _value_diffs(document: str, first: JsonValue, second: JsonValue, key: str = "") -> Iterator[ValueDiff]:
    if isinstance(first, dict) and isinstance(second, dict):
        for inner in sorted(first.keys() | second.keys()):
            yield from _value_diffs(document, first.get(inner), second.get(inner), f"{key}.{inner}" if key else inner)
    elif first != second:
        yield ValueDiff(document=document, key=key, first=first, second=second)


def _owner(is_in_first: bool, first: Side, second: Side) -> str:
    return str(first.root if is_in_first else second.root)
