"""A store with the checkpoints of one run: an object store or another disk, below a URL that fsspec knows.

Bytes are compared with the digests of a manifest in both directions.
"""

from __future__ import annotations

import os
import sys
import time
from contextlib import suppress
from pathlib import Path
from threading import Lock
from typing import IO

import fsspec
import xxhash

from megarl.checkpoint.folder import checkpoint_folder, step_of
from megarl.checkpoint.manifest import MANIFEST_FILE, FileDigest, sync
from megarl.errors import DamagedError

UPLOADING_FILE = "uploading.json"
MOVED = "moved"
_CHUNK_BYTES = 16 << 20
_PRINT_EVERY_S = 1.0
"""Between two lines of the process."""


class Store:
    """One run's checkpoints below a URL that fsspec knows."""

    def __init__(self, url: str) -> None:
        # Its own listing would be out of date: other processes write here too.
        options: dict[str, object] = {"use_listings_cache": False}
        if url.startswith("file:"):
            options["auto_mkdir"] = True
        self._files, self._root = fsspec.url_to_fs(url, **options)
        self._is_disk = url.startswith("file:")

    def names(self) -> list[str]:
        """Return the names of the files and folders at the URL."""
        try:
            listed = self._files.ls(self._root, detail=False)
        except FileNotFoundError:
            return []
        return [Path(name.rstrip("/")).name for name in listed]

    def read_named(self, name: str) -> bytes | None:
        return self.read(f"{self._root}/{name}")

    def write_named(self, name: str, contents: bytes) -> None:
        self.write(f"{self._root}/{name}", contents)

    def create_named(self, name: str, contents: bytes) -> bool:
        """Write a file unless there is one of its name; return whether it was written."""
        path = f"{self._root}/{name}"
        try:
            if self._is_disk:  # where fsspec looks first and writes then
                Path(path).parent.mkdir(parents=True, exist_ok=True)
                with Path(path).open("xb") as file:
                    file.write(contents)
                    _sync(file)
            else:
                self._files.pipe_file(path, contents, mode="create")
        except FileExistsError:
            return False
        return True

    def remove_named(self, name: str) -> None:
        with suppress(FileNotFoundError):
            self._files.rm_file(f"{self._root}/{name}")

    def steps(self) -> dict[int, str]:
        """Return the folder of every step, complete or not."""
        try:
            listed = self._files.ls(self._root, detail=False)
        except FileNotFoundError:
            return {}
        folders = {name.rstrip("/"): step_of(Path(name.rstrip("/"))) for name in listed}
        return {step: name for name, step in folders.items() if step is not None}

    def folder(self, step: int) -> str:
        return f"{self._root}/{checkpoint_folder(Path(), step).name}"

    def read(self, path: str) -> bytes | None:
        """Return the contents of a small file, None without one."""
        try:
            contents: bytes = self._files.cat_file(path)
        except FileNotFoundError:
            return None
        return contents

    def write(self, path: str, contents: bytes) -> None:
        with self._files.open(path, "wb") as file:
            file.write(contents)
            _sync(file)

    def sizes(self, folder: str) -> dict[str, int]:
        """Return the size of every file of a folder by its path inside."""
        entries = self._files.find(folder, detail=True)
        return {name.removeprefix(f"{folder}/"): entry["size"] for name, entry in entries.items()}

    def remove(self, folder: str) -> None:
        for name in (MANIFEST_FILE, UPLOADING_FILE):
            with suppress(FileNotFoundError):
                self._files.rm_file(f"{folder}/{name}")
        with suppress(FileNotFoundError):
            self._files.rm(folder, recursive=True)

    def finish(self, folder: str, text: bytes) -> None:
        self.write(f"{folder}/{MANIFEST_FILE}", text)
        self._files.rm_file(f"{folder}/{UPLOADING_FILE}")

    def send(self, path: str, source: Path, expected: FileDigest, moved: Moved) -> None:
        """Copy a file into the store; one that does not have its digests raises a DamagedError."""
        opened = self._files.open(path, "wb", block_size=_CHUNK_BYTES)
        try:
            with source.open("rb", buffering=0) as local, opened as file:
                _copy(local, file, expected, str(source), moved)
                _sync(file)
        except DamagedError:
            # Leaving the block has made it a file of the right size.
            self._files.rm_file(path)
            raise

    def receive(self, path: str, target: Path, expected: FileDigest, moved: Moved) -> None:
        """Copy a file from the store and compare its digests."""
        target.parent.mkdir(parents=True, exist_ok=True)
        opened = self._files.open(path, "rb", block_size=_CHUNK_BYTES, cache_type="none")
        with opened as file, target.open("xb", buffering=0) as local:
            _copy(file, local, expected, path, moved)
        sync(target)


class Moved:
    """Counts bytes from several threads, and prints their sum now and then."""

    def __init__(self) -> None:
        self.num_bytes = 0
        self._lock = Lock()
        self._printed = time.monotonic()

    def __call__(self, num_bytes: int) -> None:
        with self._lock:
            self.num_bytes += num_bytes
            if time.monotonic() - self._printed >= _PRINT_EVERY_S:
                self._printed = time.monotonic()
                print_line(MOVED, self.num_bytes)


def _copy(source: IO[bytes], target: IO[bytes], expected: FileDigest, name: str, moved: Moved) -> None:
    """Copy a file of these digests: of its header and its tensors, or of the whole."""
    own_bytes = expected.num_bytes - sum(tensor.num_bytes for tensor in expected.tensors)
    parts = [("", own_bytes, expected.xxh3_128)]
    parts += [(f": tensor {tensor.name}", tensor.num_bytes, tensor.xxh3_128) for tensor in expected.tensors]
    for what, num_bytes, wanted in parts:
        digest, left = xxhash.xxh3_128(), num_bytes
        while left and (chunk := source.read(min(_CHUNK_BYTES, left))):
            digest.update(chunk)
            part = memoryview(chunk)
            while part:
                part = part[target.write(part) :]
            left -= len(chunk)
            moved(len(chunk))
        if left or digest.hexdigest() != wanted:
            raise DamagedError(f"{name}{what}: damaged: it does not have the digest of the manifest")


def _sync(file: IO[bytes]) -> None:
    # A store keeps what it confirmed; a disk keeps what is synced.
    with suppress(OSError, AttributeError):
        os.fsync(file.fileno())


def print_line(*words: object) -> None:
    sys.stdout.write(" ".join(map(str, words)) + "\n")
    sys.stdout.flush()
