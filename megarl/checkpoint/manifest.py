"""The manifest of a checkpoint, the headers of its tensor files, and the comparison of all files with it.

JSON and hashes: no torch, no layouts.

step_000123/
├── model/           a Hugging Face model
├── optimizer/       exp_avg, exp_avg_sq and, where model/ is not float32, master: canonical tensors in float32
├── state.json       the state of the run
└── manifest.json    written last: size and digest of every tensor and every other file, and a digest of itself
"""

from __future__ import annotations

import hashlib
import json
import os
import struct
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, replace
from io import FileIO
from math import prod
from pathlib import Path, PurePosixPath
from typing import Literal, TypeAlias

import xxhash
from pydantic import BaseModel, ConfigDict, JsonValue, TypeAdapter, ValidationError

from megarl.errors import CheckpointError, DamagedError

FORMAT = 1
MANIFEST_FILE = "manifest.json"
MODEL_FOLDER = "model"
OPTIMIZER_FOLDER = "optimizer"
CRITIC_FOLDER, DRAFTER_FOLDER = "critic", "drafter"
"""Each has a `model` and an `optimizer` of its own."""

_WITH_WEIGHTS = (MODEL_FOLDER, OPTIMIZER_FOLDER, CRITIC_FOLDER, DRAFTER_FOLDER)

TENSOR_SUFFIX = ".safetensors"

Contents = Literal["everything", "weights"]
OnBytes: TypeAlias = Callable[[int], object]
"""Called with the number of bytes read since the last call, from several threads."""

ITEM_BYTES: Mapping[str, int] = {
    "F64": 8,
    "F32": 4,
    "F16": 2,
    "BF16": 2,
    "F8_E4M3": 1,
    "F8_E5M2": 1,
    "I64": 8,
    "I32": 4,
    "I16": 2,
    "I8": 1,
    "U64": 8,
    "U32": 4,
    "U16": 2,
    "U8": 1,
    "BOOL": 1,
}
"""Bytes of one element, by the dtype's name in a header."""

_CHUNK_BYTES = 256 << 10
"""Small enough to be hashed in a core's cache."""
_LENGTH = struct.Struct("<Q")
_MAX_HEADER_BYTES = 100_000_000
_METADATA = "__metadata__"
_ALIGNMENT = 8
_PICKLES = frozenset({".bin", ".pt", ".pth", ".ckpt", ".pkl", ".pickle"})


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorEntry:
    name: str
    dtype: str
    """The header's name: F32, BF16, F16 ..."""
    shape: tuple[int, ...]
    start: int
    """Offset in the file."""

    @property
    def num_bytes(self) -> int:
        return prod(self.shape) * ITEM_BYTES[self.dtype]


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorHeader:
    num_bytes: int
    """Size of the length field and the header; the first tensor begins there."""
    entries: tuple[TensorEntry, ...]
    """All tensors in the order of the file."""

    @property
    def num_file_bytes(self) -> int:
        return self.num_bytes + sum(entry.num_bytes for entry in self.entries)


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorDigest:
    name: str
    num_bytes: int
    xxh3_128: str


