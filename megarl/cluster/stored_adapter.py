"""One version of an adapter on its way to the engines: in Ray's object store, then in a folder of each node.

The actors of engines import this, and do without torch: that takes seconds and half a gigabyte for each of them.

Ray moves an object once to each node that reads it. An engine loads the folder, so that a damaged adapter is an answer
of the engine and not its end.

A process holds a lock on every folder that it has placed. The system takes the locks of a killed process away: the next
engine that starts on the node removes the folders that no process has locked.
"""

from __future__ import annotations

import asyncio
import fcntl
import os
import shutil
import time
from collections import deque
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from errno import EEXIST, ENOTEMPTY
from functools import partial
from pathlib import Path
from tempfile import gettempdir, mkdtemp
from typing import TypeAlias

import numpy as np
import numpy.typing as npt
import ray
import xxhash

from megarl.checkpoint.manifest import TensorEntry, TensorHeader, make_header
from megarl.config.lora import ADAPTER_CONFIG_FILE, ADAPTER_FILE
from megarl.errors import WeightSyncError, first_few
from megarl.weights.algebra.slices import TensorSpec, header_dtype

Content: TypeAlias = npt.NDArray[np.uint8]
"""The bytes of all tensors in the order of the file: one array, which Ray copies with several threads and reads in
place."""

