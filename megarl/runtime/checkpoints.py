"""Where a run keeps its models: `<run>/checkpoints/step_N/model`, and `latest` beside them."""

from __future__ import annotations

from pathlib import Path

from megarl.config.recipe import Recipe
from megarl.runtime.ranks import Ranks

LATEST = "latest"


async def save_model(recipe: Recipe, ranks: Ranks, *, step: int) -> Path:
    """Write the weights as a Hugging Face folder, all ranks together, then point `latest` at the step."""
    checkpoints = recipe.run_folder.absolute() / "checkpoints"
    folder = checkpoints / f"step_{step:06d}" / "model"
    folder.parent.mkdir(parents=True, exist_ok=True)
    await ranks.save(folder, recipe.model.path.absolute())
    # A new link renamed over the old one: whoever looks finds one of the two, never neither.
    link = checkpoints / f"{LATEST}.tmp"
    link.unlink(missing_ok=True)
    link.symlink_to(folder.parent.name)
    link.rename(checkpoints / LATEST)
    return folder
