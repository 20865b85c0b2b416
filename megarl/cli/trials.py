"""Commands that try a recipe with real ranks and engines here: `megarl check-sync`, `rehearse`, `diagnose`."""

from __future__ import annotations

import json
import math
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich import box
from rich.table import Table

from megarl.cli.lines import make_console
from megarl.cli.recipe import Overrides, RecipePath, ShapeName, load_checked
from megarl.cli.train import ignore_warnings
from megarl.errors import ConfigError, MachineError, NumericsError, WeightSyncError

if TYPE_CHECKING:
    from megarl.config.recipe import Recipe
    from megarl.families.shape import ModelShape
    from megarl.tools.check_sync import SyncCheck
    from megarl.tools.diagnose.verdict import Diagnosis, HookPointError
    from megarl.tools.rehearse import RehearsalReport
    from megarl.tools.small_recipe import SmallRecipe

diagnose_app = typer.Typer(no_args_is_help=True, help="Find out why trainer and engines differ.")

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
_NUM_NEIGHBOURS = 4
"""Modules shown before and after the first one that differs."""
_NUM_LAST = 3
"""The final norm and both kinds of log-probabilities are always shown."""


def check_sync(
    recipe: RecipePath,
    overrides: Overrides = None,
    shape: ShapeName = None,
    engines: Annotated[int, typer.Option(min=1, help="Start at most this many engines; each takes half a minute.")] = 2,
    is_rehearsal: Annotated[
        bool, typer.Option("--rehearse-only", help="Only check the plan, in memory; start no process.")
    ] = False,
    is_json: Annotated[bool, typer.Option("--json", help="Also print JSON, in the line before the last.")] = False,
) -> None:
    """Check that a recipe's weights reach its engines.

    Publishes a tiny model of the same family and compares what the engines hold: first in memory with the recipe's own
    layouts, then with real Megatron ranks and SGLang engines and every kind of split that the recipe has.

    Exits with 0 where every byte is equal, with 76 where one is not.
    """
    ignore_warnings()
    from megarl.cluster.local_ray import private_ray
    from megarl.tools.small_recipe import describe_layout, small_layouts, tiny_shape

    read, policy = _read_with_shape(recipe, overrides, shape)
    checks: dict[str, SyncCheck] = {}
    with tempfile.TemporaryDirectory(prefix="megarl-check-sync-") as folder, private_ray():
        from megarl.tools.check_sync import check_processes, rehearse_layouts

        small = small_layouts(read, folder=Path(folder), model_folder=Path(folder) / "model", max_engines=engines)
        checks["rehearsal"] = rehearse_layouts(read, policy)
        _print_sync(f"rehearsed in memory: {describe_layout(read)}", checks["rehearsal"], [])
        if not is_rehearsal:
            layout = describe_layout(small.recipe)
            print(f"starting {layout}", file=sys.stderr)
            tiny = tiny_shape(policy, small.recipe.roles.actor)
            checks["real"] = check_processes(small, tiny, ray_address=None)
            _print_sync(f"with real processes: {layout}", checks["real"], small.notes)
    if is_json:
        print(json.dumps({name: _sync_json(check) for name, check in checks.items()}))
    if not all(check.is_equal for check in checks.values()):
        print("the engines do NOT hold what was published")
        raise typer.Exit(WeightSyncError.exit_code)
    print("every byte is equal")


def _print_sync(title: str, check: SyncCheck, notes: Sequence[str]) -> None:
    shape = check.shape
    print(title)
    print(
        f"  {shape.family} of {shape.num_layers} layers, {shape.num_heads} heads ({shape.num_kv_heads} KV), "
        f"hidden {shape.hidden}, vocabulary {shape.vocab}, {check.dtype}: "
        f"{check.moved_bytes / 1e6:.2f} MB from {check.num_sources} to {check.num_targets} ranks"
    )
    for note in notes:
        print(f"  note: {note}")
    table = Table(box=box.SIMPLE_HEAD)
    for name in ("class", "tensors", "bytes", "verdict"):
        table.add_column(name, justify="right" if name in ("tensors", "bytes") else "left")
    for verdict in check.verdicts:
        outcome = "equal"
        if not verdict.is_equal:
            outcome = f"{verdict.num_differing} elements differ: {verdict.first_difference}"
        table.add_row(verdict.name, str(len(verdict.tensors)), f"{verdict.num_bytes:,}", outcome)
    make_console(width=110).print(table)


