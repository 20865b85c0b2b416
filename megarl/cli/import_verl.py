"""`megarl import-verl`: turn a verl configuration into a recipe, and report what became of every key."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated, TextIO

import typer
import yaml
from pydantic import ValidationError

from megarl.config.checks.recipe import check_without_files
from megarl.config.document import Tree
from megarl.config.hub import PUBLIC_MODELS, public_model_name
from megarl.config.load import schema_problems
from megarl.config.recipe import Recipe
from megarl.errors import ConfigError, MachineError, Problem
from megarl.tools.import_verl.rules import KeyVerdict
from megarl.tools.import_verl.translate import translate_file
from megarl.tools.import_verl.translation import Entry, Imported

_MAX_VALUE = 32


def import_verl(
    file: Annotated[
        Path,
        typer.Argument(metavar="FILE", show_default=False, help="YAML, or a shell script."),
    ],
    arguments: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[ARGUMENT | NAME=VALUE]...", show_default=False, help="What the script takes from its caller."
        ),
    ] = None,
    out: Annotated[Path | None, typer.Option(metavar="RECIPE", help="Write the recipe here instead of stdout.")] = None,
) -> None:
    """Turn a verl configuration into a recipe. Reports what became of every key."""
    imported = translate_file(file, arguments or ())
    text = _recipe_text(imported, file)
    if out is None:
        print(text, end="")
        _print_report(imported, sys.stderr)
    else:
        try:
            out.write_text(text)
        except OSError as error:
            raise MachineError(f"--out {out}: cannot be written: {error.strerror}") from error
        _print_report(imported, sys.stdout)
    problems = _problems(imported.tree)
    if problems:
        raise ConfigError(str(out or file), problems)


def _recipe_text(imported: Imported, file: Path) -> str:
    notes = "".join(f"# {note}\n" for note in imported.notes)
    ordered = {name: imported.tree[name] for name in Recipe.model_fields if name in imported.tree}
    body = yaml.safe_dump(ordered, sort_keys=False, default_flow_style=None, width=110)
    return f"# Imported from {file.name}; the report lists the keys that could not be taken over.\n{notes}{body}"


def _problems(tree: dict[str, Tree]) -> tuple[Problem, ...]:
    """Return the problems of the recipe that can be seen without its files."""
    try:
        recipe = Recipe.model_validate(tree)
    except ValidationError as error:
        return schema_problems(error, Recipe)
    critic = recipe.roles.critic
    name = public_model_name(recipe.model.path)
    if name is None:
        return ()
    critic_name = public_model_name(critic.path) if critic is not None and critic.path is not None else None
    return tuple(check_without_files(recipe, PUBLIC_MODELS[name], critic=PUBLIC_MODELS[critic_name or name]))


def _print_report(imported: Imported, stream: TextIO) -> None:
    for verdict in (KeyVerdict.UNKNOWN, KeyVerdict.NOT_SUPPORTED, KeyVerdict.NO_EFFECT, KeyVerdict.MAPPED):
        entries = [entry for entry in imported.entries if entry.verdict is verdict]
        if entries:
            print(f"{verdict} ({len(entries)})", file=stream)
        for entry in entries:
            print(f"  {_line(entry)}", file=stream)
    for note in imported.notes:
        print(f"note: {note}", file=stream)


def _line(entry: Entry) -> str:
    value = str(entry.value)
    shown = value if len(value) <= _MAX_VALUE else f"{value[: _MAX_VALUE - 3]}..."
    arrow = "->" if entry.verdict is KeyVerdict.MAPPED else ":"
    return f"{entry.key}={shown} {arrow} {entry.text}".replace(" : ", ": ")
