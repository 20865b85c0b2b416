"""The saver against ranks that write one small file: when it saves, what it says, and what a failure does."""

from __future__ import annotations

import asyncio
import shutil
import signal
from collections.abc import Sequence
from pathlib import Path
from typing import cast

import numpy as np
import pytest

from megarl.algo.algorithm import build_algorithm
from megarl.checkpoint.folder import list_checkpoints
from megarl.checkpoint.manifest import CRITIC_FOLDER, Contents, FileDigest, digest_file, verify
from megarl.checkpoint.resume import Ledger, RunState, TrainerState, read_state
from megarl.config.recipe import Recipe
from megarl.data.stream import PromptStream
from megarl.errors import CheckpointError, ConfigError, FleetError, PreemptedError, WorkerError
from megarl.observe.events import CheckpointFailed, CheckpointSaved
from megarl.observe.observer import Observer
from megarl.results import MonitorState
from megarl.run.buffer import Buffer
from megarl.run.checkpoint_writer import SavedModel
from megarl.run.preemption import Preemption
from megarl.run.saver import RunSaver
from megarl.types import PolicyVersion, Prompt
from tests.checkpoint.samples import make_recipe
from tests.observe.samples import ListSink, evaluated, scored_group
from tests.ranks.local_ranks import LocalRanks
from tests.weights.reference import make_shape

TENSORS = "model/model.safetensors"


class FakeRanks:
    """Their one weight is the number of steps they have taken."""

    def __init__(self, failures: dict[int, Exception], *, seconds: float) -> None:
        self.num_steps = 0
        self.num_writing = 0
        self.num_copies = 0
        self.is_busy = False
        self._failures = failures
        self._seconds = seconds
        self._snapshot = -1

    async def snapshot(self, contents: Contents) -> TrainerState:
        assert self.num_writing == 0, "one save at a time"
        assert not self.is_busy, "ranks that compute cannot copy"
        self.num_copies += 1
        self._snapshot = self.num_steps
        return TrainerState(num_steps=self.num_steps, num_updates=2 * self.num_steps, monitor=MonitorState())

    async def write(self, folder: Path, source_folder: Path) -> dict[str, FileDigest]:
        self.num_writing += 1
        weight = self._snapshot
        await asyncio.sleep(self._seconds)
        self.num_writing -= 1
        if weight in self._failures:
            raise self._failures[weight]
        path = folder / TENSORS
        path.parent.mkdir(parents=True)
        path.write_bytes(b"%d" % weight)
        return {TENSORS: digest_file(path)}


