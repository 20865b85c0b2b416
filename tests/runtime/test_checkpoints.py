"""The saver against ranks that write one small file: when it saves, what it says, and what a failure does."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import cast

import numpy as np
import pytest

from megarl.algo.algorithm import build_algorithm
from megarl.algo.monitor import MonitorState
from megarl.checkpoint.folder import list_checkpoints
from megarl.checkpoint.manifest import Contents, FileDigest, digest_file, verify
from megarl.checkpoint.state import TrainerState, read_state
from megarl.config.recipe import Recipe
from megarl.data.stream import PromptStream
from megarl.errors import CheckpointError, PreemptedError
from megarl.observe.events import CheckpointSaved, Warned
from megarl.observe.observer import Observer
from megarl.runtime.checkpoints import RunSaver
from megarl.runtime.preemption import Preemption
from megarl.runtime.ranks import ActorRanks
from megarl.types import Prompt
from tests.checkpoint.test_identity import make_recipe
from tests.observe.samples import ListSink
from tests.weights.reference import make_shape

TENSORS = "model/model.safetensors"


class FakeRanks:
    def __init__(self, failures: dict[int, Exception]) -> None:
        self.num_steps = 0
        self._failures = failures

    async def save(
        self, folder: Path, source_folder: Path, contents: Contents
    ) -> tuple[dict[str, FileDigest], TrainerState]:
        if self.num_steps in self._failures:
            raise self._failures[self.num_steps]
        path = folder / TENSORS
        path.parent.mkdir()
        path.write_bytes(b"tensors")
        state = TrainerState(num_steps=self.num_steps, num_updates=2 * self.num_steps, monitor=MonitorState())
        return {TENSORS: digest_file(path)}, state


class FakeRun:
    def __init__(self, recipe: Recipe, failures: dict[int, Exception] | None = None) -> None:
        self.display = ListSink()
        self.ranks = FakeRanks(failures or {})
        prompt = Prompt(
            uid="0",
            position=0,
            epoch=0,
            token_ids=np.zeros(1, np.int32),
            data_source="",
            ground_truth="",
            extra_info={},
        )
        self.prompts = PromptStream([prompt], seed=1)
        self.recipe = recipe
        self.leaves_after = -1

    def run(self) -> None:
        asyncio.run(self._run())

    async def _run(self) -> None:
        task = asyncio.current_task()
        assert task is not None
        preemption = Preemption(cast("asyncio.Task[None]", task), grace_s=60)
        preemption.begin_steps()
        saver = RunSaver(
            self.recipe,
            shape=make_shape(),
            actor=cast("ActorRanks", self.ranks),
            critic=None,
            algorithm=build_algorithm(self.recipe.algorithm, max_response_tokens=8),
            prompts=self.prompts,
            data_digest="of the data",
            preemption=preemption,
            observer=Observer([self.display]),
        )
        for step in range(1, self.recipe.run.steps + 1):
            self.ranks.num_steps = step
            for _ in range(self.recipe.train.prompts_per_step):
                self.prompts.next()
            if step == self.leaves_after:
                preemption.request()
            await saver.after_step(step, is_last=step == self.recipe.run.steps)

    @property
    def saved(self) -> list[int]:
        paths = [event.path for event in self.display.events if isinstance(event, CheckpointSaved)]
        return [int(path.rpartition("_")[2]) for path in paths]

    @property
    def warnings(self) -> list[str]:
        return [event.text for event in self.display.events if isinstance(event, Warned)]


def recipe_in(folder: Path, **checkpoint: object) -> Recipe:
    return make_recipe(run={"name": "sample", "steps": 5, "folder": folder}, checkpoint=checkpoint)


@pytest.mark.parametrize(
    ("checkpoint", "expected"),
    [
        ({"save_every_steps": 2}, [2, 4, 5]),
        ({"save_every_steps": 2, "save_at_end": False}, [2, 4]),
        ({"save_every_steps": 5, "save_at_end": False}, []),
        ({"save_every_steps": None}, [5]),
        ({}, [5]),
    ],
)
def test_it_saves_when_the_recipe_says(tmp_path: Path, checkpoint: dict[str, object], expected: list[int]) -> None:
    fake = FakeRun(recipe_in(tmp_path, **checkpoint))
    fake.run()
    assert fake.saved == expected


def test_a_checkpoint_verifies_and_says_where_the_run_stood(tmp_path: Path) -> None:
    fake = FakeRun(recipe_in(tmp_path, save_every_steps=3))
    fake.run()
    folder = tmp_path / "sample" / "checkpoints" / "step_000003"
    manifest = verify(folder)
    assert set(manifest.files) == {TENSORS, "state.json"}
    assert (manifest.step, manifest.contents) == (3, "everything")
    state = read_state(folder)
    assert (state.prompt_cursor, state.trainer.num_updates, state.data_digest) == (24, 6, "of the data")


def test_only_the_last_ones_are_kept(tmp_path: Path) -> None:
    FakeRun(recipe_in(tmp_path, save_every_steps=1, keep_last=2)).run()
    kept = list_checkpoints(tmp_path / "sample" / "checkpoints")
    assert [path.name for path in kept] == ["step_000005", "step_000004"]


@pytest.mark.parametrize("error", [CheckpointError("no room"), OSError("no room")])
def test_a_failed_save_is_told_and_training_goes_on(tmp_path: Path, error: Exception) -> None:
    fake = FakeRun(recipe_in(tmp_path, save_every_steps=2), failures={2: error})
    fake.run()
    assert fake.saved == [4, 5]
    assert fake.warnings == ["step 2 was not saved, training goes on: no room"]
    assert list((tmp_path / "sample" / "checkpoints").glob("*.tmp")) == []


def test_the_last_save_must_not_fail(tmp_path: Path) -> None:
    fake = FakeRun(recipe_in(tmp_path), failures={5: CheckpointError("no room")})
    with pytest.raises(CheckpointError, match="the run is done, but its last step was not saved: no room"):
        fake.run()


def test_a_run_that_is_asked_to_leave_saves_its_step_first(tmp_path: Path) -> None:
    fake = FakeRun(recipe_in(tmp_path))
    fake.leaves_after = 3
    with pytest.raises(PreemptedError, match="after step 3: saved"):
        fake.run()
    assert fake.saved == [3]


def test_a_run_that_cannot_save_leaves_all_the_same(tmp_path: Path) -> None:
    fake = FakeRun(recipe_in(tmp_path), failures={3: CheckpointError("no room")})
    fake.leaves_after = 3
    with pytest.raises(PreemptedError, match="after step 3: not saved: no room"):
        fake.run()


def test_a_run_that_is_asked_to_leave_after_its_last_step_is_done(tmp_path: Path) -> None:
    fake = FakeRun(recipe_in(tmp_path))
    fake.leaves_after = 5
    fake.run()
    assert fake.saved == [5]