@dataclass(frozen=True, slots=True, kw_only=True)
class FileDigest:
    num_bytes: int
    xxh3_128: str
    """Digest of the whole file or, of a safetensors file, of its header. Detects accidents; it is not cryptographic."""
    tensors: tuple[TensorDigest, ...] = ()
    """Tensors of a safetensors file, in the order of the file, which ends with the last of them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Manifest:
    format: int
    megarl_version: str
    step: int
    contents: Contents
    recipe: Mapping[str, JsonValue]
    """The recipe with overrides and defaults."""
    recipe_digest: str
    """Digest of the keys that must stay the same for the run to continue."""
    files: Mapping[str, FileDigest]
    """All files by path inside the folder."""

    @property
    def num_bytes(self) -> int:
        return sum(file.num_bytes for file in self.files.values())


def digest_file(path: Path) -> FileDigest:
    """Return size and digest of a file; those of a safetensors file tensor by tensor."""
    size = path.stat().st_size
    entries = _tensors_in(path)
    with path.open("rb", buffering=0) as file:
        own = _digest_next(file, size - sum(entry.num_bytes for entry in entries))
        tensors = [
            TensorDigest(name=entry.name, num_bytes=entry.num_bytes, xxh3_128=_digest_next(file, entry.num_bytes))
            for entry in entries
        ]
    return FileDigest(num_bytes=size, xxh3_128=own, tensors=tuple(tensors))


def _tensors_in(path: Path) -> tuple[TensorEntry, ...]:
    """Return the tensors of a safetensors file; none for any other file, whatever its name."""
    if path.suffix == TENSOR_SUFFIX:
        with suppress(CheckpointError):
            return read_header(path).entries
    return ()


def write_manifest(folder: Path, manifest: Manifest) -> None:
    path = folder / MANIFEST_FILE
    path.write_bytes(_render(_MANIFEST.dump_python(manifest, mode="json")))
    sync(path)


def read_manifest(folder: Path) -> Manifest:
    """Return the manifest if its own digest is right; its files are not looked at."""
    path = folder / MANIFEST_FILE
    try:
        text = path.read_bytes()
    except OSError as error:
        raise CheckpointError(f"{path}: cannot be read: {error.strerror}") from error
    _refuse_newer(path, text)
    try:
        manifest = _MANIFEST.validate_json(text, strict=True)
    except ValidationError as error:
        raise CheckpointError(f"{path}: damaged: not a manifest: {error.errors()[0]['msg']}") from None
    try:
        rendered = _render(_MANIFEST.dump_python(manifest, mode="json"))
    except (ValueError, RecursionError):
        rendered = b""  # a number longer than Python writes, levels deeper than it goes
    # Bytes are compared, not values: any change of the file is damage.
    if rendered != text:
        raise CheckpointError(f"{path}: damaged: its text does not have the digest it states")
    return manifest


def verify(
    folder: Path,
    *,
    below: str | None = None,
    wants_weights: bool = True,
    on_bytes: OnBytes | None = None,
    num_threads: int | None = None,
) -> Manifest:
    """Return the manifest if every file has its size and digests; a CheckpointError names the first that does not.

    `below` limits the check to an inner folder. Without `wants_weights` only the sizes are compared of files that
    trainer ranks read: `verify_tensors` compares their digests. The default of `num_threads` is one per core.
    """
    manifest = read_manifest(folder)
    files = {name: file for name, file in manifest.files.items() if below is None or name.startswith(f"{below}/")}
    _refuse_pickles(folder, manifest)

    def check(name: str) -> None:
        if wants_weights or not _has_weights(name, files[name]):
            _check(inside(folder, name), files[name], on_bytes)
        else:
            _check_size(inside(folder, name), files[name])

    _check_all(check, files, num_threads)
    return manifest


def verify_tensors(
    folder: Path, inner_folders: Collection[str], names: Collection[str], *, num_threads: int | None = None
) -> None:
    """Compare the tensors of these names in the files of inner folders, and the headers of those files, with the
    manifest; a DamagedError names the first that differs.

    Ranks that are given different names verify a checkpoint together, each tensor once.
    """
    manifest = read_manifest(folder)
    files = {
        name: wanted
        for name, file in manifest.files.items()
        if PurePosixPath(name).parent.as_posix() in inner_folders
        and (wanted := {tensor.name for tensor in file.tensors} & set(names))
    }
    _check_all(
        lambda name: _check(inside(folder, name), manifest.files[name], None, names=files[name]), files, num_threads
    )


def _check_all(check: Callable[[str], None], names: Iterable[str], num_threads: int | None) -> None:
    pool = ThreadPoolExecutor(num_threads or os.cpu_count())
    try:
        for _ in pool.map(check, names):
            pass
    finally:
        pool.shutdown(cancel_futures=True)


def _has_weights(name: str, file: FileDigest) -> bool:
    return bool(file.tensors) and name.partition("/")[0] in _WITH_WEIGHTS


def check_sizes(folder: Path) -> Manifest:
    """Return the manifest if every file exists and has its size; contents are not read."""
    manifest = read_manifest(folder)
    for name, expected in manifest.files.items():
        _check_size(inside(folder, name), expected)
    return manifest


def _check(path: Path, expected: FileDigest, on_bytes: OnBytes | None, *, names: Collection[str] | None = None) -> None:
    """Compare a file's header and its tensors, only those of `names` if given, or the whole of another file."""
    try:
        _check_size(path, expected)
        header_bytes = expected.num_bytes - sum(tensor.num_bytes for tensor in expected.tensors)
        if min((header_bytes, *(tensor.num_bytes for tensor in expected.tensors))) < 0:
            raise DamagedError(f"{path}: damaged: the manifest gives its tensors more bytes than it has")
        with path.open("rb", buffering=0) as file:
            if _digest_next(file, header_bytes, on_bytes) != expected.xxh3_128:
                part = "the header" if expected.tensors else "the file"
                raise DamagedError(f"{path}: damaged: {part} does not have the digest of the manifest")
            for tensor in expected.tensors:
                if names is not None and tensor.name not in names:
                    file.seek(tensor.num_bytes, os.SEEK_CUR)
                elif _digest_next(file, tensor.num_bytes, on_bytes) != tensor.xxh3_128:
                    raise DamagedError(
                        f"{path}: damaged: tensor {tensor.name} does not have the digest of the manifest"
                    )
    except OSError as error:
        raise CheckpointError(f"{path}: cannot be read: {error.strerror}") from error


