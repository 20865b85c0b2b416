from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import pytest
from pydantic import JsonValue

from megarl.checkpoint.resume import Decision, decide, identity_digest, list_changes, open_named
from megarl.config.recipe import Recipe
from megarl.errors import CheckpointError, FinishedError
from tests.checkpoint.samples import make_recipe, run_state, write_checkpoint


def dumped(recipe: Recipe) -> dict[str, JsonValue]:
    return recipe.model_dump(mode="json")


RECIPE = dumped(make_recipe())


def decide_in(parent: Path, *, num_steps: int = 10) -> Decision:
    return decide(parent, recipe=RECIPE, num_steps=num_steps)


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


def test_where_all_are_damaged_it_is_for_people_to_decide(tmp_path: Path) -> None:
    for step in (2, 4):
        (write_checkpoint(tmp_path, step) / "state.json").write_text("{}")
    with pytest.raises(CheckpointError, match="--resume never") as caught:
        decide_in(tmp_path)
    assert caught.value.exit_code == 4
    assert "step_000002" in str(caught.value)
    assert "step_000004" in str(caught.value)


def test_a_changed_recipe_is_refused_key_by_key_with_a_path_that_exists(tmp_path: Path) -> None:
    folder = write_checkpoint(tmp_path, 4)
    changed = make_recipe(train={"prompts_per_step": 8, "optimizer": {"learning_rate": 1e-4}}, model={"path": "other"})
    with pytest.raises(CheckpointError) as caught:
        decide(tmp_path, recipe=dumped(changed), num_steps=10)
    message = str(caught.value)
    assert f"{folder} was made with another recipe: " in message
    assert "train.optimizer.learning_rate is 0.0001, was 1e-06" in message
    assert "model.path is other, was model" in message
    named = message.partition("--resume ")[2].partition(",")[0]
    assert Path(named) == folder
    assert folder.exists()


def test_a_finished_run_is_left_as_it_is(tmp_path: Path) -> None:
    write_checkpoint(tmp_path, 4)
    with pytest.raises(FinishedError, match=r"step 4 of 4; raise run\.steps to train on.*--resume never"):
        decide_in(tmp_path, num_steps=4)


def test_a_checkpoint_of_weights_alone_is_refused_with_the_way_out(tmp_path: Path) -> None:
    folder = write_checkpoint(tmp_path, 4, contents="weights")
    with pytest.raises(CheckpointError, match=f"has only weights.*model.path={folder}/model"):
        decide_in(tmp_path)


def test_a_key_that_the_checkpoint_does_not_know_counts_as_its_default(tmp_path: Path) -> None:
    before = dumped(make_recipe())
    sampling = before["sampling"]
    assert isinstance(sampling, dict)
    del sampling["temperature"]
    assert list_changes(before, RECIPE) == []
    assert list_changes(before, dumped(make_recipe(sampling={"temperature": 0.5}))) == [
        "sampling.temperature is 0.5, was 1.0"
    ]


def test_the_same_model_by_another_path_is_no_change() -> None:
    assert list_changes(RECIPE, dumped(make_recipe(model={"path": Path("model").resolve()}))) == []


@pytest.mark.parametrize("learns", [False, True])
def test_a_draft_that_learns_is_in_the_checkpoint_and_another_folder_is_not(learns: bool) -> None:
    def recipe(path: str) -> Mapping[str, JsonValue]:
        roles: dict[str, object] = {
            "actor": {"pool": "train"},
            "rollout": {"pool": "train", "draft": {"kind": "model", "path": path}},
        }
        return dumped(make_recipe(roles=roles | ({"drafter": {"pool": "train"}} if learns else {})))

    changes = list_changes(recipe("small"), recipe("other"))
    assert changes == (["roles.rollout.draft.path is other, was small"] if learns else [])


def test_a_checkpoint_that_was_asked_for_is_taken_with_another_recipe(tmp_path: Path) -> None:
    folder = write_checkpoint(tmp_path, 4)
    other = dumped(make_recipe(model={"path": "elsewhere"}, train={"prompts_per_step": 16}))
    decision = open_named(folder, recipe=other, num_steps=10)
    assert decision.point is not None
    assert decision.notes == (
        f"train.prompts_per_step is 16, was 8, unlike in {folder}",
        f"model.path is elsewhere, was model, unlike in {folder}",
        f"model.path is not read: weights and optimizer are those of {folder}",
    )


def test_a_checkpoint_that_was_asked_for_and_cannot_be_used_is_an_error(tmp_path: Path) -> None:
    finished, weights = write_checkpoint(tmp_path, 4), write_checkpoint(tmp_path, 5, contents="weights")
    with pytest.raises(CheckpointError, match=r"raise run\.steps"):
        open_named(finished, recipe=RECIPE, num_steps=4)
    with pytest.raises(CheckpointError, match=r"model\.path="):
        open_named(weights, recipe=RECIPE, num_steps=9)
    (finished / "state.json").unlink()
    with pytest.raises(CheckpointError, match="cannot be read"):
        open_named(finished, recipe=RECIPE, num_steps=9)


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
