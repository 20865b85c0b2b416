"""megarl: Megatron trains, SGLang generates, and weights go from one to the other without gathering the model.

`train`, `plan`, `load`, `load_run`, `Recipe` and `Result` are the Python interface (docs/api.md). They are loaded when
they are first used, so that `import megarl` costs nothing.
"""

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from megarl.api import PlanAnswer, Recipe, Result, StepSummary, load, load_run, plan, train

__version__ = "0.1.0"
__all__ = ("PlanAnswer", "Recipe", "Result", "StepSummary", "__version__", "load", "load_run", "plan", "train")


def __getattr__(name: str) -> object:
    if name in __all__:
        return getattr(import_module("megarl.api"), name)
    raise AttributeError(f"module 'megarl' has no attribute {name!r}")
