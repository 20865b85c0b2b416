"""What is known before the first step, or read from the machine when somebody looks: versions, recipe, memory, disk."""

from __future__ import annotations

import math
import platform
import shutil
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import psutil

from megarl import __version__
from megarl.config import Recipe
from megarl.observe import catalogue as names
from megarl.observe.meter import Meter

_DRIVER = "driver"


def state_facts(meter: Meter, recipe: Recipe) -> None:
    packages = (_version(name) for name in ("torch", "megatron-core", "sglang", "ray"))
    meter.set(names.BUILD_INFO, 1, __version__, platform.python_version(), *packages)
    meter.set(names.RUN_INFO, 1, recipe.algorithm.kind, str(recipe.model.path), recipe.run.device)
    meter.set(names.RUN_STEPS, recipe.run.steps)
    meter.set(names.RUN_GPUS, sum(pool.gpus for pool in recipe.pools.values()))
    meter.set(names.STALENESS_LIMIT, recipe.train.max_staleness)
    if recipe.checkpoint.save_every_steps is not None:
        meter.set(names.CHECKPOINT_INTERVAL, recipe.checkpoint.save_every_steps)
    folder = recipe.run_folder.absolute()
    meter.watch(names.CHECKPOINT_FREE, lambda: _free_bytes(folder))
    process = psutil.Process()
    meter.watch(names.RESIDENT, lambda: process.memory_info().rss, _DRIVER)
    meter.watch(names.HOST_AVAILABLE, lambda: psutil.virtual_memory().available, _DRIVER)
    meter.watch(names.HOST_TOTAL, lambda: psutil.virtual_memory().total, _DRIVER)


def _free_bytes(folder: Path) -> float:
    """Not a number where the folder is gone: one number that cannot be read must not take the others along."""
    try:
        return shutil.disk_usage(folder).free
    except OSError:
        return math.nan


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return "none"
