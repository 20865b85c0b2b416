from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import TypeAlias, cast

import pytest

from megarl.checkpoint.folder import CHECKPOINTS_FOLDER
from megarl.checkpoint.manifest import digest_file, read_manifest
from megarl.checkpoint.resume import Decision, Ledger, ResumePoint, open_complete, read_state
from megarl.config.lora import LoraConfig
from megarl.config.model import read_model_shape
from megarl.config.recipe import ModelConfig, Recipe
from megarl.errors import CheckpointError
from megarl.families.shape import ModelShape
from megarl.run.inputs import Inputs
from megarl.run.resume import checked_resume_point, choose, is_of_run, last_good
from tests.checkpoint.samples import DATA_DIGEST, make_recipe, write_checkpoint
from tests.tiny_models import write_random_adapter, write_tiny_model

Fit: TypeAlias = tuple[ResumePoint, list[str]]
"""Where the run goes on, and what people are told."""


def recipe_in(folder: Path, *, name: str = "sample") -> Recipe:
    return make_recipe(run={"name": name, "steps": 9, "folder": folder})


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    recipe = recipe_in(tmp_path)
    return write_checkpoint(recipe.run_folder / CHECKPOINTS_FOLDER, 4, recipe=recipe)


def test_a_run_goes_on_by_itself_unless_told_not_to(tmp_path: Path, saved: Path) -> None:
    decision = choose(recipe_in(tmp_path), "auto")
    assert decision.point is not None
    assert decision.point.folder == saved
    assert choose(recipe_in(tmp_path), "never") == Decision(point=None)


def test_a_run_of_another_name_can_go_on_from_a_checkpoint_but_does_not_own_it(tmp_path: Path, saved: Path) -> None:
    other = recipe_in(tmp_path, name="other")
    assert choose(other, "auto").point is None
    point = choose(other, saved.with_name("latest")).point
    assert point is not None
    assert point.folder.name == "step_000004"
    assert not is_of_run(point, other.run_folder)
    assert is_of_run(point, recipe_in(tmp_path).run_folder)


@pytest.fixture
def model(tmp_path: Path) -> tuple[Path, ModelShape]:
    folder = tmp_path / "model"
    shape = write_tiny_model(folder, "qwen2", layers=1)
    (folder / "tokenizer.json").write_text("{}")
    return folder, shape


@pytest.fixture
def point(saved: Path, model: tuple[Path, ModelShape]) -> ResumePoint:
    """A checkpoint of that model."""
    for name in ("config.json", "tokenizer.json"):
        (saved / "model" / name).write_bytes((model[0] / name).read_bytes())
    manifest = read_manifest(saved)
    files = {name: digest_file(saved / name) for name in manifest.files}
    return ResumePoint(folder=saved, manifest=replace(manifest, files=files), state=read_state(saved))


def fit(
    point: ResumePoint,
    model: tuple[Path, ModelShape],
    *,
    data: str = DATA_DIGEST,
    tools: str | None = None,
    allows: bool = False,
    lora: LoraConfig | None = None,
) -> Fit:
    warnings: list[str] = []
    point = checked_resume_point(
        point,
        model=ModelConfig(path=model[0], lora=lora),
        inputs=cast("Inputs", SimpleNamespace(shape=model[1], train=SimpleNamespace(digest=data), tools_digest=tools)),
        allows_data_change=allows,
        warn=warnings.append,
    )
    return point, warnings


@pytest.mark.parametrize("allows", [False, True])
def test_the_same_model_and_data_fit(point: ResumePoint, model: tuple[Path, ModelShape], *, allows: bool) -> None:
    assert fit(point, model, allows=allows) == (point, [])


def test_tools_that_changed_between_two_starts_are_refused(point: ResumePoint, model: tuple[Path, ModelShape]) -> None:
    point = replace(point, state=replace(point.state, tools_digest="of the tools"))
    assert fit(point, model, tools="of the tools") == (point, [])
    with pytest.raises(CheckpointError, match=r"environment: not the tools .* start anew with --resume never"):
        fit(point, model, tools="of others")


def test_another_model_is_refused(point: ResumePoint, tmp_path: Path) -> None:
    write_tiny_model(tmp_path / "other", "qwen2", layers=2)
    with pytest.raises(CheckpointError, match=r"not the model .* start anew with --resume never"):
        fit(point, (tmp_path / "other", read_model_shape(tmp_path / "other")), allows=True)


