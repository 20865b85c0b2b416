"""A few groups of every step in a file, with what trainer and engine each thought of their tokens."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from random import Random
from typing import Protocol

from megarl.config.recipe import KeptRolloutsConfig
from megarl.data.rollout_files import KeptRollout, prune_rollouts, rollouts_file, write_rollouts
from megarl.types import FloatArray, ScoredGroup, TokenArray, TrainSample

_MEGABYTE = 1 << 20


class SampleWriter(Protocol):
    async def keep(self, step: int, groups: Sequence[ScoredGroup], samples: Sequence[TrainSample]) -> None:
        """`samples` are those of the groups, in their order, before they are trained on."""
        ...


class NoSampleWriter:
    """For runs in which nobody generates."""

    async def keep(self, step: int, groups: Sequence[ScoredGroup], samples: Sequence[TrainSample]) -> None:
        return


class RolloutSampler:
    """Keeping is for people: where it fails, training goes on and the first failure is told."""

    def __init__(
        self,
        config: KeptRolloutsConfig,
        *,
        run_folder: Path,
        seed: int,
        logprobs: Callable[[Sequence[TrainSample]], Awaitable[tuple[FloatArray, ...]]],
        decode: Callable[[TokenArray], str],
        warn: Callable[[str], None],
    ) -> None:
        """`logprobs` asks the trainer about the tokens of samples; `decode` gives the text of any tokens."""
        self._config = config
        self._run_folder = run_folder
        self._seed = seed
        self._logprobs = logprobs
        self._decode = decode
        self._warn = warn
        self._has_failed = False

    async def keep(self, step: int, groups: Sequence[ScoredGroup], samples: Sequence[TrainSample]) -> None:
        if self._config.groups_per_step == 0 or step % self._config.every:
            return
        kept = await self._choose(step, groups, samples)
        try:
            await asyncio.to_thread(self._write, step, kept)
        except OSError as error:
            if not self._has_failed:
                self._warn(f"the rollouts of step {step} are not kept: {error.strerror or error}")
            self._has_failed = True

    async def _choose(
        self, step: int, groups: Sequence[ScoredGroup], samples: Sequence[TrainSample]
    ) -> list[KeptRollout]:
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
            KeptRollout(group=scored, index=index, sample=sample, trainer_logprobs=of_trainer)
            for (scored, index, sample), of_trainer in zip(rows, logprobs, strict=True)
        ]

    def _write(self, step: int, kept: Sequence[KeptRollout]) -> None:
        write_rollouts(rollouts_file(self._run_folder, step), kept, decode=self._decode)
        prune_rollouts(self._run_folder, max_bytes=self._config.max_megabytes * _MEGABYTE)
