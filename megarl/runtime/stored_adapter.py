"""One version of an adapter on its way to the engines: in Ray's object store, then in a folder of each node.

Ray moves an object once to each node that reads it. An engine loads the folder, so that a damaged adapter is an answer
of the engine and not its end.

A process holds a lock on every folder that it has placed. The system takes the locks of a killed process away: the next
engine that starts on the node removes the folders that nobody holds.
"""

from __future__ import annotations

import fcntl
import json
import os
import shutil
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from errno import EEXIST, ENOTEMPTY
from pathlib import Path
from tempfile import TemporaryDirectory, gettempdir
from typing import TypeAlias
from uuid import uuid4

import numpy as np
import numpy.typing as npt
import ray
import torch
import xxhash

from megarl.checkpoint.tensor_files import write_tensor_file
from megarl.config.lora import ADAPTER_CONFIG_FILE, ADAPTER_FILE
from megarl.errors import WeightSyncError
from megarl.weights.algebra.slices import TensorSpec
from megarl.weights.executors.tensors import bytes_of, first_few, header_dtype, specs_of

Content: TypeAlias = Mapping[str, npt.NDArray[np.uint8]]
"""The bytes of every tensor. Arrays go into the object store with one copy, and are read there without one."""

_MEMORY = Path("/dev/shm")  # noqa: S108 - a folder with a random name is made in it
_SPARE = 2
_PREFIX = "megarl_adapter_"
_LEFT_S = 5.0
"""For a process to lock a folder that it has just made."""
_locks: dict[Path, int] = {}
"""Descriptors of the folders that this process has placed."""


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


def store_adapter(
    tensors: Mapping[str, torch.Tensor],
    fields: Mapping[str, object],
    *,
    version: int,
    put: Callable[[Content], ray.ObjectRef] = ray.put,
) -> StoredAdapter:
    """Put the tensors of an adapter into the object store; `fields` are its configuration."""
    content: Content = {name: np.frombuffer(bytes_of(tensor), np.uint8) for name, tensor in tensors.items()}
    return StoredAdapter(
        token=uuid4().hex,
        version=version,
        content=put(content),
        config=json.dumps(fields),
        tensors=specs_of(tensors.items()),
        digests={name: xxhash.xxh3_128_hexdigest(values.data) for name, values in content.items()},
    )


def place_adapter(stored: StoredAdapter, content: Content, *, engine: int) -> Path:
    """Write the adapter to a folder for an engine of this node; the engine reads it once, and it is removed then.

    If the bytes are not those of the trainer, a WeightSyncError says so and no folder is left.
    """
    scratch = _scratch_folder(stored.num_bytes)
    folder = scratch / f"{_PREFIX}{stored.token}_{engine}"
    headers = {name: (header_dtype(spec.dtype), spec.shape) for name, spec in stored.tensors.items()}
    try:
        with (
            TemporaryDirectory(prefix=_PREFIX, dir=scratch, ignore_cleanup_errors=True) as partial,
            _locked(Path(partial), fcntl.LOCK_SH),
        ):
            whole = Path(partial) / "whole"
            whole.mkdir(mode=0o700)
            written = write_tensor_file(whole / ADAPTER_FILE, headers, lambda entry: [content[entry.name].data])
            damaged = [tensor.name for tensor in written.tensors if tensor.xxh3_128 != stored.digests[tensor.name]]
            if damaged:
                raise WeightSyncError(
                    f"adapter of version {stored.version} was damaged on its way to engine {engine}: "
                    f"{first_few(damaged)}"
                )
            (whole / ADAPTER_CONFIG_FILE).write_text(stored.config)
            _move(whole, folder)
            _locks[folder] = _lock(folder, fcntl.LOCK_SH)
    except OSError as error:
        raise WeightSyncError(f"adapter of version {stored.version} was not written: {error}") from None
    return folder


def remove_adapter(folder: Path) -> None:
    """Remove a folder that this process placed."""
    shutil.rmtree(folder, ignore_errors=True)
    if (descriptor := _locks.pop(folder, None)) is not None:
        os.close(descriptor)


def remove_left_adapters(*, after_s: float = _LEFT_S) -> None:
    """Remove the folders of killed processes: those that nobody has locked and nothing was written to for a while."""
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


def _move(whole: Path, folder: Path) -> None:
    """Move a complete folder to its place, unless it is there: nodes of one machine share their memory."""
    try:
        whole.rename(folder)
    except OSError as error:
        if error.errno not in (EEXIST, ENOTEMPTY):
            raise


def _scratch_folder(num_bytes: int) -> Path:
    """Return a folder for files that are read once: in memory, unless there is none or too little."""
    has_room = _MEMORY.is_dir() and shutil.disk_usage(_MEMORY).free > _SPARE * num_bytes
    return _MEMORY if has_room else Path(gettempdir())
