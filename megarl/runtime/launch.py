"""The door to a run: what has to be settled before Ray is imported. The command line calls this and nothing deeper."""

from __future__ import annotations

import os
import secrets
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path

from megarl.config.recipe import Recipe
from megarl.env import LOCAL_RAY_ENVIRONMENT, RAY_ADDRESS, RAY_AUTH_TOKEN_PATH, RAY_ENVIRONMENT
from megarl.observe.events import Sink
from megarl.observe.observer import observing


def train(recipe: Recipe, *, display: Sink) -> None:
    """Run a recipe to its end. Whatever it started is gone when this returns or raises."""
    address = recipe.run.ray_address or RAY_ADDRESS.read() or None
    os.environ.update(RAY_ENVIRONMENT)
    with observing(recipe, display=display) as observer, _private_ray() if address is None else nullcontext():
        # Ray reads its environment when it is imported, and only then.
        from megarl.runtime.run import run_recipe

        run_recipe(recipe, observer, ray_address=address)


@contextmanager
def _private_ray() -> Iterator[None]:
    """Settings of a Ray for this run alone, with a token of its own in a file only this user can read."""
    folder = Path(tempfile.mkdtemp(prefix="megarl-ray-"))
    token = folder / "token"
    token.touch(mode=0o600)
    token.write_text(secrets.token_hex(32))
    os.environ.update(LOCAL_RAY_ENVIRONMENT)
    os.environ[RAY_AUTH_TOKEN_PATH.name] = str(token)
    try:
        yield
    finally:
        shutil.rmtree(folder, ignore_errors=True)
