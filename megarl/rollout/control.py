"""The driver's end of a publish: gives orders to all TP ranks of all engines and gathers their replies.

It moves no weights: trainer and engine ranks do that between themselves while `stage` waits. Every order is one HTTP
call per engine; SGLang returns from it when all its TP ranks have replied, so a missing reply is a broken engine.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Coroutine, Mapping, Sequence
from copy import copy
from datetime import timedelta
from pathlib import Path
from typing import TypeAlias
from uuid import uuid4

from torch._C._distributed_c10d import TCPStore

from megarl.compare.recordings import WeightDigests
from megarl.errors import EngineError, WeightSyncError
from megarl.rollout.client import EngineClient
from megarl.rollout.commands import (
    Abort,
    Command,
    Commit,
    Dump,
    Envelope,
    Fingerprint,
    Inspect,
    Join,
    Listen,
    RecordModules,
    Rendezvous,
    Reply,
    Stage,
    read_reply,
    to_payload,
)
from megarl.rollout.fleet import Engine, Fleet
from megarl.rollout.process import LOADER
from megarl.system.network import LOOPBACK
from megarl.types import PolicyVersion
from megarl.weights.algebra.slices import TensorSpec
from megarl.weights.executors.group import StoreAddress, StoreServer
from megarl.weights.executors.tensors import check_holding
from megarl.weights.layouts.transfer_spec import TransferSpec

logger = logging.getLogger(__name__)

_GRACE_S = 30.0
"""An order may take this much longer than what it waits for: the engine's own deadline speaks first, and better."""


_Replies: TypeAlias = tuple[Reply, ...]
"""Of one engine, by TP rank."""


