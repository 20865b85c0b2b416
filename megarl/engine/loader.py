"""Handles commands inside each SGLang TP process: the engine's end of a publish. SGLang calls `load` with each payload.

An exception here would end the whole engine, so every outcome, good or bad, is a `Reply` in the driver's mailbox. Only
`Receive` changes parameters or an adapter: the driver lets the engine serve them once it has compared the digests.
"""

from __future__ import annotations

import logging
import socket
from collections import defaultdict
from collections.abc import Sequence
from datetime import timedelta
from typing import TYPE_CHECKING, assert_never

import torch
from torch.distributed import TCPStore

from megarl.engine.commands import (
    CommandMessage,
    Inspect,
    Join,
    PublishCommand,
    Receive,
    Reply,
    ToolCommand,
    read_message,
    to_bytes,
)
from megarl.errors import WeightSyncError, first_line
from megarl.weights.executors.digest import fastest_digest
from megarl.weights.executors.fp8 import probe_products
from megarl.weights.executors.group import TransferGroup
from megarl.weights.executors.tensors import check_holding, specs_of
from megarl.weights.executors.transfer import Receiver

if TYPE_CHECKING:
    from megarl.engine.adapter_slots import AdapterSlots

logger = logging.getLogger(__name__)

_MAILBOX_TIMEOUT_S = 30.0


def load(model: torch.nn.Module, named_tensors: Sequence[tuple[str, torch.Tensor]]) -> None:
    """Handle the one command in `named_tensors`. Never raises."""
    try:
        message = read_message(named_tensors)
    except ValueError as error:
        logger.error("not a command: %s", error)
        return
    try:
        reply = _handle(message, model)
    except Exception as error:  # any exception must reach the driver and not the scheduler
        logger.exception("command failed op=%s", message.command.op)
        reply = Reply(error=_one_line(error))
    try:
        # Refused at once where the driver is gone; the store itself would try for its whole timeout.
        socket.create_connection((message.mailbox.host, message.mailbox.port), timeout=_MAILBOX_TIMEOUT_S).close()
        mailbox = TCPStore(message.mailbox.host, message.mailbox.port, timeout=timedelta(seconds=_MAILBOX_TIMEOUT_S))
        mailbox.set(message.reply_key, to_bytes(reply))  # type: ignore[arg-type]  # takes bytes as well
    except (OSError, RuntimeError) as error:
        # The driver reports the missing reply.
        logger.error("mailbox %s is out of reach: %s", message.mailbox, _one_line(error))


def _handle(message: CommandMessage, model: torch.nn.Module) -> Reply:
    command = message.command
    if isinstance(command, ToolCommand):
        from megarl.engine.tool_commands import HANDLER  # noqa: PLC0415 - no publish needs it

        return Reply(digests=HANDLER.handle(command, model, engine=message.engine, tp_rank=message.tp_rank))
    name = (
        command.rendezvous.name if isinstance(command, Join) else command.group if isinstance(command, Receive) else ""
    )
    return _MEMBERS[name].handle(command, message, model)


class _Member:
    """This process as a member of the transfer groups of one name, from one `Join` to the next."""

    def __init__(self) -> None:
        self._group: TransferGroup | None = None
        self._receiver: Receiver | None = None
        self._slots: AdapterSlots | None = None
        self._by_slot: dict[int, Receiver] = {}
        """Receivers of adapters: slots lie in different memory."""
        self._is_probed = False

    def handle(self, command: PublishCommand, message: CommandMessage, model: torch.nn.Module) -> Reply:
        match command:
            case Inspect():
                return Reply(parameters=specs_of(model.named_parameters()))
            case Join():
                self._join(command, message, model)
            case Receive(version=version, adapter=adapter):
                if adapter is not None:
                    return Reply(digests=self._receive_adapter(version, adapter))
                return Reply(digests=self._receive(version, model))
            case _:
                assert_never(command)
        return Reply()

    def _join(self, command: Join, message: CommandMessage, model: torch.nn.Module) -> None:
        earlier = self._group
        self._group = None
        self._receiver = self._slots = None
        self._by_slot = {}
        if earlier is not None:
            earlier.close()
        transfer, rendezvous = command.transfer, command.rendezvous
        plan = transfer.plan()
        if plan.hash != command.plan_hash:
            raise WeightSyncError(f"plan hash is {plan.hash} here and {command.plan_hash} at the driver")
        rank = transfer.target_rank(engine=message.engine, tp_rank=message.tp_rank)
        slots, tensors = None, dict[str, torch.Tensor](model.named_parameters())
        if transfer.lora is not None:
            from megarl.engine.adapter_slots import AdapterSlots  # noqa: PLC0415 - no publish of weights needs it

            slots = AdapterSlots.of_caller()
            tensors = slots.tensors(0)  # all slots are alike
        check_holding(
            plan.target.by_rank[rank],
            specs_of(tensors.items()),
            holder=f"TP rank {message.tp_rank}",
            unplanned=transfer.unplanned,
        )
        self._group = TransferGroup.join(
            rendezvous.address,
            name=rendezvous.name,
            peer=transfer.peer(rank),
            num_peers=transfer.num_peers,
            timeout_s=rendezvous.timeout_s,
            join_timeout_s=rendezvous.join_timeout_s,
            backend=rendezvous.backend,
            host=message.host,
        )
        self._slots = slots
        self._receiver = Receiver(
            plan,
            rank,
            tensors,
            self._group,
            bucket_bytes=rendezvous.bucket_bytes,
            digest=fastest_digest(is_on_host=transfer.is_cpu_engine),
            direct=transfer.direct,
            keeps_open=transfer.keeps_open,
        )

    def _receive(self, version: int, model: torch.nn.Module) -> dict[str, int]:
        if self._receiver is None or self._slots is not None:
            raise WeightSyncError("not in a transfer group for weights; join comes first")
        digests = self._receiver.receive(version)
        _derive(model)
        if not self._is_probed:
            probe_products(model)
        self._is_probed = True
        _synchronize()
        return digests

    def _receive_adapter(self, version: int, name: str) -> dict[str, int]:
        if self._slots is None or self._receiver is None:
            raise WeightSyncError("not in a transfer group for adapters; join comes first")
        # The last step of the requests that wait now may be under way: a transfer has the device for itself.
        _synchronize()
        slot = self._slots.take(name, is_received=True)
        if slot not in self._by_slot:
            self._by_slot[slot] = self._receiver.beside(self._slots.tensors(slot))
        digests = self._by_slot[slot].receive(version)
        _synchronize()
        return digests


def _synchronize() -> None:
    """Wait for the device: forward passes run on streams of their own."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def _derive(model: torch.nn.Module) -> None:
    """Let a model compute again what it derives from parameters; SGLang does not after a loader that is not its own.

    Latent attention decodes with products of `kv_b_proj`: they would stay those of the version before.
    """
    derive = getattr(model, "post_load_weights", None)
    if derive is not None:
        with torch.no_grad():
            derive()


_MEMBERS: defaultdict[str, _Member] = defaultdict(_Member)
"""By the name of their groups."""


def _one_line(error: BaseException) -> str:
    return first_line(error) if isinstance(error, WeightSyncError) else f"{type(error).__name__}: {first_line(error)}"
