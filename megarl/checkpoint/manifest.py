"""What a checkpoint promises about its files, and whether it keeps the promise. JSON and hashes: no torch, no layouts.

step_000123/
├── model/           a Hugging Face model
├── optimizer/       exp_avg, exp_avg_sq and, where model/ is not float32, master: canonical tensors in float32
├── state.json       where the run stood
└── manifest.json    written last: size and digest of every tensor and every other file, and a digest of itself
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from io import FileIO
from pathlib import Path, PurePosixPath
from typing import Literal, TypeAlias

import xxhash
from pydantic import JsonValue, TypeAdapter, ValidationError

from megarl.checkpoint.tensor_header import TENSOR_SUFFIX, TensorEntry, read_header
from megarl.errors import CheckpointError

FORMAT = 1
MANIFEST_FILE = "manifest.json"
MODEL_FOLDER = "model"
OPTIMIZER_FOLDER = "optimizer"
CRITIC_FOLDER = "critic"
"""With a `model` and an `optimizer` of its own."""

Contents = Literal["everything", "weights"]
OnBytes: TypeAlias = Callable[[int], object]
"""Hears how many bytes have been read since it last did; from several threads."""

_CHUNK_BYTES = 256 << 10
"""Small enough to be hashed while it is in a core's cache."""
_PICKLES = frozenset({".bin", ".pt", ".pth", ".ckpt", ".pkl", ".pickle"})


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorDigest:
    name: str
    num_bytes: int
    xxh3_128: str


@dataclass(frozen=True, slots=True, kw_only=True)
class FileDigest:
    num_bytes: int
    xxh3_128: str
    """Of the whole file or, where `tensors` has digests of their own, of the header before them.

    Finds accidents; it is not cryptographic.
    """
    tensors: tuple[TensorDigest, ...] = ()
    """Of a safetensors file: in the order of the file, which ends with the last of them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Manifest:
    format: int
    megarl_version: str
    step: int
    contents: Contents
    recipe: Mapping[str, JsonValue]
    """As it was after overrides and defaults."""
    recipe_digest: str
    """Of what must stay the same for the run to go on."""
    files: Mapping[str, FileDigest]
    """By path inside the folder."""

    @property
    def num_bytes(self) -> int:
        return sum(file.num_bytes for file in self.files.values())


def digest_file(path: Path) -> FileDigest:
    """What a manifest says of a file that is as it should be; of a safetensors file, tensor by tensor."""
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
    """None in a file that is not what its name says: it is digested whole."""
    if path.suffix == TENSOR_SUFFIX:
        with suppress(CheckpointError):
            return read_header(path).entries
    return ()


def write_manifest(folder: Path, manifest: Manifest) -> None:
    path = folder / MANIFEST_FILE
    path.write_bytes(_render(_MANIFEST.dump_python(manifest, mode="json")))
    sync(path)


def read_manifest(folder: Path) -> Manifest:
    """The manifest, if it is what was written; the files it names are not looked at."""
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
    # The bytes, not only what they mean: whatever changed in the file, it is not what was written.
    if _render(_MANIFEST.dump_python(manifest, mode="json")) != text:
        raise CheckpointError(f"{path}: damaged: its text does not have the digest it states")
    return manifest


def verify(
    folder: Path, *, below: str | None = None, on_bytes: OnBytes | None = None, num_threads: int | None = None
) -> Manifest:
    """The manifest, if every file is what was written; a CheckpointError names the first that is not.

    `below` limits it to an inner folder. Without `num_threads`, one per core.
    """
    manifest = read_manifest(folder)
    files = {name: file for name, file in manifest.files.items() if below is None or name.startswith(f"{below}/")}
    _refuse_pickles(folder, manifest)
    pool = ThreadPoolExecutor(num_threads or os.cpu_count())
    try:
        for _ in pool.map(lambda name: _check(_inside(folder, name), files[name], on_bytes), files):
            pass
    finally:
        pool.shutdown(cancel_futures=True)
    return manifest


def check_sizes(folder: Path) -> Manifest:
    """The manifest, if every file is there and as long as it was; its bytes are not read."""
    manifest = read_manifest(folder)
    for name, expected in manifest.files.items():
        _check_size(_inside(folder, name), expected)
    return manifest


def _check(path: Path, expected: FileDigest, on_bytes: OnBytes | None) -> None:
    try:
        _check_size(path, expected)
        header_bytes = expected.num_bytes - sum(tensor.num_bytes for tensor in expected.tensors)
        with path.open("rb", buffering=0) as file:
            if _digest_next(file, header_bytes, on_bytes) != expected.xxh3_128:
                what = "its header" if expected.tensors else "its digest"
                raise CheckpointError(f"{path}: damaged: {what} is not the one that was written")
            for tensor in expected.tensors:
                if _digest_next(file, tensor.num_bytes, on_bytes) != tensor.xxh3_128:
                    raise CheckpointError(f"{path}: damaged: tensor {tensor.name} is not the one that was written")
    except OSError as error:
        raise CheckpointError(f"{path}: cannot be read: {error.strerror}") from error


def _check_size(path: Path, expected: FileDigest) -> None:
    try:
        size = path.stat().st_size
    except OSError as error:
        raise CheckpointError(f"{path}: cannot be read: {error.strerror}") from error
    if size != expected.num_bytes:
        raise CheckpointError(f"{path}: damaged: {size} bytes, {expected.num_bytes} were written")


def _refuse_pickles(folder: Path, manifest: Manifest) -> None:
    """Some loaders would prefer one to the tensors that were verified, and loading it runs its code."""
    for path in sorted(folder.rglob("*")):
        if path.suffix in _PICKLES and path.relative_to(folder).as_posix() not in manifest.files:
            raise CheckpointError(f"{path}: a pickle that megarl did not write; remove it, loading it can run code")


def read_chunks(file: FileIO, num_bytes: int, *, chunk_bytes: int = _CHUNK_BYTES) -> Iterator[memoryview]:
    """The next bytes of an unbuffered file, in one buffer that each chunk overwrites; fewer where the file ends."""
    buffer = memoryview(bytearray(min(chunk_bytes, num_bytes)))
    while num_bytes > 0:
        wanted = min(len(buffer), num_bytes)
        count = 0
        while count < wanted and (more := file.readinto(buffer[count:wanted])):
            count += more
        yield buffer[:count]
        # A short chunk is the last: the file has ended.
        num_bytes = num_bytes - count if count == wanted else 0


def sync(path: Path) -> None:
    """Return once a file, or the names in a folder, are on disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


