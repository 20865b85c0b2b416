"""The command line: argv to one call, and an exit code and a message for every way out.

A new command is a file of its own and one line here. Heavy modules are imported by the command that needs them:
`validate` and `--version` load neither torch nor Ray.
"""

from __future__ import annotations

import sys
import tempfile
import traceback
from collections.abc import Sequence
from contextlib import AbstractContextManager
from functools import cache
from typing import Annotated, Protocol

import typer
from typer.core import TyperGroup

from megarl import __version__
from megarl.cli.data import data_app
from megarl.cli.import_verl import import_verl
from megarl.cli.plan import plan
from megarl.cli.recipe import schema, validate
from megarl.cli.train import train
from megarl.errors import ConfigError, MegarlError
from megarl.system.secret import masked

EXIT_BUG = 70
EXIT_INTERRUPTED = 130

GROUPS = {
    "Write a recipe": ("init", "validate", "plan", "import-verl", "schema", "data"),
    "Run it": ("train", "doctor", "rehearse", "launch", "fleet"),
    "Look at runs": ("top", "view", "report", "compare", "samples", "timeline", "rescore", "metrics", "dashboards"),
    "Use the model": ("evaluate", "export", "checkpoint"),
    "Compare trainer and engines": ("check-sync", "diagnose"),
}
"""The commands in the order of a day."""


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
app.command()(train)
app.command()(validate)
app.command()(plan)
app.command()(schema)
app.command("import-verl")(import_verl)
app.add_typer(data_app, name="data")

_QUICK = ("train", "validate", "plan", "schema", "import-verl")
"""Commands that start without importing the other ones."""


@cache
def complete_app() -> None:
    """Add the commands that are slow to import."""
    from megarl.cli.check_sync import check_sync
    from megarl.cli.checkpoint import checkpoint_app
    from megarl.cli.compare import compare
    from megarl.cli.diagnose import diagnose_app
    from megarl.cli.doctor import doctor
    from megarl.cli.evaluate import evaluate
    from megarl.cli.export import export
    from megarl.cli.init import init
    from megarl.cli.launch import launch_app
    from megarl.cli.metrics import dashboards, metrics_app
    from megarl.cli.rehearse import rehearse
    from megarl.cli.rescore import rescore_run
    from megarl.cli.run_folder import fleet, report, samples, timeline, top, view

    for command in (init, doctor, rehearse, evaluate, view, top, compare, report, timeline, samples, fleet):
        app.command()(command)
    app.command()(export)
    app.command()(dashboards)
    app.command("check-sync")(check_sync)
    app.command("rescore")(rescore_run)
    app.add_typer(checkpoint_app, name="checkpoint")
    app.add_typer(diagnose_app, name="diagnose")
    app.add_typer(launch_app, name="launch")
    app.add_typer(metrics_app, name="metrics")


def main() -> None:
    """The console script."""
    sys.exit(run(sys.argv[1:]))


def run(arguments: Sequence[str]) -> int:
    """Run one command and return its exit code."""
    if not arguments or arguments[0] not in _QUICK:
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
    print(masked(text), file=sys.stderr)


def _keep_traceback(error: Exception) -> str:
    with tempfile.NamedTemporaryFile(
        "w", prefix="megarl-traceback-", suffix=".txt", delete=False, encoding="utf-8"
    ) as file:
        file.writelines(traceback.format_exception(error))
    return file.name
