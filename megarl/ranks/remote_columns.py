"""Columns of tokens that stay where ranks computed them; the driver has references to them.

An update gets columns from rank to rank, and ranks assign credit from them; the driver fetches only what it needs.
"""

from __future__ import annotations

import asyncio
from collections.abc import Collection, Sequence
from dataclasses import dataclass

import ray
from ray.actor import ActorHandle

from megarl.cluster.worker_group import WorkerDiedError, WorkerLateError
from megarl.errors import first_line
from megarl.tokens import SampleColumn, assemble, by_sample
from megarl.types import FloatArray


@dataclass(frozen=True, slots=True, kw_only=True)
class RemotePart:
    """One column of one data-parallel rank's samples, in the object store of its node."""

    sample_ids: frozenset[int]
    reference: ray.ObjectRef
    rank: int = 0

    @classmethod
    def of(cls, column: SampleColumn) -> RemotePart:
        return cls(sample_ids=frozenset(column.sample_ids.tolist()), reference=ray.put(column))


@dataclass(frozen=True, slots=True, kw_only=True)
class RemoteColumn:
    """One column of a step's samples."""

    role: str
    parts: tuple[RemotePart, ...]
    timeout_s: float
    workers: tuple[ActorHandle, ...] = ()
    """All ranks of the role."""

    async def fetch(self) -> tuple[FloatArray, ...]:
        """Return one array per sample of the step; raise WorkerError if the rank that has some is lost."""
        return assemble(await self._get([part.reference for part in self.parts]))

    async def select(self, sample_ids: Collection[int]) -> dict[int, FloatArray]:
        """Return the arrays of these samples; the others stay where they are."""
        chosen = [(part, part.sample_ids.intersection(sample_ids)) for part in self.parts]
        started = [self.workers[part.rank].select.remote([part.reference], ids) for part, ids in chosen if ids]
        return by_sample(await self._get(started))

    async def _get(self, references: Sequence[ray.ObjectRef]) -> list[SampleColumn]:
        try:
            async with asyncio.timeout(self.timeout_s):
                columns: list[SampleColumn] = await asyncio.gather(*references)
                return columns
        except TimeoutError:
            late = f"numbers of {self.role} ranks were not fetched within {self.timeout_s:g} s"
            raise WorkerLateError(f"{late} (train.operation_timeout_s)") from None
        except ray.exceptions.RayError as error:
            lost = f"numbers of {self.role} ranks are lost with the rank: {first_line(error)}"
            raise WorkerDiedError(lost) from error

    def references(self, sample_ids: frozenset[int]) -> list[ray.ObjectRef]:
        """Return references to the parts that have some of the samples."""
        return [part.reference for part in self.parts if not part.sample_ids.isdisjoint(sample_ids)]
