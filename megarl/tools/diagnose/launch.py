"""The entry of `megarl diagnose mismatch`: settles what Ray reads when it is imported, then runs the comparison."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from megarl.checkpoint.manifest import MODEL_FOLDER, verify
from megarl.config.recipe import Recipe
from megarl.runtime.launch import ray_address_of, ray_environment
from megarl.tools.diagnose.one_copy import one_copy

if TYPE_CHECKING:
    from megarl.tools.diagnose.diagnosis import Diagnosis

_DIAGNOSE_FOLDER = "diagnose"
"""Inside the folder of the run."""
_MAX_CPU_PROCESSES = 8


def diagnose(
    recipe: Recipe, *, question: str | int, checkpoint: Path | None, on_start: Callable[[Recipe, Sequence[str]], None]
) -> Diagnosis:
    """Compare trainer and engine of a recipe on a text or on a row of its data, with its model or a checkpoint's.

    `on_start` receives the recipe that is started and notes on how it differs from the given one.
    """
    address = ray_address_of(recipe.run)
    if checkpoint is not None:
        verify(checkpoint)
        recipe = recipe.model_copy(
            update={"model": recipe.model.model_copy(update={"path": checkpoint / MODEL_FOLDER})}
        )
    small = one_copy(recipe, name=_DIAGNOSE_FOLDER, num_devices=_num_devices(recipe.run.device, address))
    on_start(small.recipe, small.notes)
    with ray_environment(address):
        from megarl.tools.diagnose.run import run_diagnosis  # noqa: PLC0415

        return run_diagnosis(recipe, small.recipe, question, ray_address=address)


def _num_devices(device: str, ray_address: str | None) -> int:
    """Return the number of GPUs of this machine, a small number of processes on CPU, no limit on a cluster."""
    if ray_address is not None:
        return sys.maxsize
    if device == "cpu":
        return _MAX_CPU_PROCESSES
    from torch import cuda  # noqa: PLC0415

    return cuda.device_count()