class FakeRun:
    """Steps of a loop that trains nothing; one prompt in five is dropped."""

    def __init__(
        self,
        recipe: Recipe,
        failures: dict[int, Exception] | None = None,
        *,
        save_seconds: float = 0.0,
        accuracies: Sequence[float] = (),
        resumed: RunState | None = None,
    ) -> None:
        self.display = ListSink()
        self.ranks = FakeRanks(failures or {}, seconds=save_seconds)
        self.critic: FakeRanks | None = None
        self.recipe = recipe
        self.leaves_after = -1
        self.leaves_in = -1
        """Asked to leave while it generates for this step."""
        self.fails_in = -1
        self.leaves_in_update = -1
        """Asked to leave while its ranks compute in this step; they would do so for long."""
        self.now = 0.0
        self.generating_s, self.computing_s = 0.0, 0.0
        """Seconds of each step, by the clock."""
        self.saved_at_trained: list[tuple[int, int]] = []
        """Step that was trained, newest checkpoint by then."""
        self._accuracies = accuracies
        self._resumed = resumed

    def run(self) -> None:
        asyncio.run(self._run())

    async def _run(self) -> None:
        task = asyncio.current_task()
        assert task is not None
        self.preemption = Preemption(cast("asyncio.Task[None]", task), grace_s=60)
        self.preemption.begin_steps()
        state = self._resumed
        first = 1 if state is None else state.trainer.num_steps + 1
        self.buffer = Buffer(prompts_per_step=self.recipe.train.prompts_per_step, max_staleness=0)
        self.prompts = PromptStream([PROMPT], seed=1, cursor=0 if state is None else state.prompt_cursor)
        models = {"": self._saved(self.ranks)}
        if self.critic is not None:
            models[CRITIC_FOLDER] = self._saved(self.critic)
        saver = RunSaver(
            self.recipe,
            models=models,
            algorithm=build_algorithm(self.recipe.algorithm, max_response_tokens=8),
            prompts=self.prompts,
            buffer=self.buffer,
            data_digest="of the data",
            preemption=self.preemption,
            observer=Observer([self.display]),
            resumed=state,
            clock=lambda: self.now,
        )
        async with saver:
            for step in range(first, self.recipe.run.total_steps + 1):
                await saver.unless_leaving(self._generate(step))
                await saver.unless_held(self._update(step))
                saver.mark(step)
                if step <= len(self._accuracies):
                    saver.evaluated(step, evaluated(step, self._accuracies[step - 1]).result)
                if step == self.leaves_after:
                    self.preemption.request(signal.SIGTERM)
                is_last = step == self.recipe.run.steps
                await saver.after_step(step, is_last=is_last)
                await self.buffer.release_step(PolicyVersion(0))
                self.saved_at_trained.append((step, self.saved[-1] if self.saved else 0))

    async def _update(self, step: int) -> None:
        self.now += self.computing_s
        both = [ranks for ranks in (self.ranks, self.critic) if ranks is not None]
        if step == self.leaves_in_update:
            for ranks in both:
                ranks.is_busy = True
            self.preemption.request(signal.SIGTERM)
            await asyncio.sleep(0.2)  # they may end it
        for ranks in both:
            ranks.num_steps, ranks.is_busy = step, False

    def _saved(self, ranks: FakeRanks) -> SavedModel:
        return SavedModel(ranks=LocalRanks(ranks), shape=make_shape(), source_folder=self.recipe.model.path)

    async def _generate(self, step: int) -> None:
        self.now += self.generating_s
        while len(self.buffer.counts.carried) < self.recipe.train.prompts_per_step:
            ticket, prompt = await self.buffer.reserve(), next(self.prompts)
            if step == self.leaves_in:
                self.preemption.request(signal.SIGUSR1)
                await asyncio.sleep(60)
            if step == self.fails_in:
                raise FleetError("no engine left")
            if prompt.position % 5 == 4:
                await self.buffer.give_up(ticket)
            else:
                await self.buffer.put(ticket, scored_group([1.0], lengths=[1], version=0))
        await self.buffer.take_step()

    @property
    def saved(self) -> list[int]:
        return [event.step for event in self.display.events if isinstance(event, CheckpointSaved)]

    @property
    def failures(self) -> list[tuple[int, str]]:
        return [(event.step, event.reason) for event in self.display.events if isinstance(event, CheckpointFailed)]

    @property
    def folder(self) -> Path:
        return self.recipe.run_folder / "checkpoints"

    @property
    def kept(self) -> list[str]:
        return [path.name for path in list_checkpoints(self.folder)]


PROMPT = Prompt(
    uid="0", position=0, epoch=0, token_ids=np.zeros(1, np.int32), data_source="", ground_truth="", extra_info={}
)


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
    folder = fake.folder / "step_000003"
    manifest = verify(folder)
    assert set(manifest.files) == {TENSORS, "state.json"}
    assert (manifest.step, manifest.contents) == (3, "everything")
    state = read_state(folder)
    assert (state.trainer.num_updates, state.data_digest) == (6, "of the data")
    assert state.ledger == Ledger(num_trained=24, num_dropped=5)
    assert state.prompt_cursor == state.ledger.num_drawn
    assert state.versions == (0,)


def test_the_ledger_goes_on_where_it_stood(tmp_path: Path) -> None:
    whole = FakeRun(recipe_in(tmp_path / "whole", save_every_steps=2, keep_last=9))
    whole.run()
    half = read_state(whole.folder / "step_000002")
    resumed = FakeRun(recipe_in(tmp_path / "half"), resumed=half)
    resumed.run()
    assert read_state(resumed.folder / "step_000005") == read_state(whole.folder / "step_000005")


def test_training_goes_on_behind_a_save_and_does_not_change_it(tmp_path: Path) -> None:
    fake = FakeRun(recipe_in(tmp_path, save_every_steps=2, keep_last=9), save_seconds=0.2)
    fake.run()
    assert fake.saved_at_trained == [(1, 0), (2, 0), (3, 0), (4, 2), (5, 5)]
    for step in (2, 4, 5):
        folder = fake.folder / f"step_{step:06d}"
        assert (folder / TENSORS).read_bytes() == b"%d" % step
        assert read_state(folder).ledger.num_trained == 8 * step
    events = {event.step: event for event in fake.display.events if isinstance(event, CheckpointSaved)}
    assert events[2].blocking_seconds < 0.2 <= events[2].seconds
    assert events[4].blocking_seconds > 0.1, "it waited for the save of step 2"


