"""The recipe: its schema, how it is read, and what can be wrong with it. Neither torch nor an engine is imported."""

from megarl.config.load import load_recipe, read_recipe
from megarl.config.model import ModelShape, read_model_shape
from megarl.config.recipe import Recipe

__all__ = ["ModelShape", "Recipe", "load_recipe", "read_model_shape", "read_recipe"]
