"""`megarl checkpoint`: list, verify, compare and remove checkpoints. Only `diff` loads torch."""

from __future__ import annotations

import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.table import Column, Table

from megarl.checkpoint.folder import (
    BEST,
    LATEST,
    find_checkpoints,
    list_checkpoints,
    marked,
    parent_of,
    plan_prune,
    prune,
)
from megarl.checkpoint.manifest import MANIFEST_FILE, check_sizes, read_manifest, verify
from megarl.cli.display import count_bytes, format_seconds, make_console
from megarl.errors import CheckpointError

if TYPE_CHECKING:
    from megarl.checkpoint.diff import CheckpointDiff

checkpoint_app = typer.Typer(no_args_is_help=True, help="List, verify, compare and remove checkpoints.")

RunPath = Annotated[
    Path, typer.Argument(metavar="PATH", help="The folder of a run, or one of its checkpoints.", show_default=False)
]
_SECONDS_PER_DAY = 86400


@checkpoint_app.command("ls")
def list_command(path: RunPath) -> None:
    """List the checkpoints of a run, the newest first. Checks that their files are there, and does not read them."""
    table = Table("checkpoint", "step", "GB", "age", "contents", "state", "", box=None)
    complaints = []
    for folder in _all_folders(path):
        try:
            figures = _describe(folder)
        except CheckpointError as error:
            complaints.append(str(error))
            figures = ("", "", _age(folder), "", "damaged")
        table.add_row(folder.name, *figures, _marks(folder))
    make_console().print(table)
    for complaint in complaints:
        print(complaint)


@checkpoint_app.command("verify")
def verify_command(path: RunPath) -> None:
    """Read every byte and compare digests. Exits with 4 where a checkpoint is damaged."""
    console = make_console()
    damaged = []
    for folder in find_checkpoints(path):
        try:
            num_bytes = read_manifest(folder).num_bytes
            with count_bytes(console, folder.name, total_bytes=num_bytes) as counter:
                manifest = verify(folder, on_bytes=counter)
            num_tensors = sum(len(file.tensors) for file in manifest.files.values())
            counts = f"{len(manifest.files)} files, {num_tensors} tensors, {num_bytes:,} bytes"
            console.print(f"{folder}: ok: {counts} at {counter.rate}")
        except CheckpointError as error:
            damaged.append(str(error))
    if damaged:
        raise CheckpointError("; ".join(damaged))


@checkpoint_app.command("diff")
def diff_command(
    first: Annotated[Path, typer.Argument(metavar="A", help="A checkpoint, a run, or a Hugging Face folder.")],
    second: Annotated[Path, typer.Argument(metavar="B", help="Another one.")],
) -> None:
    """Compare two checkpoints or models. Exits with 1 where they differ.

    Shows tensors by class, and configuration, state and recipe by key.
    """
    from megarl.checkpoint.diff import compare, open_side

    sides = open_side(first), open_side(second)
    diff = compare(*sides)
    print(f"A {sides[0].root}\nB {sides[1].root}")
    _print_diff(diff)
    if not diff.is_equal:
        raise typer.Exit(1)


@checkpoint_app.command("prune")
def prune_command(
    run: Annotated[Path, typer.Argument(metavar="RUN", help="The folder of a run.", show_default=False)],
    keep_last: Annotated[int, typer.Option(min=1, help="Keep this many of the newest.", show_default=False)],
    keep_best: Annotated[bool, typer.Option("--keep-best", help="Keep the one with the best metric.")] = False,
    is_dry_run: Annotated[bool, typer.Option("--dry-run", help="Print what would be removed; remove nothing.")] = False,
) -> None:
    """Remove old checkpoints. The newest one that verifies is always kept."""
    parent = parent_of(run)
    if not list_checkpoints(parent):
        raise CheckpointError(f"{run}: there is no checkpoint here; name the folder of a run, as in runs/quickstart")
    console = make_console()
    with count_bytes(console, "verifying") as counter:
        plan = plan_prune(parent, keep_last=keep_last, keep_best=keep_best, on_bytes=counter)
    for folder in plan.removed if is_dry_run else prune(plan):
        console.print(f"{'would remove' if is_dry_run else 'removed'} {folder}")
    console.print(f"{'would keep' if is_dry_run else 'kept'} {', '.join(folder.name for folder in plan.kept)}")


def _all_folders(path: Path) -> list[Path]:
    """Return checkpoints, then unfinished saves, then abandoned checkpoints."""
    if (path / MANIFEST_FILE).exists():
        return [path]
    parent = parent_of(path)
    folders = [*list_checkpoints(parent), *sorted(parent.glob("step_*.tmp")), *sorted(parent.glob("step_*.abandoned"))]
    return folders or find_checkpoints(path)


def _describe(folder: Path) -> tuple[str, str, str, str, str]:
    """Return step, size, age, contents and state."""
    if folder.suffix == ".tmp":
        num_bytes = sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())
        return "", f"{num_bytes / 1e9:.3f}", _age(folder), "", "temp"
    manifest = check_sizes(folder)
    state = "abandoned" if folder.suffix == ".abandoned" else "ok"
    size = f"{manifest.num_bytes / 1e9:.3f}"
    return str(manifest.step), size, _age(folder / MANIFEST_FILE), manifest.contents, state


def _age(path: Path) -> str:
    seconds = max(0.0, time.time() - path.stat().st_mtime)
    return f"{seconds / _SECONDS_PER_DAY:.1f}d" if seconds >= _SECONDS_PER_DAY else format_seconds(seconds)


def _marks(folder: Path) -> str:
    return " ".join(name for name in (LATEST, BEST) if marked(folder.resolve().parent, name) == folder.resolve())


def _print_diff(diff: CheckpointDiff) -> None:
    # Names are folded, not cut.
    table = Table(Column("folder", overflow="fold"), Column("tensors", overflow="fold", min_width=24), box=None)
    for title in ("number", "equal", "max abs diff", "relative norm"):
        table.add_column(title, justify="right")
    for item in diff.classes:
        figures = ("", "") if item.is_equal else (f"{item.max_abs_diff:.3g}", f"{item.relative_norm:.3g}")
        table.add_row(item.folder, item.name, str(item.num_tensors), str(item.num_equal), *figures)
    make_console().print(table)
    for value in diff.values:
        print(f"{value.document}: {value.key}: {value.first!r} -> {value.second!r}")
    for sentence in diff.others:
        print(sentence)
    if diff.is_equal:
        print("no difference")
