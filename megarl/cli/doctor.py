"""`megarl doctor`: what is wrong with this machine, a cluster or a run, as tables or as JSON."""

from __future__ import annotations

import json
import shutil
import sys
from collections.abc import Iterable, Sequence
from dataclasses import asdict
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich import box
from rich.console import Group
from rich.table import Table
from rich.text import Text

from megarl.cli.lines import make_console
from megarl.cli.recipe import Overrides
from megarl.env import RAY_ADDRESS
from megarl.errors import ConfigError, MachineError, Problem

if TYPE_CHECKING:
    from megarl.config.recipe import Recipe
    from megarl.tools.doctor import Check
    from megarl.tools.doctor.rules import Finding, RunDiagnosis

_AUTO = "auto"
"""An address for Ray: that in `RAY_ADDRESS`, or of a cluster that was started on this machine."""
_STYLES = {"ok": "green", "note": "dim", "warning": "yellow", "error": "bold red"}


def doctor(
    paths: Annotated[
        list[Path] | None,
        typer.Argument(metavar="[RECIPE] [RUN]", help="A recipe, the folder of a run, or both.", show_default=False),
    ] = None,
    overrides: Overrides = None,
    ray_address: Annotated[
        str | None, typer.Option(metavar="ADDRESS", help="Check every node of this Ray cluster.", show_default=False)
    ] = None,
    tries_groups: Annotated[
        bool, typer.Option("--all-reduce", help="Try an all-reduce in every pool here, as is always done on a cluster.")
    ] = False,
    is_bring_up: Annotated[
        bool,
        typer.Option("--cluster", help="Bring a cluster up in stages: GPUs, links, storage, a publish and an update."),
    ] = False,
    stage: Annotated[
        list[str] | None,
        typer.Option(metavar="NAME", help="With --cluster, only this stage; may be repeated.", show_default=False),
    ] = None,
    is_json: Annotated[bool, typer.Option("--json", help="Print everything as JSON.")] = False,
) -> None:
    """Find out what is wrong with a machine, a recipe or a run.

    Checks this machine and, where given, a recipe with its cluster; diagnoses a run from its events.

    Exits with 0 where nothing is an error, with 5 where something is.
    """
    recipe_path, run = _sort_out(paths or [])
    if recipe_path is None and (overrides or ray_address or tries_groups or is_bring_up):
        problem = Problem(key="", message="--set, --ray-address, --all-reduce and --cluster need a RECIPE")
        raise ConfigError("megarl doctor", (problem,))
    checks: list[Check] = []
    if recipe_path is not None and is_bring_up:
        checks = _bring_up(recipe_path, overrides or [], ray_address, stage or [])
    # A question about a run alone may be asked on another machine.
    elif recipe_path is not None or run is None:
        checks = _examine(recipe_path, overrides or [], ray_address, tries_groups=tries_groups)
    diagnosis = None
    if run is not None:
        from megarl.tools.doctor.rules import diagnose_run

        diagnosis = diagnose_run(run, now=datetime.now(UTC))
    if is_json:
        print(json.dumps(_as_json(checks, diagnosis), indent=2))
    else:
        _show(checks, diagnosis, run)
    severities = [*(check.status for check in checks), *(item.severity for item in _findings(diagnosis))]
    if "error" in severities:
        raise typer.Exit(MachineError.exit_code)


def _sort_out(paths: Sequence[Path]) -> tuple[Path | None, Path | None]:
    """Return the recipe and the run; a folder is a run, any other path a recipe."""
    folders = [path for path in paths if path.is_dir()]
    files = [path for path in paths if not path.is_dir()]
    if len(folders) > 1 or len(files) > 1:
        names = ", ".join(map(str, folders if len(folders) > 1 else files))
        kind = "run" if len(folders) > 1 else "recipe"
        raise ConfigError("megarl doctor", (Problem(key="", message=f"takes one {kind}, not several: {names}"),))
    return (files[0] if files else None), (folders[0] if folders else None)


def _examine(path: Path | None, overrides: Sequence[str], address: str | None, *, tries_groups: bool) -> list[Check]:
    from megarl.config.load import read_recipe
    from megarl.tools.doctor.machine import examine_machine, examine_recipe

    recipe: Recipe | None = None
    if path is not None:
        recipe = read_recipe(path, overrides).recipe
        address = _address(recipe, address)
    checks = [*examine_machine(recipe, is_joined=address is not None)]
    if recipe is not None:
        checks += examine_recipe(recipe)
        if address == _AUTO and not RAY_ADDRESS.read():
            address = None  # a recipe for a cluster, asked about a machine before there is one
        if address is not None or tries_groups:
            checks += _try_cluster(recipe, address, ("nodes", "all nodes"))
    return checks


def _address(recipe: Recipe, given: str | None) -> str | None:
    return given or recipe.run.ray_address or RAY_ADDRESS.read() or None


