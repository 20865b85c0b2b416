"""A publish as a transaction: stage everywhere, compare digests, then commit everywhere or nowhere.

Decides and sequences; the bytes go from trainer ranks to engine ranks without passing here. An engine that did not
confirm the commit is stale: the fleet gives it no request.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Coroutine
from contextlib import suppress
from typing import TypeVar

from megarl.errors import WeightSyncError, WorkerError
from megarl.rollout.control import EngineControl
from megarl.rollout.orders import Meeting, Route
from megarl.runtime.ranks import ActorRanks
from megarl.types import PolicyVersion, PublishResult
from megarl.weights.check import check_delivery
from megarl.weights.group import abandon_group
from megarl.weights.transfer import DEFAULT_BUCKET_BYTES, StoreServer

logger = logging.getLogger(__name__)

Sent = TypeVar("Sent")
Arrived = TypeVar("Arrived")

_GROUP = "publish"


class NoPublisher:
    """For runs without engines."""

    async def publish(self, version: PolicyVersion) -> PublishResult:
        return PublishResult(version=version, num_bytes=0, seconds=0.0, num_engines=0)


class TransferPublisher:
    """From trainer ranks to engine ranks through a transfer group that outlives the publishes."""

    def __init__(self, *, ranks: ActorRanks, control: EngineControl, route: Route, timeout_s: float, host: str) -> None:
        self._ranks = ranks
        self._control = control
        self._route = route
        self._timeout_s = timeout_s
        self._store = StoreServer(host)
        self._plan = route.plan()

    async def connect(self) -> None:
        """Check the engines' real parameters against the layout, then bring both sides together."""
        await self._control.check_layout(self._route)
        meeting = Meeting(
            address=self._store.address,
            name=_GROUP,
            timeout_s=self._timeout_s,
            # NCCL refuses two processes on one GPU; what crosses between GPUs of a shared pool goes through the host.
            backend="gloo" if self._route.is_cpu_engine or self._route.shares_devices else "nccl",
            bucket_bytes=DEFAULT_BUCKET_BYTES,
        )
        await self._together(
            self._ranks.join(self._route, meeting),
            self._control.join(self._route, plan_hash=self._plan.hash, meeting=meeting),
        )

    async def publish(self, version: PolicyVersion) -> PublishResult:
        started = time.monotonic()
        try:
            sent, arrived = await self._together(self._ranks.send(version), self._control.stage(version))
            check_delivery(sent, arrived)
        except (WeightSyncError, WorkerError) as error:
            with suppress(WeightSyncError):  # an engine that cannot abort is not serving the new version either
                await self._control.abort()
            raise WeightSyncError(
                f"version {version} was not published; engines keep the one before: {error}"
            ) from error
        num_engines = await self._control.commit(version)
        seconds = time.monotonic() - started
        num_bytes = sum(self._plan.received_bytes.values())
        logger.info("published version=%d bytes=%d engines=%d seconds=%.3f", version, num_bytes, num_engines, seconds)
        return PublishResult(
            version=version,
            num_bytes=num_bytes,
            busiest_bytes=self._plan.busiest_bytes,
            floor_bytes=self._plan.floor_bytes,
            seconds=seconds,
            num_engines=num_engines,
        )

    async def _together(
        self, trainers: Coroutine[None, None, Sent], engines: Coroutine[None, None, Arrived]
    ) -> tuple[Sent, Arrived]:
        """Both ends of one exchange. The first failure is the news, and whoever still waits for the other is told."""
        tasks = asyncio.create_task(trainers), asyncio.create_task(engines)
        done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_EXCEPTION)
        for task in done:
            error = task.exception()
            if error is not None:
                await asyncio.to_thread(abandon_group, self._store.address, name=_GROUP, reason=str(error))
                await asyncio.wait(tasks)
                raise error
        return tasks[0].result(), tasks[1].result()
