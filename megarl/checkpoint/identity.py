"""What must stay the same for a run to go on: the recipe without layout, length, paths and what only people see.

Model and data are not compared by path but by content, where they are read. Pure.
"""

from __future__ import annotations

import hashlib
import json

from pydantic import JsonValue

from megarl.config.recipe import Recipe

_KEPT: dict[str, set[str] | bool] = {
    "run": {"seed"},
    "data": {"is_shuffled", "max_prompt_tokens", "overlong_prompts"},
    "algorithm": True,
    "sampling": True,
    "reward": True,
    "train": {"prompts_per_step", "prompts_per_update", "max_staleness", "optimizer"},
}


def identity_of(recipe: Recipe) -> dict[str, JsonValue]:
    """The part of a recipe that decides what is trained on and how."""
    return recipe.model_dump(mode="json", include=_KEPT)


def digest_of(recipe: Recipe) -> str:
    return hashlib.sha256(json.dumps(identity_of(recipe), sort_keys=True).encode()).hexdigest()
