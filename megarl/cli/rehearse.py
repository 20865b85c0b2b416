"""`megarl rehearse`: a recipe's topology with a tiny model on this machine, through the loss of a node."""

from __future__ import annotations

import sys
import time
import warnings
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich import box
from rich.console import Console
from rich.table import Table

from megarl.cli.recipe import Overrides, RecipePath
from megarl.env import NO_COLOR
from megarl.errors import ConfigError, MachineError

if TYPE_CHECKING:
    from megarl.config.model import ModelShape
    from megarl.tools.rehearse import RehearsalReport

_WIDTH = 120
_REWARD = '''"""Right now and then, so that groups of a random model have something to learn from."""


def compute_score(data_source, solution_str, ground_truth, extra_info=None):
    return float(sum(map(ord, solution_str)) % 3 == 0)
'''
_NOT_SHOWN = (
    "GPUs: memory, kernels, NCCL and CUDA IPC, bf16 (megarl plan computes memory; megarl doctor tries an all-reduce)",
    "splits by more than two (megarl check-sync --rehearse-only checks the recipe's own layouts in memory)",
    "storage that every node sees: all nodes read and write this machine's disk",
    "the recipe's model, data, reward, lengths and speed, and its options of Megatron and SGLang",
    "the loss of the head or of the driver: the run ends, and the same command resumes from its newest checkpoint",
)


def rehearse(
    recipe: RecipePath,
    overrides: Overrides = None,
    nodes: Annotated[int, typer.Option(min=1, help="Local nodes of each pool that has several; 1 shows less.")] = 2,
    shape: Annotated[str | None, typer.Option(help="A public model's name, where model.path is missing here.")] = None,
    out: Annotated[
        Path | None, typer.Option(metavar="DIR", help="Keep run, logs and recipe here.", show_default=False)
    ] = None,
) -> None:
    """Rehearse a recipe's cluster on this machine.

    Starts a Ray of several local nodes and a whole run with a tiny model of the same family: the recipe's pools, roles
    and algorithm, with every split by at most two. After a checkpoint a node of engines, where these have several for
    themselves, and one of ranks are killed; the run must notice it, wait for others, resume from a checkpoint and end.

    Exits with 0 where everything was shown, with 5 where something was not.
    """
    if not sys.warnoptions:
        warnings.simplefilter("ignore")
    import tempfile

    from megarl.cluster.local_ray import private_ray
    from megarl.config.checks.recipe import check_without_files
    from megarl.config.load import read_recipe
    from megarl.planner.deployment import find_shapes
    from megarl.tools.small_recipe import RehearsalFiles, small_topology, tiny_shape

    read = read_recipe(recipe, overrides or []).recipe
    shapes = find_shapes(read.model, read.roles, name=shape)
    problems = check_without_files(read, shapes.policy, critic=shapes.critic)
    if problems:
        raise ConfigError(str(recipe), tuple(problems))
    folder = out.absolute() if out is not None else Path(tempfile.mkdtemp(prefix="megarl-rehearse-"))
    if (folder / "run").exists():
        raise MachineError(f"{folder} has a rehearsal already; name another folder with --out")
    began = time.monotonic()

    def say(text: str) -> None:
        print(f"{time.monotonic() - began:6.0f} s  {text}", file=sys.stderr, flush=True)

    with private_ray():
        from megarl.tools.rehearse import rehearse as run_rehearsal

        files = RehearsalFiles(model=folder / "model", data=folder / "data.parquet", reward=folder / "reward.py")
        small = small_topology(read, folder=folder, files=files, max_nodes=nodes)
        tiny = tiny_shape(shapes.policy, small.recipe.roles.actor)
        write_files(files.model, files.data, files.reward, tiny, kind=read.algorithm.kind)
        for note in small.notes:
            print(note)
        report = run_rehearsal(small, folder, say=say)
    _show(report)
    print(f"run, logs and recipe: {folder}")
    if not report.is_complete:
        raise typer.Exit(MachineError.exit_code)


def write_files(model: Path, data: Path, reward: Path, shape: ModelShape, *, kind: str) -> None:
    """Write prompts, their reward, and a random model of `shape` with the tokenizer of the quickstart."""
    from megarl.tools.check_sync import write_random_model
    from megarl.tools.quickstart.arithmetic import make_arithmetic
    from megarl.tools.quickstart.tiny_model import TinyShape

    made = make_arithmetic(data.parent / "arithmetic", num_train=256, num_sft=256, num_eval=16)
    made.model.rename(model)
    {"sft": made.sft, "dpo": made.pairs}.get(kind, made.train).rename(data)
    reward.write_text(_REWARD)
    quickstart = TinyShape()
    write_random_model(
        model, replace(shape, vocab=quickstart.vocab, max_context_tokens=quickstart.max_context_tokens), seed=1
    )


def _show(report: RehearsalReport) -> None:
    console = Console(width=_WIDTH, no_color=bool(NO_COLOR.read()), highlight=False, markup=False)
    table = Table(box=box.SIMPLE_HEAD)
    for name in ("", "shown", "how"):
        table.add_column(name, overflow="fold")
    for item in report.shown:
        table.add_row(item.what, "yes" if item.is_shown else "NO", item.how)
    console.print(table)
    console.print("not shown:")
    for text in (*_NOT_SHOWN, report.unshown_network):
        console.print(f"  {text}")
    console.print(f"rehearsed in {report.seconds:.0f} s")
