"""The door to a run: what has to be settled before Ray is imported. The command line calls this and nothing deeper."""

from __future__ import annotations

import os
import secrets
import shutil
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING

from megarl.checkpoint.manifest import MODEL_FOLDER, verify
from megarl.config.model import ModelShape
from megarl.config.recipe import Recipe
from megarl.env import LOCAL_RAY_ENVIRONMENT, RAY_ADDRESS, RAY_AUTH_TOKEN_PATH, RAY_ENVIRONMENT
from megarl.observe.events import Sink
from megarl.observe.observer import observing
from megarl.runtime.epitaph import epitaph
from megarl.runtime.one_copy import one_copy
from megarl.runtime.resume import ResumeChoice, choose, is_of_run
from megarl.runtime.small_sync import SmallSync

if TYPE_CHECKING:
    from megarl.runtime.check_sync import SyncCheck
    from megarl.runtime.verdict import Diagnosis

_DIAGNOSE_FOLDER = "diagnose"
"""Inside the folder of the run."""
_MAX_CPU_PROCESSES = 8


def train(
    recipe: Recipe,
    *,
    display: Sink,
    resume: ResumeChoice = "auto",
    allows_data_change: bool = False,
    tasks_file: Path | None = None,
) -> None:
    """Run a recipe to its end. Whatever it started is gone when this returns or raises.

    What Ray knows of its tasks goes to `tasks_file`, if there is one.
    """
    address = recipe.run.ray_address or RAY_ADDRESS.read() or None
    decision = choose(recipe, resume)
    point = decision.point
    with (
        epitaph(recipe.run_folder),
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

        run_recipe(
            recipe,
            observer,
            ray_address=address,
            resume=point,
            allows_data_change=allows_data_change,
            tasks_file=tasks_file,
        )


def diagnose(
    recipe: Recipe, *, question: str | int, checkpoint: Path | None, on_start: Callable[[Recipe, Sequence[str]], None]
) -> Diagnosis:
    """Compare trainer and engine of a recipe on a text or on a row of its data, with its model or a checkpoint's.

    `on_start` is told what is really started, and what about it is not as the recipe says.
    """
    address = recipe.run.ray_address or RAY_ADDRESS.read() or None
    if checkpoint is not None:
        verify(checkpoint)
        recipe = recipe.model_copy(
            update={"model": recipe.model.model_copy(update={"path": checkpoint / MODEL_FOLDER})}
        )
    small = one_copy(recipe, name=_DIAGNOSE_FOLDER, num_devices=_num_devices(recipe.run.device, address))
    on_start(small.recipe, small.notes)
    with private_ray() if address is None else joined_ray():
        # Ray reads its environment when it is imported, and only then.
        from megarl.runtime.diagnose import run_diagnosis

        return run_diagnosis(recipe, small.recipe, question, ray_address=address)


def rehearse_sync(recipe: Recipe, shape: ModelShape) -> SyncCheck:
    """A recipe's own layouts with a tiny shape, within this process."""
    with private_ray():
        from megarl.runtime.check_sync import rehearse_layouts

        return rehearse_layouts(recipe, shape)


def check_sync(small: SmallSync) -> SyncCheck:
    """Start what `small` says on this machine, publish, and compare what the engines then have."""
    with private_ray():
        # Ray reads its environment when it is imported, and only then.
        from megarl.runtime.check_sync import check_for_real

        return check_for_real(small, ray_address=None)


def _num_devices(device: str, ray_address: str | None) -> int:
    """GPUs that can be had; on a CPU, processes that are no burden. Of a cluster, what it has is its own answer."""
    if ray_address is not None:
        return sys.maxsize
    if device == "cpu":
        return _MAX_CPU_PROCESSES
    from torch import cuda

    return cuda.device_count()


@contextmanager
def joined_ray() -> Iterator[None]:
    """Settings for somebody else's Ray: its token is where RAY_AUTH_TOKEN_PATH says."""
    os.environ.update(RAY_ENVIRONMENT)
    yield


@contextmanager
def private_ray() -> Iterator[None]:
    """Settings of a Ray for this process alone, with a token of its own in a file only this user can read."""
    folder = Path(tempfile.mkdtemp(prefix="megarl-ray-"))
    token = folder / "token"
    token.touch(mode=0o600)
    token.write_text(_token())
    os.environ.update({**RAY_ENVIRONMENT, **LOCAL_RAY_ENVIRONMENT, RAY_AUTH_TOKEN_PATH.name: str(token)})
    try:
        yield
    finally:
        shutil.rmtree(folder, ignore_errors=True)


@cache
def _token() -> str:
    """One for all that this process starts: Ray reads its token once, and a second Ray with another would refuse us."""
    return secrets.token_hex(32)
