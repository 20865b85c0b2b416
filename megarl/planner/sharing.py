"""Whether a model computes the common beginnings of rows once, and what that saves."""

from __future__ import annotations

from megarl.config.recipe import TrainConfig
from megarl.config.roles import ModelParallelConfig
from megarl.families.shape import ModelShape


def sharing_obstacle(train: TrainConfig, split: ModelParallelConfig, shape: ModelShape) -> str | None:
    """Return why rows stay apart; None where their common beginnings are computed once."""
    if not train.share_prefixes:
        return "train.share_prefixes is false"
    if split.context > 1:
        return f"{split.context} context-parallel ranks divide each row"
    if shape.delta_layers:
        return "delta nets carry a state from token to token"
    return None
