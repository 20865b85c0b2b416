"""A few groups of every step are written to a file, with the log-probabilities of trainer and engine."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import KW_ONLY, dataclass, field
from itertools import accumulate
from pathlib import Path
from random import Random
from typing import TypeAlias

from megarl.config.recipe import RolloutSamplesConfig
from megarl.data.rollout_files import SampledRollout, prune_rollouts, rollouts_file, write_rollouts
from megarl.errors import MegarlError
from megarl.results import UpdateResult
from megarl.rollout.task import RolloutSource
from megarl.rollout.workers import RolloutWorkers
from megarl.run.inputs import Inputs
from megarl.stages import Trainer
from megarl.types import Estimates, FloatArray, ScoredGroup, TrainSample

_PATIENCE_S = 60.0
"""Time that a step waits, after its update, for a file that is still being written."""


WriteSamples: TypeAlias = Callable[[Path, Sequence[SampledRollout]], Awaitable[None]]
"""Writes a file of samples."""


def sample_writer(inputs: Inputs, workers: RolloutSource | None) -> WriteSamples:
    """Return what writes files of samples for people, where their tokens are."""
    if isinstance(workers, RolloutWorkers):
        return workers.write

    async def write(path: Path, rollouts: Sequence[SampledRollout]) -> None:
        await asyncio.to_thread(write_rollouts, path, rollouts, decode=inputs.tokenizer.decode)

    return write


@dataclass(kw_only=True)
class RolloutSampler:
    """Has the samples of chosen groups written for people to read; if that fails, training goes on with a warning."""

    config: RolloutSamplesConfig
    run_folder: Path
    seed: int
    logprobs: Callable[[Sequence[TrainSample]], Awaitable[tuple[FloatArray, ...]]]
    """Returns the trainer's log-probabilities of samples."""
    complete: Callable[[Sequence[TrainSample], Sequence[int]], Awaitable[Sequence[TrainSample]]]
    """Returns the samples at these places with all numbers that ranks hold of their tokens."""
    write: WriteSamples
    warn: Callable[[str], None]
    _has_failed: bool = False
    _writing: asyncio.Task[None] | None = None
    _is_late: bool = False

    async def begin(self, step: int, groups: Sequence[ScoredGroup], samples: Sequence[TrainSample]) -> None:
        """Ask the trainer before its update, and begin to write."""
        if self.config.groups_per_step == 0 or step % self.config.every:
            return
        if self._writing is not None:
            self._fail(step, "the file of an earlier step is still being written")
            return
        self._writing = asyncio.create_task(self._write(step, await self._choose(step, groups, samples)))

    async def finish(self) -> None:
        """Wait for the file, but only once and not for ever: a disk that hangs does not hold up the run."""
        if self._writing is not None:
            done, _ = await asyncio.wait([self._writing], timeout=0 if self._is_late else _PATIENCE_S)
            self._is_late = not done
            for writing in done:
                self._writing = None
                writing.result()

    async def _choose(
        self, step: int, groups: Sequence[ScoredGroup], samples: Sequence[TrainSample]
    ) -> list[SampledRollout]:
        firsts = [0, *accumulate(len(scored.scores) for scored in groups)]
        num_groups = min(self.config.groups_per_step, len(groups))
        places = sorted(Random(f"{self.seed}/{step}").sample(range(len(groups)), num_groups))  # noqa: S311 - a choice for readers
        rows = [(place, i) for place in places for i in range(len(groups[place].scores))]
        chosen = await self.complete(samples, [firsts[place] + i for place, i in rows])
        old_logprobs = [sample.old_logprobs for sample in chosen if sample.old_logprobs is not None]
        logprobs = old_logprobs if len(old_logprobs) == len(chosen) else await self.logprobs(chosen)
        return [
            SampledRollout(group=groups[place], index=index, sample=sample, trainer_logprobs=of_trainer)
            for (place, index), sample, of_trainer in zip(rows, chosen, logprobs, strict=True)
        ]

    async def _write(self, step: int, rollouts: Sequence[SampledRollout]) -> None:
        try:
            await self.write(rollouts_file(self.run_folder, step), rollouts)
            await asyncio.to_thread(prune_rollouts, self.run_folder, max_bytes=self.config.max_megabytes << 20)
            self._has_failed = False
        except (MegarlError, OSError) as error:
            self._fail(step, str(error))

    def _fail(self, step: int, reason: str) -> None:
        if not self._has_failed:
            self.warn(f"the rollouts of step {step} are not written: {reason}")
        self._has_failed = True


@dataclass(eq=False)
class SampledTrainer:
    """A Trainer that has samples of each step written while it updates."""

    trainer: Trainer
    sampler: RolloutSampler
    _: KW_ONLY
    num_steps: int
    """Steps that the trainer has taken."""
    _groups: Sequence[ScoredGroup] = field(default_factory=lambda: (), init=False)

    async def estimate(self, groups: Sequence[ScoredGroup]) -> Estimates:
        self._groups = groups
        return await self.trainer.estimate(groups)

    async def update(self, samples: Sequence[TrainSample]) -> UpdateResult:
        groups, self._groups = self._groups, ()
        await self.sampler.begin(self.num_steps + 1, groups, samples)
        try:
            update = await self.trainer.update(samples)
        finally:
            await self.sampler.finish()
        self.num_steps += 1
        return update
