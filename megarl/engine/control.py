"""The driver's end of a publish: sends commands to all TP ranks of all engines and collects their replies.

It moves no weights: trainer and engine ranks do that among themselves while `receive` waits. A command is one HTTP call
per engine; SGLang returns from it when all its TP ranks have replied, so a missing reply means a broken engine.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from copy import copy
from datetime import timedelta
from typing import Any, Self, TypeAlias
from uuid import uuid4

from torch.distributed import TCPStore

from megarl.engine.client import EngineClient
from megarl.engine.commands import (
    Command,
    CommandMessage,
    Inspect,
    Join,
    Receive,
    Rendezvous,
    Reply,
    read_reply,
    to_payload,
)
from megarl.engine.fleet import Engine, Fleet
from megarl.engine.process import DRAFT_LOADER, LOADER
from megarl.errors import EngineError, WeightSyncError
from megarl.system.network import LOOPBACK
from megarl.types import PolicyVersion
from megarl.weights.algebra.slices import TensorSpec
from megarl.weights.executors.meeting import StoreAddress, StoreServer
from megarl.weights.executors.tensors import check_holding
from megarl.weights.layouts.transfer_spec import TransferSpec

_GRACE_S = 30.0
"""Added to a command's deadline: the engine's own deadline passes first, and its message says more."""

_Replies: TypeAlias = tuple[Reply, ...]
"""The replies of one engine, by TP rank."""


class EngineControl:
    """Commands for some engines of a fleet: all that are reachable when it is made, or those given to `among`.

    One publish at a time.
    """

    def __init__(
        self,
        fleet: Fleet,
        *,
        timeout_s: float,
        host: str = LOOPBACK,
        flushes_cache: bool = True,
        is_for_drafts: bool = False,
        holds_requests: bool = False,
    ) -> None:
        """`timeout_s` is the deadline of a command; `host` is this process's address for the engines.

        Without `flushes_cache`, prefixes computed with earlier weights stay cached for the requests that use them. With
        `is_for_drafts` commands go to the drafts of the engines, whose versions no engine reports. With
        `holds_requests` requests wait between two tokens during a command; else it waits for them, or for a pause.
        """
        self._fleet = fleet
        self._flushes_cache = flushes_cache
        self._is_for_drafts = is_for_drafts
        self._holds_requests = holds_requests
        self._engines: Sequence[Engine] = fleet.reachable
        self._timeout_s = timeout_s
        self._group = ""
        """Name of the transfer group that the engines have joined."""
        self._server = StoreServer(host)
        self._mailbox = TCPStore(host, self._server.address.port, timeout=timedelta(seconds=_GRACE_S))
        self._late: dict[EngineClient, asyncio.Task[_Replies]] = {}
        """Calls that were still running when another engine failed. Each has a deadline of its own."""

    def among(self, engines: Sequence[Engine]) -> Self:
        """Return a control of these engines; it shares mailbox and late calls with this one."""
        control = copy(self)
        control._engines = tuple(engines)
        return control

    @property
    def address(self) -> StoreAddress:
        """A store that engines and trainer ranks can reach, for a rendezvous."""
        return self._server.address

    async def inspect(self) -> list[Mapping[str, TensorSpec]]:
        """Return the parameters of each target rank."""
        return [reply.parameters for reply in await self.ask(Inspect())]

    async def check_layout(self, transfer: TransferSpec) -> None:
        """Compare the engines' parameters with the layout that the plan assumes; the error names the tensor."""
        by_rank = transfer.engine_layout().by_rank
        for rank, parameters in enumerate(await self.inspect()):
            engine = self._engines[rank // transfer.tensor]
            holder = f"{engine}, TP rank {rank % transfer.tensor}"
            check_holding(by_rank[rank], parameters, holder=holder, unplanned=transfer.unplanned)

    async def join(self, transfer: TransferSpec, *, plan_hash: str, rendezvous: Rendezvous) -> None:
        """Join a transfer group with the trainer ranks, which join at the same time and must have the same plan."""
        engines, deadlines = (transfer.num_engines, len(self._engines)), (rendezvous.timeout_s, self._timeout_s)
        assert engines[0] == engines[1], f"{engines[0]} engines to join, {engines[1]} reachable"
        assert deadlines[0] <= deadlines[1], f"rendezvous {deadlines[0]} s, commands {deadlines[1]} s"
        self._group = rendezvous.name
        await self.ask(Join(transfer=transfer, plan_hash=plan_hash, rendezvous=rendezvous))

    async def receive(self, version: PolicyVersion, *, adapter: str | None = None) -> dict[int, Mapping[str, int]]:
        """Let every target rank receive `version` in place; return a digest per tensor and rank.

        Trainer ranks send at the same time. The first failure ends the wait. Until `confirm` the engines must get no
        request: their weights may be of two versions. With the name of an `adapter` that is none to this adapter.
        """
        reported = version if adapter is None and not self._is_for_drafts else None
        replies = await self.ask(Receive(version=version, group=self._group, adapter=adapter), version=reported)
        return {rank: reply.digests for rank, reply in enumerate(replies)}

    async def confirm(self, version: PolicyVersion, *, is_catching_up: bool = False) -> int:
        """Let all engines serve what they received, whose digests were compared; return how many do.

        The others are stale from now on. So is every engine outside this control, unless the engines of this control
        are only `is_catching_up`.
        """
        # Cached prefixes were computed with the old weights.
        flushed = [engine.client.flush_cache() for engine in self._engines if self._flushes_cache]
        outcomes = await asyncio.gather(*flushed, return_exceptions=True) or [None] * len(self._engines)
        succeeded, reasons = [], []
        for engine, outcome in zip(self._engines, outcomes, strict=True):
            match outcome:
                case None:
                    succeeded.append(engine)
                case EngineError():
                    reasons.append(str(outcome))
                    await self._fleet.mark_stale(engine, f"version {version} has the cache of another: {outcome}")
                case BaseException():
                    raise outcome
        if not succeeded:
            raise WeightSyncError(f"version {version} is served nowhere: {'; '.join(reasons)}")
        if is_catching_up:
            committed = self._fleet.committed_version()
            assert version == committed, f"{version}, not {committed}"
            for engine in succeeded:
                await self._fleet.joined(engine)
        else:
            await self._fleet.committed(version, succeeded)
        return len(succeeded)

    async def ask(self, command: Command, *, version: PolicyVersion | None = None) -> list[Reply]:
        """Send one command to every TP rank of every engine; return the replies by target rank, or raise all failures.

        The engines report `version` afterwards. The first failure ends the wait. The calls to the other engines
        continue: cutting off a weight update would leave its session open.
        """
        tasks = [
            asyncio.create_task(self._ask(engine, position, command, version=version))
            for position, engine in enumerate(self._engines)
        ]
        done, unfinished = await asyncio.wait(tasks, return_when=asyncio.FIRST_EXCEPTION)
        for engine, task in zip(self._engines, tasks, strict=True):
            if task in unfinished:
                self._late[engine.client] = task
                task.add_done_callback(ignore_outcome)
        failures = [error for task in tasks if task in done and (error := task.exception()) is not None]
        for error in failures:
            if not isinstance(error, EngineError | WeightSyncError):
                raise error
        if failures:
            raise WeightSyncError("; ".join(str(error) for error in failures))
        return [reply for task in tasks for reply in task.result()]

    async def _ask(
        self,
        engine: Engine,
        position: int,
        command: Command,
        *,
        version: PolicyVersion | None,
    ) -> _Replies:
        late = self._late.pop(engine.client, None)
        if late is not None:
            await asyncio.wait([late])
        endpoint = engine.client.endpoint
        messages = [
            CommandMessage(
                command=command,
                engine=position,
                tp_rank=tp_rank,
                host=endpoint.host_of(tp_rank),
                mailbox=self._server.address,
                reply_key=f"{command.op}/{endpoint.index}/{tp_rank}/{uuid4().hex}",
            )
            for tp_rank in range(endpoint.tensor)
        ]
        await engine.client.load_weights(
            [to_payload(message) for message in messages],
            load_format=DRAFT_LOADER if self._is_for_drafts else LOADER,
            version=version,
            is_for_draft=self._is_for_drafts,
            holds_requests=self._holds_requests,
            timeout_s=self._timeout_s + _GRACE_S,
        )
        return tuple(self._take(engine, message) for message in messages)

    def _take(self, engine: Engine, message: CommandMessage) -> Reply:
        where = f"{engine}, TP rank {message.tp_rank}: {message.command.op}"
        if not self._mailbox.check([message.reply_key]):
            raise WeightSyncError(f"{where}: no reply; see the engine's log")
        reply = read_reply(self._mailbox.get(message.reply_key))
        self._mailbox.delete_key(message.reply_key)
        if reply.error is not None:
            raise WeightSyncError(f"{where}: {reply.error}")
        return reply


def ignore_outcome(task: asyncio.Task[Any]) -> None:
    """Mark the exception of a finished task as retrieved; asyncio prints those that are not."""
    if not task.cancelled():
        task.exception()
