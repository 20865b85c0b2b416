"""A publish as a transaction: stage everywhere, compare digests, then commit everywhere or nowhere.

Decides and sequences; the bytes go from trainer ranks to engine ranks without passing here. It goes to the engines that
can be reached: one that is lost on the way is left out and the rest are sent the version again, in a new transfer
group. An engine that did not confirm the commit is stale: the fleet gives it no request until it has caught up.

A publisher belongs to one life of the trainer ranks; the fleet outlives it.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Coroutine, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, suppress
from dataclasses import dataclass
from typing import Protocol, Self, TypeVar

from megarl.errors import WeightSyncError, WorkerError
from megarl.results import PublishResult
from megarl.rollout.commands import Rendezvous
from megarl.rollout.control import ignore_outcome
from megarl.rollout.fleet import Engine, Fleet
from megarl.rollout.lifecycle import EngineState
from megarl.types import PolicyVersion
from megarl.weights.algebra.buckets import DEFAULT_BUCKET_BYTES
from megarl.weights.algebra.plan import Plan
from megarl.weights.executors.digest import check_digests
from megarl.weights.executors.group import Backend, StoreServer, abandon_group
from megarl.weights.layouts.transfer_spec import TransferSpec

logger = logging.getLogger(__name__)

Sent = TypeVar("Sent")
Arrived = TypeVar("Arrived")

_GROUP = "publish"
_MAX_UNEXPLAINED = 2
"""Failures for which every engine is there afterwards: then each is tried on its own, to find the one at fault."""
_GIVE_UP_S = 10.0
"""For engines to hear that nothing comes any more."""


class SendingRanks(Protocol):
    """The trainer ranks, as a publish needs them."""

    def at_rest(self) -> AbstractAsyncContextManager[None]:
        """Return a context in which no rank computes, so that weights do not change."""
        ...

    async def join(self, transfer: TransferSpec, rendezvous: Rendezvous, /) -> None: ...

    async def version(self) -> int: ...

    async def send(self, version: int, /) -> Sequence[Mapping[tuple[int, str], int]]:
        """Return per rank the digests of what it sent, by target rank and tensor."""
        ...


class ReceivingEngines(Protocol):
    """The engines, as a publish needs them; see `EngineControl`."""

    def among(self, engines: Sequence[Engine], /) -> Self: ...

    async def check_layout(self, transfer: TransferSpec, /) -> None: ...

    async def join(self, transfer: TransferSpec, /, *, plan_hash: str, rendezvous: Rendezvous) -> None: ...

    async def stage(self, version: PolicyVersion, /) -> Mapping[int, Mapping[str, int]]: ...

    async def commit(self, version: PolicyVersion, /, *, is_catching_up: bool) -> int: ...

    async def abort(self) -> None: ...


class NoPublisher:
    """For runs without engines."""

    async def publish(self, version: PolicyVersion) -> PublishResult:
        return PublishResult(version=version, num_bytes=0, seconds=0.0, num_engines=0)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Link:
    """Trainer ranks and the engines of a roster, in one transfer group."""

    members: tuple[object, ...]
    """The clients of the roster: a restarted engine has another one."""
    store: StoreServer
    """Where its peers meet, and nobody else: a group that was given up is remembered there."""
    control: ReceivingEngines
    plan: Plan


class TransferPublisher:
    """From trainer ranks to engine ranks through a transfer group that lives as long as its roster."""

    def __init__(
        self,
        *,
        ranks: SendingRanks,
        fleet: Fleet,
        control: ReceivingEngines,
        transfer: TransferSpec,
        timeout_s: float,
        host: str,
        failed: Callable[[PolicyVersion, str], None] = lambda _version, _reason: None,
    ) -> None:
        """`transfer` goes to all engines of the fleet; `failed` is told of every attempt that is made again."""
        self._ranks = ranks
        self._fleet = fleet
        self._control = control
        self._transfer = transfer
        self._timeout_s = timeout_s
        self._host = host
        self._failed = failed
        self._link: _Link | None = None
        self._has_published = False
        self._turn = asyncio.Lock()
        """Versions travel one after the other."""

    async def connect(self) -> None:
        """Check the real parameters of all reachable engines against the layout, whatever version they serve."""
        while True:
            roster = await self._fleet.any_reachable()
            try:
                await self._control.among(roster).check_layout(self._transfer_to(roster))
                return
            except WeightSyncError as error:
                if await self._are_all_there(roster, str(error)):
                    raise

    async def publish(self, version: PolicyVersion) -> PublishResult:
        """To all reachable engines; where there is none, to the first that is restarted."""
        async with self._turn:
            started = time.monotonic()
            num_engines, plan = await self._publish_somewhere(version)
            self._has_published = True
            seconds = time.monotonic() - started
        num_bytes = sum(plan.traffic.received_bytes.values())
        logger.info("published version=%d bytes=%d engines=%d seconds=%.3f", version, num_bytes, num_engines, seconds)
        return PublishResult(
            version=version,
            num_bytes=num_bytes,
            busiest_bytes=plan.traffic.busiest_bytes,
            floor_bytes=plan.traffic.floor_bytes,
            seconds=seconds,
            num_engines=num_engines,
        )

    async def catch_up(self, engine: Engine) -> bool:
        """Bring a stale engine to the committed version while the others go on; False where it is not the time.

        It is not before the first publish, nor when the trainer ranks already have the next version: a rank refuses to
        send what it does not hold, and the next publish goes to this engine as to the others.
        """
        async with self._turn, self._ranks.at_rest():
            version = self._fleet.committed_version
            if not self._has_published or engine.state is not EngineState.STALE:
                return False
            if await self._ranks.version() != version:
                return False
            with self._fleet.syncing([engine]):
                await self._deliver([engine], version, is_catching_up=True)
            return True

    async def _publish_somewhere(self, version: PolicyVersion) -> tuple[int, Plan]:
        """How many engines have it, and by which plan."""
        num_unexplained = 0
        while True:
            roster = await self._fleet.any_reachable()
            if num_unexplained >= _MAX_UNEXPLAINED and len(roster) > 1:
                return await self._publish_to_one(roster, version)
            try:
                with self._fleet.syncing(roster):
                    return await self._deliver(roster, version)
            except WeightSyncError as error:
                logger.info("publish failed version=%d engines=%d reason=%s", version, len(roster), error)
                self._failed(version, str(error.__cause__ or error))
                if await self._are_all_there(roster, str(error)):
                    num_unexplained += 1
                    if num_unexplained > _MAX_UNEXPLAINED:
                        raise

    async def _publish_to_one(self, roster: Sequence[Engine], version: PolicyVersion) -> tuple[int, Plan]:
        """The first engine that can be published to alone; the others are stale and catch up one by one."""
        reasons = []
        for engine in roster:
            try:
                with self._fleet.syncing([engine]):
                    return await self._deliver([engine], version)
            except WeightSyncError as error:
                reasons.append(str(error))
        raise WeightSyncError("; ".join(reasons))

    async def _are_all_there(self, roster: Sequence[Engine], reason: str) -> bool:
        """Whether no engine of the roster is lost; those that do not answer are dead from now on."""
        return all(await asyncio.gather(*(self._fleet.examine(engine, reason) for engine in roster)))

    async def _deliver(
        self, roster: Sequence[Engine], version: PolicyVersion, *, is_catching_up: bool = False
    ) -> tuple[int, Plan]:
        """One transaction with these engines: all of them keep what they have, or those that confirm it have it."""
        try:
            link = await self._linked(roster)
            sent, arrived = await self._together(link.store, self._ranks.send(version), link.control.stage(version))
            check_digests(sent, arrived)
            num_engines = await link.control.commit(version, is_catching_up=is_catching_up)
        except (WeightSyncError, WorkerError) as error:
            self._link = None
            if there := [engine for engine in roster if engine.life.is_reachable]:
                with suppress(WeightSyncError):  # an engine that cannot abort is not serving the new version either
                    await self._control.among(there).abort()
            # Ranks that are lost are started again; nothing is said of the engines by that.
            kind = WorkerError if isinstance(error, WorkerError) else WeightSyncError
            raise kind(f"version {version} was not published; engines keep the one before: {error}") from error
        return num_engines, link.plan

    async def _linked(self, roster: Sequence[Engine]) -> _Link:
        """The transfer group of a roster: the one there is, or a new one."""
        members = tuple(engine.client for engine in roster)
        if self._link is not None and self._link.members == members:
            return self._link
        self._link = None
        transfer = self._transfer_to(roster)
        plan = transfer.plan()
        control = self._control.among(roster)
        store = StoreServer(self._host)
        rendezvous = Rendezvous(
            address=store.address,
            name=_GROUP,
            timeout_s=self._timeout_s,
            backend=self._backend,
            bucket_bytes=DEFAULT_BUCKET_BYTES,
        )
        await self._together(
            store,
            self._ranks.join(transfer, rendezvous),
            control.join(transfer, plan_hash=plan.hash, rendezvous=rendezvous),
        )
        self._link = _Link(members=members, store=store, control=control, plan=plan)
        return self._link

    def _transfer_to(self, roster: Sequence[Engine]) -> TransferSpec:
        return self._transfer.with_engines([engine.index for engine in roster])

    @property
    def _backend(self) -> Backend:
        # NCCL refuses two processes on one GPU; what crosses between GPUs of a shared pool goes through the host.
        return "gloo" if self._transfer.is_cpu_engine or self._transfer.shares_devices else "nccl"

    async def _together(
        self, store: StoreServer, trainers: Coroutine[None, None, Sent], engines: Coroutine[None, None, Arrived]
    ) -> tuple[Sent, Arrived]:
        """Both ends of one exchange. The first failure is the news, and whoever still waits for the other is told."""
        tasks = asyncio.create_task(trainers), asyncio.create_task(engines)
        for task in tasks:
            task.add_done_callback(ignore_outcome)
        try:
            done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_EXCEPTION)
        except asyncio.CancelledError:
            # The ranks are about to be ended; an engine would wait for them until its deadline, and hear nobody.
            await asyncio.to_thread(abandon_group, store.address, name=_GROUP, reason="the publish was given up")
            tasks[0].cancel()
            await asyncio.wait(tasks, timeout=_GIVE_UP_S)
            raise
        failures = [error for task in done if (error := task.exception()) is not None]
        if failures:
            await asyncio.to_thread(abandon_group, store.address, name=_GROUP, reason=str(failures[0]))
            await asyncio.wait(tasks)
            # Engines lose their connection to a rank that dies before anybody knows that it is dead.
            loss = tasks[0].exception()
            raise loss if isinstance(loss, WorkerError) else failures[0]
        return tasks[0].result(), tasks[1].result()
