"""megarl: Megatron trains, SGLang generates, and weights go from one to the other without gathering the model.

`train`, `plan`, `load`, `load_run`, `Recipe` and `Result` are the Python interface (docs/api.md). They are loaded when
they are first used, so that `import megarl` costs nothing.
"""

import sys
from importlib import import_module
from types import ModuleType
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from megarl.api import PlanAnswer, Recipe, Result, StepSummary, load, load_run, plan, train

__version__ = "0.2.0"
__all__ = ("PlanAnswer", "Recipe", "Result", "StepSummary", "__version__", "load", "load_run", "plan", "train")


class _Package(ModuleType):
    """Keeps `megarl.train` the function: an import of the subpackage of that name would put it in its place."""

    @property
    def train(self) -> object:
        return import_module("megarl.api").train

    @train.setter
    def train(self, _subpackage: ModuleType) -> None: ...


sys.modules[__name__].__class__ = _Package


def __getattr__(name: str) -> object:
    if name in __all__:
        return getattr(import_module("megarl.api"), name)
    raise AttributeError(f"module 'megarl' has no attribute {name!r}")