def _sync_json(check: SyncCheck) -> dict[str, object]:
    return {
        "is_equal": check.is_equal,
        "num_sources": check.num_sources,
        "num_targets": check.num_targets,
        "moved_bytes": check.moved_bytes,
        "classes": [
            {
                "name": verdict.name,
                "tensors": len(verdict.tensors),
                "bytes": verdict.num_bytes,
                "differing_elements": verdict.num_differing,
                "first_difference": verdict.first_difference,
            }
            for verdict in check.verdicts
        ],
    }


def rehearse(
    recipe: RecipePath,
    overrides: Overrides = None,
    nodes: Annotated[int, typer.Option(min=1, help="Local nodes of each pool that has several; 1 shows less.")] = 2,
    shape: ShapeName = None,
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
    ignore_warnings()
    from megarl.cluster.local_ray import private_ray
    from megarl.tools.small_recipe import RehearsalFiles, small_topology, tiny_shape

    read, policy = _read_with_shape(recipe, overrides, shape)
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
        tiny = tiny_shape(policy, small.recipe.roles.actor)
        write_files(files.model, files.data, files.reward, tiny, kind=read.algorithm.kind)
        for note in small.notes:
            print(note)
        report = run_rehearsal(small, folder, say=say)
    _print_rehearsal(report)
    print(f"run, logs and recipe: {folder}")
    if not report.is_complete:
        raise typer.Exit(MachineError.exit_code)


def _read_with_shape(path: Path, overrides: list[str] | None, shape: str | None) -> tuple[Recipe, ModelShape]:
    """Return a recipe and the shape of its policy, or of a public model; raise every problem that needs no files."""
    from megarl.config.checks.recipe import check_without_files
    from megarl.config.load import read_recipe
    from megarl.planner.deployment import find_shapes

    recipe = read_recipe(path, overrides or []).recipe
    shapes = find_shapes(recipe.model, recipe.roles, name=shape)
    if problems := check_without_files(recipe, shapes.policy, critic=shapes.critic):
        raise ConfigError(str(path), tuple(problems))
    return recipe, shapes.policy


def write_files(model: Path, data: Path, reward: Path, shape: ModelShape, *, kind: str) -> None:
    """Write prompts, their reward, and a random model of `shape` with the tokenizer of the quickstart."""
    from megarl.tools.check_sync import write_random_model
    from megarl.tools.quickstart.tiny_model import TinyShape

    write_inputs(model, data, reward, kind=kind)
    quickstart = TinyShape()
    write_random_model(
        model, replace(shape, vocab=quickstart.vocab, max_context_tokens=quickstart.max_context_tokens), seed=1
    )


def write_inputs(model: Path, data: Path, reward: Path, *, kind: str) -> None:
    """Write prompts, their reward, and the model of the quickstart, whose tokenizer fits every larger vocabulary."""
    from megarl.tools.quickstart.arithmetic import make_arithmetic

    made = make_arithmetic(data.parent / "arithmetic", num_train=256, num_sft=256, num_eval=16)
    made.model.rename(model)
    {"sft": made.sft, "dpo": made.pairs}.get(kind, made.train).rename(data)
    reward.write_text(_REWARD)


def _print_rehearsal(report: RehearsalReport) -> None:
    console = make_console(width=120)
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


@diagnose_app.command("mismatch")
def mismatch(
    recipe: RecipePath,
    overrides: Overrides = None,
    prompt: Annotated[
        str | None, typer.Option(metavar="TEXT", help="Compare on this user message.", show_default=False)
    ] = None,
    row: Annotated[
        int | None,
        typer.Option(metavar="N", min=0, help="Compare on prompt N of data.train, counted from 0 (default 0)."),
    ] = None,
    checkpoint: Annotated[
        Path | None,
        typer.Option(metavar="PATH", help="Use the weights of this checkpoint instead of model.path."),
    ] = None,
    is_json: Annotated[bool, typer.Option("--json", help="Also print everything as JSON, in the last line.")] = False,
) -> None:
    """Compare trainer and engine module by module.

    Both compute the same prompt and a few sampled tokens.

    Exits with 0 where nothing differs, with 77 where something does.
    """
    if prompt is not None and row is not None:
        raise typer.BadParameter("name a --prompt or a --row, not both")
    checked = load_checked(recipe, overrides)
    ignore_warnings()

    from megarl.run.launch import ray_address_of, ray_environment

    address = ray_address_of(checked.run)
    with ray_environment(address, checked.cluster):
        from megarl.tools.diagnose.run import diagnose_recipe

        diagnosis = diagnose_recipe(
            checked,
            question=prompt if prompt is not None else row or 0,
            checkpoint=checkpoint,
            ray_address=address,
            on_start=_print_start,
        )
    _print_diagnosis(diagnosis)
    if is_json:
        print(json.dumps(_diagnosis_json(diagnosis)))
    if diagnosis.first is not None or diagnosis.differing_tensors:
        raise typer.Exit(NumericsError.exit_code)


def _print_start(small: SmallRecipe) -> None:
    actor, rollout = small.recipe.roles.actor, small.recipe.roles.rollout
    assert rollout is not None
    print(
        f"starting {actor.model_parallel} trainer rank(s) and an engine of tensor {rollout.tensor}; "
        f"logs and recordings: {small.recipe.run_folder}"
    )
    for note in small.notes:
        print(f"note: {note}")


def _print_diagnosis(diagnosis: Diagnosis) -> None:
    talk = diagnosis.conversation
    title = f"{len(talk.prompt_ids)} prompt tokens, {len(talk.response_ids)} sampled, temperature {talk.temperature:g}"
    table = Table(title=title, title_justify="left", box=box.SIMPLE_HEAD)
    for name in ("module", "error", "tolerance", "at token", ""):
        table.add_column(name, justify="left" if name in ("module", "") else "right")
    shown = _shown_rows(diagnosis)
    for place, index in enumerate(shown):
        if place and index != shown[place - 1] + 1:
            table.add_row("...")
        error = diagnosis.errors[index]
        mark = "first to differ" if error is diagnosis.first else "differs" if error.is_beyond else ""
        table.add_row(error.point.name, f"{error.error:.1e}", f"{error.tolerance:.0e}", str(error.token), mark)
    make_console(width=100).print(table)
    print(diagnosis.sentence)


def _shown_rows(diagnosis: Diagnosis) -> list[int]:
    """Return the rows around the first module that differs, or else the one closest to it, and the last rows."""
    errors = diagnosis.errors
    centre = max(range(len(errors)), key=lambda index: _share_of_tolerance(errors[index]))
    if diagnosis.first is not None:
        centre = errors.index(diagnosis.first)
    near = range(max(0, centre - _NUM_NEIGHBOURS), min(len(errors), centre + _NUM_NEIGHBOURS + 1))
    return sorted({*near, *range(max(0, len(errors) - _NUM_LAST), len(errors))})


def _share_of_tolerance(error: HookPointError) -> float:
    return error.error / error.tolerance if math.isfinite(error.error) else math.inf


def _diagnosis_json(diagnosis: Diagnosis) -> dict[str, object]:
    first = diagnosis.first
    return {
        "verdict": diagnosis.verdict.value,
        "sentence": diagnosis.sentence,
        "first": None if first is None else _point_json(first),
        "differing_tensors": list(diagnosis.differing_tensors),
        "num_prompt_tokens": len(diagnosis.conversation.prompt_ids),
        "num_sampled_tokens": len(diagnosis.conversation.response_ids),
        "modules": [_point_json(error) for error in diagnosis.errors],
    }


def _point_json(error: HookPointError) -> dict[str, object]:
    return {
        "module": error.point.name,
        # JSON has no NaN.
        "error": error.error if math.isfinite(error.error) else str(error.error),
        "tolerance": error.tolerance,
        "token": error.token,
        "weights": list(error.point.weights),
    }
