"""Which groups of a step are kept, with whose log-probabilities, and that nobody's training depends on it."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from megarl.config.recipe import RolloutSamplesConfig
from megarl.data.rollout_files import SampledRollout, list_rollouts, rollouts_file, write_rollouts
from megarl.data.rollout_reading import read_list, read_rollout
from megarl.results import UpdateResult
from megarl.run import rollout_samples
from megarl.run.rollout_samples import RolloutSampler, SampledTrainer
from megarl.types import Estimates, FloatArray, PolicyVersion, ScoredGroup, TrainSample
from tests.data.test_rollout_files import decode, sampled
from tests.small_disk import filled, small_disk

OF_TWO = RolloutSamplesConfig(groups_per_step=2)
GROUPS = [sampled(str(number), position=number) for number in range(8)]


class Trainer:
    def __init__(self) -> None:
        self.asked: list[int] = []

    async def logprobs(self, samples: Sequence[TrainSample]) -> tuple[FloatArray, ...]:
        self.asked.append(len(samples))
        return tuple(sample.rollout.logprobs - np.float32(0.5) for sample in samples)

    async def complete(self, samples: Sequence[TrainSample], indices: Sequence[int]) -> list[TrainSample]:
        """Return samples whose credit ranks have assigned."""
        return [replace(samples[index], advantages=np.full_like(samples[index].advantages, 7)) for index in indices]


async def write(path: Path, rollouts: Sequence[SampledRollout]) -> None:
    await asyncio.to_thread(write_rollouts, path, rollouts, decode=decode)


def keep(
    folder: Path, config: RolloutSamplesConfig, *, steps: Sequence[int], samples: Sequence[TrainSample] | None = None
) -> tuple[Trainer, list[str]]:
    trainer, warnings = Trainer(), list[str]()
    sampler = sampler_of(trainer, folder, write, warnings.append, config)
    groups: list[ScoredGroup] = [rollout.group for rollout in GROUPS]

    async def keep_step(step: int) -> None:
        await sampler.begin(step, groups, samples or [rollout.sample for rollout in GROUPS])
        await sampler.finish()

    for step in steps:
        asyncio.run(keep_step(step))
    return trainer, warnings


def test_the_same_groups_are_kept_each_time_and_others_in_another_step(tmp_path: Path) -> None:
    config = RolloutSamplesConfig(groups_per_step=3)
    uids = []
    for folder in (tmp_path / "a", tmp_path / "b"):
        keep(folder, config, steps=[1, 2])
        uids.append([[row["prompt_uid"] for row in read_list(path)] for path in list_rollouts(folder).values()])
    assert uids[0] == uids[1]
    assert uids[0][0] != uids[0][1]
    assert [len(of_step) for of_step in uids[0]] == [3, 3]


def test_only_every_nth_step_is_kept_and_only_then_the_trainer_is_asked(tmp_path: Path) -> None:
    trainer, _ = keep(tmp_path, RolloutSamplesConfig(groups_per_step=2, every=4), steps=range(1, 10))
    assert list(list_rollouts(tmp_path)) == [4, 8]
    assert trainer.asked == [2, 2]
    row = read_rollout(list_rollouts(tmp_path)[4], 0)
    assert row["largest_gap"] == 0.5
    assert set(row["advantages"]) == {7.0}, "of the ranks, not what the driver has"


def test_nobody_is_asked_what_is_known(tmp_path: Path) -> None:
    samples = [replace(rollout.sample, old_logprobs=rollout.sample.rollout.logprobs) for rollout in GROUPS]
    trainer, _ = keep(tmp_path, RolloutSamplesConfig(), steps=[1], samples=samples)
    assert not trainer.asked
    assert read_rollout(list_rollouts(tmp_path)[1], 0)["largest_gap"] == 0.0


def test_zero_groups_keep_nothing(tmp_path: Path) -> None:
    trainer, _ = keep(tmp_path, RolloutSamplesConfig(groups_per_step=0), steps=[1])
    assert not trainer.asked
    assert not list_rollouts(tmp_path)


def test_a_folder_that_cannot_be_written_is_told_once(tmp_path: Path) -> None:
    blocked = tmp_path / "rollouts"
    blocked.write_text("a file where the folder should be")
    _, warnings = keep(tmp_path, RolloutSamplesConfig(), steps=[1, 2])
    path = rollouts_file(tmp_path, 1)
    assert warnings == [f"the rollouts of step 1 are not written: {path}: cannot be written: File exists"]


@pytest.mark.needs("root")
@pytest.mark.fault("a full disk where rollouts are kept", "told; the run goes on; the next file is tried")
def test_a_full_disk_costs_the_file_of_a_step_and_is_told_each_time_it_fills(tmp_path: Path) -> None:
    warnings: list[str] = []
    with small_disk(tmp_path / "disk", num_bytes=1 << 20) as disk:

        async def run() -> None:
            trainer = Updating()
            trainer.is_allowed.set()
            kept = SampledTrainer(trainer, sampler_of(trainer, disk, write, warnings.append), num_steps=0)
            for is_full in (True, True, False, True):
                with filled(disk) if is_full else nullcontext():
                    await kept.estimate([rollout.group for rollout in GROUPS])
                    await kept.update([rollout.sample for rollout in GROUPS])

        asyncio.run(asyncio.wait_for(run(), 60))
        assert [path.name for path in (disk / "rollouts").iterdir()] == ["step_000003.parquet"]
    assert [warning.partition(" are not written")[0] for warning in warnings] == [
        "the rollouts of step 1",
        "the rollouts of step 4",
    ]
    assert all(warning.endswith("cannot be written: No space left on device") for warning in warnings), warnings


class Updating(Trainer):
    """A trainer whose updates wait for `is_allowed`."""

    def __init__(self) -> None:
        super().__init__()
        self.is_allowed = asyncio.Event()

    async def estimate(self, groups: Sequence[ScoredGroup]) -> Estimates:
        return Estimates()

    async def update(self, samples: Sequence[TrainSample]) -> UpdateResult:
        await self.is_allowed.wait()
        return UpdateResult(version=PolicyVersion(1), stats=None)


def sampler_of(
    trainer: Trainer,
    folder: Path,
    write: Callable[[Path, Sequence[SampledRollout]], Awaitable[None]],
    warn: Callable[[str], None],
    config: RolloutSamplesConfig = OF_TWO,
) -> RolloutSampler:
    return RolloutSampler(
        config=config,
        run_folder=folder,
        seed=1,
        logprobs=trainer.logprobs,
        complete=trainer.complete,
        write=write,
        warn=warn,
    )


async def steps(trainer: Updating, number: int, sampler: RolloutSampler) -> None:
    sampled_trainer = SampledTrainer(trainer, sampler, num_steps=6)
    for _ in range(number):
        await sampled_trainer.estimate([rollout.group for rollout in GROUPS])
        await sampled_trainer.update([rollout.sample for rollout in GROUPS])


def test_samples_are_written_while_the_trainer_updates_and_are_there_after_it(tmp_path: Path) -> None:
    async def run() -> None:
        trainer = Updating()
        running = asyncio.create_task(steps(trainer, 2, sampler_of(trainer, tmp_path, write, list[str]().append)))
        while list(list_rollouts(tmp_path)) != [7]:
            await asyncio.sleep(0.01)
        assert trainer.asked == [2], "the update waits, the file does not"
        trainer.is_allowed.set()
        await running
        assert list(list_rollouts(tmp_path)) == [7, 8]

    asyncio.run(asyncio.wait_for(run(), 60))


def test_a_disk_that_hangs_costs_files_and_no_step(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rollout_samples, "_PATIENCE_S", 1.0)
    warnings: list[str] = []

    async def hang(path: Path, rollouts: Sequence[SampledRollout]) -> None:
        await asyncio.Event().wait()

    async def run() -> None:
        trainer = Updating()
        trainer.is_allowed.set()
        await steps(trainer, 100, sampler_of(trainer, tmp_path, hang, warnings.append))

    asyncio.run(asyncio.wait_for(run(), 60))  # the first step waits, none after it
    assert warnings == ["the rollouts of step 8 are not written: the file of an earlier step is still being written"]
