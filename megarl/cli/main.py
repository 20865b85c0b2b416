"""The command line: argv to one call, and an exit code and a message for every way out.

A new command is a function and one line here. Only the module of the command that runs is imported, and it imports
heavy ones when it needs them: `validate` and `--version` load neither torch nor Ray.
"""

from __future__ import annotations

import sys
import tempfile
import traceback
from collections.abc import Sequence
from contextlib import AbstractContextManager
from functools import cache
from importlib import import_module
from typing import Annotated, Protocol

import typer
from typer.core import TyperGroup

from megarl import __version__
from megarl.errors import ConfigError, MegarlError
from megarl.system.imports import uncollected
from megarl.system.secret import masked, printable

EXIT_BUG = 70
EXIT_INTERRUPTED = 130

GROUPS = {
    "Write a recipe": {
        "init": "prepare:init",
        "validate": "recipe:validate",
        "plan": "plan:plan",
        "import-verl": "prepare:import_verl",
        "schema": "recipe:schema",
        "data": "prepare:data_app",
    },
    "Run it": {
        "train": "train:train",
        "doctor": "doctor:doctor",
        "rehearse": "trials:rehearse",
        "launch": "launch:launch_app",
        "fleet": "run_folder:fleet",
    },
    "Look at runs": {
        "top": "run_folder:top",
        "view": "run_folder:view",
        "report": "run_folder:report",
        "compare": "run_folder:compare",
        "samples": "run_folder:samples",
        "timeline": "run_folder:timeline",
        "rescore": "evaluate:rescore_run",
        "metrics": "run_folder:metrics_app",
        "dashboards": "run_folder:dashboards",
    },
    "Use the model": {
        "evaluate": "evaluate:evaluate",
        "export": "checkpoint:export",
        "checkpoint": "checkpoint:checkpoint_app",
    },
    "Compare trainer and engines": {
        "check-sync": "trials:check_sync",
        "diagnose": "trials:diagnose_app",
        "family": "family:family_app",
    },
}
"""The commands in the order of a day, each with its module below `megarl.cli` and its name there."""
_PLACES = {name: place for commands in GROUPS.values() for name, place in commands.items()}


class _HelpText(Protocol):
    """The part of Typer's help formatter that is used here; Typer exports no name for it."""

    def section(self, name: str) -> AbstractContextManager[None]: ...

    def write_dl(self, rows: Sequence[tuple[str, str]]) -> None: ...


class _GroupedHelp(TyperGroup):
    """Lists the commands by what they are for, with whole sentences."""

    def format_commands(self, ctx: object, formatter: _HelpText) -> None:
        for title, names in GROUPS.items():
            found = [(name, self.commands.get(name)) for name in names]
            rows = [(name, command.get_short_help_str(limit=200)) for name, command in found if command is not None]
            with formatter.section(title):
                formatter.write_dl(rows)


app = typer.Typer(
    cls=_GroupedHelp,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
    help="Reinforcement-learning post-training: Megatron trains, SGLang generates.",
)


@cache
def add_command(name: str) -> None:
    """Import one command and add it to the app."""
    module, _, attribute = _PLACES[name].partition(":")
    with uncollected():
        command = getattr(import_module(f"megarl.cli.{module}"), attribute)
    if isinstance(command, typer.Typer):
        app.add_typer(command, name=name)
    else:
        app.command(name)(command)


def complete_app() -> None:
    """Add all commands, as their help needs them, in the order of `GROUPS` whichever of them ran before."""
    for name in _PLACES:
        add_command(name)
    places = list(_PLACES)
    app.registered_commands.sort(key=lambda command: places.index(str(command.name)))
    app.registered_groups.sort(key=lambda group: places.index(str(group.name)))


def main() -> None:
    """The console script."""
    sys.exit(run(sys.argv[1:]))


def run(arguments: Sequence[str]) -> int:
    """Run one command and return its exit code."""
    if arguments and arguments[0] in _PLACES:
        add_command(arguments[0])
    elif list(arguments) != ["--version"]:
        complete_app()
    return run_app(app, arguments, prog_name="megarl")


def run_app(app: typer.Typer, arguments: Sequence[str], *, prog_name: str) -> int:
    """Run one command of `app` and return its exit code. An exception is reported in one line, never as a traceback."""
    try:
        app(arguments, prog_name=prog_name)
    except SystemExit as end:
        # Typer turns Ctrl-C into a silent 130.
        if end.code == EXIT_INTERRUPTED:
            _complain("megarl: interrupted")
        return end.code if isinstance(end.code, int) else int(end.code is not None)
    except ConfigError as error:
        _complain(str(error))
        return error.exit_code
    except MegarlError as error:
        _complain(f"megarl: {error}")
        return error.exit_code
    except Exception as error:  # noqa: BLE001 - the outermost frame: what arrives here is a bug, and is reported as one
        _complain(f"megarl: bug: {type(error).__name__}; the traceback is in {_keep_traceback(error)}")
        return EXIT_BUG
    return 0


@app.callback(invoke_without_command=True)
def _root(
    version: Annotated[bool, typer.Option("--version", help="Print the version and exit.")] = False,
) -> None:
    if version:
        print(f"megarl {__version__}")
        raise typer.Exit


def _complain(text: str) -> None:
    print(printable(masked(text)), file=sys.stderr)


def _keep_traceback(error: Exception) -> str:
    with tempfile.NamedTemporaryFile(
        "w", prefix="megarl-traceback-", suffix=".txt", delete=False, encoding="utf-8"
    ) as file:
        file.writelines(traceback.format_exception(error))
    return file.name
