"""All ranks of one model as Ray actors: where they start, how they are called and watched, and how they end."""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import socket
import threading
import time
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType
from typing import Concatenate, Generic, ParamSpec, TypeVar

import ray
from ray.actor import ActorHandle

from megarl.cluster.cluster import address_of, own_address
from megarl.cluster.remote_process import RemoteProcess, end, this_process
from megarl.cluster.stored import cut_at_source, fetch
from megarl.cluster.worker_group import WorkerGroup, WorkerLateError
from megarl.config.roles import ModelParallelConfig
from megarl.data.shares import Share, with_columns
from megarl.env import (
    FLIGHT_RECORDER,
    GLOO_INTERFACE,
    NCCL_VARIABLES,
    kernel_caches,
    nccl_interface,
    update_environment,
)
from megarl.errors import WeightSyncError, WorkerError
from megarl.ranks.calls import ModelCalls
from megarl.ranks.flight import GroupCalls, capture_collectives, find_stalls
from megarl.ranks.hang import RankStacks, capture, explain_hang, fetch_collectives, fetch_stacks, write_report
from megarl.ranks.remote_columns import ColumnHost, RemoteColumn, RemotePart
from megarl.system.affinity import bind_to_gpu
from megarl.system.network import interface_of
from megarl.system.process_log import log_process
from megarl.system.start_log import note_piece, process_began
from megarl.tokens import ColumnName, SampleColumn
from megarl.train.profiling import RankProfile
from megarl.train.rank_spec import RankSpec
from megarl.types import TrainBatch

logger = logging.getLogger(__name__)

Rank = TypeVar("Rank", bound=ModelCalls, covariant=True)
Parameters = ParamSpec("Parameters")
Result = TypeVar("Result")

BESIDE_TRAINING = "beside_training"
"""Concurrency group of calls that run in a second thread of a rank while it trains."""
ALWAYS = "always"
"""Concurrency group of calls that return even while a rank hangs."""

START_TIMEOUT_S = 300.0
"""Deadline for a process to start, and for its weights where `train.operation_timeout_s` is shorter: disks are slow."""
RECORDS_PREFIX = "collectives_"
"""Begins the name of a folder with the records of all ranks, for `python -m torch.distributed.flight_recorder.fr_trace
--prefix rank_ FOLDER`."""
_LEAVE_S = 5.0
_KILL_S = 30.0
"""Time for the system to take a process apart: one with much memory on a device needs a while."""


class RankHost(ColumnHost):
    """The process of one rank: builds the rank and runs its methods, which the driver calls on all ranks at once.

    Each call that changes something has the token of its driver. One of a driver that another has followed is refused.
    """

    def __init__(self, bind: str | None, log: Path | None = None) -> None:
        """Write all output of the process to `log`."""
        super().__init__()
        for variable in (*NCCL_VARIABLES, FLIGHT_RECORDER):
            if not variable.is_set:
                variable.set(variable.default)
        if log is not None:
            _log_to(log)
        self._rank: ModelCalls | None = None
        self._listener: socket.socket | None = None
        """Rank 0's: another process could take a port that is only known to be free."""
        self._has_failed = False
        self._profile: RankProfile | None = None
        self._is_replaced = threading.Event()
        self._host = own_address(bind)
        note_piece("process", began=process_began())
        self._idle_since = time.time()
        # Gloo would listen on the interface the host's name resolves to.
        if (interface := interface_of(self._host)) is not None:
            update_environment({GLOO_INTERFACE.name: interface, **nccl_interface(interface)})

    def find_address(self) -> tuple[str, int]:
        """Return this node's address and the port of rank 0's rendezvous, where it listens from now on."""
        self._listener = socket.create_server((self._host, 0), backlog=1024)
        self._idle_since = time.time()
        return self._host, self._listener.getsockname()[1]

    def start(self, build: Callable[[RankSpec], ModelCalls], spec: RankSpec) -> None:
        """Build the rank and fill it with weights."""
        # Ray imports what builds it before it calls this.
        note_piece("imports", began=self._idle_since)
        if spec.device == "cuda":
            update_environment(kernel_caches())
            bind_to_gpu()
        if self._listener is not None:
            spec = replace(spec, listener=self._listener.detach())
        self._rank = build(spec)

    def run(self, token: int, method: str, *arguments: object, **named: object) -> object:
        """Call a method of the rank."""
        self._fence.enter(token)
        assert self._rank is not None, "start comes first"
        try:
            return getattr(self._rank, method)(*arguments, **named)
        except BaseException as error:
            self._has_failed |= not isinstance(error, WeightSyncError)  # a publish changes nothing here
            # The driver reports one rank's error; each is in the log of its rank.
            logger.exception("%s failed", method)
            raise

    def begin_profile(self) -> None:
        """Record what this rank computes from now on."""
        self._profile = RankProfile()

    def end_profile(self, path: Path) -> list[Path]:
        """Write what was recorded; return the files, none where nothing was."""
        profile, self._profile = self._profile, None
        return [] if profile is None else profile.write(path)

    @ray.method(concurrency_group=ALWAYS)  # type: ignore[untyped-decorator]
    def follow(self, token: int) -> RemoteProcess:
        """Refuse what earlier drivers ask from now on; what they began goes on."""
        self._fence.enter(token)
        return this_process()

    @ray.method(concurrency_group=ALWAYS)  # type: ignore[untyped-decorator]
    def leave(self, token: int) -> None:
        """End this process, unless a later driver has called it."""
        self._fence.enter(token)
        os.kill(os.getpid(), signal.SIGKILL)

    def adopt(self, token: int, fill: Callable[[ModelCalls], bool]) -> bool:
        """Let `fill` bring the rank to this driver's state, after every call that an earlier driver began."""
        self._fence.enter(token)
        if self._rank is None or self._has_failed:
            raise WorkerError("it was left without a model, or inside a call that failed")
        return fill(self._rank)

    def run_share(
        self, token: int, method: str, share: Share, references: Mapping[ColumnName, Sequence[ray.ObjectRef]]
    ) -> object:
        """Call a method of the rank with its share of a step, and with columns that ranks computed before.

        The responses are loaded here. A column of tokens that the method returns stays on this node.
        """
        self._fence.enter(token)
        fetch(share.sources)
        columns = {name: ray.get(list(parts)) for name, parts in references.items()}
        result = self.run(token, method, with_columns(share.fill(), columns))
        return RemotePart.of(result) if isinstance(result, SampleColumn) else result

    @ray.method(concurrency_group=ALWAYS)  # type: ignore[untyped-decorator]
    def process(self) -> RemoteProcess:
        return this_process()

    @ray.method(concurrency_group=ALWAYS)  # type: ignore[untyped-decorator]
    def watch(self) -> None:
        """Wait until another driver watches: this one learns at once when the process ends."""
        self._is_replaced.set()
        self._is_replaced = replaced = threading.Event()
        replaced.wait()

    @ray.method(concurrency_group=ALWAYS)  # type: ignore[untyped-decorator]
    def stacks(self) -> RankStacks:
        return capture(__name__, ColumnHost.__module__)

    @ray.method(concurrency_group=ALWAYS)  # type: ignore[untyped-decorator]
    def collectives(self, path: Path) -> tuple[GroupCalls, ...]:
        """Return the last collective of every group, and write torch's whole record to `path`."""
        return capture_collectives(path)


