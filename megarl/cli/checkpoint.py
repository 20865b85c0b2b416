"""`megarl checkpoint`: what a run has saved, and whether it is what was written. Loads no torch."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich.table import Table

from megarl.checkpoint.folder import CHECKPOINTS_FOLDER, LATEST, list_checkpoints
from megarl.checkpoint.manifest import MANIFEST_FILE, read_manifest, verify
from megarl.cli.display import make_console
from megarl.errors import CheckpointError

app = typer.Typer(no_args_is_help=True, help="Checkpoints of a run.")

RunPath = Annotated[
    Path, typer.Argument(metavar="PATH", help="A run's folder, or one checkpoint of it.", show_default=False)
]


@app.command("ls")
def list_command(path: RunPath) -> None:
    """The checkpoints of a run, the newest first."""
    table = Table("checkpoint", "step", "contents", "GB", "megarl", box=None)
    for folder in _checkpoints(path):
        try:
            manifest = read_manifest(folder)
        except CheckpointError as error:
            table.add_row(_name(folder), "", f"unreadable: {error}", "", "")
            continue
        size = f"{manifest.num_bytes / 1e9:.3f}"
        table.add_row(_name(folder), str(manifest.step), manifest.contents, size, manifest.megarl_version)
    make_console().print(table)


@app.command("verify")
def verify_command(path: RunPath) -> None:
    """Read every byte and compare digests; exits with 4 when a checkpoint is damaged."""
    damaged = []
    for folder in _checkpoints(path):
        try:
            manifest = verify(folder)
            print(f"{folder}: ok: {len(manifest.files)} files, {manifest.num_bytes:,} bytes")
        except CheckpointError as error:
            damaged.append(str(error))
    if damaged:
        raise CheckpointError("; ".join(damaged))


def _checkpoints(path: Path) -> list[Path]:
    """The one the path names, or those of the run it names."""
    if (path / MANIFEST_FILE).exists():
        return [path]
    parent = path if path.name == CHECKPOINTS_FOLDER else path / CHECKPOINTS_FOLDER
    found = list_checkpoints(parent)
    if not found:
        raise CheckpointError(f"{path}: there is no checkpoint here; name a run's folder, as in runs/quickstart")
    return found


def _name(folder: Path) -> str:
    latest = folder.with_name(LATEST)
    is_latest = latest.is_symlink() and latest.resolve() == folder.resolve()
    return f"{folder.name} ({LATEST})" if is_latest else folder.name
