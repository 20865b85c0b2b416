"""From the path a person names to what is there: a run's checkpoints, one of them, or any Hugging Face folder.

Nothing is returned whose digests, where it has some, were not compared with its bytes. No torch.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from megarl.checkpoint.folder import CHECKPOINTS_FOLDER, list_checkpoints
from megarl.checkpoint.manifest import MANIFEST_FILE, MODEL_FOLDER, FileDigest, OnBytes, verify
from megarl.errors import CheckpointError

CONFIG_FILE = "config.json"

_MASTER_FOLDER = "optimizer/master"
_MAX_INNER_DEPTH = 3
"""How far below its checkpoint a model may lie: critic/model."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelSource:
    folder: Path
    """Configuration, tokenizer, and the weights as they are served."""
    tensor_folder: Path
    """The weights: the same folder, or the master weights of the checkpoint it is in."""
    digests: Mapping[str, FileDigest]
    """What the checkpoint's manifest says of the files of `tensor_folder`, by name; empty where there is none."""
    notes: tuple[str, ...] = ()
    """What people should know about the choice."""


def find_checkpoints(path: Path) -> list[Path]:
    """The one the path names, or those of the run it names, the newest first."""
    if (path / MANIFEST_FILE).exists():
        return [path]
    found = list_checkpoints(parent_of(path))
    if not found:
        raise CheckpointError(f"{path}: there is no checkpoint here; name a run's folder, as in runs/quickstart")
    return found


def parent_of(path: Path) -> Path:
    """Where a run has its checkpoints; the path is the run's folder, or that one already."""
    return path if path.name == CHECKPOINTS_FOLDER else path / CHECKPOINTS_FOLDER


def find_model(path: Path, *, wants_master: bool = False, on_bytes: OnBytes | None = None) -> ModelSource:
    """The model at `path`: of the run's newest checkpoint that is whole, of that checkpoint, or the folder itself.

    `wants_master` takes the float32 master weights of a checkpoint, where it has some.
    """
    if not path.exists():
        raise CheckpointError(f"{path}: does not exist; name a run's folder, a checkpoint or a Hugging Face model")
    if (path / CONFIG_FILE).exists():
        return _of_folder(path, wants_master=wants_master, on_bytes=on_bytes)
    if (path / MANIFEST_FILE).exists():
        return _of_checkpoint(path, MODEL_FOLDER, wants_master=wants_master, on_bytes=on_bytes)
    notes: list[str] = []
    for checkpoint in list_checkpoints(parent_of(path)):
        try:
            found = _of_checkpoint(checkpoint, MODEL_FOLDER, wants_master=wants_master, on_bytes=on_bytes)
            return replace(found, notes=(*notes, *found.notes))
        except CheckpointError as error:
            notes.append(f"skipped {checkpoint}: {error}")
    if notes:
        raise CheckpointError(f"{path}: no checkpoint of this run verifies: {'; '.join(notes)}")
    raise CheckpointError(
        f"{path}: neither a run's folder, nor a checkpoint, nor a Hugging Face model (it has no {CONFIG_FILE})"
    )


def _of_folder(folder: Path, *, wants_master: bool, on_bytes: OnBytes | None) -> ModelSource:
    resolved = folder.resolve()
    for checkpoint in resolved.parents[:_MAX_INNER_DEPTH]:
        if (checkpoint / MANIFEST_FILE).exists():
            inner = resolved.relative_to(checkpoint).as_posix()
            return _of_checkpoint(checkpoint, inner, wants_master=wants_master, on_bytes=on_bytes)
    return ModelSource(folder=folder, tensor_folder=folder, digests={})


def _of_checkpoint(checkpoint: Path, inner: str, *, wants_master: bool, on_bytes: OnBytes | None) -> ModelSource:
    manifest = verify(checkpoint, below=inner, on_bytes=on_bytes)
    # critic/model has its master weights in critic/optimizer/master.
    master = f"{inner.removesuffix(MODEL_FOLDER)}{_MASTER_FOLDER}"
    tensors = inner
    notes: tuple[str, ...] = ()
    if wants_master and any(name.startswith(f"{master}/") for name in manifest.files):
        verify(checkpoint, below=master, on_bytes=on_bytes)
        tensors = master
        notes = (f"weights are those of {checkpoint / master}: float32, as they were trained",)
    digests = {
        name.removeprefix(f"{tensors}/"): file
        for name, file in manifest.files.items()
        if name.startswith(f"{tensors}/")
    }
    return ModelSource(folder=checkpoint / inner, tensor_folder=checkpoint / tensors, digests=digests, notes=notes)
