"""The door to a run: what has to be settled before Ray is imported. The command line calls this and nothing deeper."""

from __future__ import annotations

import os
import secrets
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from megarl.config.recipe import Recipe
from megarl.env import LOCAL_RAY_ENVIRONMENT, RAY_ADDRESS, RAY_AUTH_TOKEN_PATH, RAY_ENVIRONMENT
from megarl.observe.events import Sink
from megarl.observe.observer import observing
from megarl.runtime.resume import ResumeChoice, choose, is_of_run


def train(recipe: Recipe, *, display: Sink, resume: ResumeChoice = "auto", allows_data_change: bool = False) -> None:
    """Run a recipe to its end. Whatever it started is gone when this returns or raises."""
    address = recipe.run.ray_address or RAY_ADDRESS.read() or None
    decision = choose(recipe, resume)
    point = decision.point
    with (
        observing(
            recipe,
            display=display,
            resumed_step=0 if point is None else point.step,
            is_continued=point is not None and is_of_run(point, recipe),
        ) as observer,
        private_ray() if address is None else joined_ray(),
    ):
        for note in decision.notes:
            observer.warned(note)
        # Ray reads its environment when it is imported, and only then.
        from megarl.runtime.run import run_recipe

        run_recipe(recipe, observer, ray_address=address, resume=point, allows_data_change=allows_data_change)


@contextmanager
def joined_ray() -> Iterator[None]:
    """Settings for somebody else's Ray: its token is where RAY_AUTH_TOKEN_PATH says."""
    os.environ.update(RAY_ENVIRONMENT)
    yield


@contextmanager
def private_ray() -> Iterator[None]:
    """Settings of a Ray for this run alone, with a token of its own in a file only this user can read."""
    folder = Path(tempfile.mkdtemp(prefix="megarl-ray-"))
    token = folder / "token"
    token.touch(mode=0o600)
    token.write_text(secrets.token_hex(32))
    os.environ.update({**RAY_ENVIRONMENT, **LOCAL_RAY_ENVIRONMENT, RAY_AUTH_TOKEN_PATH.name: str(token)})
    try:
        yield
    finally:
        shutil.rmtree(folder, ignore_errors=True)