def test_a_second_model_is_saved_beside_the_first(tmp_path: Path) -> None:
    fake = FakeRun(recipe_in(tmp_path))
    fake.critic = FakeRanks({}, seconds=0.05)
    fake.run()
    assert set(verify(fake.folder / "latest").files) == {TENSORS, f"critic/{TENSORS}", "state.json"}


BEST = {"save_every_steps": 4, "keep_last": 1}


@pytest.mark.parametrize(
    ("keep_best", "accuracies", "saved", "kept"),
    [
        ({}, [0.1, 0.7, 0.3, 0.7, 0.2], [1, 2, 4, 5], ["step_000005", "step_000002"]),
        ({"mode": "min"}, [0.1, 0.7, 0.3, 0.7, 0.2], [1, 4, 5], ["step_000005", "step_000001"]),
        ({}, [0.1, float("nan"), 0.3], [1, 3, 4, 5], ["step_000005", "step_000003"]),
    ],
)
def test_the_best_one_is_saved_and_kept(
    tmp_path: Path, keep_best: dict[str, str], accuracies: list[float], saved: list[int], kept: list[str]
) -> None:
    fake = FakeRun(recipe_in(tmp_path, **BEST, keep_best=keep_best), accuracies=accuracies)
    fake.run()
    assert fake.saved == saved
    assert fake.kept == kept
    assert (fake.folder / "best").readlink() == Path(kept[-1])
    best = read_state(fake.folder / "latest").best
    assert best is not None
    assert kept[-1] == f"step_{best.step:06d}"


def test_the_best_one_is_remembered_by_a_run_that_goes_on(tmp_path: Path) -> None:
    recipe = recipe_in(tmp_path, **BEST, keep_best={})
    fake = FakeRun(recipe, accuracies=[0.1, 0.7, 0.3])
    fake.leaves_after = 3
    with pytest.raises(PreemptedError):
        fake.run()
    resumed = FakeRun(recipe, accuracies=[0, 0, 0, 0.6, 0.5], resumed=read_state(fake.folder / "latest"))
    resumed.run()
    assert resumed.kept == ["step_000005", "step_000002"]


def test_a_best_one_that_could_not_be_saved_is_not_the_best(tmp_path: Path) -> None:
    fake = FakeRun(recipe_in(tmp_path, **BEST, keep_best={}), {2: OSError("full")}, accuracies=[0.1, 0.7, 0.3])
    fake.run()
    assert fake.saved == [1, 3, 4, 5]
    assert fake.kept == ["step_000005", "step_000003"]


def test_a_metric_that_the_evaluation_does_not_have_is_a_mistake_of_the_recipe(tmp_path: Path) -> None:
    fake = FakeRun(recipe_in(tmp_path, keep_best={"metric": "pass@9"}), accuracies=[0.5])
    with pytest.raises(ConfigError, match=r"keep_best.metric: the evaluation has no pass@9; it has accuracy"):
        fake.run()


@pytest.mark.parametrize("error", [CheckpointError("no room"), OSError("no room")])
def test_a_failed_save_is_told_and_training_goes_on(tmp_path: Path, error: Exception) -> None:
    fake = FakeRun(recipe_in(tmp_path, save_every_steps=2), failures={2: error})
    fake.run()
    assert fake.saved == [4, 5]
    assert fake.failures == [(2, "no room")]
    assert list(fake.folder.glob("*.tmp")) == []


def test_a_disk_without_room_is_noticed_before_anything_is_copied(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shutil, "disk_usage", lambda path: shutil._ntuple_diskusage(10, 10, 0))  # type: ignore[attr-defined]
    fake = FakeRun(recipe_in(tmp_path, save_every_steps=2, save_at_end=False))
    fake.run()
    assert [step for step, reason in fake.failures if "0.0 GB are free" in reason] == [2, 4]
    assert list(fake.folder.iterdir()) == []


def test_the_last_save_must_not_fail(tmp_path: Path) -> None:
    fake = FakeRun(recipe_in(tmp_path), failures={5: CheckpointError("no room")})
    with pytest.raises(CheckpointError, match="the run is done, but its last step was not saved: no room"):
        fake.run()


