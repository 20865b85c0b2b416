"""`megarl checkpoint`: what a run has saved, whether it is what was written, what changed, what may go.

Only `diff` loads torch.
"""

from __future__ import annotations

import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.table import Column, Table

from megarl.checkpoint.folder import BEST, LATEST, list_checkpoints, marked, plan_prune, prune
from megarl.checkpoint.locate import find_checkpoints, parent_of
from megarl.checkpoint.manifest import MANIFEST_FILE, check_sizes, read_manifest, verify
from megarl.cli.byte_progress import count_bytes
from megarl.cli.display import format_seconds, make_console
from megarl.errors import CheckpointError

if TYPE_CHECKING:
    from megarl.checkpoint.diff import CheckpointDiff

app = typer.Typer(no_args_is_help=True, help="Checkpoints of a run.")

RunPath = Annotated[
    Path, typer.Argument(metavar="PATH", help="A run's folder, or one checkpoint of it.", show_default=False)
]
_SECONDS_PER_DAY = 86400


@app.command("ls")
def list_command(path: RunPath) -> None:
    """The checkpoints of a run, the newest first; whether their files are there, not what is in them."""
    table = Table("checkpoint", "step", "GB", "age", "contents", "state", "", box=None)
    complaints = []
    for folder in _everything(path):
        try:
            figures = _describe(folder)
        except CheckpointError as error:
            complaints.append(str(error))
            figures = ("", "", _age(folder), "", "damaged")
        table.add_row(folder.name, *figures, _marks(folder))
    make_console().print(table)
    for complaint in complaints:
        print(complaint)


@app.command("verify")
def verify_command(path: RunPath) -> None:
    """Read every byte and compare digests; exits with 4 when a checkpoint is damaged."""
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


@app.command("diff")
def diff_command(
    first: Annotated[Path, typer.Argument(metavar="A", help="A checkpoint, a run, or a Hugging Face folder.")],
    second: Annotated[Path, typer.Argument(metavar="B", help="Another.")],
) -> None:
    """What differs: tensors by class, configuration, state and recipe by key. Exits with 1 when anything does."""
    from megarl.checkpoint.diff import compare, open_side

    sides = open_side(first), open_side(second)
    found = compare(*sides)
    print(f"A {sides[0].root}\nB {sides[1].root}")
    _print_diff(found)
    if not found.is_equal:
        raise typer.Exit(1)


@app.command("prune")
def prune_command(
    run: Annotated[Path, typer.Argument(metavar="RUN", help="A run's folder.", show_default=False)],
    keep_last: Annotated[int, typer.Option(min=1, help="How many of the newest stay.", show_default=False)],
    keep_best: Annotated[bool, typer.Option("--keep-best", help="The one with the best metric stays.")] = False,
    is_dry_run: Annotated[bool, typer.Option("--dry-run", help="Say what would go; remove nothing.")] = False,
) -> None:
    """Remove old checkpoints; the newest one that verifies always stays."""
    parent = parent_of(run)
    if not list_checkpoints(parent):
        raise CheckpointError(f"{run}: there is no checkpoint here; name a run's folder, as in runs/quickstart")
    console = make_console()
    with count_bytes(console, "verifying") as counter:
        plan = plan_prune(parent, keep_last=keep_last, keep_best=keep_best, on_bytes=counter)
    for folder in plan.removed if is_dry_run else prune(plan):
        console.print(f"{'would remove' if is_dry_run else 'removed'} {folder}")
    console.print(f"{'would keep' if is_dry_run else 'kept'} {', '.join(folder.name for folder in plan.kept)}")


def _everything(path: Path) -> list[Path]:
    """Checkpoints, then what saves left behind or under way, then what was set aside."""
    if (path / MANIFEST_FILE).exists():
        return [path]
    parent = parent_of(path)
    found = [*list_checkpoints(parent), *sorted(parent.glob("step_*.tmp")), *sorted(parent.glob("step_*.abandoned"))]
    return found or find_checkpoints(path)


def _describe(folder: Path) -> tuple[str, str, str, str, str]:
    """Step, size, age, contents, state."""
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


def _print_diff(found: CheckpointDiff) -> None:
    # A name that is cut says nothing: it goes on in the next line.
    table = Table(Column("folder", overflow="fold"), Column("tensors", overflow="fold", min_width=24), box=None)
    for title in ("number", "equal", "max abs diff", "relative norm"):
        table.add_column(title, justify="right")
    for item in found.classes:
        figures = ("", "") if item.is_equal else (f"{item.max_abs_diff:.3g}", f"{item.relative_norm:.3g}")
        table.add_row(item.folder, item.name, str(item.num_tensors), str(item.num_equal), *figures)
    make_console().print(table)
    for value in found.values:
        print(f"{value.document}: {value.key}: {value.first!r} -> {value.second!r}")
    for sentence in found.others:
        print(sentence)
    if found.is_equal:
        print("no difference")
