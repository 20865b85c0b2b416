"""`megarl data make`: write data sets, and models to train on them."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from megarl.config.model import Family
from megarl.config.public_models import PUBLIC_MODELS
from megarl.errors import ConfigError, MachineError, Problem

if TYPE_CHECKING:
    from megarl.tools.quickstart.tiny_model import TinyShape

data_app = typer.Typer(no_args_is_help=True, help="Make data sets.")
make_app = typer.Typer(no_args_is_help=True, help="Write a data set and a model to train on it.")
data_app.add_typer(make_app, name="make")


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


def _random_shape(name: str) -> TinyShape:
    from megarl.tools.quickstart.tiny_model import TinyShape

    known = {known: shape for known, shape in PUBLIC_MODELS.items() if shape.family is Family.QWEN2}
    if name not in known:
        problem = Problem(key="--like", message=f"{name} is not known; name one of {', '.join(known)}")
        raise ConfigError("megarl data make arithmetic", (problem,))
    return TinyShape.like(known[name])
