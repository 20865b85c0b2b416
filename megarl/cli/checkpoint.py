"""Checkpoints: `megarl checkpoint` lists, verifies, compares and removes them; `megarl export` writes the model of one
as a Hugging Face folder, and checks that transformers loads it equally. Only `diff` and `export` load torch.
"""

from __future__ import annotations

import json
import time
from enum import StrEnum
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import psutil
import typer
from rich.table import Column, Table

from megarl.checkpoint.folder import (
    BEST,
    CONFIG_FILE,
    LATEST,
    ModelSource,
    find_checkpoints,
    list_checkpoints,
    marked,
    parent_of,
    plan_prune,
    prune,
)
from megarl.checkpoint.manifest import MANIFEST_FILE, check_sizes, read_manifest, verify
from megarl.cli.display import count_bytes
from megarl.cli.lines import format_seconds, make_console
from megarl.errors import CheckpointError, MachineError, first_line

if TYPE_CHECKING:
    import torch

    from megarl.checkpoint.diff import CheckpointDiff
    from megarl.checkpoint.export import Adapter

checkpoint_app = typer.Typer(no_args_is_help=True, help="List, verify, compare and remove checkpoints.")

RunPath = Annotated[
    Path, typer.Argument(metavar="PATH", help="The folder of a run, or one of its checkpoints.", show_default=False)
]
_SECONDS_PER_DAY = 86400
NUM_TOKENS = 64
_TOLERANCE = 1e-5
"""Equal bytes in the same dtype give equal numbers; a wrong configuration gives others."""
_MERGED_TOLERANCE = 1e-4
_ROUNDED_TOLERANCE = 0.5
"""Bound on the largest difference over all tokens of the vocabulary, where the sum is rounded to 8 bits."""
_TOKEN_STEP = 7919
"""A prime: the prompt walks through the whole vocabulary."""
_MEMORY_FACTOR = 1.25
_SPARE_BYTES = 1 << 30


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


class ExportDtype(StrEnum):
    BF16 = "bf16"
    FP32 = "fp32"


_DTYPES = {ExportDtype.BF16: "bfloat16", ExportDtype.FP32: "float32"}


def export(
    source: Annotated[
        Path,
        typer.Argument(
            metavar="CKPT",
            help="A checkpoint, the folder of a run (its newest complete checkpoint), or a Hugging Face folder.",
            show_default=False,
        ),
    ],
    out: Annotated[Path, typer.Argument(metavar="OUT", help="A folder that does not exist yet.", show_default=False)],
    dtype: Annotated[ExportDtype | None, typer.Option(help="Dtype of the weights; the source's if not given.")] = None,
    merges: Annotated[
        bool, typer.Option("--merge", help="Add the adapter of a LoRA run to its base, and write the whole model.")
    ] = False,
    base: Annotated[
        Path | None,
        typer.Option(help="The adapter's base, if it is not where the run had it.", show_default=False),
    ] = None,
    is_loaded: Annotated[
        bool,
        typer.Option(
            "--load-check/--no-load-check",
            help="Load source and result with transformers and compare log-probabilities; needs memory for one model.",
        ),
    ] = True,
) -> None:
    """Write a model as a Hugging Face folder, and verify it. Runs on the CPU, in little memory."""
    from megarl.checkpoint.export import export_model, open_adapter, refuse_occupied
    from megarl.checkpoint.folder import find_model

    console = make_console()
    wanted = _DTYPES[dtype] if dtype is not None else None
    refuse_occupied(out)
    with count_bytes(console, "verifying") as counter:
        model = find_model(source, wants_master=dtype is ExportDtype.FP32, on_bytes=counter)
    for note in model.notes:
        console.print(note)
    _refuse_unmerged(model, merges=merges)
    adapter, model = open_adapter(model, base) if merges else (None, model)
    check = LoadCheck(model, dtype=wanted, adapter=adapter) if is_loaded else None
    with count_bytes(console, "exporting") as counter:
        exported = export_model(model, out, dtype=wanted, on_bytes=counter, check=check, adapter=adapter)
    size = f"{exported.num_tensors} tensors, {exported.num_bytes / 1e9:.3f} GB in {exported.num_files} file(s)"
    cast = f", {exported.num_cast} cast to {wanted}" if exported.num_cast else ""
    console.print(f"{out}: {size}{cast}; names, shapes, dtypes and digests compared with {model.tensor_folder}")
    console.print(f"{out}: in transformers: {check}" if check is not None else f"{out}: not compared in transformers")


def _refuse_unmerged(model: ModelSource, *, merges: bool) -> None:
    if model.is_adapter and not merges:
        raise CheckpointError(
            f"{model.folder}: an adapter, which PEFT loads as it is; --merge writes the whole model with it"
        )
    if merges and not model.is_adapter:
        raise CheckpointError(f"{model.folder}: a whole model, there is nothing to merge; leave --merge out")


