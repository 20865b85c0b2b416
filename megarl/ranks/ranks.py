"""All ranks of one model as Ray actors: where they start, how they are called and watched, and how they end."""

from __future__ import annotations

import asyncio
import logging
import socket
import threading
from collections.abc import Awaitable, Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from types import MappingProxyType
from typing import Concatenate, Generic, ParamSpec, Protocol, TypeVar

import numpy as np
import ray
from ray.actor import ActorHandle

from megarl.algo.advantage import Wide
from megarl.algo.held_credit import CreditTask, PartCredit
from megarl.cluster.cluster import address_of, own_address
from megarl.cluster.remote_process import RemoteProcess, end, this_process
from megarl.cluster.stored import cut_at_source, fetch
from megarl.cluster.worker_group import WorkerDiedError, WorkerGroup, WorkerLateError
from megarl.config.roles import ModelParallelConfig
from megarl.data.shares import Share, with_numbers
from megarl.env import GLOO_INTERFACE
from megarl.errors import WeightSyncError, WorkerError, first_line
from megarl.ranks.hang import RankStacks, ask_stacks, capture, explain_hang, write_report
from megarl.system.network import interface_of
from megarl.tokens import RolloutSums, SampleNumbers, assemble, by_sample
from megarl.train.interface import ModelCalls, RankSpec
from megarl.types import FloatArray, TrainBatch

logger = logging.getLogger(__name__)

Rank = TypeVar("Rank", bound=ModelCalls, covariant=True)
Parameters = ParamSpec("Parameters")
Result = TypeVar("Result")

BESIDE_TRAINING = "beside_training"
"""Concurrency group of calls that a rank answers in a second thread while it trains."""
ALWAYS = "always"
"""Concurrency group of calls that a rank answers even while it hangs."""

START_TIMEOUT_S = 300.0
"""Deadline for a process to start, and for its weights where `train.operation_timeout_s` is shorter: disks are slow."""
_KILL_S = 30.0
"""For the system to take a process apart: one with much memory on a device needs a while."""


class SpecOf(Protocol):
    """A RankSpec that lacks only the rank's place among the others."""

    def __call__(self, *, rank: int, world: int, master_address: str, master_port: int) -> RankSpec: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class HeldPart:
    """The numbers of one data-parallel rank's samples, in the object store of its node."""

    sample_ids: frozenset[int]
    reference: ray.ObjectRef
    rank: int = 0

    @classmethod
    def of(cls, numbers: SampleNumbers) -> HeldPart:
        return cls(sample_ids=frozenset(numbers.sample_ids.tolist()), reference=ray.put(numbers))


@dataclass(frozen=True, slots=True, kw_only=True)
class HeldNumbers:
    """Numbers per token that stay where ranks computed them; the driver has references to them."""

    role: str
    parts: tuple[HeldPart, ...]
    timeout_s: float
    workers: tuple[ActorHandle, ...] = ()
    """All ranks of the role."""

    async def fetch(self) -> tuple[FloatArray, ...]:
        """Return one array per sample of the step; raise WorkerError if the rank that holds some is lost."""
        return assemble(await self._get([part.reference for part in self.parts]))

    async def select(self, sample_ids: Collection[int]) -> dict[int, FloatArray]:
        """Return the arrays of these samples; the others stay where they are."""
        chosen = [(part, part.sample_ids.intersection(sample_ids)) for part in self.parts]
        asked = [self.workers[part.rank].select.remote([part.reference], ids) for part, ids in chosen if ids]
        return by_sample(await self._get(asked))

    async def _get(self, references: Sequence[ray.ObjectRef]) -> list[SampleNumbers]:
        try:
            async with asyncio.timeout(self.timeout_s):
                found: list[SampleNumbers] = await asyncio.gather(*references)
                return found
        except TimeoutError:
            late = f"numbers of {self.role} ranks were not fetched within {self.timeout_s:g} s"
            raise WorkerLateError(f"{late} (train.operation_timeout_s)") from None
        except ray.exceptions.RayError as error:
            reason = first_line(error)
            raise WorkerDiedError(f"numbers of {self.role} ranks are lost with the rank: {reason}") from error

    def of(self, sample_ids: frozenset[int]) -> list[ray.ObjectRef]:
        """Return references to the parts that have some of the samples."""
        return [part.reference for part in self.parts if not part.sample_ids.isdisjoint(sample_ids)]


