"""The checkpoints of a run on disk: names, links to the latest and the best, how one is made and found, which go.

A checkpoint is written as `step_N.T.tmp` and renamed after every byte of it is on disk. T is the token of the driver
that writes it (`system.run_lock`): one that another driver has followed neither removes nor renames the other's files.
"""

from __future__ import annotations

import re
import shutil
from collections.abc import Collection, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from math import prod
from pathlib import Path, PurePosixPath

from megarl.checkpoint.manifest import (
    MANIFEST_FILE,
    MODEL_FOLDER,
    FileDigest,
    Manifest,
    OnBytes,
    sync,
    verify,
    write_manifest,
)
from megarl.config.lora import ADAPTER_CONFIG_FILE, LoraConfig
from megarl.errors import CheckpointError
from megarl.families.shape import ModelShape
from megarl.system.faults import reach, step_in
from megarl.system.run_lock import check_held, held_token
from megarl.weights.layouts.canonical import canonical_tensors
from megarl.weights.layouts.lora import LoraShape, adapter_tensors

CHECKPOINTS_FOLDER = "checkpoints"
LATEST = "latest"
BEST = "best"
ABANDONED = ".abandoned"
LATEST_STEP_FILE = "latest_checkpointed_iteration.txt"
"""Has the latest step, for tools that read it from a file of this name."""

CONFIG_FILE = "config.json"

_STEP = re.compile(r"step_(\d{6,})")
_LEFTOVER = re.compile(r"step_.*?(?:\.(\d+))?\.tmp")
_MASTER_FOLDER = "optimizer/master"
_MAX_INNER_DEPTH = 3
"""Number of parent folders of a model to search for its checkpoint, which has critic/model."""


def checkpoint_folder(parent: Path, step: int) -> Path:
    return parent / f"step_{step:06d}"


def step_of(folder: Path) -> int | None:
    match = _STEP.fullmatch(folder.name)
    return int(match.group(1)) if match else None


def list_checkpoints(parent: Path) -> list[Path]:
    """Return the checkpoints, newest first, without the leftovers of killed saves."""
    if not parent.is_dir():
        return []
    steps = {path: step for path in parent.iterdir() if path.is_dir() and (step := step_of(path)) is not None}
    return sorted(steps, key=lambda path: steps[path], reverse=True)


def begin(folder: Path, *, num_bytes: int, token: int | None = None) -> Path:
    """Return an empty folder for a checkpoint of about `num_bytes`; leftovers of killed saves are removed.

    `token` is the driver's, for a process that it started; the driver's own is known.
    """
    parent, run_folder = folder.parent, folder.parent.parent
    token = held_token(run_folder) if token is None else token
    check_held(run_folder, token)
    if not parent.exists():
        parent.mkdir(parents=True, exist_ok=True)
        _sync_names_of(parent)
    for leftover in parent.glob("step_*.tmp"):
        if _token_of(leftover) <= token:  # a later driver may have begun by now
            shutil.rmtree(leftover)
    free_bytes = shutil.disk_usage(parent).free
    if free_bytes < num_bytes:
        raise CheckpointError(
            f"{folder} was not saved: it needs {num_bytes / 1e9:.1f} GB and {free_bytes / 1e9:.1f} GB are free; "
            "make room, lower checkpoint.keep_last or set checkpoint.contents to weights"
        )
    partial = _partial(folder, token)
    partial.mkdir()
    reach("begun", step=step_in(partial))
    return partial


def commit(partial: Path, folder: Path, manifest: Manifest) -> None:
    """Write the manifest, give the complete checkpoint its name and make it the latest."""
    write_manifest(partial, manifest)
    reach("manifest_written", step=step_in(partial))
    run_folder, token = folder.parent.parent, _token_of(partial)
    check_held(run_folder, token)
    for inner in {inside for name in manifest.files for inside in PurePosixPath(name).parents}:
        sync(partial / inner)
    reach("folders_synced", step=step_in(partial))
    # Again: syncing took long. Asked before each name is given, so that no driver changes names after its successor.
    check_held(run_folder, token)
    _set_aside_from(folder)
    reach("later_set_aside", step=step_in(partial))
    check_held(run_folder, token)
    partial.rename(folder)
    sync(folder.parent)
    reach("renamed", step=step_in(folder))
    check_held(run_folder, token)
    _point(folder, LATEST, token)
    reach("latest_linked", step=step_in(folder))
    _write_latest_step(folder, token)
    reach("latest_numbered", step=step_in(folder))


def _sync_names_of(parent: Path) -> None:
    """Return once the names of a new run's folders are on disk: without one of them a power failure takes all."""
    sync(parent.parent)
    for outer in parent.parents[1:3]:
        with suppress(OSError):  # a folder of someone else, which has had its names for long
            sync(outer)


def discard(folder: Path) -> None:
    """Remove what a failed save of `folder` wrote; the next save removes what cannot be removed now."""
    shutil.rmtree(_partial(folder, held_token(folder.parent.parent)), ignore_errors=True)


def mark_best(folder: Path) -> None:
    run_folder = folder.parent.parent
    check_held(run_folder)
    _point(folder, BEST, held_token(run_folder))