def test_a_run_of_an_adapter_goes_on_from_an_adapter_of_its_base(
    point: ResumePoint, model: tuple[Path, ModelShape], tmp_path: Path
) -> None:
    lora = LoraConfig(rank=4, alpha=6, modules=("q_proj", "o_proj"))
    with pytest.raises(CheckpointError, match="not the model"):
        fit(point, model, lora=lora)
    (point.folder / "model" / "config.json").unlink()
    write_random_adapter(point.folder / "model", model[0], lora.modules, rank=4, alpha=6)
    assert fit(point, model, lora=lora) == (point, [])
    other = write_tiny_model(tmp_path / "other", "qwen2", layers=2)
    for wrong in (None, lora.model_copy(update={"rank": 8}), lora.model_copy(update={"modules": ("q_proj",)})):
        with pytest.raises(CheckpointError, match="not the model"):
            fit(point, model, lora=wrong)
    with pytest.raises(CheckpointError, match="not the model"):
        fit(point, (model[0], other), lora=lora)


def test_another_tokenizer_is_refused(point: ResumePoint, model: tuple[Path, ModelShape]) -> None:
    (model[0] / "tokenizer.json").write_text('{"added": 1}')
    with pytest.raises(CheckpointError, match=r"tokenizer\.json: not the tokenizer"):
        fit(point, model, allows=True)


def test_other_prompts_are_refused_with_the_way_out(point: ResumePoint, model: tuple[Path, ModelShape]) -> None:
    with pytest.raises(CheckpointError, match=r"data\.train: not the prompts .* --allow-data-change"):
        fit(point, model, data="of other data")


def test_other_prompts_start_with_their_first_where_they_are_allowed(
    point: ResumePoint, model: tuple[Path, ModelShape]
) -> None:
    found, (warning,) = fit(point, model, data="of other data", allows=True)
    assert (found.state.prompt_cursor, found.state.ledger) == (0, Ledger())
    assert found.state.trainer == point.state.trainer
    assert "the new ones start with their first epoch" in warning


def go_on(recipe: Recipe, *saved_steps: int, first: ResumePoint | None = None) -> tuple[ResumePoint | None, list[str]]:
    notes: list[str] = []
    return last_good(recipe, first=first, saved_steps=saved_steps, warn=notes.append), notes


def test_lost_ranks_go_on_from_the_newest_checkpoint_of_this_run(tmp_path: Path) -> None:
    recipe = recipe_in(tmp_path)
    parent = recipe.run_folder / CHECKPOINTS_FOLDER
    for step in (2, 4, 6):
        write_checkpoint(parent, step)
    # Step 6 is of a run that went further from step 2; step 3 was removed when step 4 was there.
    point, notes = go_on(recipe, 3, 4)
    assert point is not None
    assert (point.step, notes) == (4, [])


def test_a_checkpoint_that_does_not_verify_is_skipped_and_told(tmp_path: Path) -> None:
    recipe = recipe_in(tmp_path)
    parent = recipe.run_folder / CHECKPOINTS_FOLDER
    for step in (2, 4):
        write_checkpoint(parent, step)
    (parent / "step_000004" / "state.json").unlink()
    point, (note,) = go_on(recipe, 2, 4)
    assert point is not None
    assert point.step == 2
    assert "step_000004" in note


def test_what_ranks_found_damaged_is_not_chosen_again(tmp_path: Path, saved: Path) -> None:
    recipe = recipe_in(tmp_path)
    write_checkpoint(saved.parent, 2, recipe=recipe)
    write_checkpoint(saved.parent, 4, recipe=recipe)
    point = choose(recipe, "auto", damaged={saved}).point
    assert point is not None
    assert point.step == 2
    with pytest.raises(CheckpointError, match=r"step_000004: damaged; name an earlier one"):
        choose(recipe, saved, damaged={saved.resolve()})
    point = last_good(recipe, first=None, saved_steps=(2, 4), warn=lambda _: None, damaged={saved})
    assert point is not None
    assert point.step == 2


def test_without_one_of_their_own_they_go_on_where_the_run_began(tmp_path: Path) -> None:
    recipe = recipe_in(tmp_path)
    assert go_on(recipe) == (None, [])
    first = open_complete(write_checkpoint(tmp_path / "elsewhere", 2))
    assert go_on(recipe, first=first) == (first, [])


def test_a_beginning_that_is_gone_is_said(tmp_path: Path) -> None:
    recipe = recipe_in(tmp_path)
    first = open_complete(write_checkpoint(tmp_path / "elsewhere", 2))
    gone = replace(first, folder=tmp_path / "gone")
    with pytest.raises(CheckpointError, match="the run resumed from it, and it is gone"):
        go_on(recipe, first=gone)