class LoadCheck:
    """Compares the log-probabilities of an exported model with those of its source, both loaded by transformers.

    The source of a merged model is its base with the adapter beside it.

    Created before the export: one that cannot be checked is refused before an hour of work.
    """

    def __init__(self, source: ModelSource, *, dtype: str | None, adapter: Adapter | None = None) -> None:
        config = json.loads((source.folder / CONFIG_FILE).read_text())
        self._reference = source.folder
        own_dtype = str(config.get("dtype") or config.get("torch_dtype") or "float32")
        # In the coarser of the two dtypes both have bit-equal weights.
        self._dtype = "bfloat16" if dtype == "bfloat16" else own_dtype
        self._adapter = adapter
        self._tolerance = _TOLERANCE
        if adapter is not None:
            # Adding to a matrix rounds its sum.
            self._tolerance = _MERGED_TOLERANCE if self._dtype == "float32" else _ROUNDED_TOLERANCE
            self._dtype = "float32"
        self.max_difference = float("nan")
        _refuse_too_large(source.folder)

    def __call__(self, folder: Path) -> None:
        expected = logprobs(self._reference, dtype=self._dtype, adapter=self._adapter)
        actual = logprobs(folder, dtype=self._dtype)
        self.max_difference = float((expected - actual).abs().max())
        # Not `>`: a NaN is a difference too.
        if not self.max_difference <= self._tolerance:
            raise CheckpointError(
                f"{folder}: its log-probabilities in transformers differ from those of {self._reference} "
                f"by {self.max_difference:g}; the export was removed"
            )

    def __str__(self) -> str:
        figures = f"{self.max_difference:g} at most over {NUM_TOKENS} tokens in {self._dtype}"
        return f"log-probabilities differ from the source's by {figures}"


def logprobs(folder: Path, *, dtype: str, adapter: Adapter | None = None) -> torch.Tensor:
    """Return the log-probabilities of every token at every place of a fixed prompt, or the outputs of another head."""
    import torch
    import transformers

    from megarl.weights.executors.tensors import torch_dtype

    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    config = json.loads((folder / CONFIG_FILE).read_text())
    architecture = (config.get("architectures") or ["AutoModelForCausalLM"])[0]
    if config.get("language_model_only"):  # its class has modules for images, whose tensors are not in the folder
        architecture = "AutoModelForCausalLM"
    try:
        model, report = getattr(transformers, architecture).from_pretrained(
            folder, dtype=torch_dtype(dtype), local_files_only=True, output_loading_info=True
        )
    except (AttributeError, OSError, ValueError, RuntimeError) as error:
        raise CheckpointError(f"{folder}: transformers cannot load it: {first_line(error)}") from error
    for kind in ("missing_keys", "unexpected_keys", "mismatched_keys"):
        if report.get(kind):
            raise CheckpointError(f"{folder}: loaded with transformers it has {kind}: {sorted(report[kind])[:3]}")
    if adapter is not None:
        _attach(adapter, model)
        _attach_to_experts(adapter, model, folder)
    token_ids = torch.arange(NUM_TOKENS) * _TOKEN_STEP % model.config.get_text_config().vocab_size
    with torch.no_grad():
        outputs = model.eval()(input_ids=token_ids[None], use_cache=False).logits.float()
    assert isinstance(outputs, torch.Tensor)
    return outputs.log_softmax(-1) if outputs.dim() == 3 else outputs


def _attach(adapter: Adapter, model: torch.nn.Module) -> None:
    """Let the linear layers of a base compute with an adapter beside their matrices."""

    def add(change: torch.Tensor, module: object, arguments: tuple[torch.Tensor, ...], output: torch.Tensor) -> object:
        del module
        return output + (arguments[0].float() @ change.t()).to(output.dtype)

    for name, module in model.named_modules():
        change = adapter.change_of(f"{name}.weight")
        if change is not None:
            module.register_forward_hook(partial(add, change))


def _attach_to_experts(adapter: Adapter, model: torch.nn.Module, folder: Path) -> None:
    """Add an adapter to the experts of a base, whose matrices are stacks: those of a layer are one parameter."""
    import torch

    from megarl.config.model import read_model_shape
    from megarl.families import family_of
    from megarl.weights.layouts.canonical import EXPERT

    shape = read_model_shape(folder)
    weights = [weight.name for block in family_of(shape).blocks(shape).values() for weight in block.weights]
    matrices = [name for name in weights if EXPERT in name]  # gate, up, down
    parts = {"gate_up_proj": matrices[:2], "down_proj": matrices[2:]}
    for path, parameter in model.named_parameters():
        block, is_expert, kind = path.rpartition(".experts.")
        layer = block.rpartition(".")[0]
        for number, matrix in enumerate(parameter.data) if is_expert and kind in parts else ():
            names = [f"{layer}.{name.replace(EXPERT, str(number))}" for name in parts[kind]]
            changes = [change for change in map(adapter.change_of, names) if change is not None]
            if changes:
                matrix += torch.cat(changes)


def _refuse_too_large(folder: Path) -> None:
    num_bytes = sum(path.stat().st_size for path in folder.glob("*.safetensors"))
    needed = int(num_bytes * _MEMORY_FACTOR) + _SPARE_BYTES
    available = _available_bytes()
    if needed > available:
        raise MachineError(
            f"{folder}: loading it to compare log-probabilities needs about {needed / 1e9:.0f} GB of memory, "
            f"{available / 1e9:.0f} GB are available; --no-load-check skips the comparison"
        )


def _available_bytes() -> int:
    available: int = psutil.virtual_memory().available
    return available