def remove_old(parent: Path, *, keep_last: int, keep_steps: Collection[int] = ()) -> None:
    """Remove all checkpoints but the newest `keep_last` and those of `keep_steps`."""
    for folder in list_checkpoints(parent)[keep_last:]:
        if step_of(folder) not in keep_steps:
            remove(folder)


def remove(folder: Path) -> None:
    """Remove a checkpoint, or one that was set aside."""
    run_folder = folder.parent.parent
    check_held(run_folder)
    # Renamed to a leftover first: if the process is killed in here, the next save removes the rest.
    doomed = _partial(folder.with_name(folder.name.removesuffix(ABANDONED)), held_token(run_folder))
    folder.rename(doomed)
    reach("doomed", step=step_in(doomed))
    shutil.rmtree(doomed)
    reach("pruned", step=step_in(doomed))


@dataclass(frozen=True, slots=True, kw_only=True)
class PrunePlan:
    """The checkpoints that `prune` keeps and removes."""

    kept: tuple[Path, ...]
    removed: tuple[Path, ...]


def plan_prune(parent: Path, *, keep_last: int, keep_best: bool, on_bytes: OnBytes | None = None) -> PrunePlan:
    """Keep the newest `keep_last`, the newest that verifies, `latest` and, with `keep_best`, `best`.

    Checkpoints set aside as abandoned are removed; a save under way (`.tmp`) is not touched.
    """
    checkpoints = list_checkpoints(parent)
    kept = {*checkpoints[:keep_last], _newest_whole(checkpoints, on_bytes)}
    kept |= {
        folder for name in (LATEST, *([BEST] if keep_best else [])) if (folder := marked(parent, name)) is not None
    }
    removed = [folder for folder in checkpoints if folder not in kept]
    return PrunePlan(
        kept=tuple(folder for folder in checkpoints if folder in kept),
        removed=(*removed, *sorted(parent.glob(f"step_*{ABANDONED}"))),
    )


def prune(plan: PrunePlan) -> Iterator[Path]:
    """Remove the folders of the plan, and yield each after it is removed."""
    for folder in plan.removed:
        try:
            remove(folder)
        except OSError as error:
            raise CheckpointError(f"{folder}: not removed: {error.strerror}") from error
        yield folder


def marked(parent: Path, name: str) -> Path | None:
    """Return the checkpoint that the link `name` points to, None without one."""
    link = parent / name
    return parent / link.readlink().name if link.is_symlink() and link.exists() else None


def _newest_whole(checkpoints: list[Path], on_bytes: OnBytes | None) -> Path:
    complaints = []
    for folder in checkpoints:
        try:
            verify(folder, on_bytes=on_bytes)
        except CheckpointError as error:
            complaints.append(str(error))
        else:
            return folder
    raise CheckpointError(f"nothing was removed, because no checkpoint verifies: {'; '.join(complaints)}")


def below(folder_name: str, files: Mapping[str, FileDigest]) -> dict[str, FileDigest]:
    """Return the digests of an inner folder's files by their path in the checkpoint."""
    return {f"{folder_name}/{name}": digest for name, digest in files.items()}


def _partial(folder: Path, token: int) -> Path:
    return folder.with_name(f"{folder.name}.{token}.tmp")


def _token_of(leftover: Path) -> int:
    """Return the token of the driver that writes a folder; 0 where its name has none."""
    match = _LEFTOVER.fullmatch(leftover.name)
    return int(match.group(1) or 0) if match else 0


def _set_aside_from(folder: Path) -> None:
    """Rename checkpoints of this step or later: they are damaged, or the run resumed from an earlier one."""
    step = step_of(folder)
    assert step is not None, f"{folder} is not named after a step"
    for later in list_checkpoints(folder.parent):
        if (step_of(later) or 0) >= step:
            aside = later.with_name(f"{later.name}{ABANDONED}")
            shutil.rmtree(aside, ignore_errors=True)
            later.rename(aside)


def _point(folder: Path, name: str, token: int) -> None:
    # A new link is renamed over the old one, so that a link exists at every moment.
    link = folder.with_name(f"{name}.{token}.tmp")
    link.unlink(missing_ok=True)
    link.symlink_to(folder.name)
    link.rename(folder.with_name(name))
    sync(folder.parent)


def _write_latest_step(folder: Path, token: int) -> None:
    number = folder.with_name(f"{LATEST_STEP_FILE}.{token}.tmp")
    number.write_text(f"{step_of(folder)}\n")
    sync(number)
    number.rename(folder.with_name(LATEST_STEP_FILE))
    sync(folder.parent)


def estimate_bytes(shape: ModelShape, *, wants_optimizer: bool, lora: LoraConfig | None = None) -> int:
    """Return the size of one model, or of its adapter, in a checkpoint on disk."""
    canonical = canonical_tensors(shape)
    if lora is not None:
        canonical = adapter_tensors(canonical, LoraShape.of(lora))
    specs = canonical.values()
    model_bytes = sum(spec.num_bytes for spec in specs)
    num_kept_in_fp32 = 2 if shape.dtype == "float32" else 3
    optimizer_bytes = sum(4 * num_kept_in_fp32 * prod(spec.shape) for spec in specs) if wants_optimizer else 0
    return model_bytes + optimizer_bytes


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