def _check_size(path: Path, expected: FileDigest) -> None:
    try:
        size = path.stat().st_size
    except OSError as error:
        raise CheckpointError(f"{path}: cannot be read: {error.strerror}") from error
    if size != expected.num_bytes:
        raise DamagedError(f"{path}: damaged: {size} bytes, {expected.num_bytes} were written")


def _refuse_pickles(folder: Path, manifest: Manifest) -> None:
    """Raise if there is a pickle: some loaders prefer it to the verified tensors, and loading it runs its code."""
    for path in sorted(folder.rglob("*")):
        if path.suffix in _PICKLES and path.relative_to(folder).as_posix() not in manifest.files:
            raise CheckpointError(f"{path}: a pickle that megarl did not write; remove it, loading it can run code")


def read_chunks(file: FileIO, num_bytes: int, *, chunk_bytes: int = _CHUNK_BYTES) -> Iterator[memoryview]:
    """Yield the next bytes of an unbuffered file, in one buffer that each chunk overwrites; stops at the file's end."""
    buffer = memoryview(bytearray(min(chunk_bytes, num_bytes)))
    while num_bytes > 0:
        wanted = min(len(buffer), num_bytes)
        count = 0
        while count < wanted and (more := file.readinto(buffer[count:wanted])):
            count += more
        yield buffer[:count]
        # A short chunk means that the file has ended.
        num_bytes = num_bytes - count if count == wanted else 0


class FolderGrowth:
    """Tells whether the files of a folder have grown since it was asked before, or was made."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self.num_bytes = self._count()

    def __call__(self) -> bool:
        before, self.num_bytes = self.num_bytes, self._count()
        return self.num_bytes > before

    def _count(self) -> int:
        # On disk: the tensors of a file are written in any order, and it may have its whole length from the start.
        num_bytes = 0
        for path in self._folder.rglob("*"):
            with suppress(FileNotFoundError):
                num_bytes += path.stat().st_blocks * 512
        return num_bytes


def sync(path: Path) -> None:
    """Return once a file, or the names in a folder, are on disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


_MANIFEST: TypeAdapter[Manifest] = TypeAdapter(Manifest)


def _render(fields: Mapping[str, JsonValue]) -> bytes:
    """Return the canonical text of a manifest; its last key is the digest of all others."""
    body = json.dumps(fields, indent=1, sort_keys=True).encode()
    digest = hashlib.sha256(body).hexdigest()
    return json.dumps({**dict(sorted(fields.items())), "sha256": digest}, indent=1).encode() + b"\n"


def _refuse_newer(path: Path, text: bytes) -> None:
    """Raise on a newer format before anything else is parsed, since all the rest may differ."""
    try:
        version = json.loads(text)["format"]
    except (ValueError, TypeError, KeyError, RecursionError):
        return
    if isinstance(version, int) and version > FORMAT:
        raise CheckpointError(f"{path}: format {version} is newer than {FORMAT}; use the megarl that wrote it")


def _digest_next(file: FileIO, num_bytes: int, on_bytes: OnBytes | None = None) -> str:
    digest = xxhash.xxh3_128()
    for chunk in read_chunks(file, num_bytes):
        digest.update(chunk)
        if on_bytes is not None:
            on_bytes(len(chunk))
    return digest.hexdigest()


