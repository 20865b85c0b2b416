"""All ranks of one model as Ray actors, and calls of them: with the same arguments, or with a share of a step each."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from copy import copy
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType
from typing import Concatenate, Generic, ParamSpec, Self, TypeVar

import ray
from ray.actor import ActorHandle

from megarl.cluster.stored import cut_at_source, fetch
from megarl.config.roles import ModelParallelConfig
from megarl.data.shares import Share, with_columns
from megarl.errors import WeightSyncError
from megarl.ranks.calls import ModelCalls
from megarl.ranks.rank_process import RankProcess
from megarl.ranks.remote_columns import RemoteColumn, RemotePart
from megarl.ranks.watched_ranks import WatchedRanks
from megarl.tokens import ColumnName, SampleColumn
from megarl.types import ONE_POLICY, TrainBatch

logger = logging.getLogger(__name__)

Rank = TypeVar("Rank", bound=ModelCalls, covariant=True)
Parameters = ParamSpec("Parameters")
Result = TypeVar("Result")

BESIDE_TRAINING = "beside_training"
"""Concurrency group of calls that run in a second thread of a rank while it trains."""


class RankHost(RankProcess):
    """The process of one rank: runs its methods, which the driver calls on all ranks at once."""

    def run(self, token: int, policy: str, method: str, *arguments: object, **named: object) -> object:
        """Call a method of a policy's rank."""
        self._fence.enter(token)
        assert policy in self._ranks, "start comes first"
        try:
            return getattr(self._ranks[policy], method)(*arguments, **named)
        except BaseException as error:
            self._has_failed |= not isinstance(error, WeightSyncError)  # a publish changes nothing here
            # The driver reports one rank's error; each is in the log of its rank.
            logger.exception("%s failed", method)
            raise

    def run_share(
        self,
        token: int,
        policy: str,
        method: str,
        share: Share,
        references: Mapping[ColumnName, Sequence[ray.ObjectRef]],
    ) -> object:
        """Call a method of a policy's rank with its share of a step, and with columns that ranks computed before.

        The responses are loaded here. A column of tokens that the method returns stays on this node.
        """
        self._fence.enter(token)
        if not share.is_here:
            fetch(share.sources)
        columns = {name: ray.get(list(parts)) for name, parts in references.items()}
        result = self.run(token, policy, method, with_columns(share.fill(), columns))
        return RemotePart.of(result) if isinstance(result, SampleColumn) else result


class RankGroup(WatchedRanks[Rank], Generic[Rank]):
    """The ranks of one model.

    `group.call(ActorCalls.update, batch)` runs the method on every rank.
    """

    def __init__(
        self,
        role: str,
        workers: Sequence[ActorHandle],
        *,
        split: ModelParallelConfig,
        timeout_s: float,
        run_folder: Path,
        device_lock: asyncio.Lock,
    ) -> None:
        """All models of a pool have the same lock."""
        super().__init__(role, workers, timeout_s=timeout_s, run_folder=run_folder)
        self._split = split
        self._data_parallel = len(workers) // split.model_parallel
        self.device_lock = device_lock
        """Locked while the ranks compute: models of one pool compute one after the other."""
        self._policy = ONE_POLICY

    def of_policy(self, policy: str) -> Self:
        """Return these ranks, once they have started, with the calls to those of one policy."""
        ranks = copy(self)
        ranks._policy = policy
        return ranks

    async def compute(
        self,
        method: Callable[Concatenate[Rank, Parameters], Result],
        *arguments: Parameters.args,
        **named: Parameters.kwargs,
    ) -> Result:
        """Call every rank with the devices locked; all ranks return the same, so rank 0's result is returned."""
        async with self.device_lock:
            return (await self.call(method, *arguments, **named))[0]

    async def compute_shares(
        self,
        method: Callable[[Rank, TrainBatch], Result],
        shares: Iterator[Share],
        columns: Mapping[ColumnName, RemoteColumn] = MappingProxyType({}),
    ) -> Result:
        """Call every rank with the share of its data-parallel rank and with these columns; return rank 0's result."""
        results: list[Result] = await self._compute_shares(method.__name__, shares, columns)
        return results[0]

    async def compute_column(
        self, method: Callable[[Rank, TrainBatch], SampleColumn | None], shares: Iterator[Share]
    ) -> RemoteColumn:
        """Have every rank compute a column of its share's tokens, which stays on its node."""
        parts: list[RemotePart | None] = await self._compute_shares(method.__name__, shares, {})
        return self.remote_column({rank: part for rank, part in enumerate(parts) if part is not None})

    def remote_column(self, parts: Mapping[int, RemotePart]) -> RemoteColumn:
        """Return the column whose parts these ranks have."""
        numbered = tuple(replace(part, rank=rank) for rank, part in parts.items())
        return RemoteColumn(role=self.role, parts=numbered, timeout_s=self.timeout_s, workers=self.workers)

    async def _compute_shares(
        self, method: str, shares: Iterator[Share], columns: Mapping[ColumnName, RemoteColumn]
    ) -> list[Result]:
        async with self.device_lock:
            # In a thread: planning a step takes seconds. A share is stored once, and only its ranks read it.
            whole = await asyncio.to_thread(lambda: list(shares))
            if not all(share.is_here for share in whole):
                nodes = {process.node for process in self.processes}
                whole = await cut_at_source(whole, nodes, timeout_s=self.timeout_s)
            stored = await asyncio.to_thread(lambda: [_store(share, columns) for share in whole])
            data_parallel = self._data_parallel
            assert len(stored) == data_parallel, f"{len(stored)} shares, {data_parallel} data-parallel ranks"
            started = [
                worker.run_share.options(name=f"{self.role.capitalize()}Rank.{method}").remote(
                    self.token,
                    self._policy,
                    method,
                    *stored[rank // (self._split.tensor * self._split.context) % data_parallel],
                )
                for rank, worker in enumerate(self.workers)
            ]
            return await self.gather(method, started)

    async def call_beside(
        self,
        is_moving: Callable[[], Awaitable[bool]],
        method: Callable[Concatenate[Rank, Parameters], Result],
        *arguments: Parameters.args,
        **named: Parameters.kwargs,
    ) -> list[Result]:
        """Do as `call_to_end` in the ranks' second thread: training goes on meanwhile. No deadline ends what moves."""
        shared = [ray.put(argument) for argument in arguments]
        started = [
            worker.run.options(concurrency_group=BESIDE_TRAINING).remote(
                self.token, self._policy, method.__name__, *shared, **named
            )
            for worker in self.workers
        ]
        return await self.gather(method.__name__, started, waits_for_all=True, is_moving=is_moving)

    def _start(
        self, worker: ActorHandle, method: str, arguments: Sequence[object], named: dict[str, object]
    ) -> ray.ObjectRef:
        call = worker.run.options(name=f"{self.role.capitalize()}Rank.{method}")
        return call.remote(self.token, self._policy, method, *arguments, **named)


def _store(
    share: Share, columns: Mapping[ColumnName, RemoteColumn]
) -> tuple[ray.ObjectRef, dict[ColumnName, list[ray.ObjectRef]]]:
    """Return a reference to the stored share, and references to the parts of columns that have its samples."""
    sample_ids = frozenset(share.sample_ids)
    return ray.put(share), {name: column.references(sample_ids) for name, column in columns.items()}
