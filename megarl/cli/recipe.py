"""The recipe argument of all commands, and `megarl validate` and `megarl schema`, which only read recipes."""

from __future__ import annotations

import json
import logging
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from functools import partial
from pathlib import Path
from typing import Annotated

import typer

from megarl.config.checks.recipe import advise, check_recipe
from megarl.config.environment import EnvironmentConfig
from megarl.config.load import CheckedRecipe, explain, inspect_recipe, read_recipe
from megarl.config.model import read_model_shape
from megarl.config.recipe import Recipe
from megarl.config.schema import json_schema, reference
from megarl.errors import ConfigError, MegarlError, Problem

RecipePath = Annotated[
    Path, typer.Argument(metavar="RECIPE", help="A YAML file such as those in recipes/.", show_default=False)
]
Overrides = Annotated[
    list[str] | None,
    typer.Option("--set", metavar="KEY=VALUE", help="Set one key, as in a.b=3; VALUE is YAML. May be repeated."),
]
ShapeName = Annotated[str | None, typer.Option(help="A public model's name, where model.path is missing here.")]


def load_checked(path: Path, overrides: list[str] | None, *, downloads: bool = False) -> Recipe:
    """Return the recipe after all checks that read no rows; print warnings to stderr.

    With `downloads`, models that are named as on the Hugging Face hub are fetched.
    """
    checked = _inspected(path, overrides, downloads=downloads)
    if problems := (*checked.not_cached, *checked.problems):
        raise ConfigError(str(path), problems)
    _check_columns(checked.recipe)
    _print_warnings(checked.recipe)
    return checked.recipe


def _inspected(path: Path, overrides: list[str] | None, *, downloads: bool = False) -> CheckedRecipe:
    from megarl.reward.build import check_reward

    checks = (
        check_recipe,
        lambda recipe: check_reward(recipe.reward),
        lambda recipe: _environment_problems(recipe.environment),
    )
    return inspect_recipe(path, overrides or (), checks=checks, downloads=downloads)


def _check_columns(recipe: Recipe) -> None:
    from megarl.run.preflight import check_columns

    check_columns(recipe.data, recipe.algorithm)


def _print_warnings(recipe: Recipe) -> None:
    from megarl.data.rows import advise_template

    for warning in (*advise(recipe, read_model_shape(recipe.model.path)), *advise_template(recipe.data)):
        print(f"warning: {warning}", file=sys.stderr)


def _environment_problems(config: EnvironmentConfig | None) -> list[Problem]:
    if config is None:
        return []
    from megarl.episodes.build import check_environment

    return check_environment(config)


class _RowsRead(logging.Handler):
    """Tells every few seconds how many rows of a table were read."""

    def __init__(self, told: Callable[[str], None], *, every_s: float) -> None:
        super().__init__(logging.INFO)
        self._told, self._every_s, self._last = told, every_s, time.monotonic()

    def emit(self, record: logging.LogRecord) -> None:
        now = time.monotonic()
        if record.levelno == logging.INFO and isinstance(record.args, tuple) and now - self._last >= self._every_s:
            self._last = now
            self._told("read {:,} of {:,} rows".format(*record.args))


@contextmanager
def telling_rows(told: Callable[[str], None], *, every_s: float = 5.0) -> Iterator[None]:
    """Tell inside the block how far tables are read: a million rows take a minute or more."""
    logger, handler = logging.getLogger("megarl.data.prompts"), _RowsRead(told, every_s=every_s)
    level = logger.level
    logger.setLevel(logging.INFO)
    logger.addHandler(handler)
    try:
        yield
    finally:
        logger.removeHandler(handler)
        logger.setLevel(level)


