"""Hugging Face folders as holders of weights: the contents of their safetensors files, and filling a rank from them.

Only headers and the boxes that a rank needs are read. Knows no transport and no engine.

A folder may be without bytes: its files have a header alone, and the weights are computed where they are read. A
publish and an update of a 235B shape can be tried with it on any file system. A value depends on the tensor's name and
on its place, so that ranks with overlapping boxes agree.
"""

from __future__ import annotations

import json
import zlib
from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping
from contextlib import ExitStack
from dataclasses import replace
from functools import cache
from math import prod
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open

from megarl.errors import CheckpointError
from megarl.families import family_of
from megarl.families.shape import ModelShape
from megarl.weights.algebra.plan import Move, plan
from megarl.weights.algebra.slices import Holding, Index, Layout, Piece, Slice, TensorSpec
from megarl.weights.executors.codecs import as_files, read_box
from megarl.weights.executors.tensors import box_of, torch_dtype
from megarl.weights.layouts.canonical import canonical_tensors
from megarl.weights.layouts.stored import StoredTensor, held_in, stored_tensors

INDEX_FILE = "model.safetensors.index.json"
_KEY, _RANDOM = "weights", "random"
_STD = 0.02
_DTYPES = {torch.bfloat16: "BF16", torch.float16: "F16", torch.float32: "F32"}
_LENGTH_BYTES = 8


def read_hf_layout(folder: Path, canonical: Mapping[str, TensorSpec]) -> Layout:
    """Return which of the `tensor_files` holds which canonical tensor; a missing or misshapen one is a CheckpointError.

    Tensors of other names are ignored: some checkpoints of tied models repeat the embedding as the head.
    """
    return _Folder(folder).layout(canonical)


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
    stored = _Folder(folder)
    if may_lack:
        lacking = set(may_lack) - stored.tensors.keys()
        canonical = {name: spec for name, spec in canonical.items() if name not in lacking}
        holding = replace(holding, pieces=tuple(piece for piece in holding.pieces if piece.slice.name in canonical))
    moves = plan(stored.layout(canonical), Layout(canonical=canonical, holdings=(holding,))).moves
    _zero_padding(holding, tensors)
    by_file: defaultdict[int, list[Move]] = defaultdict(list)
    for move in moves:
        by_file[move.source_rank].append(move)
    for of_file in by_file.values():
        stored.read(of_file, tensors)


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


