"""One version of an adapter on its way to the engines: in Ray's object store, then in a folder of each node.

Ray moves an object once to each node that reads it. An engine loads the folder, so that a damaged adapter is an answer
of the engine and not its end.
"""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from uuid import uuid4

import ray

from megarl.checkpoint.manifest import MODEL_FOLDER, FileDigest, digest_file
from megarl.checkpoint.tensor_header import read_header
from megarl.config.lora import ADAPTER_CONFIG_FILE, ADAPTER_FILE
from megarl.errors import CheckpointError, WeightSyncError
from megarl.weights.algebra.slices import TensorSpec
from megarl.weights.executors.tensors import HEADER_DTYPES

_MEMORY = Path("/dev/shm")  # noqa: S108 - a folder with a random name is made in it
_SPARE = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredAdapter:
    token: str
    """Names its folder on every node."""
    version: int
    content: ray.ObjectRef
    """The bytes of the safetensors file."""
    config: str
    """The text of the configuration file."""
    digest: FileDigest
    """Digests of what the trainer wrote, tensor by tensor."""
    tensors: Mapping[str, TensorSpec]


def scratch_folder(num_bytes: int = 0) -> Path:
    """Return a folder for files that are read once: in memory, unless there is none or too little."""
    has_room = _MEMORY.is_dir() and shutil.disk_usage(_MEMORY).free > _SPARE * num_bytes
    return _MEMORY if has_room else Path(tempfile.gettempdir())


def read_adapter(folder: Path, files: Mapping[str, FileDigest], version: int) -> StoredAdapter:
    """Put an adapter that was exported to `folder` into the object store."""
    name = f"{MODEL_FOLDER}/{ADAPTER_FILE}"
    path = folder / name
    entries = read_header(path).entries
    return StoredAdapter(
        token=uuid4().hex,
        version=version,
        content=ray.put(path.read_bytes()),
        config=(folder / MODEL_FOLDER / ADAPTER_CONFIG_FILE).read_text(),
        digest=files[name],
        tensors={entry.name: TensorSpec(shape=entry.shape, dtype=HEADER_DTYPES[entry.dtype]) for entry in entries},
    )


def place_adapter(stored: StoredAdapter, content: bytes, *, engine: int) -> Path:
    """Write the adapter to a folder for an engine of this node; the engine reads it once, and it is removed then.

    If the bytes are not those of the trainer, a WeightSyncError says so and no folder is left.
    """
    folder = scratch_folder(len(content)) / f"megarl_adapter_{stored.token}_{engine}"
    try:
        folder.mkdir(mode=0o700, exist_ok=True)
        (folder / ADAPTER_FILE).write_bytes(content)
        (folder / ADAPTER_CONFIG_FILE).write_text(stored.config)
        found = digest_file(folder / ADAPTER_FILE)
    except (OSError, CheckpointError) as error:
        shutil.rmtree(folder, ignore_errors=True)
        raise WeightSyncError(f"adapter of version {stored.version} was not written: {error}") from None
    if found != stored.digest:
        shutil.rmtree(folder, ignore_errors=True)
        raise WeightSyncError(f"adapter of version {stored.version} was damaged on its way to engine {engine}")
    return folder
