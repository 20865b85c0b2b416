"""A few groups of every step are written to a file, with the log-probabilities of trainer and engine."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from random import Random

from megarl.config.recipe import RolloutSamplesConfig
from megarl.data.rollout_files import SampledRollout, prune_rollouts, rollouts_file, write_rollouts
from megarl.results import UpdateResult
from megarl.stages import Trainer
from megarl.types import Estimates, FloatArray, ScoredGroup, TokenArray, TrainSample

_MEGABYTE = 1 << 20


class RolloutSampler:
    """Writes the samples of chosen groups for people to read; if that fails, training goes on with a warning."""

    def __init__(
        self,
        config: RolloutSamplesConfig,
        *,
        run_folder: Path,
        seed: int,
        logprobs: Callable[[Sequence[TrainSample]], Awaitable[tuple[FloatArray, ...]]],
        decode: Callable[[TokenArray], str],
        warn: Callable[[str], None],
    ) -> None:
        """`logprobs` returns the trainer's log-probabilities of samples; `decode` the text of tokens."""
        self._config = config
        self._run_folder = run_folder
        self._seed = seed
        self._logprobs = logprobs
        self._decode = decode
        self._warn = warn
        self._has_failed = False

    async def write(self, step: int, groups: Sequence[ScoredGroup], samples: Sequence[TrainSample]) -> None:
        if self._config.groups_per_step == 0 or step % self._config.every:
            return
        chosen = await self._choose(step, groups, samples)
        try:
            await asyncio.to_thread(self._write, step, chosen)
        except OSError as error:
            if not self._has_failed:
                self._warn(f"the rollouts of step {step} are not kept: {error.strerror or error}")
            self._has_failed = True

    async def _choose(
        self, step: int, groups: Sequence[ScoredGroup], samples: Sequence[TrainSample]
    ) -> list[SampledRollout]:
        firsts = [0]
        for scored in groups:
            firsts.append(firsts[-1] + len(scored.scores))
        num_groups = min(self._config.groups_per_step, len(groups))
        places = sorted(Random(f"{self._seed}/{step}").sample(range(len(groups)), num_groups))  # noqa: S311 - a choice for readers
        rows = [
            (groups[place], i, samples[firsts[place] + i]) for place in places for i in range(len(groups[place].scores))
        ]
        chosen = [sample for _, _, sample in rows]
        known = [sample.old_logprobs for sample in chosen if sample.old_logprobs is not None]
        logprobs = known if len(known) == len(chosen) else await self._logprobs(chosen)
        return [
            SampledRollout(group=scored, index=index, sample=sample, trainer_logprobs=of_trainer)
            for (scored, index, sample), of_trainer in zip(rows, logprobs, strict=True)
        ]

    def _write(self, step: int, rollouts: Sequence[SampledRollout]) -> None:
        write_rollouts(rollouts_file(self._run_folder, step), rollouts, decode=self._decode)
        prune_rollouts(self._run_folder, max_bytes=self._config.max_megabytes * _MEGABYTE)


class SampledTrainer:
    """A Trainer that has samples of each step written before it updates."""

    def __init__(self, trainer: Trainer, sampler: RolloutSampler, *, num_steps: int) -> None:
        """The trainer has taken `num_steps` steps."""
        self._trainer = trainer
        self._sampler = sampler
        self._num_steps = num_steps
        self._groups: Sequence[ScoredGroup] = ()

    async def estimate(self, groups: Sequence[ScoredGroup]) -> Estimates:
        self._groups = groups
        return await self._trainer.estimate(groups)

    async def update(self, samples: Sequence[TrainSample]) -> UpdateResult:
        groups, self._groups = self._groups, ()
        await self._sampler.write(self._num_steps + 1, groups, samples)
        update = await self._trainer.update(samples)
        self._num_steps += 1
        return update
