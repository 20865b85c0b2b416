"""`megarl data prepare` and `megarl data make`: write the prompt tables of data sets, and models to train on them."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from megarl.config.hub import PUBLIC_MODELS
from megarl.config.model import Family
from megarl.errors import ConfigError, MachineError, Problem
from megarl.tools.prepare import DataSetName

if TYPE_CHECKING:
    from megarl.tools.quickstart.tiny_model import TinyShape

_PREVIEW_CHARS = 400

data_app = typer.Typer(no_args_is_help=True, help="Write prompt tables from data sets, and make data sets.")
make_app = typer.Typer(no_args_is_help=True, help="Write a data set and a model to train on it.")
data_app.add_typer(make_app, name="make")


@data_app.command()
def prepare(
    name: Annotated[
        DataSetName, typer.Argument(show_default=False, help="A known data set, or `rows` for records of your own.")
    ],
    source: Annotated[
        Path,
        typer.Option(
            "--from",
            metavar="FILE_OR_FOLDER",
            show_default=False,
            help="JSON lines, CSV, Parquet, Arrow, a folder of them, or a data set of the Hugging Face hub.",
        ),
    ],
    out: Annotated[Path, typer.Option(metavar="DIR", help="The folder to write.", show_default=False)],
    prompt_key: Annotated[str | None, typer.Option(help="Column with the prompt, for `rows`.")] = None,
    answer_key: Annotated[str | None, typer.Option(help="Column with the ground truth, for `rows`.")] = None,
    response_key: Annotated[str | None, typer.Option(help="Column with the answer to imitate, for `rows`.")] = None,
    data_source: Annotated[str | None, typer.Option(help="The data_source of all rows, for `rows`.")] = None,
) -> None:
    """Write a data set as the Parquet files that a recipe names in data.train and data.eval."""
    from megarl.tools.prepare.prompt_table import RecordColumns, prepare

    named = {"prompt": prompt_key, "answer": answer_key, "response": response_key}
    columns = RecordColumns(source=data_source, **{key: (value,) for key, value in named.items() if value is not None})
    try:
        written = prepare(name, source, out, columns, report=lambda line: print(line, file=sys.stderr))
    except OSError as error:
        raise MachineError(f"--out {out}: cannot be written: {error.strerror}") from error
    for split in written:
        repeated = f", {split.num_repeated:,} repeated ones left out" if split.num_repeated else ""
        print(f"wrote {split.path}: {split.num_rows:,} rows{repeated}; the first:")
        print("\n".join(f"  {line}" for line in split.first[:_PREVIEW_CHARS].splitlines()))
        print(f"  -> {split.first_truth[:_PREVIEW_CHARS]}")


@make_app.command()
def arithmetic(
    out: Annotated[Path, typer.Option(metavar="DIR", help="The folder to write.", show_default=False)],
    seed: Annotated[int, typer.Option(min=0, help="Seed of the problems and of the model's weights.")] = 1,
    like: Annotated[
        str | None,
        typer.Option(metavar="NAME", help="Give the random model the size of this Qwen2 model, such as qwen2.5-0.5b."),
    ] = None,
) -> None:
    """Write sums of two-digit numbers, and a model that learns them.

    The problems are for training and held out; the model is tiny and random.
    """
    from megarl.tools.quickstart.arithmetic import SHAPE, make_arithmetic

    shape = SHAPE if like is None else _random_shape(like)
    try:
        files = make_arithmetic(out, seed=seed, shape=shape)
    except OSError as error:
        raise MachineError(f"--out {out}: cannot be written: {error.strerror}") from error
    for path in (files.train, files.sft, files.eval, files.model):
        print(f"wrote {path}")


@make_app.command()
def calculator(
    out: Annotated[Path, typer.Option(metavar="DIR", help="The folder to write.", show_default=False)],
    seed: Annotated[int, typer.Option(min=0, help="Seed of the problems and of the model's weights.")] = 1,
) -> None:
    """Write sums that a tool adds, lessons of calling it, and a tiny random model whose chat template has tools."""
    from megarl.tools.quickstart.calculator import make_calculator

    try:
        files = make_calculator(out, seed=seed)
    except OSError as error:
        raise MachineError(f"--out {out}: cannot be written: {error.strerror}") from error
    for path in (files.train, files.sft, files.eval, files.model):
        print(f"wrote {path}")


def _random_shape(name: str) -> TinyShape:
    from megarl.tools.quickstart.tiny_model import TinyShape

    known = {known: shape for known, shape in PUBLIC_MODELS.items() if shape.family is Family.QWEN2}
    if name not in known:
        problem = Problem(key="--like", message=f"{name} is not known; name one of {', '.join(known)}")
        raise ConfigError("megarl data make arithmetic", (problem,))
    return TinyShape.like(known[name])
