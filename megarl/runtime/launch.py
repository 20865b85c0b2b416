"""The entry of a run: settles what Ray reads when it is imported. The command line calls nothing deeper."""

from __future__ import annotations

import secrets
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from functools import cache
from pathlib import Path

from megarl.config.recipe import Recipe, RunConfig
from megarl.env import LOCAL_RAY_ENVIRONMENT, RAY_ADDRESS, RAY_AUTH_TOKEN_PATH, RAY_ENVIRONMENT, update_environment
from megarl.observe.events import Sink
from megarl.observe.observing import observing
from megarl.runtime.exit_notice import exit_notice
from megarl.runtime.resume import ResumeChoice, choose, is_of_run


def train(
    recipe: Recipe,
    *,
    display: Sink,
    resume: ResumeChoice = "auto",
    allows_data_change: bool = False,
    tasks_file: Path | None = None,
) -> None:
    """Run a recipe to its end; everything it started has ended when this returns or raises.

    A trace of Ray's tasks is written to `tasks_file`.
    """
    address = ray_address_of(recipe.run)
    decision = choose(recipe, resume)
    point = decision.point
    with (
        exit_notice(recipe.run_folder),
        observing(
            recipe,
            display=display,
            resumed_step=0 if point is None else point.step,
            is_continued=point is not None and is_of_run(point, recipe),
        ) as observer,
        ray_environment(address),
    ):
        for note in decision.notes:
            observer.warned(note)
        from megarl.runtime.run import run_recipe  # noqa: PLC0415 - imports Ray, which reads the environment then

        run_recipe(
            recipe,
            observer,
            ray_address=address,
            resume=point,
            allows_data_change=allows_data_change,
            tasks_file=tasks_file,
        )


def ray_address_of(run: RunConfig) -> str | None:
    """The Ray cluster to join; None starts a private one."""
    return run.ray_address or RAY_ADDRESS.read() or None


def ray_environment(address: str | None) -> AbstractContextManager[None]:
    """Settings for the Ray at `address`, or for a private one. Ray reads them when it is first imported."""
    return private_ray() if address is None else joined_ray()


@contextmanager
def joined_ray() -> Iterator[None]:
    """Set the environment for a running Ray cluster; RAY_AUTH_TOKEN_PATH names the file with its token."""
    update_environment(RAY_ENVIRONMENT)
    yield


@contextmanager
def private_ray() -> Iterator[None]:
    """Set the environment for a private Ray, with a new token in a file that only this user can read."""
    folder = Path(tempfile.mkdtemp(prefix="megarl-ray-"))
    token = folder / "token"
    token.touch(mode=0o600)
    token.write_text(_token())
    update_environment({**RAY_ENVIRONMENT, **LOCAL_RAY_ENVIRONMENT, RAY_AUTH_TOKEN_PATH.name: str(token)})
    try:
        yield
    finally:
        shutil.rmtree(folder, ignore_errors=True)


@cache
def _token() -> str:
    """Return the token of this process: Ray reads it once, and a second Ray with another token would refuse us."""
    return secrets.token_hex(32)