class RankHost:
    """The process of one rank: builds the rank and runs its methods, which the driver calls on all ranks at once."""

    def __init__(self, bind: str | None) -> None:
        self._rank: ModelCalls | None = None
        self._has_failed = False
        self._credit: PartCredit | None = None
        self._is_replaced = threading.Event()
        self._host = own_address(bind)
        # Gloo would listen on the interface the host's name resolves to.
        if (interface := interface_of(self._host)) is not None:
            GLOO_INTERFACE.set(interface)

    def find_address(self) -> tuple[str, int]:
        """Return this node's address and a port that is free now, for rank 0's rendezvous."""
        with socket.create_server((self._host, 0)) as listener:
            port: int = listener.getsockname()[1]
        return self._host, port

    def start(self, build: Callable[[RankSpec], ModelCalls], spec: RankSpec) -> None:
        """Build the rank and fill it with weights."""
        self._rank = build(spec)

    def run(self, method: str, *arguments: object, **named: object) -> object:
        """Call a method of the rank."""
        assert self._rank is not None, "start comes first"
        try:
            return getattr(self._rank, method)(*arguments, **named)
        except BaseException as error:
            self._has_failed |= not isinstance(error, WeightSyncError)  # a publish changes nothing here
            raise

    def adopt(self, fill: Callable[[ModelCalls], bool]) -> bool:
        """Let `fill` bring the rank to this driver's state, after every call that an earlier driver began."""
        if self._rank is None or self._has_failed:
            raise WorkerError("it was left without a model, or inside a call that failed")
        return fill(self._rank)

    def run_share(self, method: str, share: Share, numbers: Mapping[str, Sequence[ray.ObjectRef]]) -> object:
        """Call a method of the rank with its share of a step, and with columns that ranks computed before.

        The responses are loaded here. Numbers per token that the method returns stay on this node.
        """
        fetch(share.sources)
        columns = {name: ray.get(list(parts)) for name, parts in numbers.items()}
        result = self.run(method, with_numbers(share.fill(), columns))
        if not isinstance(result, SampleNumbers):
            return result
        return HeldPart.of(result)

    def assess(
        self, task: CreditTask, numbers: Mapping[str, Sequence[ray.ObjectRef]], sample_ids: frozenset[int]
    ) -> Wide:
        """Assign raw credit to these samples of a step; return a few numbers of each that has a score."""
        columns = {name: by_sample(ray.get(list(parts))) for name, parts in numbers.items()}
        self._credit = task.assess(
            {name: {i: arrays[i] for i in sorted(sample_ids)} for name, arrays in columns.items()}
        )
        return self._credit.rows

    def select(self, part: Sequence[ray.ObjectRef], sample_ids: Collection[int]) -> SampleNumbers:
        """Return the numbers of these samples from a part that is on this node."""
        numbers: SampleNumbers = ray.get(part[0])
        return numbers.only(sample_ids)

    def settle(self, scales: Wide) -> tuple[dict[str, HeldPart], Wide]:
        """Scale the credit; its columns stay on this node, and the size of each rollout's is returned."""
        assert self._credit is not None, "assess comes first"
        credit, self._credit = self._credit, None
        columns, sizes = credit.settle(scales)
        return {name: HeldPart.of(numbers) for name, numbers in columns.items()}, sizes

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
        return capture(__name__)


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
        report_folder: Path,
        turn: asyncio.Lock,
    ) -> None:
        """A call that does not end leaves a file in `report_folder`. Models of one pool share one `turn`."""
        super().__init__(role, workers, timeout_s=timeout_s)
        self._split = split
        self.is_lost = False
        self.turn = turn
        """Held while a rank computes: models of one pool compute one after the other."""
        self._report_folder = report_folder
        self._processes: list[RemoteProcess] = []

    async def compute(
        self,
        method: Callable[Concatenate[Rank, Parameters], Result],
        *arguments: Parameters.args,
        **named: Parameters.kwargs,
    ) -> Result:
        """Call every rank in this model's turn; all ranks return the same, so rank 0's result is returned."""
        async with self.turn:
            return (await self.call(method, *arguments, **named))[0]

    def computing(
        self, method: Callable[Concatenate[Rank, Parameters], Result]
    ) -> Callable[Parameters, Awaitable[Result]]:
        """Return `compute` of one method as a function."""

        def compute(*arguments: Parameters.args, **named: Parameters.kwargs) -> Awaitable[Result]:
            return self.compute(method, *arguments, **named)

        return compute

    async def compute_shares(
        self,
        method: Callable[[Rank, TrainBatch], Result],
        shares: Iterator[Share],
        numbers: Mapping[str, HeldNumbers] = MappingProxyType({}),
    ) -> Result:
        """Call every rank in this model's turn with the share of its data-parallel rank; return rank 0's result."""
        results: list[Result] = await self._compute_shares(method.__name__, shares, numbers)
        return results[0]

    async def ask(
        self, method: Callable[[Rank, TrainBatch], SampleNumbers | None], shares: Iterator[Share]
    ) -> HeldNumbers:
        """Have every rank compute numbers of its share's tokens, in this model's turn; they stay where they are."""
        parts: list[HeldPart | None] = await self._compute_shares(method.__name__, shares, {})
        return self._held(enumerate(parts))

    async def credit(
        self, task: CreditTask, own: HeldNumbers, numbers: Mapping[str, HeldNumbers]
    ) -> tuple[RolloutSums, dict[str, HeldNumbers]]:
        """Have the ranks that hold `own` assign the credit of their rollouts; return its sums and its columns."""
        tasks: dict[int, CreditTask] = {}
        samples: dict[int, frozenset[int]] = {}
        taken: frozenset[int] = frozenset()
        for part in own.parts:  # rows of one sample may be in several
            samples[part.rank] = part.sample_ids - taken
            tasks[part.rank] = task.among(samples[part.rank])
            taken |= part.sample_ids
        asked = [
            self.workers[rank].assess.remote(tasks[rank], {name: held.of(ids) for name, held in numbers.items()}, ids)
            for rank, ids in samples.items()
        ]
        answers: list[Wide] = await self._gather("assess", asked, timeout_s=self._timeout_s)
        order = {sample_id: place for place, sample_id in enumerate(task.sample_ids)}
        places = [[order[sample_id] for sample_id in of_part.sample_ids] for of_part in tasks.values()]
        back = np.argsort(np.concatenate(places))  # the answers end to end are in the order of the ranks
        rows = np.concatenate(answers)[back]
        scales = task.scales(rows)
        if scales is None:
            return task.sums(rows), {}
        started = [self.workers[rank].settle.remote(scales[of]) for rank, of in zip(tasks, places, strict=True)]
        settled: list[tuple[dict[str, HeldPart], Wide]]
        settled = await self._gather("settle", started, timeout_s=self._timeout_s)
        parts = [(rank, columns) for rank, (columns, _) in zip(tasks, settled, strict=True)]
        held = {name: self._held((rank, columns[name]) for rank, columns in parts) for name in settled[0][0]}
        return replace(task.sums(rows), advantages=np.concatenate([sizes for _, sizes in settled])[back]), held

    def _held(self, parts: Iterable[tuple[int, HeldPart | None]]) -> HeldNumbers:
        """Return the numbers of some ranks; one that has none answers None."""
        known = tuple(replace(part, rank=rank) for rank, part in parts if part is not None)
        return HeldNumbers(role=self.role, parts=known, timeout_s=self._timeout_s, workers=self.workers)

    async def _compute_shares(
        self, method: str, shares: Iterator[Share], numbers: Mapping[str, HeldNumbers]
    ) -> list[Result]:
        async with self.turn:
            # In a thread: planning a step takes seconds. A share is stored once, and only its ranks read it.
            made = await asyncio.to_thread(lambda: list(shares))
            nodes = {process.node for process in self._processes}
            cut = await cut_at_source(made, nodes, timeout_s=self._timeout_s)
            stored = await asyncio.to_thread(lambda: [_store(share, numbers) for share in cut])
            data_parallel = len(self) // self._split.model_parallel
            assert len(stored) == data_parallel, f"{len(stored)} shares, {data_parallel} data-parallel ranks"
            started = [
                worker.run_share.options(name=f"{self.role.capitalize()}Rank.{method}").remote(
                    method, *stored[rank // (self._split.tensor * self._split.context) % data_parallel]
                )
                for rank, worker in enumerate(self.workers)
            ]
            return await self._gather(method, started, timeout_s=self._timeout_s)

    async def call_beside(
        self,
        method: Callable[Concatenate[Rank, Parameters], Result],
        *arguments: Parameters.args,
        **named: Parameters.kwargs,
    ) -> list[Result]:
        """Do as `call_to_end` in the ranks' second thread: training goes on meanwhile."""
        shared = [ray.put(argument) for argument in arguments]
        started = [
            worker.run.options(concurrency_group=BESIDE_TRAINING).remote(method.__name__, *shared, **named)
            for worker in self.workers
        ]
        return await self._gather(method.__name__, started, timeout_s=self._timeout_s, waits_for_all=True)

    async def start(self, build: Callable[[RankSpec], ModelCalls], spec_of: SpecOf) -> None:
        """Build every rank in its process; comes first."""
        started = [worker.process.remote() for worker in self.workers]
        self._processes = await self._gather("process", started, timeout_s=START_TIMEOUT_S)
        addresses: list[tuple[str, int]] = await self._gather(
            "find_address", [self.workers[0].find_address.remote()], timeout_s=self._timeout_s
        )
        address, port = addresses[0]
        specs = [
            spec_of(rank=rank, world=len(self), master_address=address, master_port=port) for rank in range(len(self))
        ]
        starting = [worker.start.remote(build, spec) for worker, spec in zip(self.workers, specs, strict=True)]
        await self._gather("start", starting, timeout_s=max(self._timeout_s, START_TIMEOUT_S))

    async def adopt(self, fill: Callable[[Rank], bool], *, timeout_s: float) -> bool:
        """Take over the ranks of an earlier driver; return whether all were in this driver's state already."""
        for group in (ALWAYS, BESIDE_TRAINING):  # in the latter after the calls that the earlier driver began
            started = [worker.process.options(concurrency_group=group).remote() for worker in self.workers]
            self._processes = await self._gather("process", started, timeout_s=timeout_s)
        filling = [worker.adopt.remote(fill) for worker in self.workers]
        return all(await self._gather("adopt", filling, timeout_s=max(timeout_s, self._timeout_s)))

    async def measure(self) -> dict[int, float]:
        """Return `ModelCalls.measure` of every rank."""
        async with self.turn:
            return dict(enumerate(await self.call(ModelCalls.measure)))

    def node_of(self, rank: int) -> str:
        return address_of(self._processes[rank].node)

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
        """End every process, frozen ones included, and wait until they are gone."""
        for worker in self.workers:
            ray.kill(worker, no_restart=True)
        endings = await asyncio.gather(
            *(end(process, grace_s=1.0, timeout_s=_KILL_S) for process in self._processes),
            return_exceptions=True,
        )
        for rank, outcome in enumerate(endings):
            if outcome is not True:
                logger.warning("role=%s rank=%d may still run: %s", self.role, rank, outcome or "it does not end")

    def _start(
        self, worker: ActorHandle, method: str, arguments: Sequence[object], named: dict[str, object]
    ) -> ray.ObjectRef:
        return worker.run.options(name=f"{self.role.capitalize()}Rank.{method}").remote(method, *arguments, **named)

    async def _explain(self, method: str, late: Sequence[int], timeout_s: float) -> WorkerLateError:
        processes: Sequence[RemoteProcess | None] = self._processes or [None] * len(self)
        answers = await asyncio.gather(*map(ask_stacks, self.workers, processes))
        report = explain_hang(answers, method=method, late=late)
        headline = f"{self.role}: {method} did not finish within {timeout_s:g} s (train.operation_timeout_s): {report}"
        where = await asyncio.to_thread(write_report, self._report_folder, self.role, method, headline, answers)
        return WorkerLateError(f"{headline}; {where}", self.role, report.at_fault)


def _store(share: Share, numbers: Mapping[str, HeldNumbers]) -> tuple[ray.ObjectRef, dict[str, list[ray.ObjectRef]]]:
    """Return a reference to the stored share, and references to the numbers of its samples by column."""
    sample_ids = frozenset(share.sample_ids)
    return ray.put(share), {name: held.of(sample_ids) for name, held in numbers.items()}
