"""`megarl bench`: figures that megarl promises about itself, measured on this machine."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

bench_app = typer.Typer(no_args_is_help=True, help="Measure megarl on this machine.")


@bench_app.command("plan")
def bench_plan(
    repeats: Annotated[int, typer.Option(min=1, help="Processes per command; the median counts.")] = 3,
    is_json: Annotated[bool, typer.Option("--json", help="Print the figures as JSON in the last line too.")] = False,
) -> None:
    """Time `validate` and `plan` of a 70B recipe on 512 training and 256 rollout GPUs, one core each.

    Exit code 1 where a goal is missed by more than a factor of 2.
    """
    from megarl.cli.measure import TOLERANCE, measure_planning, print_table

    measurements = measure_planning(repeats=repeats)
    print_table(measurements)
    if is_json:
        print(json.dumps([asdict(measurement) for measurement in measurements]))
    if any(measurement.worst_ratio > TOLERANCE for measurement in measurements):
        raise typer.Exit(1)


@bench_app.command("checkpoint")
def bench_checkpoint(
    folder: Annotated[
        Path, typer.Option(metavar="DIR", exists=True, file_okay=False, help="On the disk to measure.")
    ] = Path(),
    gigabytes: Annotated[float, typer.Option(min=0.1, help="Of the model.")] = 2.0,
    repeats: Annotated[int, typer.Option(min=1, help="Saves; the median counts.")] = 3,
    is_json: Annotated[bool, typer.Option("--json", help="Print the figures as JSON in the last line too.")] = False,
) -> None:
    """Time saving against `dd`, verifying, and exporting, with random weights; needs 4 times the model on the disk.

    Exit code 1 where a goal is missed by more than a factor of 2.
    """
    from megarl.cli.measure import TOLERANCE
    from megarl.cli.measure_checkpoint import as_json, measure_checkpoint, print_figures

    figures = measure_checkpoint(folder, gigabytes=gigabytes, repeats=repeats)
    print_figures(figures)
    if is_json:
        print(as_json(figures))
    if any(figure.miss > TOLERANCE for figure in figures):
        raise typer.Exit(1)


@bench_app.command("algo")
def bench_algo(
    rollouts: Annotated[int, typer.Option(min=16, help="Of the step, in groups of 16.")] = 8192,
    tokens: Annotated[int, typer.Option(min=1, help="Of each response.")] = 8192,
    repeats: Annotated[int, typer.Option(min=1, help="Processes per estimator; the fastest counts.")] = 3,
    is_json: Annotated[bool, typer.Option("--json", help="Print the figures as JSON in the last line too.")] = False,
) -> None:
    """Time credit and packing of one large step, and how much memory they need, on two cores.

    Exit code 1 where a goal is missed by more than a factor of 2.
    """
    from megarl.cli.measure import TOLERANCE
    from megarl.cli.measure_algo import measure_steps, print_step_table

    measurements = measure_steps(num_rollouts=rollouts, num_tokens=tokens, repeats=repeats)
    print_step_table(measurements)
    if is_json:
        print(json.dumps([asdict(measurement) for measurement in measurements]))
    if any(measurement.worst_ratio > TOLERANCE for measurement in measurements):
        raise typer.Exit(1)
