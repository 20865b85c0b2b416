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

from megarl.config.checks.advice import advise
from megarl.config.checks.recipe import check_recipe
from megarl.config.environment import EnvironmentConfig
from megarl.config.load import explain, load_recipe, read_recipe
from megarl.config.model import read_model_shape
from megarl.config.recipe import Recipe
from megarl.config.schema import json_schema, reference
from megarl.errors import Problem
from megarl.reward.build import check_reward

RecipePath = Annotated[
    Path, typer.Argument(metavar="RECIPE", help="A YAML file such as those in recipes/.", show_default=False)
]
Overrides = Annotated[
    list[str] | None,
    typer.Option("--set", metavar="KEY=VALUE", help="Set one key, as in a.b=3; VALUE is YAML. May be repeated."),
]


def load_checked(path: Path, overrides: list[str] | None, *, downloads: bool = False) -> Recipe:
    """Return the recipe after all checks that read no rows; print warnings to stderr.

    With `downloads`, models that are named as on the Hugging Face hub are fetched.
    """
    checks = (
        check_recipe,
        lambda recipe: check_reward(recipe.reward),
        lambda recipe: _environment_problems(recipe.environment),
    )
    recipe = load_recipe(path, overrides or (), checks=checks, downloads=downloads)

    from megarl.data.rows import advise_template
    from megarl.run.preflight import check_columns

    check_columns(recipe.data, recipe.algorithm)
    for warning in (*advise(recipe, read_model_shape(recipe.model.path)), *advise_template(recipe.data)):
        print(f"warning: {warning}", file=sys.stderr)
    return recipe


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
        bool, typer.Option("--quick", help="Only the recipe and its files: no rows, no call of the reward, no GPU.")
    ] = False,
) -> None:
    """Report every problem of a recipe, its data and its reward. Starts nothing.

    Reads all rows, scores the ground truth of a row of each data source, and looks for the GPU and the metrics port.
    """
    checked = load_checked(recipe, overrides)
    if is_explained:
        print_explanation(recipe, overrides or [])
    summary = ""
    if not is_quick:
        from megarl.run.launch import ray_address_of
        from megarl.run.preflight import check_start

        # A recipe of several nodes runs elsewhere: the GPUs of this machine say nothing about it.
        is_wide = any(pool.nodes > 1 for pool in checked.pools.values())
        # Off a terminal, standard error has the problems alone.
        with telling_rows(partial(print, file=sys.stderr)) if sys.stderr.isatty() else nullcontext():
            address = "elsewhere" if is_wide else ray_address_of(checked.run)
            inputs = check_start(checked, address=address, keeps_rows=False)
        held_out = f", {len(inputs.eval)} held out" if inputs.eval else ""
        summary = f", {inputs.train.num_prompts} prompts{held_out}"
        if checked.environment is not None:
            from megarl.episodes.build import rehearse

            limit = checked.sampling.max_response_tokens
            if line := rehearse(checked.environment, inputs.tokenizer, max_response_tokens=limit):
                print(line)
    steps, epochs = checked.run.steps, checked.run.epochs
    length = " or ".join([f"{epochs} epoch(s)"] * bool(epochs) + [f"{steps} steps"] * bool(steps))
    print(f"{recipe}: ok: {checked.algorithm.kind}, {length}{summary}, runs in {checked.run_folder}")


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