def _log_to(path: Path) -> None:
    """Write the output of this process to the file."""
    try:
        log_process(path)
    except OSError as error:
        logger.warning("the log of this rank is left to Ray: %s: %s", path, error.strerror)


class RankGroup(WorkerGroup[Rank], Generic[Rank]):
    """The ranks of one model. They belong together: when one is lost, so are the others.

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
        """A call that does not end leaves a file in `run_folder`. All models of a pool have the same lock."""
        super().__init__(role, workers, timeout_s=timeout_s, run_folder=run_folder)
        self._split = split
        self._data_parallel = len(workers) // split.model_parallel
        self.is_lost = False
        self.device_lock = device_lock
        """Locked while the ranks compute: models of one pool compute one after the other."""
        self._run_folder = run_folder
        self.processes: list[RemoteProcess] = []
        """The processes of the ranks, in order; empty until they have started."""

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
            uncut = await asyncio.to_thread(lambda: list(shares))
            nodes = {process.node for process in self.processes}
            cut = await cut_at_source(uncut, nodes, timeout_s=self.timeout_s)
            stored = await asyncio.to_thread(lambda: [_store(share, columns) for share in cut])
            data_parallel = self._data_parallel
            assert len(stored) == data_parallel, f"{len(stored)} shares, {data_parallel} data-parallel ranks"
            started = [
                worker.run_share.options(name=f"{self.role.capitalize()}Rank.{method}").remote(
                    self.token, method, *stored[rank // (self._split.tensor * self._split.context) % data_parallel]
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
            worker.run.options(concurrency_group=BESIDE_TRAINING).remote(self.token, method.__name__, *shared, **named)
            for worker in self.workers
        ]
        return await self.gather(method.__name__, started, waits_for_all=True, is_moving=is_moving)

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
            self.is_lost = True
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

    def _start(
        self, worker: ActorHandle, method: str, arguments: Sequence[object], named: dict[str, object]
    ) -> ray.ObjectRef:
        call = worker.run.options(name=f"{self.role.capitalize()}Rank.{method}")
        return call.remote(self.token, method, *arguments, **named)

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


def _store(
    share: Share, columns: Mapping[ColumnName, RemoteColumn]
) -> tuple[ray.ObjectRef, dict[ColumnName, list[ray.ObjectRef]]]:
    """Return a reference to the stored share, and references to the parts of columns that have its samples."""
    sample_ids = frozenset(share.sample_ids)
    return ray.put(share), {name: column.references(sample_ids) for name, column in columns.items()}
