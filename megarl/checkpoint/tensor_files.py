"""Safetensors files: writing one a piece at a time with its digests, finding and checking the tensors of a folder.

The safetensors library copies every tensor before it writes one, and digests would take a second pass over the file.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterable, Mapping
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import TypeAlias

import xxhash

from megarl.checkpoint.manifest import FileDigest, TensorDigest, TensorEntry, make_header, read_header
from megarl.errors import CheckpointError
from megarl.weights.executors.hf import INDEX_FILE, tensor_files

Buffer: TypeAlias = bytes | memoryview

_WRITE_BYTES = 1 << 20
"""Small enough to be still in a core's cache after hashing."""
_FLUSH_BYTES = 16 << 20
_SYNC_BYTES = 256 << 20
"""After so much the writer waits for the disk: the kernel would take a whole save into its memory, and whoever watches
the save would see nothing move while it is synced."""


class TensorFile:
    """A new file with tensors of these dtypes and shapes, which are written in any order. The caller syncs it."""

    def __init__(self, path: Path, specs: Mapping[str, tuple[str, tuple[int, ...]]]) -> None:
        self._header, text = make_header(specs)
        self._digests: dict[str, TensorDigest] = {}
        self._file = path.open("xb", buffering=0)
        self._own = _write(self._file.fileno(), 0, [text])
        self._unsynced_bytes = 0

    @property
    def entries(self) -> tuple[TensorEntry, ...]:
        return self._header.entries

    def write(self, entry: TensorEntry, pieces: Iterable[Buffer]) -> None:
        """Write one tensor at its place."""
        written = _write(self._file.fileno(), entry.start, pieces)
        assert written.num_bytes == entry.num_bytes, f"{entry}: {written.num_bytes} bytes"
        self._digests[entry.name] = TensorDigest(name=entry.name, num_bytes=entry.num_bytes, xxh3_128=written.xxh3_128)
        self._unsynced_bytes += entry.num_bytes
        if self._unsynced_bytes >= _SYNC_BYTES:
            os.fdatasync(self._file.fileno())
            self._unsynced_bytes = 0

    def close(self) -> None:
        self._file.close()

    def digest(self) -> FileDigest:
        """Return the digests after every tensor is written."""
        tensors = tuple(self._digests[entry.name] for entry in self.entries)
        return FileDigest(num_bytes=self._header.num_file_bytes, xxh3_128=self._own.xxh3_128, tensors=tensors)


def write_tensor_file(
    path: Path,
    specs: Mapping[str, tuple[str, tuple[int, ...]]],
    contents: Callable[[TensorEntry], Iterable[Buffer]],
) -> FileDigest:
    """Write a new file with tensors of these dtypes and shapes; `contents` returns the bytes of each.

    The caller syncs the file.
    """
    with closing(TensorFile(path, specs)) as file:
        for entry in file.entries:
            file.write(entry, contents(entry))
        return file.digest()


def _write(descriptor: int, offset: int, pieces: Iterable[Buffer]) -> FileDigest:
    digest = xxhash.xxh3_128()
    position = flushed = offset
    for piece in pieces:
        view = memoryview(piece)
        for start in range(0, len(view), _WRITE_BYTES):
            part = view[start : start + _WRITE_BYTES]
            digest.update(part)
            while part:
                # A write may be partial, such as just before the disk is full.
                count = os.pwrite(descriptor, part, position)
                part, position = part[count:], position + count
            if position - flushed >= _FLUSH_BYTES:
                # Makes the kernel start to write now; it would wait until the file is synced.
                os.posix_fadvise(descriptor, flushed, position - flushed, os.POSIX_FADV_DONTNEED)
                flushed = position
    return FileDigest(num_bytes=position - offset, xxh3_128=digest.hexdigest())


@dataclass(frozen=True, slots=True, kw_only=True)
class PlacedTensor:
    """One tensor and the file it is in."""

    path: Path
    entry: TensorEntry


def read_tensor_folder(folder: Path) -> Mapping[str, PlacedTensor]:
    """Return the tensors by name, from headers only; an index that differs from the files, or a tensor that is in two
    files, raises a CheckpointError."""
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
    indexed: dict[str, str] = json.loads(index.read_text())["weight_map"]
    actual = {name: tensor.path.name for name, tensor in placed.items()}
    for name in sorted(indexed.keys() | actual.keys()):
        if indexed.get(name) != actual.get(name):
            raise CheckpointError(
                f"{index}: tensor {name} should be in {indexed.get(name, 'no file')}, it is in "
                f"{actual.get(name, 'none')}"
            )
