"""Whether what a recipe logs to is installed. Looks for packages without importing them."""

from __future__ import annotations

from collections.abc import Iterator
from importlib.util import find_spec

from megarl.config.recipe import ObserveConfig
from megarl.errors import Problem

_PACKAGES = {"tensorboard": "tensorboardX", "wandb": "wandb", "mlflow": "mlflow"}
"""By key of the recipe's section, which is also the name of the extra."""


def check_loggers(observe: ObserveConfig) -> Iterator[Problem]:
    wanted = {"tensorboard": observe.tensorboard, "wandb": observe.wandb, "mlflow": observe.mlflow}
    for key, config in wanted.items():
        package = _PACKAGES[key]
        if config is not None and find_spec(package) is None:
            yield Problem(
                key=f"observe.{key}",
                message=f"{package} is not installed; run `pip install 'megarl[{key}]'` or remove the key",
            )
