"""The copy of a run's checkpoints in an object store or on another disk. A process of its own: `python -m` this module.

Errors of a store have no common class: whoever starts this process reads its exit code and its last line. It prints
`moved BYTES` as it works, then `uploaded STEP BYTES`, `newest STEP` or `fetched STEP BYTES`.

The store has the files of a checkpoint under their names. `manifest.json` is written last and removed first: with it a
checkpoint is complete. Until then `uploading.json` has the same text, so that an interrupted upload is continued.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from threading import Lock
from typing import IO

import fsspec
import xxhash

from megarl.checkpoint.folder import BEST, begin, checkpoint_folder, commit, list_checkpoints, marked, step_of
from megarl.checkpoint.manifest import MANIFEST_FILE, FileDigest, Manifest, inside, read_manifest, sync
from megarl.errors import CheckpointError, DamagedError, MegarlError

UPLOADING_FILE = "uploading.json"
UPLOADED, NEWEST, FETCHED, MOVED = "uploaded", "newest", "fetched", "moved"
NUM_STREAMS = 8
"""Files under way at once: one connection to a store does not fill a network."""
_CHUNK_BYTES = 16 << 20
_TELL_EVERY_S = 1.0


class Store:
    """One run's checkpoints below a URL that fsspec knows."""

    def __init__(self, url: str) -> None:
        # Its own listing would be out of date: other processes write here too.
        options: dict[str, object] = {"use_listings_cache": False}
        if url.startswith("file:"):
            options["auto_mkdir"] = True
        self._files, self._root = fsspec.url_to_fs(url, **options)

    def steps(self) -> dict[int, str]:
        """Return the folder of every step, complete or not."""
        try:
            found = self._files.ls(self._root, detail=False)
        except FileNotFoundError:
            return {}
        folders = {name.rstrip("/"): step_of(Path(name.rstrip("/"))) for name in found}
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
        found = self._files.find(folder, detail=True)
        return {name.removeprefix(f"{folder}/"): entry["size"] for name, entry in found.items()}

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
        self._told = time.monotonic()

    def __call__(self, num_bytes: int) -> None:
        with self._lock:
            self.num_bytes += num_bytes
            if time.monotonic() - self._told >= _TELL_EVERY_S:
                self._told = time.monotonic()
                _tell(MOVED, self.num_bytes)


def upload(parent: Path, store: Store, *, keep_last: int) -> None:
    """Copy the checkpoints that the store lacks, the newest first, and remove from it what is not to be kept.

    One that is removed meanwhile is passed over; a damaged one is reported after the others are copied.
    """
    best = marked(parent, BEST)
    local = list_checkpoints(parent)
    complaints = []
    for folder in [*local[:keep_last], *(folder for folder in local[keep_last:] if folder == best)]:
        try:
            _upload_one(folder, store)
        except (DamagedError, FileNotFoundError, CheckpointError) as error:
            if folder.exists():
                complaints.append(str(error))
    if complaints:
        raise CheckpointError("; ".join(complaints))
    kept = [step for folder in (*local, best) if folder is not None and (step := step_of(folder)) is not None]
    if kept:
        _prune(store, newest=max(kept), best=None if best is None else step_of(best), keep_last=keep_last)


def _upload_one(folder: Path, store: Store) -> None:
    manifest, text, moved = read_manifest(folder), (folder / MANIFEST_FILE).read_bytes(), Moved()
    target = store.folder(manifest.step)
    if store.read(f"{target}/{MANIFEST_FILE}") == text:
        return
    if store.read(f"{target}/{UPLOADING_FILE}") != text:
        store.remove(target)
        store.write(f"{target}/{UPLOADING_FILE}", text)
    present = store.sizes(target)
    missing = [name for name, file in manifest.files.items() if present.get(name) != file.num_bytes]

    def send(name: str) -> None:
        store.send(f"{target}/{name}", inside(folder, name), manifest.files[name], moved)

    _in_parallel(send, missing, manifest.files)
    store.finish(target, text)
    _tell(UPLOADED, manifest.step, moved.num_bytes)


def _prune(store: Store, *, newest: int, best: int | None, keep_last: int) -> None:
    """Keep the newest `keep_last` complete checkpoints and the best.

    Later ones than `newest`, the newest on the local disk, belong to steps that the run has taken again.
    """
    steps = store.steps()
    complete = [
        step
        for step in sorted(steps, reverse=True)
        if step <= newest and store.read(f"{steps[step]}/{MANIFEST_FILE}") is not None
    ]
    for step, folder in steps.items():
        if step not in (*complete[:keep_last], best):
            store.remove(folder)


def newest(store: Store, copy: Path, *, without: Iterable[int]) -> None:
    """Print the newest complete step that is not in `without`, and copy its manifest to the folder `copy`."""
    skipped = set(without)
    for step, folder in sorted(store.steps().items(), reverse=True):
        text = None if step in skipped else store.read(f"{folder}/{MANIFEST_FILE}")
        if text is not None:
            (copy / MANIFEST_FILE).write_bytes(text)
            _tell(NEWEST, step)
            return


def fetch(store: Store, parent: Path, step: int) -> None:
    """Copy a checkpoint of the store to the local disk, where it takes its name when every digest was compared."""
    folder, source, moved = checkpoint_folder(parent, step), store.folder(step), Moved()
    text = store.read(f"{source}/{MANIFEST_FILE}")
    if text is None:
        raise CheckpointError(f"{source}: has no {MANIFEST_FILE} any more")
    manifest = _parsed(text, folder)

    def receive(name: str) -> None:
        store.receive(f"{source}/{name}", inside(partial, name), manifest.files[name], moved)

    partial = begin(folder, num_bytes=manifest.num_bytes)
    _in_parallel(receive, manifest.files, manifest.files)
    commit(partial, folder, manifest)
    _tell(FETCHED, step, moved.num_bytes)


def _parsed(text: bytes, folder: Path) -> Manifest:
    """Return the manifest after it is checked like one on disk."""
    copy = folder.with_name(f"{folder.name}.manifest.tmp")
    copy.mkdir(parents=True, exist_ok=True)
    try:
        (copy / MANIFEST_FILE).write_bytes(text)
        return read_manifest(copy)
    finally:
        (copy / MANIFEST_FILE).unlink(missing_ok=True)
        copy.rmdir()


def _in_parallel(move: Callable[[str], None], names: Iterable[str], files: Mapping[str, FileDigest]) -> None:
    """Move files at once, the largest first; the first error ends the others after their file."""
    pool = ThreadPoolExecutor(NUM_STREAMS)
    try:
        for _ in pool.map(move, sorted(names, key=lambda name: -files[name].num_bytes)):
            pass
    finally:
        pool.shutdown(cancel_futures=True)


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


def _tell(*words: object) -> None:
    sys.stdout.write(" ".join(map(str, words)) + "\n")
    sys.stdout.flush()


def main(words: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(prog="megarl.checkpoint.mirror")
    parser.add_argument("action", choices=("upload", "newest", "fetch"))
    parser.add_argument("url")
    parser.add_argument("folder", type=Path)
    parser.add_argument("--keep-last", type=int, default=1)
    parser.add_argument("--step", type=int, default=0)
    parser.add_argument("--without", type=int, nargs="*", default=())
    given = parser.parse_args(words)
    store = Store(given.url)
    try:
        match given.action:
            case "upload":
                upload(given.folder, store, keep_last=given.keep_last)
            case "newest":
                newest(store, given.folder, without=given.without)
            case _:
                fetch(store, given.folder, given.step)
    except MegarlError as error:
        sys.stderr.write(f"{error}\n")
        return error.exit_code
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