@pytest.mark.parametrize(("save_every_steps", "saved"), [(None, [2]), (2, [2]), (1, [1, 2])])
def test_a_run_that_is_asked_to_leave_while_it_generates_saves_the_step_before_once(
    tmp_path: Path, save_every_steps: int | None, saved: list[int]
) -> None:
    fake = FakeRun(recipe_in(tmp_path, save_every_steps=save_every_steps), save_seconds=0.05)
    fake.leaves_in = 3
    with pytest.raises(PreemptedError, match="SIGUSR1 after step 2: saved"):
        fake.run()
    assert fake.saved == saved
    assert read_state(fake.folder / "latest").ledger.num_trained == 16


def test_a_run_that_has_trained_nothing_has_nothing_to_save(tmp_path: Path) -> None:
    fake = FakeRun(recipe_in(tmp_path))
    fake.leaves_in = 1
    with pytest.raises(PreemptedError, match="before a step was trained"):
        fake.run()


@pytest.mark.parametrize(("every_steps", "num_copies"), [(None, 3), (3, 3), (1, 3)])
def test_a_long_update_is_given_up_and_the_step_before_it_saved(
    tmp_path: Path, every_steps: int | None, num_copies: int
) -> None:
    """Whether that step is held in host memory, being written or saved: the ranks, which compute, are asked nothing."""
    fake = FakeRun(recipe_in(tmp_path, save_every_steps=every_steps), save_seconds=0.05)
    fake.computing_s = 31  # more than half of the grace
    fake.leaves_in_update = 4
    with pytest.raises(PreemptedError, match="SIGTERM after step 3: saved"):
        fake.run()
    assert fake.saved[-1] == 3
    assert (fake.folder / "latest" / TENSORS).read_bytes() == b"3"
    state = read_state(fake.folder / "latest")
    assert state.trainer.num_steps == 3
    assert state.ledger.num_trained == 24
    assert fake.ranks.num_copies == num_copies


def test_a_short_update_is_finished_and_its_step_saved(tmp_path: Path) -> None:
    fake = FakeRun(recipe_in(tmp_path))
    fake.computing_s = 29
    fake.leaves_in_update = 4
    with pytest.raises(PreemptedError, match="SIGTERM after step 4: saved"):
        fake.run()
    assert fake.saved == [4]
    assert fake.ranks.num_copies == 1


def test_the_first_update_is_finished_since_nothing_is_lost_by_it(tmp_path: Path) -> None:
    fake = FakeRun(recipe_in(tmp_path))
    fake.computing_s = 31
    fake.leaves_in_update = 1
    with pytest.raises(PreemptedError, match="SIGTERM after step 1: saved"):
        fake.run()


@pytest.mark.parametrize(
    ("step_s", "expected"), [(900.0, [4, 5]), (1700.0, [2, 4, 5]), (4000.0, [1, 2, 3, 4, 5]), (10.0, [5])]
)
def test_a_run_saves_before_an_hour_has_passed(tmp_path: Path, step_s: float, expected: list[int]) -> None:
    """The step after a save that is due would end behind the hour."""
    fake = FakeRun(recipe_in(tmp_path, keep_last=9))
    fake.generating_s = step_s
    fake.run()
    assert fake.saved == expected


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


def test_a_save_under_way_is_finished_when_the_run_fails(tmp_path: Path) -> None:
    fake = FakeRun(recipe_in(tmp_path, save_every_steps=2), save_seconds=0.1)
    fake.fails_in = 3
    with pytest.raises(FleetError):
        fake.run()
    assert fake.saved == [2]


def test_a_rank_that_dies_while_it_writes_ends_the_run(tmp_path: Path) -> None:
    fake = FakeRun(recipe_in(tmp_path, save_every_steps=2), failures={2: WorkerError("actor rank 1: died")})
    with pytest.raises(WorkerError):
        fake.run()


async def test_one_that_fails_and_is_then_told_to_leave_at_once_leaves_no_save_behind(tmp_path: Path) -> None:
    fake = FakeRun(recipe_in(tmp_path, save_every_steps=2), save_seconds=30.0)
    fake.fails_in = 3

    running = asyncio.create_task(fake._run())
    while fake.ranks.num_writing == 0:
        await asyncio.sleep(0.01)
    await asyncio.sleep(0.05)
    running.cancel()
    with pytest.raises(asyncio.CancelledError):
        await running
    assert asyncio.all_tasks() == {asyncio.current_task()}
    assert fake.saved == []