_MEMORY = Path("/dev/shm")  # noqa: S108 - a folder with a random name is made in it
_SPARE = 2
_PREFIX = "megarl_adapter_"
_LEFT_S = 5.0
"""Time for a process to lock a folder that it has just made."""
_READ_S = 60.0
"""Seconds after which every TP rank has read an adapter."""
_MAX_READ = 2
"""Folders of adapters stay for so long; publishes in quick succession remove older ones earlier."""
DIGESTING_THREADS = 4
_locks: dict[Path, int] = {}
"""Descriptors of the folders that this process has placed."""
_rooms: dict[int, Path] = {}
"""Folders with a file that has its pages already, by its size."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredAdapter:
    token: str
    """Names its folder on every node."""
    version: int
    content: ray.ObjectRef
    """Its `Content`."""
    config: str
    """The text of the configuration file."""
    tensors: Mapping[str, TensorSpec]
    digests: Mapping[str, str]
    """Digests of what the trainer holds, tensor by tensor."""

    @property
    def num_bytes(self) -> int:
        return sum(spec.num_bytes for spec in self.tensors.values())


def header_of(specs: Mapping[str, TensorSpec]) -> tuple[TensorHeader, bytes]:
    return make_header({name: (header_dtype(spec.dtype), spec.shape) for name, spec in specs.items()})


def digest_of(header: TensorHeader, content: Content, entry: TensorEntry) -> str:
    start = entry.start - header.num_bytes
    return xxhash.xxh3_128_hexdigest(content[start : start + entry.num_bytes].data)


def place_adapter(stored: StoredAdapter, content: Content, *, engine: int) -> Path:
    """Write the adapter to a folder for an engine of this node; the engine reads it once, and it is removed then.

    If the bytes are not those of the trainer, a WeightSyncError says so and no folder is left.
    """
    header, text = header_of(stored.tensors)
    try:
        unfinished = _rooms.pop(header.num_file_bytes, None) or _new_folder(_scratch_folder(stored.num_bytes))
        folder = unfinished.parent / f"{_PREFIX}{stored.token}_{engine}"
        try:
            with ThreadPoolExecutor(DIGESTING_THREADS) as threads:
                digests = threads.map(partial(digest_of, header, content), header.entries)
                _write(unfinished / ADAPTER_FILE, text, content.data)
                pairs = zip(header.entries, digests, strict=True)
                damaged = [entry.name for entry, digest in pairs if digest != stored.digests[entry.name]]
            if damaged:
                raise WeightSyncError(
                    f"adapter of version {stored.version} was damaged on its way to engine {engine}: "
                    f"{first_few(damaged)}"
                )
            (unfinished / ADAPTER_CONFIG_FILE).write_text(stored.config)
            _move(unfinished, folder)
        except BaseException:
            remove_adapter(unfinished)
            raise
    except OSError as error:
        raise WeightSyncError(f"adapter of version {stored.version} was not written: {error}") from None
    return folder


def _write(path: Path, *parts: bytes | memoryview) -> None:
    """Write a file, which may have its size and its pages already."""
    with os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT, 0o600), "wb", buffering=0) as file:
        for part in parts:
            view = memoryview(part)
            while view:
                view = view[file.write(view) :]


class ReadAdapters:
    """Folders that an engine has read, or is still reading.

    An engine answers when its first TP rank has read an adapter. Another rank that no longer found it would lack the
    adapter, and end the engine at the first request.
    """

    def __init__(self) -> None:
        self._folders: deque[Path] = deque()
        self._tidying: asyncio.Future[None] | None = None

    async def add(self, folder: Path) -> None:
        """Remove the folder after a while; the publish goes on meanwhile."""
        if self._tidying is not None:
            await self._tidying
        self._folders.append(folder)
        loop = asyncio.get_running_loop()
        self._tidying = loop.run_in_executor(None, self._tidy, folder)
        loop.call_later(_READ_S, remove_adapter, folder)

    def _tidy(self, newest: Path) -> None:
        make_room(newest)
        while len(self._folders) > _MAX_READ:
            remove_adapter(self._folders.popleft())

    async def remove(self) -> None:
        """Remove all folders: the engine has ended."""
        if self._tidying is not None:
            await self._tidying
        for folder in (*self._folders, *_rooms.values()):
            remove_adapter(folder)
        self._folders.clear()
        _rooms.clear()


def make_room(folder: Path) -> None:
    """Let the next adapter, which is as large as that of the folder, find its pages in the node's memory: they take as
    long to get as to write."""
    with suppress(OSError):  # no room, as the next adapter will report, or the folder is removed already
        num_bytes = (folder / ADAPTER_FILE).stat().st_size
        if num_bytes in _rooms or folder.parent != _MEMORY or _scratch_folder(num_bytes) != _MEMORY:
            return
        room = _new_folder(_MEMORY)
        try:
            with (room / ADAPTER_FILE).open("xb") as file:
                os.posix_fallocate(file.fileno(), 0, num_bytes)
            _rooms[num_bytes] = room
        except OSError:
            remove_adapter(room)


def remove_adapter(folder: Path) -> None:
    """Remove a folder that this process placed."""
    shutil.rmtree(folder, ignore_errors=True)
    if (descriptor := _locks.pop(folder, None)) is not None:
        os.close(descriptor)


def remove_left_adapters(*, after_s: float = _LEFT_S) -> None:
    """Remove the folders of killed processes: those without a lock that nothing was written to for a while."""
    for path in (path for place in (_MEMORY, Path(gettempdir())) for path in place.glob(f"{_PREFIX}*")):
        with suppress(OSError):  # another user's, in use, or just removed
            status = path.stat()
            if status.st_uid == os.getuid() and time.time() - status.st_mtime >= after_s:
                with _locked(path, fcntl.LOCK_EX):
                    shutil.rmtree(path, ignore_errors=True)


@contextmanager
def _locked(folder: Path, kind: int) -> Iterator[None]:
    descriptor = _lock(folder, kind)
    try:
        yield
    finally:
        os.close(descriptor)


def _lock(folder: Path, kind: int) -> int:
    """Lock a folder and return the descriptor that holds the lock; raise BlockingIOError where it is held."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        fcntl.flock(descriptor, kind | fcntl.LOCK_NB)
    except OSError:
        os.close(descriptor)
        raise
    return descriptor


def _new_folder(place: Path) -> Path:
    """Make a folder that only this user reads, and lock it."""
    folder = Path(mkdtemp(prefix=_PREFIX, dir=place))
    _locks[folder] = _lock(folder, fcntl.LOCK_SH)
    return folder


def _move(whole: Path, folder: Path) -> None:
    """Move a folder with its lock to its place, unless it is there: nodes of one machine share their memory."""
    try:
        whole.rename(folder)
        _locks[folder] = _locks.pop(whole)
    except OSError as error:
        if error.errno not in (EEXIST, ENOTEMPTY):
            raise
        remove_adapter(whole)
        if folder not in _locks:
            _locks[folder] = _lock(folder, fcntl.LOCK_SH)


def _scratch_folder(num_bytes: int) -> Path:
    """Return a folder for files that are read once: in memory, unless there is none or too little."""
    has_room = _MEMORY.is_dir() and shutil.disk_usage(_MEMORY).free > _SPARE * num_bytes
    return _MEMORY if has_room else Path(gettempdir())
