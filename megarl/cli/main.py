"""The command line: argv to one call, and every way out with its exit code and its sentence.

Heavy modules are imported by the command that needs them: `validate` and `--version` load neither torch nor Ray.
"""

from __future__ import annotations

import sys
import tempfile
import traceback
import warnings
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from megarl import __version__
from megarl.cli.plan import plan
from megarl.cli.recipes import Overrides, RecipePath, load_checked
from megarl.cli.schema import schema
from megarl.cli.verl import import_command
from megarl.config.model import Family
from megarl.config.public_models import PUBLIC_MODELS
from megarl.errors import ConfigError, MachineError, MegarlError, Problem
from megarl.system.secret import masked

if TYPE_CHECKING:
    from megarl.tools.quickstart.tiny_model import TinyShape

EXIT_BUG = 70
EXIT_INTERRUPTED = 130

app = typer.Typer(
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
    help="Reinforcement-learning post-training: Megatron trains, SGLang generates.",
)
data_app = typer.Typer(no_args_is_help=True, help="Data sets.")
make_app = typer.Typer(no_args_is_help=True, help="Write a data set, and a model to train on it.")
app.add_typer(data_app, name="data")
data_app.add_typer(make_app, name="make")
app.command()(schema)
app.command()(plan)
app.command("import-verl")(import_command)

Resume = Annotated[
    str,
    typer.Option(
        metavar="auto|never|PATH",
        help="Go on from the run's newest checkpoint, never, or from the one at PATH.",
    ),
]


_QUICK = ("validate", "plan", "train", "schema", "import-verl")
"""Commands that do not wait for what only the others need."""


@cache
def _add_other_commands() -> None:
    from megarl.cli.check_sync import check_sync
    from megarl.cli.checkpoint import app as checkpoint_app
    from megarl.cli.diagnose import diagnose_app
    from megarl.cli.doctor import doctor
    from megarl.cli.export import export
    from megarl.cli.fleet import fleet
    from megarl.cli.launch import launch_app
    from megarl.cli.metrics import dashboards, metrics_app
    from megarl.cli.samples import samples
    from megarl.cli.trace import timeline
    from megarl.cli.view import report, view

    app.add_typer(checkpoint_app, name="checkpoint")
    app.add_typer(diagnose_app, name="diagnose")
    app.add_typer(metrics_app, name="metrics")
    app.command()(dashboards)
    app.add_typer(launch_app, name="launch")
    app.command("check-sync")(check_sync)
    app.command()(samples)
    app.command()(doctor)
    app.command()(view)
    app.command()(report)
    app.command()(timeline)
    app.command()(export)
    app.command()(fleet)


def main() -> None:
    """The console script."""
    sys.exit(run(sys.argv[1:]))


def run(arguments: Sequence[str]) -> int:
    """Run one command and return its exit code."""
    if not arguments or arguments[0] not in _QUICK:
        _add_other_commands()
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


@app.command()
def train(
    recipe: RecipePath,
    overrides: Overrides = None,
    resume: Resume = "auto",
    allows_data_change: Annotated[
        bool, typer.Option("--allow-data-change", help="Go on with other prompts than the checkpoint was made with.")
    ] = False,
    timeline: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Write when each role and each Ray task was busy, as a trace for Perfetto."),
    ] = None,
) -> None:
    """Run a recipe to its end; a run that was stopped goes on from its newest checkpoint."""
    checked = load_checked(recipe, overrides)
    if not sys.warnoptions:
        # What libraries warn their callers about on import is ours to act on, not the user's; -W shows it.
        warnings.simplefilter("ignore")

    from megarl.cli.display import make_console, make_display, show_warnings
    from megarl.cli.trace import traced
    from megarl.runtime import launch

    console = make_console()
    show_warnings(console)
    with traced(checked.run_folder, timeline) as tasks_file:
        launch.train(
            checked,
            display=make_display(console),
            resume=_resume_choice(resume),
            allows_data_change=allows_data_change,
            tasks_file=tasks_file,
        )

    from megarl.cli.report import print_report
    from megarl.observe.report import make_report

    print_report(make_report(checked.run_folder), console)


@app.command()
def validate(
    recipe: RecipePath,
    overrides: Overrides = None,
    is_explained: Annotated[
        bool, typer.Option("--explain", help="Print every value and where it was written.")
    ] = False,
) -> None:
    """Report every problem of a recipe, its data and its reward; train nothing."""
    checked = load_checked(recipe, overrides)
    if is_explained:
        from megarl.cli.explain import print_explanation

        print_explanation(recipe, overrides or [])
    print(f"{recipe}: ok: {checked.algorithm.kind}, {checked.run.steps} steps, runs in {checked.run_folder}")


def _resume_choice(text: str) -> Path | Literal["auto", "never"]:
    match text:
        case "auto" | "never":
            return text
        case _:
            return Path(text)


@make_app.command()
def arithmetic(
    out: Annotated[Path, typer.Option(metavar="DIR", help="The folder to write.", show_default=False)],
    seed: Annotated[int, typer.Option(min=0)] = 1,
    like: Annotated[
        str | None,
        typer.Option(metavar="NAME", help="A Qwen2 model whose size the random one has, such as qwen2.5-0.5b."),
    ] = None,
) -> None:
    """Two-digit sums: problems to train on and held-out ones, and a tiny random model that learns them."""
    from megarl.tools.quickstart.arithmetic import SHAPE, make_arithmetic

    shape = SHAPE if like is None else _random_shape(like)
    try:
        files = make_arithmetic(out, seed=seed, shape=shape)
    except OSError as error:
        raise MachineError(f"--out {out}: cannot be written: {error.strerror}") from error
    for path in (files.train, files.sft, files.eval, files.model):
        print(f"wrote {path}")


@app.callback(invoke_without_command=True)
def _root(
    version: Annotated[bool, typer.Option("--version", help="Print the version and exit.")] = False,
) -> None:
    if version:
        print(f"megarl {__version__}")
        raise typer.Exit


def _random_shape(name: str) -> TinyShape:
    from megarl.tools.quickstart.tiny_model import TinyShape

    known = {known: shape for known, shape in PUBLIC_MODELS.items() if shape.family is Family.QWEN2}
    if name not in known:
        problem = Problem(key="--like", message=f"{name} is not known; one of {', '.join(known)}")
        raise ConfigError("megarl data make arithmetic", (problem,))
    return TinyShape.like(known[name])


def _complain(text: str) -> None:
    print(masked(text), file=sys.stderr)


def _keep_traceback(error: Exception) -> str:
    with tempfile.NamedTemporaryFile(
        "w", prefix="megarl-traceback-", suffix=".txt", delete=False, encoding="utf-8"
    ) as file:
        file.writelines(traceback.format_exception(error))
    return file.name
