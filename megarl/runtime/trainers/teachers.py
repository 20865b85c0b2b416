"""The teachers of a run on Megatron ranks: which samples each of them is asked about."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

from megarl.config.algorithm import AlgorithmConfig, PolicyGradientConfig
from megarl.data.shares import Share
from megarl.rollout.teacher import teacher_of
from megarl.runtime.trainers.ranks import HeldNumbers
from megarl.train.interface import RankSpec, TeacherCalls
from megarl.types import TrainSample


@dataclass(frozen=True, slots=True, kw_only=True)
class Teacher:
    ask: Callable[[Iterator[Share]], Awaitable[HeldNumbers]]
    pack: Callable[[Sequence[TrainSample], Sequence[int]], Iterator[Share]]
    """Takes the samples of a step, and the indices of those to ask about."""
    sources: tuple[str, ...]
    """Empty: all that no other teacher has."""


class Teachers:
    """Asks the teacher of each sample's source about it."""

    def __init__(self, teachers: Mapping[str, Teacher]) -> None:
        self._teachers = teachers
        self._sources = {name: teacher.sources for name, teacher in teachers.items()}

    async def hold(self, samples: Sequence[TrainSample], sources: Sequence[str]) -> HeldNumbers:
        """Return the numbers of all samples, which stay where ranks computed them."""
        asked: dict[str, list[int]] = {}
        for index, source in enumerate(sources):
            asked.setdefault(teacher_of(source, self._sources), []).append(index)
        answers = await asyncio.gather(
            *(self._teachers[name].ask(self._teachers[name].pack(samples, indices)) for name, indices in asked.items())
        )
        return replace(answers[0], parts=tuple(part for answer in answers for part in answer.parts))


def teacher_builder(algorithm: AlgorithmConfig, folder: Path, *, vocab: int) -> Callable[[RankSpec], TeacherCalls]:
    """Return the function that builds a rank; `vocab` is the size of the policy's vocabulary."""
    distillation = algorithm.distillation if isinstance(algorithm, PolicyGradientConfig) else None
    assert distillation is not None, "a teacher without algorithm.distillation"
    return partial(_build, folder=folder, num_top=distillation.top_k, vocab=vocab)


def _build(spec: RankSpec, *, folder: Path, num_top: int, vocab: int) -> TeacherCalls:
    from megarl.train.rank import TeacherRank  # noqa: PLC0415 - Megatron, which only a rank loads

    rank = TeacherRank(spec, num_top=num_top, vocab=vocab)
    rank.load(folder)
    return rank
