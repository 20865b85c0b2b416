"""Which groups of a step are kept, with whose log-probabilities, and that nobody's training depends on it."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np

from megarl.config.recipe import RolloutSamplesConfig
from megarl.data.rollout_files import list_rollouts, read_list, read_rollout
from megarl.results import UpdateResult
from megarl.runtime.rollout_samples import RolloutSampler, SampledTrainer
from megarl.types import Estimates, FloatArray, PolicyVersion, ScoredGroup, TrainSample
from tests.data.test_rollout_files import decode, sampled

GROUPS = [sampled(str(number), position=number) for number in range(8)]


class Trainer:
    def __init__(self) -> None:
        self.asked: list[int] = []

    async def logprobs(self, samples: Sequence[TrainSample]) -> tuple[FloatArray, ...]:
        self.asked.append(len(samples))
        return tuple(sample.rollout.logprobs - np.float32(0.5) for sample in samples)


def keep(
    folder: Path, config: RolloutSamplesConfig, *, steps: Sequence[int], samples: Sequence[TrainSample] | None = None
) -> tuple[Trainer, list[str]]:
    trainer, warnings = Trainer(), list[str]()
    sampler = RolloutSampler(
        config, run_folder=folder, seed=1, logprobs=trainer.logprobs, decode=decode, warn=warnings.append
    )
    groups: list[ScoredGroup] = [rollout.group for rollout in GROUPS]
    for step in steps:
        asyncio.run(sampler.write(step, groups, samples or [rollout.sample for rollout in GROUPS]))
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
    assert read_rollout(list_rollouts(tmp_path)[4], 0)["largest_gap"] == 0.5


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
    assert warnings == ["the rollouts of step 1 are not kept: File exists"]


def test_samples_are_written_with_the_groups_of_their_step_before_the_update(tmp_path: Path) -> None:
    groups, samples = [rollout.group for rollout in GROUPS], [rollout.sample for rollout in GROUPS]
    inner = Trainer()
    sampler = RolloutSampler(
        RolloutSamplesConfig(groups_per_step=2),
        run_folder=tmp_path,
        seed=1,
        logprobs=inner.logprobs,
        decode=decode,
        warn=list[str]().append,
    )

    class Updating(Trainer):
        async def estimate(self, groups: Sequence[ScoredGroup]) -> Estimates:
            return Estimates()

        async def update(self, samples: Sequence[TrainSample]) -> UpdateResult:
            self.asked.append(len(list_rollouts(tmp_path)))
            return UpdateResult(version=PolicyVersion(1), stats=None)

    async def two_steps(trainer: SampledTrainer) -> None:
        for _ in range(2):
            await trainer.estimate(groups)
            await trainer.update(samples)

    trainer = Updating()
    asyncio.run(two_steps(SampledTrainer(trainer, sampler, num_steps=6)))
    assert list(list_rollouts(tmp_path)) == [7, 8]
    assert trainer.asked == [1, 2], "each file is there when its update begins"