def inside(folder: Path, name: str) -> Path:
    """Return the path of a file; one outside the folder raises a CheckpointError."""
    parts = PurePosixPath(name).parts
    path = folder.joinpath(*parts)
    if "\0" in name:
        raise CheckpointError(f"{path!r}: no file has such a name")
    if ".." in parts or PurePosixPath(name).is_absolute() or not path.resolve().is_relative_to(folder.resolve()):
        raise CheckpointError(f"{path}: is outside the checkpoint")
    return path


class _RawEntry(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)

    dtype: str
    shape: list[int]
    data_offsets: list[int]


_RAW_ENTRIES: TypeAdapter[dict[str, _RawEntry]] = TypeAdapter(dict[str, _RawEntry])


def read_header(path: Path) -> TensorHeader:
    """Return the header; a file that is not a header followed by tensors without gaps raises a CheckpointError."""
    try:
        size = path.stat().st_size
        with path.open("rb") as file:
            prefix = file.read(_LENGTH.size)
            (length,) = _LENGTH.unpack(prefix) if len(prefix) == _LENGTH.size else (size,)
            if length > min(size - _LENGTH.size, _MAX_HEADER_BYTES):
                raise CheckpointError(f"{path}: not a safetensors file: it has no header")
            text = file.read(length)
    except OSError as error:
        raise CheckpointError(f"{path}: cannot be read: {error.strerror}") from error
    header = _parse(path, text)
    if header.num_file_bytes != size:
        raise CheckpointError(f"{path}: {size} bytes, its header describes {header.num_file_bytes}; is it complete?")
    return header


def make_header(specs: Mapping[str, tuple[str, tuple[int, ...]]]) -> tuple[TensorHeader, bytes]:
    """Return the header of a file with tensors of these dtypes and shapes, and its bytes.

    Tensors with wide elements come first, so that every tensor is aligned to its element size.
    """
    entries = []
    offset = 0
    for name in sorted(specs, key=lambda name: (-ITEM_BYTES[specs[name][0]], name)):
        dtype, shape = specs[name]
        entries.append(TensorEntry(name=name, dtype=dtype, shape=shape, start=offset))
        offset += entries[-1].num_bytes
    raw: dict[str, object] = {_METADATA: {"format": "pt"}}
    for entry in entries:
        offsets = [entry.start, entry.start + entry.num_bytes]
        raw[entry.name] = {"dtype": entry.dtype, "shape": list(entry.shape), "data_offsets": offsets}
    text = json.dumps(raw, separators=(",", ":")).encode()
    text += b" " * (-len(text) % _ALIGNMENT)
    num_bytes = _LENGTH.size + len(text)
    placed = tuple(replace(entry, start=num_bytes + entry.start) for entry in entries)
    return TensorHeader(num_bytes=num_bytes, entries=placed), _LENGTH.pack(len(text)) + text


def _parse(path: Path, text: bytes) -> TensorHeader:
    try:
        fields = json.loads(text)
        if not isinstance(fields, dict):
            raise ValueError("not an object")
        fields.pop(_METADATA, None)
        raw = _RAW_ENTRIES.validate_python(fields)
    except (ValueError, ValidationError, RecursionError) as error:
        raise CheckpointError(f"{path}: not a safetensors file: its header cannot be parsed") from error
    num_bytes = _LENGTH.size + len(text)
    entries = []
    offset = 0
    for name, entry in sorted(raw.items(), key=lambda item: item[1].data_offsets):
        if entry.dtype not in ITEM_BYTES:
            raise CheckpointError(f"{path}: tensor {name} has dtype {entry.dtype}; known are {', '.join(ITEM_BYTES)}")
        tensor = TensorEntry(name=name, dtype=entry.dtype, shape=tuple(entry.shape), start=num_bytes + offset)
        if entry.data_offsets != [offset, offset + tensor.num_bytes] or min(entry.shape, default=0) < 0:
            raise CheckpointError(f"{path}: the offsets of tensor {name} do not match its dtype and shape")
        offset += tensor.num_bytes
        entries.append(tensor)
    return TensorHeader(num_bytes=num_bytes, entries=tuple(entries))
