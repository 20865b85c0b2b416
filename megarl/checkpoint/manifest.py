"""What a checkpoint promises about its files, and whether it keeps the promise. JSON and hashes: no torch, no layouts.

step_000123/
├── model/           a Hugging Face model
├── optimizer/       exp_avg, exp_avg_sq and, where model/ is not float32, master: canonical tensors in float32
├── state.json       where the run stood
└── manifest.json    written last: size and digest of every other file, and a digest of itself
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Literal

import xxhash
from pydantic import JsonValue, TypeAdapter, ValidationError

from megarl.errors import CheckpointError

FORMAT = 1
MANIFEST_FILE = "manifest.json"
MODEL_FOLDER = "model"
OPTIMIZER_FOLDER = "optimizer"
CRITIC_FOLDER = "critic"
"""With a `model` and an `optimizer` of its own."""

Contents = Literal["everything", "weights"]

_CHUNK_BYTES = 4 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class FileDigest:
    num_bytes: int
    xxh3_128: str
    """Finds accidents; it is not cryptographic."""


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
    digest = xxhash.xxh3_128()
    num_bytes = 0
    with path.open("rb") as file:
        while chunk := file.read(_CHUNK_BYTES):
            digest.update(chunk)
            num_bytes += len(chunk)
    return FileDigest(num_bytes=num_bytes, xxh3_128=digest.hexdigest())


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


def verify(folder: Path) -> Manifest:
    """The manifest, if every file is what was written; a CheckpointError names the first that is not."""
    manifest = read_manifest(folder)
    for name, expected in manifest.files.items():
        path = _inside(folder, name)
        try:
            size = path.stat().st_size
            if size != expected.num_bytes:
                raise CheckpointError(f"{path}: damaged: {size} bytes, {expected.num_bytes} were written")
            if digest_file(path) != expected:
                raise CheckpointError(f"{path}: damaged: its digest is not the one that was written")
        except OSError as error:
            raise CheckpointError(f"{path}: cannot be read: {error.strerror}") from error
    return manifest


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


def _inside(folder: Path, name: str) -> Path:
    """The file of that name; one that is elsewhere is refused, whatever it contains."""
    parts = PurePosixPath(name).parts
    path = folder.joinpath(*parts)
    if ".." in parts or PurePosixPath(name).is_absolute() or not path.resolve().is_relative_to(folder.resolve()):
        raise CheckpointError(f"{path}: is outside the checkpoint")
    return path