def _try_cluster(recipe: Recipe, address: str | None, chosen: Sequence[str]) -> list[Check]:
    from megarl.run.launch import ray_environment

    with ray_environment(address, recipe.cluster):
        from megarl.tools.doctor.bring_up import bring_up

        return [*bring_up(recipe, address=address, chosen=chosen, say=_say)]


def _bring_up(path: Path, overrides: Sequence[str], address: str | None, chosen: Sequence[str]) -> list[Check]:
    """Run the stages; the last one, which starts a run, only where the others found no error."""
    from megarl.config.load import read_recipe
    from megarl.tools.doctor import STAGES, UPDATE

    for name in chosen:
        if name not in STAGES:
            raise typer.BadParameter(f"{name}: no such stage; one of {', '.join(STAGES)}", param_hint="--stage")
    recipe = read_recipe(path, overrides).recipe
    address = _address(recipe, address)
    checks: list[Check] = []
    if not chosen or set(chosen) - {UPDATE}:
        checks += _try_cluster(recipe, address, chosen)
    if not chosen or UPDATE in chosen:
        checks += _first_step(recipe, address, has_errors=any(check.status == "error" for check in checks))
    return checks


def _first_step(recipe: Recipe, address: str | None, *, has_errors: bool) -> list[Check]:
    from megarl.cli.trials import write_inputs
    from megarl.planner.deployment import find_shapes
    from megarl.planner.fit import PlanQuestion, answer_for
    from megarl.tools.doctor import Check, CheckStatus
    from megarl.tools.doctor.first_step import FirstStepFiles, first_step_recipe, try_first_step
    from megarl.weights.executors.hf import write_random_folder

    if has_errors:
        found = "not tried: mend the errors above, or run this stage alone with --stage update"
        return [Check(area="cluster", name="update", found=found, status=CheckStatus.NOTE)]
    # Every node reads the files and writes its logs there.
    folder = recipe.run_folder.absolute() / "doctor" / "update"
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    files = FirstStepFiles(model=folder / "model", data=folder / "data.parquet", reward=folder / "reward.py")
    shape = find_shapes(recipe.model, recipe.roles).policy
    write_inputs(files.model, files.data, files.reward, kind=recipe.algorithm.kind)
    write_random_folder(files.model, shape)
    first = first_step_recipe(recipe, folder, files)
    planned = None
    if recipe.run.device == "cuda":
        reshard = answer_for(recipe, PlanQuestion()).plan.reshard
        planned = None if reshard is None else reshard.seconds
    _say("update: a publish and two updates with random weights of the recipe's shape")
    return [*try_first_step(first, folder, address=address, planned_publish_s=planned, say=_say)]


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def _findings(diagnosis: RunDiagnosis | None) -> Sequence[Finding]:
    return () if diagnosis is None else diagnosis.findings


def _show(checks: Sequence[Check], diagnosis: RunDiagnosis | None, run: Path | None) -> None:
    console = make_console(width=120)
    if checks:
        console.print(_checks_table(checks))
        console.print(_count([str(check.status) for check in checks]))
    if diagnosis is not None:
        assert run is not None
        reason = f": {diagnosis.reason}" if diagnosis.reason else ""
        console.print(
            f"run {diagnosis.run}: step {diagnosis.last_step} of {diagnosis.num_steps}, {diagnosis.status}{reason}"
        )
        if diagnosis.findings:
            console.print(Group(*(_finding_table(finding, run) for finding in diagnosis.findings)))
        else:
            ended = diagnosis.status == "failed"
            console.print("no rule says more about it" if ended else "no problem found")


def _checks_table(checks: Iterable[Check]) -> Table:
    table = Table(box=box.SIMPLE_HEAD, expand=True)
    for name, ratio in (("", None), ("check", 3), ("found", 4), ("status", None), ("what to do", 6)):
        table.add_column(name, overflow="fold", ratio=ratio, no_wrap=ratio is None)
    area = ""
    for check in checks:
        status = Text(check.status, style=_STYLES[check.status])
        table.add_row("" if check.area == area else check.area, check.name, check.found, status, check.remedy)
        area = check.area
    return table


def _finding_table(finding: Finding, run: Path) -> Table:
    title = Text(f"{finding.severity}: {finding.rule}", style=_STYLES[finding.severity])
    table = Table(title=title, title_justify="left", box=box.SIMPLE, show_header=False)
    table.add_column(no_wrap=True)
    table.add_column(overflow="fold")
    table.add_row("evidence", finding.evidence)
    table.add_row("cause", finding.cause)
    for change in finding.changes:
        table.add_row("change", str(change))
    table.add_row("advice", finding.advice.replace("RUN", str(run)))
    return table


def _count(statuses: Sequence[str]) -> str:
    return ", ".join(f"{statuses.count(name)} {name}" for name in _STYLES if name in statuses)


def _as_json(checks: Sequence[Check], diagnosis: RunDiagnosis | None) -> dict[str, object]:
    return {
        "checks": [asdict(check) for check in checks],
        "run": None if diagnosis is None else asdict(diagnosis),
    }
