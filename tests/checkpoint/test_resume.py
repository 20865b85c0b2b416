from __future__ import annotations

from pathlib import Path

import pytest

from megarl.checkpoint.resume import Decision, decide, identity_digest, open_named
from megarl.config.recipe import Recipe
from megarl.errors import CheckpointError
from tests.checkpoint.samples import RECIPE_DIGEST, make_recipe, run_state, write_checkpoint


def decide_in(parent: Path, *, recipe_digest: str = RECIPE_DIGEST, num_steps: int = 10) -> Decision:
    return decide(parent, recipe_digest=recipe_digest, num_steps=num_steps)


def test_a_run_goes_on_from_its_newest_checkpoint(tmp_path: Path) -> None:
    for step in (2, 4):
        write_checkpoint(tmp_path, step)
    decision = decide_in(tmp_path)
    assert decision.point is not None
    assert decision.point.folder.name == "step_000004"
    assert decision.point.state == run_state(4)
    assert decision.notes == ()


def test_a_run_without_checkpoints_starts_anew(tmp_path: Path) -> None:
    assert decide_in(tmp_path / "nowhere") == Decision(point=None)


@pytest.mark.parametrize("name", ["manifest.json", "state.json", "model/config.json"])
def test_a_damaged_checkpoint_is_skipped_and_people_are_told(tmp_path: Path, name: str) -> None:
    for step in (2, 4):
        write_checkpoint(tmp_path, step)
    (tmp_path / "step_000004" / name).unlink()
    decision = decide_in(tmp_path)
    assert decision.point is not None
    assert decision.point.folder.name == "step_000002"
    (note,) = decision.notes
    assert "skipped" in note
    assert "step_000004" in note
    assert name in note


def test_what_ranks_found_damaged_is_passed_over(tmp_path: Path) -> None:
    folders = [write_checkpoint(tmp_path, step) for step in (2, 4)]
    chosen = decide(tmp_path, recipe_digest=RECIPE_DIGEST, num_steps=10, damaged=folders[1:])
    assert chosen.point is not None
    assert chosen.point.step == 2
    with pytest.raises(CheckpointError, match="--resume never"):
        decide(tmp_path, recipe_digest=RECIPE_DIGEST, num_steps=10, damaged=folders)


def test_where_all_are_damaged_it_is_for_people_to_decide(tmp_path: Path) -> None:
    for step in (2, 4):
        (write_checkpoint(tmp_path, step) / "state.json").write_text("{}")
    with pytest.raises(CheckpointError, match="--resume never") as caught:
        decide_in(tmp_path)
    assert caught.value.exit_code == 4
    assert "step_000002" in str(caught.value)
    assert "step_000004" in str(caught.value)


@pytest.mark.parametrize(
    ("contents", "recipe_digest", "num_steps", "reason"),
    [
        ("everything", "another", 10, "another recipe"),
        ("everything", RECIPE_DIGEST, 4, "was finished"),
        ("weights", RECIPE_DIGEST, 10, "only weights"),
    ],
)
def test_a_run_starts_anew_and_says_why(
    tmp_path: Path, contents: str, recipe_digest: str, num_steps: int, reason: str
) -> None:
    write_checkpoint(tmp_path, 4, contents="weights" if contents == "weights" else "everything")
    decision = decide_in(tmp_path, recipe_digest=recipe_digest, num_steps=num_steps)
    assert decision.point is None
    (note,) = decision.notes
    assert reason in note


def test_a_checkpoint_that_was_asked_for_is_taken_with_another_recipe(tmp_path: Path) -> None:
    folder = write_checkpoint(tmp_path, 4)
    decision = open_named(folder, recipe_digest="another", num_steps=10)
    assert decision.point is not None
    assert decision.notes == (f"the recipe differs from the one {folder} was made with",)


def test_a_checkpoint_that_was_asked_for_and_cannot_be_used_is_an_error(tmp_path: Path) -> None:
    finished, weights = write_checkpoint(tmp_path, 4), write_checkpoint(tmp_path, 5, contents="weights")
    with pytest.raises(CheckpointError, match=r"raise run\.steps"):
        open_named(finished, recipe_digest=RECIPE_DIGEST, num_steps=4)
    with pytest.raises(CheckpointError, match=r"model\.path="):
        open_named(weights, recipe_digest=RECIPE_DIGEST, num_steps=9)
    (finished / "state.json").unlink()
    with pytest.raises(CheckpointError, match="cannot be read"):
        open_named(finished, recipe_digest=RECIPE_DIGEST, num_steps=9)


def digest_of(recipe: Recipe) -> str:
    return identity_digest(recipe.model_dump(mode="json"))


@pytest.mark.parametrize(
    "sections",
    [
        {"run": {"name": "other", "steps": 9, "device": "cpu", "folder": Path("elsewhere")}},
        {"pools": {"gpus": {"gpus_per_node": 8}}, "roles": {"actor": {"pool": "gpus", "tensor": 4, "pipeline": 2}}},
        {"train": {"prompts_per_step": 8, "tokens_per_micro_batch": 100, "operation_timeout_s": 5}},
        {"checkpoint": {"keep_last": 7}},
        {"data": {"train": ["moved/train.parquet"]}},
    ],
)
def test_layout_length_and_places_may_change(sections: dict[str, object]) -> None:
    assert digest_of(make_recipe(**sections)) == digest_of(make_recipe())


@pytest.mark.parametrize(
    "sections",
    [
        {"run": {"name": "sample", "steps": 2, "seed": 5}},
        {"train": {"prompts_per_step": 16}},
        {"train": {"prompts_per_step": 8, "optimizer": {"learning_rate": 1e-3}}},
        {"algorithm": {"kind": "grpo"}},
        {"sampling": {"temperature": 0.5}},
        {"data": {"train": ["train.parquet"], "is_shuffled": False}},
    ],
)
def test_what_is_trained_on_and_how_may_not(sections: dict[str, object]) -> None:
    assert digest_of(make_recipe(**sections)) != digest_of(make_recipe())