class EngineControl:
    """Orders for some engines of a fleet, by default all that are reachable when it is made. One publish at a time."""

    def __init__(self, fleet: Fleet, *, timeout_s: float, host: str = LOOPBACK, flushes_cache: bool = True) -> None:
        """`timeout_s` bounds what an order waits for; `host` is where the engines reach this process.

        Without `flushes_cache` prefixes computed with earlier weights stay for requests that go on with them.
        """
        self._fleet = fleet
        self._flushes_cache = flushes_cache
        self._engines: Sequence[Engine] = fleet.reachable
        self._timeout_s = timeout_s
        self._server = StoreServer(host)
        self._mailbox = TCPStore(host, self._server.address.port, timeout=timedelta(seconds=_GRACE_S))
        self._late: dict[EngineClient, asyncio.Task[_Replies]] = {}
        """Calls that outlived the failure of another engine. Each has a deadline of its own."""

    def among(self, engines: Sequence[Engine]) -> EngineControl:
        """The same, for these engines."""
        control = copy(self)
        control._engines = tuple(engines)
        return control

    @property
    def address(self) -> StoreAddress:
        """A store that engines and trainer ranks reach: they can meet here."""
        return self._server.address

    @property
    def num_engines(self) -> int:
        return len(self._engines)

    async def inspect(self) -> list[Mapping[str, TensorSpec]]:
        """The parameters each target rank really has."""
        return [reply.parameters for reply in await self._replies(Inspect())]

    async def check_layout(self, transfer: TransferSpec) -> None:
        """Compare the engines' parameters with the layout the plan is made for; the error names the tensor."""
        by_rank = transfer.engine_layout().by_rank
        for rank, parameters in enumerate(await self.inspect()):
            engine = self._engines[rank // transfer.tensor]
            check_holding(by_rank[rank], parameters, holder=f"{engine}, TP rank {rank % transfer.tensor}")

    async def join(self, transfer: TransferSpec, *, plan_hash: str, meeting: Rendezvous) -> None:
        """Meet the trainer ranks, which join at the same time. The plan must be the same on both sides."""
        assert transfer.num_engines == len(self._engines), (
            f"{transfer.num_engines} engines, {len(self._engines)} reachable"
        )
        assert meeting.timeout_s <= self._timeout_s, f"meeting {meeting.timeout_s} s, orders {self._timeout_s} s"
        await self._replies(Join(transfer=transfer, plan_hash=plan_hash, meeting=meeting))

    async def stage(self, version: PolicyVersion) -> dict[int, Mapping[str, int]]:
        """Let every target rank receive `version` beside its parameters: a digest per parameter, of what arrived.

        Trainer ranks send at the same time. The first failure ends the wait; the engines go on serving what they have.
        """
        replies = await self._replies(Stage(version=version))
        return {rank: reply.digests for rank, reply in enumerate(replies)}

    async def commit(self, version: PolicyVersion, *, is_catching_up: bool = False) -> int:
        """Serve what is staged, everywhere. An engine that fails is stale from now on; returns how many succeeded.

        So is every engine that was not asked, unless those that were are `is_catching_up` with them.
        """

        async def commit_one(engine: Engine, position: int) -> _Replies:
            replies = await self._ask(engine, position, Commit(version=version), version=version)
            if self._flushes_cache:
                # Cached prefixes were computed with the old weights.
                await engine.client.flush_cache()
            return replies

        outcomes = await asyncio.gather(*self._start(commit_one), return_exceptions=True)
        succeeded, reasons = [], []
        for engine, outcome in zip(self._engines, outcomes, strict=True):
            match outcome:
                case tuple():
                    succeeded.append(engine)
                case EngineError() | WeightSyncError():
                    reasons.append(str(outcome))
                    await self._fleet.mark_stale(engine, f"commit of version {version} failed: {outcome}")
                case BaseException():
                    raise outcome
        if not succeeded:
            raise WeightSyncError(f"version {version} was committed nowhere: {'; '.join(reasons)}")
        if is_catching_up:
            assert version == self._fleet.committed_version, f"{version}, not {self._fleet.committed_version}"
            for engine in succeeded:
                await self._fleet.joined(engine)
        else:
            await self._fleet.committed(version, succeeded)
        return len(succeeded)

    async def abort(self) -> None:
        """Forget what is staged; every engine goes on serving the version it has."""
        await self._replies(Abort())

    async def fingerprints(self) -> list[Mapping[str, str]]:
        """A hash of the bytes of every parameter, per target rank, as it is served now."""
        return [reply.fingerprints for reply in await self._replies(Fingerprint())]

    async def dump(self, folder: Path) -> None:
        """Let every target rank write its parameters, as they are served now, into a file of `folder`."""
        await self._replies(Dump(folder=str(folder)))

    async def listen(self, transfer: TransferSpec) -> None:
        """Let every target rank keep what passes through its modules, until `record`."""
        await self._replies(Listen(transfer=transfer))

    async def record(self, folder: Path) -> list[WeightDigests]:
        """Let every target rank write what it heard into a file of `folder`; per rank, what it holds."""
        return [reply.digests for reply in await self._replies(RecordModules(folder=str(folder)))]

    async def _replies(self, order: Command) -> list[Reply]:
        """One order to every TP rank of every engine: replies in the order of target ranks, or the first failure.

        The calls to the other engines go on: a weight update that is cut off would leave its session open.
        """

        async def ask_one(engine: Engine, position: int) -> _Replies:
            return await self._ask(engine, position, order)

        tasks = self._start(ask_one)
        done, unfinished = await asyncio.wait(tasks, return_when=asyncio.FIRST_EXCEPTION)
        for engine, task in zip(self._engines, tasks, strict=True):
            if task in unfinished:
                self._late[engine.client] = task
                task.add_done_callback(_hear)
        failures = [error for task in tasks if task in done and (error := task.exception()) is not None]
        for error in failures:
            if not isinstance(error, EngineError | WeightSyncError):
                raise error
        if failures:
            raise WeightSyncError("; ".join(str(error) for error in failures))
        return [reply for task in tasks for reply in task.result()]

    def _start(self, call: Callable[[Engine, int], Coroutine[None, None, _Replies]]) -> list[asyncio.Task[_Replies]]:
        async def call_in_turn(engine: Engine, position: int) -> _Replies:
            late = self._late.pop(engine.client, None)
            if late is not None:
                await asyncio.wait([late])
            return await call(engine, position)

        return [asyncio.create_task(call_in_turn(engine, position)) for position, engine in enumerate(self._engines)]

    async def _ask(
        self,
        engine: Engine,
        position: int,
        order: Command,
        *,
        version: PolicyVersion | None = None,
    ) -> _Replies:
        endpoint = engine.client.endpoint
        envelopes = [
            Envelope(
                order=order,
                engine=position,
                tp_rank=tp_rank,
                host=endpoint.host,
                mailbox=self._server.address,
                reply_key=f"{order.op}/{endpoint.index}/{tp_rank}/{uuid4().hex}",
            )
            for tp_rank in range(endpoint.tensor)
        ]
        await engine.client.load_weights(
            [to_payload(envelope) for envelope in envelopes],
            load_format=LOADER,
            version=version,
            timeout_s=self._timeout_s + _GRACE_S,
        )
        return tuple(self._take(engine, envelope) for envelope in envelopes)

    def _take(self, engine: Engine, envelope: Envelope) -> Reply:
        where = f"{engine}, TP rank {envelope.tp_rank}: {envelope.order.op}"
        if not self._mailbox.check([envelope.reply_key]):
            raise WeightSyncError(f"{where}: no reply; the engine's log says why")
        reply = read_reply(self._mailbox.get(envelope.reply_key))
        self._mailbox.delete_key(envelope.reply_key)
        if reply.error is not None:
            raise WeightSyncError(f"{where}: {reply.error}")
        return reply


def _hear(task: asyncio.Task[_Replies]) -> None:
    """A late failure is no news, and asyncio complains of those that nobody looked at."""
    if not task.cancelled():
        task.exception()
