"""Saves that are killed or fail at every named point: the newest valid checkpoint is used, and no leftover stays."""

from __future__ import annotations

import re
from pathlib import Path
from typing import get_args

import pytest
import torch
from safetensors.torch import load_file

from megarl.checkpoint.folder import CHECKPOINTS_FOLDER, list_checkpoints
from megarl.checkpoint.manifest import verify
from megarl.checkpoint.resume import decide
from megarl.config.recipe import Recipe
from megarl.system.fault_points import SavePoint
from tests.checkpoint.local_run import train, train_with_accidents
from tests.checkpoint.samples import make_recipe
from tests.processes import Outcome, run_processes
from tests.tiny_models import write_tiny_model

OF_RANKS = {"snapshot_taken", "ranks_met"}
"""Passed by Megatron's ranks alone: see tests/train/test_checkpoint.py."""
OF_THE_OLDER = {"doomed", "pruned"}
"""Passed by the checkpoint that is removed when another is complete."""
POINTS = [point for point in get_args(SavePoint) if point not in OF_RANKS]
COMPLETE_FROM = POINTS.index("renamed")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    write_tiny_model(folder, "qwen2", layers=1)
    return folder


def recipe_of(model: Path, folder: Path) -> Recipe:
    return make_recipe(
        run={"name": "sample", "steps": 9, "folder": folder},
        model={"path": model},
        checkpoint={"save_every_steps": 1, "keep_last": 1},
    )


def steps_in(recipe: Recipe) -> list[str]:
    return sorted(path.name for path in (recipe.run_folder / CHECKPOINTS_FOLDER).iterdir())


def run(
    recipe: Recipe, steps: list[int], *faults: dict[str, object], max_file_bytes: int | None = None
) -> Outcome[tuple[list[int], list[tuple[int, str]]]]:
    return run_processes([(train_with_accidents, (recipe, steps, list(faults), max_file_bytes))])[0]


def newest(recipe: Recipe) -> int:
    """Return the step that a run resumes from, after checking that its tensors are those of that step."""
    parent = recipe.run_folder / CHECKPOINTS_FOLDER
    point = decide(parent, recipe=recipe.model_dump(mode="json"), num_steps=9).point
    assert point is not None
    (moments,) = (point.folder / "optimizer" / "exp_avg").glob("*.safetensors")
    assert all(torch.equal(tensor, torch.full_like(tensor, point.step)) for tensor in load_file(moments).values())
    assert point.state.trainer.num_steps == point.step
    return point.step


@pytest.mark.patient
@pytest.mark.fault("kill -9 at every named point of a save", "`latest` verifies, no half checkpoint")
@pytest.mark.parametrize("point", POINTS)
def test_killed_at_any_point_of_a_save(model: Path, tmp_path: Path, point: str) -> None:
    recipe = recipe_of(model, tmp_path)
    step = 1 if point in OF_THE_OLDER else 2
    killed = run(recipe, [1, 2], {"point": point, "step": step, "kind": "kill"})
    assert killed.value is None
    assert killed.error is None

    found = newest(recipe)
    assert found == (2 if POINTS.index(point) >= COMPLETE_FROM else 1)
    assert (recipe.run_folder / CHECKPOINTS_FOLDER / "latest" / "manifest.json").exists()

    assert train(recipe, [3]) == ([3], [])
    assert newest(recipe) == 3
    assert steps_in(recipe) == ["latest", "latest_checkpointed_iteration.txt", "step_000003"]


@pytest.mark.fault("a disk that is full, read-only or broken", "the save fails loudly, the one before is untouched")
@pytest.mark.parametrize(
    ("point", "kind", "line"),
    [
        ("begun", "EROFS", "Read-only file system"),
        ("tensors_received", "EIO", "Input/output error"),
        ("file_written", "ENOSPC", "No space left on device"),
        ("companions_copied", "ENOSPC", "No space left on device"),
        ("state_written", "EFBIG", "File too large"),
        ("manifest_written", "EROFS", "Read-only file system"),
    ],
)
def test_a_failed_save_is_told_and_leaves_the_one_before_alone(
    model: Path, tmp_path: Path, point: str, kind: str, line: str
) -> None:
    recipe = recipe_of(model, tmp_path)
    saved, failed = run(recipe, [1, 2], {"point": point, "step": 2, "kind": kind}).get()
    assert saved == [1]
    ((step, reason),) = failed
    assert step == 2
    assert line in reason
    assert "\n" not in reason
    assert newest(recipe) == 1
    assert steps_in(recipe) == ["latest", "latest_checkpointed_iteration.txt", "step_000001"]


def test_a_file_that_the_system_refuses_to_make_longer(model: Path, tmp_path: Path) -> None:
    recipe = recipe_of(model, tmp_path)
    assert train(recipe, [1]) == ([1], [])
    saved, ((step, reason),) = run(recipe, [2], max_file_bytes=4096).get()
    assert (saved, step) == ([], 2)
    assert "File too large" in reason
    assert "step_000002" in reason
    assert newest(recipe) == 1


def test_weights_that_are_not_finite_are_not_saved(model: Path, tmp_path: Path) -> None:
    recipe = recipe_of(model, tmp_path)
    saved, ((step, reason),) = train(recipe, [1, 2], broken_step=2)
    assert (saved, step) == ([1], 2)
    assert re.search(
        r"step_000002\.\d+\.tmp/model was not saved: 1 of \d+ values of [\w.]+ are NaN or infinite", reason
    )
    assert newest(recipe) == 1


def test_a_checkpoint_of_a_whole_run_verifies(model: Path, tmp_path: Path) -> None:
    recipe = recipe_of(model, tmp_path)
    assert train(recipe, [1, 2, 3]) == ([1, 2, 3], [])
    (folder,) = list_checkpoints(recipe.run_folder / CHECKPOINTS_FOLDER)
    files = {str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file()}
    assert set(verify(folder).files) == files - {"manifest.json"}