class _Folder:
    """The tensors in the files of a folder, and how to read them."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._files = tensor_files(folder)
        headers = [read_header(path) for path in self._files]
        self._file_of = {name: rank for rank, header in enumerate(headers) for name in header}
        self.tensors = stored_tensors({name: entry for header in headers for name, entry in header.items()})

    def layout(self, canonical: Mapping[str, TensorSpec]) -> Layout:
        pieces: list[list[Piece]] = [[] for _ in self._files]
        for name, spec in canonical.items():
            found = held_in(name, self.tensors)
            if found is None:
                raise CheckpointError(f"{self._folder}: tensor {name} is in no safetensors file")
            if found.shape != spec.shape:
                shapes = f"{list(found.shape)}, config.json says {list(spec.shape)}"
                raise CheckpointError(f"{self._folder}: tensor {name} has shape {shapes}")
            stored, box = found.tensor, Slice(name=name, offsets=(0,) * len(spec.shape), shape=spec.shape)
            pieces[self._file(stored)].append(Piece(slice=box, local_name=stored.name, local_offsets=found.offsets))
        specs: list[dict[str, TensorSpec]] = [{} for _ in self._files]
        for stored in self.tensors.values():
            specs[self._file(stored)][stored.name] = stored.spec
        holdings = (
            Holding(rank=rank, tensors=specs[rank], pieces=tuple(pieces[rank])) for rank in range(len(self._files))
        )
        return Layout(canonical=canonical, holdings=tuple(holdings))

    def read(self, moves: Iterable[Move], tensors: Mapping[str, torch.Tensor]) -> None:
        """Carry out moves whose sources are in this folder."""
        with ExitStack() as opened:
            files = cache(lambda rank: opened.enter_context(safe_open(self._files[rank], framework="pt")))

            def take(name: str, ranges: tuple[slice, ...]) -> torch.Tensor:
                path = self._files[self._file_of[name]]
                try:
                    file = files(self._file_of[name])
                    if is_random(file.metadata()):
                        return random_box(name, ranges)
                    values: torch.Tensor = file.get_slice(name)[ranges]
                except (SafetensorError, OSError) as error:
                    raise CheckpointError(f"{path}: cannot be read as safetensors: {error}") from error
                return values

            for move in moves:
                values = read_box(self.tensors[move.source_name], move.source_offsets, move.slice.shape, take)
                box_of(tensors[move.target_name], move.target_offsets, move.slice.shape).copy_(values)

    def _file(self, stored: StoredTensor) -> int:
        return self._file_of[stored.held_as]


def read_header(path: Path) -> dict[str, tuple[str, Index]]:
    """Return dtypes and shapes of the tensors of a file; what is not safetensors is a CheckpointError."""
    try:
        with safe_open(path, framework="pt") as file:
            slices = {name: file.get_slice(name) for name in file.keys()}  # noqa: SIM118 - not a mapping
            return {name: (view.get_dtype(), tuple(view.get_shape())) for name, view in slices.items()}
    except (SafetensorError, OSError) as error:
        raise CheckpointError(f"{path}: cannot be read as safetensors: {error}") from error


def _zero_padding(holding: Holding, tensors: Mapping[str, torch.Tensor]) -> None:
    covered: defaultdict[str, int] = defaultdict(int)
    for piece in holding.pieces:
        covered[piece.local_name] += piece.slice.num_elements
    for name, spec in holding.tensors.items():
        if covered[name] < prod(spec.shape):
            tensors[name].detach().zero_()


def write_random_folder(folder: Path, shape: ModelShape) -> None:
    """Write config.json and model.safetensors, which is as long as its header says and takes no space on a disk."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(family_of(shape).config_json(shape), indent=2) + "\n")
    empty = {
        name: torch.empty(spec.shape, dtype=torch_dtype(spec.dtype), device="meta")
        for name, spec in canonical_tensors(shape).items()
    }
    header: dict[str, object] = {"__metadata__": {"format": "pt", _KEY: _RANDOM}}
    end = 0
    for name, tensor in as_files(empty).items():
        first, end = end, end + tensor.nbytes
        header[name] = {"dtype": _DTYPES[tensor.dtype], "shape": list(tensor.shape), "data_offsets": [first, end]}
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % _LENGTH_BYTES)
    with (folder / "model.safetensors").open("wb") as file:
        file.write(len(text).to_bytes(_LENGTH_BYTES, "little") + text)
        file.truncate(_LENGTH_BYTES + len(text) + end)


def is_random(metadata: Mapping[str, str] | None) -> bool:
    """Whether the weights of a file with this metadata are computed, not read."""
    return metadata is not None and metadata.get(_KEY) == _RANDOM


def random_box(name: str, ranges: tuple[slice, ...]) -> torch.Tensor:
    """Return a box of a tensor in float32: about 1 in norms, else spread evenly around 0.

    An element is the fraction of a sum of one random number for each of its indices.
    """
    total = torch.zeros([1] * len(ranges))
    for axis, wanted in enumerate(ranges):
        generator = torch.Generator().manual_seed(zlib.crc32(f"{name} {axis}".encode()))
        numbers = torch.rand(wanted.stop, generator=generator)[wanted.start :]
        total = total + numbers.reshape([-1 if each == axis else 1 for each in range(len(ranges))])
    values = total.remainder_(1.0).sub_(0.5).mul_(_STD * 12**0.5)
    assert values.numel() == prod(each.stop - each.start for each in ranges)
    return values.add_(1.0) if "norm" in name else values
