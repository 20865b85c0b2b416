"""The processes of one model's ranks, as the driver starts, watches and ends them, and explains why they are late."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from threading import Event
from typing import Generic, TypeVar

import ray
from ray.actor import ActorHandle

from megarl.cluster.cluster import address_of
from megarl.cluster.remote_process import RemoteProcess, end
from megarl.cluster.worker_group import WorkerGroup, WorkerLateError
from megarl.errors import WorkerError
from megarl.ranks.calls import ModelCalls
from megarl.ranks.flight import find_stalls
from megarl.ranks.hang import RankStacks, explain_hang, fetch_collectives, fetch_stacks, write_report
from megarl.train.rank_spec import RankSpec

logger = logging.getLogger(__name__)

Rank = TypeVar("Rank", covariant=True)

START_TIMEOUT_S = 300.0
"""Deadline for a process to start, and for its weights where `train.operation_timeout_s` is shorter: disks are slow."""
RECORDS_PREFIX = "collectives_"
"""Begins the name of a folder with the records of all ranks, for `python -m torch.distributed.flight_recorder.fr_trace
--prefix rank_ FOLDER`."""
_LEAVE_S = 5.0
_KILL_S = 30.0
"""Time for the system to take a process apart: one with much memory on a device needs a while."""


class WatchedRanks(WorkerGroup[Rank], Generic[Rank]):
    """Ranks that belong together: when one is lost, so are the others."""

    def __init__(self, role: str, workers: Sequence[ActorHandle], *, timeout_s: float, run_folder: Path) -> None:
        """A call that does not end leaves a file in `run_folder`."""
        super().__init__(role, workers, timeout_s=timeout_s, run_folder=run_folder)
        self._loss = Event()
        self._run_folder = run_folder
        self.processes: list[RemoteProcess] = []
        """The processes of the ranks, in order; empty until they have started."""

    @property
    def is_lost(self) -> bool:
        """Whether a rank is known to be dead."""
        return self._loss.is_set()

    async def start(self, build: Callable[[RankSpec], ModelCalls], spec: RankSpec) -> None:
        """Build every rank in its process; comes first. `spec` is that of rank 0, without the rendezvous."""
        started = [worker.process.remote() for worker in self.workers]
        self.processes = await self.gather("process", started, timeout_s=START_TIMEOUT_S)
        addresses: list[tuple[str, int]]
        addresses = await self.gather("find_address", [self.workers[0].find_address.remote()])
        address, port = addresses[0]
        specs = [replace(spec, rank=rank, master_address=address, master_port=port) for rank in range(len(self))]
        starting = [worker.start.remote(build, spec) for worker, spec in zip(self.workers, specs, strict=True)]
        await self.gather("start", starting, timeout_s=max(self.timeout_s, START_TIMEOUT_S))

    async def start_beside(self, policy: str, build: Callable[[RankSpec, ModelCalls], ModelCalls]) -> None:
        """Build another policy's ranks in the processes of these."""
        starting = [worker.start_beside.remote(self.token, policy, build) for worker in self.workers]
        await self.gather("start_beside", starting, timeout_s=max(self.timeout_s, START_TIMEOUT_S))

    def node_of(self, rank: int) -> str:
        return address_of(self.processes[rank].node)

    async def watch(self) -> None:
        """Wait until a rank dies, and raise its error."""
        watches: list[asyncio.Future[None]] = [
            asyncio.ensure_future(self._await(rank, "the run", worker.watch.remote()))
            for rank, worker in enumerate(self.workers)
        ]
        try:
            await asyncio.gather(*watches)
        except WorkerError:
            self._loss.set()
            raise
        finally:
            for watch in watches:
                watch.cancel()

    async def end(self) -> None:
        """End every process, frozen ones included, and wait until they are gone, unless another driver has them."""
        if not await self.is_ours():
            if await self.is_followed():
                await self._leave()
            return
        for worker in self.workers:
            ray.kill(worker, no_restart=True)
        endings = await asyncio.gather(
            *(end(process, grace_s=1.0, timeout_s=_KILL_S) for process in self.processes),
            return_exceptions=True,
        )
        for rank, outcome in enumerate(endings):
            if outcome is not True:
                logger.warning("role=%s rank=%d may still run: %s", self.role, rank, outcome or "it does not end")

    async def _leave(self) -> None:
        """Let ranks that obey no later driver end: where this one was frozen as it started them, nobody knows them."""
        leaving = [worker.leave.remote(self.token) for worker in self.workers]
        with suppress(TimeoutError):
            async with asyncio.timeout(_LEAVE_S):
                await asyncio.gather(*leaving, return_exceptions=True)

    async def _explain(self, method: str, late: Sequence[int], timeout_s: float) -> WorkerLateError:
        processes: Sequence[RemoteProcess | None] = self.processes or [None] * len(self)
        stacks = await asyncio.gather(*map(fetch_stacks, self.workers, processes))
        records = self._run_folder / f"{RECORDS_PREFIX}{self.role}_{method}"
        answering = [rank for rank, each in enumerate(stacks) if isinstance(each, RankStacks)]
        called = await asyncio.gather(
            *(fetch_collectives(self.workers[rank], records / f"rank_{rank}") for rank in answering)
        )
        answers = {rank: calls for rank, calls in zip(answering, called, strict=True) if calls is not None}
        report = explain_hang(stacks, method=method, late=late, stalls=find_stalls(answers))
        headline = f"{self.role}: {method} did not finish within {timeout_s:g} s (train.operation_timeout_s): {report}"
        where = await asyncio.to_thread(write_report, self._run_folder, self.role, method, headline, stacks)
        return WorkerLateError(f"{headline}; {where}", self.role, report.at_fault)