def validate(
    recipe: RecipePath,
    overrides: Overrides = None,
    is_explained: Annotated[bool, typer.Option("--explain", help="Print every value and where it was set.")] = False,
    is_quick: Annotated[
        bool, typer.Option("--quick", help="Only the recipe and its files: no rows, no call of the reward.")
    ] = False,
    is_here: Annotated[
        bool,
        typer.Option("--here", help="Also check what the run needs of this machine: GPUs, packages, ports, the hub."),
    ] = False,
) -> None:
    """Report every problem of a recipe, its data and its reward, on any machine. Starts nothing.

    Reads all rows, scores the ground truth of a row of each data source and computes whether the run fits its GPUs.
    What only the machines of the run can tell is listed as not checked here; `megarl train` checks it, and `--here` on
    this machine. Several problems of different kinds end with exit code 2.
    """
    checked = _inspected(recipe, overrides)
    if is_explained:
        print_explanation(recipe, overrides or [])
    if not is_quick:
        summary = _validate_inputs(checked, str(recipe), is_here=is_here)
    elif problems := (*(checked.not_cached if is_here else ()), *checked.problems):
        raise ConfigError(str(recipe), problems)
    else:
        _check_columns(checked.recipe)
        summary = ""
    if not checked.not_cached:
        _print_warnings(checked.recipe)
    run = checked.recipe.run
    length = " or ".join([f"{run.epochs} epoch(s)"] * bool(run.epochs) + [f"{run.steps} steps"] * bool(run.steps))
    kind, folder = checked.recipe.algorithm.kind, checked.recipe.run_folder
    print(f"{recipe}: ok: {kind}, {length}{summary}, runs in {folder}")


def _validate_inputs(checked: CheckedRecipe, source: str, *, is_here: bool) -> str:
    """Check what a run reads; raise every problem, or return how many prompts there are."""
    from megarl.run.preflight import Findings, find_problems

    recipe = checked.recipe
    # Off a terminal, standard error has the problems alone.
    with telling_rows(partial(print, file=sys.stderr)) if sys.stderr.isatty() else nullcontext():
        findings = find_problems(checked)
    errors = list(findings.errors)
    if is_here:
        errors += _errors_here(checked)
    else:
        for need in findings.unchecked:
            print(f"not checked here: {need}")
    inputs = findings.inputs
    Findings(inputs=inputs, errors=tuple(errors)).raise_errors(source)
    if inputs is None:
        return ""
    if recipe.environment is not None:
        from megarl.episodes.build import rehearse

        limit = recipe.sampling.max_response_tokens
        if line := rehearse(recipe.environment, inputs.tokenizer, max_response_tokens=limit):
            print(line)
    return f", {inputs.train.num_prompts} prompts" + (f", {len(inputs.eval)} held out" if inputs.eval else "")


def _errors_here(checked: CheckedRecipe) -> list[MegarlError]:
    """Return what this machine lacks for the run, as `megarl train` would refuse it."""
    from megarl.run.launch import find_token, ray_address_of, refuse_nodes_without_cluster
    from megarl.run.preflight import machine_errors, noting

    recipe, address = checked.recipe, ray_address_of(checked.recipe.run)
    errors: list[MegarlError] = []
    if checked.not_cached:
        errors.append(ConfigError(recipe.run.name, checked.not_cached))
    with noting(errors):
        refuse_nodes_without_cluster(recipe.pools, address)
    if address is not None:
        with noting(errors):
            find_token(allows_none=recipe.cluster.allows_no_token)
    return [*errors, *machine_errors(recipe, address)]


def print_explanation(recipe: Path, overrides: list[str]) -> None:
    """Print key, value and origin of every value, in full: a shortened one would not explain anything."""
    rows = [
        (item.key, item.value, "default" if item.origin is None else str(item.origin))
        for item in explain(read_recipe(recipe, overrides))
    ]
    key_width, value_width = (max(len(row[column]) for row in rows) for column in (0, 1))
    for key, value, origin in rows:
        print(f"{key:<{key_width}}  {value:<{value_width}}  {origin}")


def schema(
    is_docs: Annotated[bool, typer.Option("--docs", help="Print the reference in Markdown instead.")] = False,
) -> None:
    """Print the JSON Schema of a recipe."""
    print(reference() if is_docs else json.dumps(json_schema(), indent=2) + "\n", end="")