_MANIFEST: TypeAdapter[Manifest] = TypeAdapter(Manifest)


def _render(fields: Mapping[str, JsonValue]) -> bytes:
    """The text of a manifest: one way to write each, with the digest of everything else as its last key."""
    body = json.dumps(fields, indent=1, sort_keys=True).encode()
    digest = hashlib.sha256(body).hexdigest()
    return json.dumps({**dict(sorted(fields.items())), "sha256": digest}, indent=1).encode() + b"\n"


def _refuse_newer(path: Path, text: bytes) -> None:
    """Before anything else is read: a newer format may differ in all the rest."""
    try:
        found = json.loads(text)["format"]
    except (ValueError, TypeError, KeyError):
        return
    if isinstance(found, int) and found > FORMAT:
        raise CheckpointError(f"{path}: format {found} is newer than {FORMAT}; use the megarl that wrote it")


def _digest_next(file: FileIO, num_bytes: int, on_bytes: OnBytes | None = None) -> str:
    digest = xxhash.xxh3_128()
    for chunk in read_chunks(file, num_bytes):
        digest.update(chunk)
        if on_bytes is not None:
            on_bytes(len(chunk))
    return digest.hexdigest()


def _inside(folder: Path, name: str) -> Path:
    """The file of that name; one that is elsewhere is refused, whatever it contains."""
    parts = PurePosixPath(name).parts
    path = folder.joinpath(*parts)
    if ".." in parts or PurePosixPath(name).is_absolute() or not path.resolve().is_relative_to(folder.resolve()):
        raise CheckpointError(f"{path}: is outside the checkpoint")
    return path
