"""Finds the checkpoints or the model at a path that a user named: a run, a checkpoint, or a Hugging Face folder.

A model with digests is returned only after they were compared with its bytes. No torch.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from megarl.checkpoint.folder import CHECKPOINTS_FOLDER, list_checkpoints
from megarl.checkpoint.manifest import MANIFEST_FILE, MODEL_FOLDER, FileDigest, OnBytes, verify
from megarl.config.lora import ADAPTER_CONFIG_FILE
from megarl.errors import CheckpointError

CONFIG_FILE = "config.json"

_MASTER_FOLDER = "optimizer/master"
_MAX_INNER_DEPTH = 3
"""Number of parent folders of a model to search for its checkpoint, which has critic/model."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelSource:
    folder: Path
    """Has configuration, tokenizer, and the weights as they are served."""
    tensor_folder: Path
    """Has the weights: the same folder, or the master weights of its checkpoint."""
    digests: Mapping[str, FileDigest]
    """The manifest's digests of the files in `tensor_folder`, by name; empty without a manifest."""
    notes: tuple[str, ...] = ()
    """Sentences for the user about the choice."""

    @property
    def is_adapter(self) -> bool:
        """Whether it is a folder of PEFT, whose base is elsewhere."""
        return (self.folder / ADAPTER_CONFIG_FILE).exists()


def find_checkpoints(path: Path) -> list[Path]:
    """Return the checkpoint at the path, or the checkpoints of the run at the path, newest first."""
    if (path / MANIFEST_FILE).exists():
        return [path]
    checkpoints = list_checkpoints(parent_of(path))
    if not checkpoints:
        raise CheckpointError(f"{path}: there is no checkpoint here; name a run's folder, as in runs/quickstart")
    return checkpoints


def parent_of(path: Path) -> Path:
    """Return the folder of a run's checkpoints; the path is that folder or the run's."""
    return path if path.name == CHECKPOINTS_FOLDER else path / CHECKPOINTS_FOLDER


def find_model(path: Path, *, wants_master: bool = False, on_bytes: OnBytes | None = None) -> ModelSource:
    """Return the model of the run's newest checkpoint that verifies, of the checkpoint, or of the folder at `path`.

    `wants_master` selects the float32 master weights of a checkpoint that has them.
    """
    if not path.exists():
        raise CheckpointError(f"{path}: does not exist; name a run's folder, a checkpoint or a Hugging Face model")
    if (path / CONFIG_FILE).exists() or (path / ADAPTER_CONFIG_FILE).exists():
        return _of_folder(path, wants_master=wants_master, on_bytes=on_bytes)
    if (path / MANIFEST_FILE).exists():
        return _of_checkpoint(path, MODEL_FOLDER, wants_master=wants_master, on_bytes=on_bytes)
    notes: list[str] = []
    for checkpoint in list_checkpoints(parent_of(path)):
        try:
            source = _of_checkpoint(checkpoint, MODEL_FOLDER, wants_master=wants_master, on_bytes=on_bytes)
            return replace(source, notes=(*notes, *source.notes))
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
        notes = (f"the weights are the float32 master weights in {checkpoint / master}",)
    digests = {
        name.removeprefix(f"{tensors}/"): file
        for name, file in manifest.files.items()
        if name.startswith(f"{tensors}/")
    }
    return ModelSource(folder=checkpoint / inner, tensor_folder=checkpoint / tensors, digests=digests, notes=notes)
