"""A publish: its steps for any way in which bytes move, what is sent again, and the transaction between ranks.

`EnginePublisher` has the steps. `TransferPublisher` moves the bytes: receive everywhere, compare digests, then serve
the version everywhere or nowhere. Bytes go from trainer ranks to engine ranks directly and in place: an engine has no
room for two versions. A publish goes to the reachable engines. If it fails after its first byte, they are stale: the
fleet gives them no request until the version was sent again, in a new transfer group, without the engines that were
lost. The trainer ranks keep the version until then, so nothing is lost but time.

A transfer belongs to one set of trainer ranks; the fleet outlives it.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Coroutine, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import TypeVar

from megarl.config.roles import InFlight
from megarl.engine import admin
from megarl.engine.commands import Rendezvous
from megarl.engine.control import EngineControl, ignore_outcome
from megarl.engine.fleet import Engine, Fleet
from megarl.engine.lifecycle import EngineState, FellBehind
from megarl.errors import NumericsError, WeightSyncError, WorkerError
from megarl.ranks.calls import ActorCalls
from megarl.ranks.ranks import RankGroup
from megarl.results import PublishResult
from megarl.serving.canary import Canary
from megarl.stages import Phases, Publisher
from megarl.types import ONE_POLICY, PolicyVersion
from megarl.weights.algebra.buckets import DEFAULT_BUCKET_BYTES
from megarl.weights.algebra.plan import Plan
from megarl.weights.algebra.slices import Link
from megarl.weights.executors.digest import check_digests
from megarl.weights.executors.meeting import Backend, StoreServer, abandon_group
from megarl.weights.executors.shared_memory import UNREADABLE
from megarl.weights.layouts.transfer_spec import TransferSpec

logger = logging.getLogger(__name__)

Sent = TypeVar("Sent")
Arrived = TypeVar("Arrived")

_GROUP = "publish"
_MAX_UNEXPLAINED = 2
"""Failures after which every engine still answers; then each is tried alone, to find the one at fault."""
_GIVE_UP_S = 10.0
"""Time for engines to notice that the group was abandoned."""


@dataclass(eq=False, kw_only=True)
class EnginePublisher:
    """A Publisher (see `stages`): the steps of a publish, whichever way the bytes move."""

    transport: Publisher
    """Moves the bytes; returns when the engines serve the version."""
    fleet: Fleet
    phases: Phases
    in_flight: InFlight | None = None
    """The treatment of requests that run during a publish; None where none does."""
    publish_draft: Callable[[], Awaitable[None]] | None = None
    """Sends what the drafts of the engines have learned; None where they stay as they are."""
    announce: Callable[[], Awaitable[None]] | None = None
    """Returns when rollout workers in other processes know what the engines serve."""
    canary: Canary | None = None
    _num_published: int = field(default=0, init=False)

    async def publish(self, version: PolicyVersion) -> PublishResult:
        if self.in_flight is None:
            result = await self._send(version)
        else:
            async with admin.paused(self.fleet, self.in_flight, announce=self.announce):
                result = await self._send(version)
        if self.canary is not None and self._num_published % self.canary.every == 0:
            await self.canary.check(version)
        self._num_published += 1
        return result

    async def _send(self, version: PolicyVersion) -> PublishResult:
        # In a shared pool engines take the memory of their weights first.
        async with self.phases.publishing():
            if self.publish_draft is not None:
                await self.publish_draft()
            result = await self.transport.publish(version)
        if self.announce is not None:
            await self.announce()
        return result


class NoPublisher:
    """The publisher of a run without engines: it does nothing."""

    async def publish(self, version: PolicyVersion) -> PublishResult:
        return PublishResult(version=version, num_bytes=0, seconds=0.0, num_engines=0)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Link:
    """The transfer group of the trainer ranks and the engines of a roster."""

    members: tuple[object, ...]
    """The clients of the roster; a restarted engine has a new one."""
    store: StoreServer
    """The rendezvous of this group alone: that the group was abandoned is recorded here."""
    control: EngineControl
    plan: Plan


@dataclass(eq=False, kw_only=True)
class TransferPublisher:
    """Publishes from trainer ranks to engine ranks through a transfer group that lasts as long as its roster."""

    ranks: RankGroup[ActorCalls]
    fleet: Fleet
    control: EngineControl
    transfer: Callable[[], TransferSpec]
    """Returns the one to all engines of the fleet, where they are then."""
    timeout_s: float
    host: str
    policy: str = ONE_POLICY
    failed: Callable[[PolicyVersion, str], None] = lambda _version, _reason: None
    """Called before an attempt is repeated."""
    _link: _Link | None = field(default=None, init=False)
    _farthest_read: Link = field(default=Link.NODE, init=False)
    _has_published: bool = field(default=False, init=False)

    async def connect(self) -> None:
        """Check the parameters of all reachable engines against the layout, whatever version they serve."""
        while True:
            roster = await self.fleet.any_reachable()
            try:
                await self.control.among(roster).check_layout(self._transfer_to(roster))
                return
            except WeightSyncError as error:
                if await self._are_all_there(roster, str(error)):
                    raise

    async def publish(self, version: PolicyVersion) -> PublishResult:
        """Publish to all reachable engines; if there is none, to the first that is restarted."""
        async with self.fleet.publish_lock:
            started = time.monotonic()
            num_engines, plan = await self._publish_somewhere(version)
            self._has_published = True
            seconds = time.monotonic() - started
        num_bytes = sum(plan.traffic.received_bytes.values())
        logger.info(
            "published group=%s version=%d bytes=%d engines=%d seconds=%.3f",
            self._group,
            version,
            num_bytes,
            num_engines,
            seconds,
        )
        return PublishResult(
            version=version,
            num_bytes=num_bytes,
            busiest_bytes=plan.traffic.busiest_bytes,
            floor_bytes=plan.traffic.floor_bytes,
            seconds=seconds,
            num_engines=num_engines,
        )

    async def catch_up(self, engine: Engine) -> bool:
        """Send the committed version to a stale engine while the others generate; return False if that is not possible.

        It is not possible before the first publish, nor once the trainer ranks hold the next version: a rank can only
        send the version it holds. The next publish includes this engine.
        """
        async with self.fleet.publish_lock, self.ranks.device_lock:
            version = self.fleet.committed_version(self.policy)
            if not self._has_published or engine.state is not EngineState.STALE or self.policy not in engine.lacks:
                return False
            if (await self.ranks.call(ActorCalls.version))[0] != version:
                return False
            with self.fleet.syncing([engine]):
                await self._deliver([engine], version, is_catching_up=True)
            return True

    async def _publish_somewhere(self, version: PolicyVersion) -> tuple[int, Plan]:
        """Return the number of engines that serve `version`, and the plan that was used."""
        num_unexplained = 0
        while True:
            roster = await self.fleet.any_reachable()
            if num_unexplained >= _MAX_UNEXPLAINED and len(roster) > 1:
                return await self._publish_to_one(roster, version)
            try:
                with self.fleet.syncing(roster):
                    return await self._deliver(roster, version)
            except WeightSyncError as error:
                logger.info("publish failed version=%d engines=%d reason=%s", version, len(roster), error)
                self.failed(version, str(error.__cause__ or error))
                if UNREADABLE in str(error) and self._sends_more(roster):
                    continue
                if await self._are_all_there(roster, str(error)):
                    num_unexplained += 1
                    if num_unexplained > _MAX_UNEXPLAINED:
                        raise

    def _sends_more(self, roster: Sequence[Engine]) -> bool:
        """Send over the farthest link that engines read over; return False if they read over none.

        Processes in containers of their own, or on GPUs that do not reach each other, may not read each other's memory.
        """
        direct = self._transfer_to(roster).direct
        if direct is Link.PROCESS:
            return False
        self._farthest_read = Link(direct - 1)
        where = "of other GPUs of their node" if direct is Link.NODE else "of their GPU's trainer rank"
        logger.warning("publish: engines cannot read the memory %s; from now on it is sent to them", where)
        return True

    async def _publish_to_one(self, roster: Sequence[Engine], version: PolicyVersion) -> tuple[int, Plan]:
        """Publish to the first engine that accepts it alone; the others are stale and catch up one by one."""
        reasons = []
        for engine in roster:
            try:
                with self.fleet.syncing([engine]):
                    return await self._deliver([engine], version)
            except WeightSyncError as error:
                reasons.append(str(error))
        raise WeightSyncError("; ".join(reasons))

    async def _are_all_there(self, roster: Sequence[Engine], reason: str) -> bool:
        """Return whether all engines of the roster answer; those that do not are dead from now on."""
        return all(await asyncio.gather(*(self.fleet.examine(engine, reason) for engine in roster)))

    async def _deliver(
        self, roster: Sequence[Engine], version: PolicyVersion, *, is_catching_up: bool = False
    ) -> tuple[int, Plan]:
        """Run one transaction: afterwards an engine of the roster serves `version`, or is stale.

        A failure before the first byte changes no engine.
        """
        consequence = "engines keep the one before"
        try:
            link = await self._linked(roster)
            consequence = "engines wait until it is sent again"
            with self._unusable(roster, version):
                await self._exchange(link, version)
            num_engines = await link.control.confirm(version, is_catching_up=is_catching_up)
        except (WeightSyncError, WorkerError) as error:
            raise self._not_published(version, consequence, error) from error
        return num_engines, link.plan

    async def _exchange(self, link: _Link, version: PolicyVersion, *, adapter: str | None = None) -> None:
        """Move a version into the parameters of engines, or into an adapter that they have loaded; compare digests."""
        receiving = link.control.receive(version, adapter=adapter)
        sent, arrived = await self._together(link.store, self.ranks.call(ActorCalls.send, version), receiving)
        check_digests(sent, arrived)

    def _not_published(
        self, version: PolicyVersion, consequence: str, error: Exception
    ) -> WorkerError | WeightSyncError:
        """Leave the transfer group, which the error may have broken; return the error to raise."""
        self._link = None
        # Lost ranks are restarted by the run; the engines are not at fault.
        kind = WorkerError if isinstance(error, WorkerError) else WeightSyncError
        return kind(f"version {version} was not published; {consequence}: {error}")

    @contextmanager
    def _unusable(self, roster: Sequence[Engine], version: PolicyVersion) -> Iterator[None]:
        """Mark the engines as stale if the block fails or is cancelled: their weights may be of two versions."""
        try:
            yield
        except BaseException as error:
            for engine in roster:
                self.fleet.report(
                    engine, FellBehind(reason=f"received a part of version {version}: {error or 'it was given up'}")
                )
            raise

    async def _linked(self, roster: Sequence[Engine]) -> _Link:
        """Return the transfer group of a roster, a new one if the roster has changed."""
        members = tuple(engine.client for engine in roster)
        if self._link is not None and self._link.members == members:
            return self._link
        self._link = None
        transfer = self._transfer_to(roster)
        plan = transfer.plan()
        control = self.control.among(roster)
        store = StoreServer(self.host)
        rendezvous = Rendezvous(
            address=store.address,
            name=self._group,
            timeout_s=self.timeout_s,
            backend=_backend(transfer, plan),
            bucket_bytes=DEFAULT_BUCKET_BYTES,
        )
        await self._together(
            store,
            self.ranks.call(ActorCalls.join, transfer, rendezvous),
            control.join(transfer, plan_hash=plan.hash, rendezvous=rendezvous),
        )
        self._link = _Link(members=members, store=store, control=control, plan=plan)
        return self._link

    @property
    def _group(self) -> str:
        """The name of the transfer group: ranks and engines have one for each policy."""
        return f"{_GROUP} {self.policy}" if self.policy else _GROUP

    def _transfer_to(self, roster: Sequence[Engine]) -> TransferSpec:
        transfer = replace(self.transfer(), farthest_read=self._farthest_read)
        return transfer.with_engines([engine.index for engine in roster])

    async def _together(
        self, store: StoreServer, trainers: Coroutine[None, None, Sent], engines: Coroutine[None, None, Arrived]
    ) -> tuple[Sent, Arrived]:
        """Run both ends of an exchange. After the first failure the group is abandoned, which ends the other waits."""
        tasks = asyncio.create_task(trainers), asyncio.create_task(engines)
        for task in tasks:
            task.add_done_callback(ignore_outcome)
        try:
            done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_EXCEPTION)
        except asyncio.CancelledError:
            # The ranks are about to end; without this an engine would wait for them until its deadline.
            await asyncio.to_thread(abandon_group, store.address, name=self._group, reason="the publish was cancelled")
            tasks[0].cancel()
            await asyncio.wait(tasks, timeout=_GIVE_UP_S)
            raise
        failures = [error for task in done if (error := task.exception()) is not None]
        if failures:
            await asyncio.to_thread(abandon_group, store.address, name=self._group, reason=str(failures[0]))
            await asyncio.wait(tasks)
            # Engines lose the connection to a rank that died or refused before the driver hears of it.
            loss = tasks[0].exception()
            raise loss if isinstance(loss, WorkerError | NumericsError) else failures[0]
        return tasks[0].result(), tasks[1].result()


def _backend(transfer: TransferSpec, plan: Plan) -> Backend | None:
    """Return the way of the bytes that engine ranks do not read from the memory of trainer ranks."""
    sent = sum(sum(plan.traffic.received[link].values()) for link in Link if link > transfer.direct)
    if not sent:
        return None
    if transfer.is_cpu_engine:
        return "gloo"
    if transfer.shares_devices:
        # NCCL refuses two processes on one GPU.
        logger.warning("publish bytes=%d between nodes of a shared pool go through host memory", sent)
        return "gloo"
    return "nccl"
