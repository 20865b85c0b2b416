"""What runs inside each SGLang TP process: the engine's end of a publish. SGLang calls `load` with every payload.

An exception here would end the whole engine, so every outcome, good or bad, is a `Reply` in the driver's mailbox. The
parameters change in `commit` and nowhere else.
"""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Sequence
from datetime import timedelta
from pathlib import Path
from typing import assert_never

import torch
from safetensors.torch import save_file
from torch._C._distributed_c10d import TCPStore

from megarl.compare.recordings import WeightDigests
from megarl.errors import WeightSyncError
from megarl.rollout.commands import (
    Abort,
    Commit,
    Dump,
    Envelope,
    Fingerprint,
    Inspect,
    Join,
    Listen,
    RecordModules,
    Reply,
    Stage,
    dump_file,
    read_envelope,
    to_bytes,
)
from megarl.rollout.recorder import EngineRecorder
from megarl.weights.executors.digest import fastest_digest
from megarl.weights.executors.group import TransferGroup
from megarl.weights.executors.tensors import check_holding, specs_of
from megarl.weights.executors.transfer import Receiver
from megarl.weights.layouts.transfer_spec import TransferSpec

logger = logging.getLogger(__name__)

_MAILBOX_TIMEOUT_S = 30.0


def load(model: torch.nn.Module, named_tensors: Sequence[tuple[str, torch.Tensor]]) -> None:
    """Carry out the one order in `named_tensors`. Never raises."""
    try:
        envelope = read_envelope(named_tensors)
    except ValueError as error:
        logger.error("not an order: %s", error)
        return
    try:
        reply = _MEMBER.obey(envelope, model)
    except Exception as error:  # whatever it is, it must reach the driver and not the scheduler
        logger.exception("order failed op=%s", envelope.order.op)
        reply = Reply(error=_one_line(error))
    try:
        mailbox = TCPStore(envelope.mailbox.host, envelope.mailbox.port, timeout=timedelta(seconds=_MAILBOX_TIMEOUT_S))
        mailbox.set(envelope.reply_key, to_bytes(reply))  # type: ignore[arg-type]  # takes bytes as well
    except RuntimeError as error:
        # The driver finds no reply and says so.
        logger.error("mailbox %s is out of reach: %s", envelope.mailbox, _one_line(error))


class _Member:
    """This process as a member of a transfer group, from one `join` to the next."""

    def __init__(self) -> None:
        self._group: TransferGroup | None = None
        self._receiver: Receiver | None = None
        self._recorder: EngineRecorder | None = None

    def obey(self, envelope: Envelope, model: torch.nn.Module) -> Reply:
        match envelope.order:
            case Inspect():
                return Reply(parameters=specs_of(model.named_parameters()))
            case Join() as order:
                self._join(order, envelope, model)
                return Reply()
            case Stage(version=version):
                return Reply(digests=self._joined().stage(version))
            case Commit(version=version):
                self._commit(version)
                return Reply()
            case Abort():
                self._abort()
                return Reply()
            case Fingerprint():
                return Reply(fingerprints={name: _fingerprint(tensor) for name, tensor in model.named_parameters()})
            case Dump(folder=folder):
                _dump(model, Path(folder) / dump_file(engine=envelope.engine, tp_rank=envelope.tp_rank))
                return Reply()
            case Listen(transfer=transfer):
                self._listen(transfer, envelope, model)
                return Reply()
            case RecordModules(folder=folder):
                return Reply(digests=self._record(Path(folder)))
            case _:
                assert_never(envelope.order)

    def _join(self, order: Join, envelope: Envelope, model: torch.nn.Module) -> None:
        self._leave()
        transfer, meeting = order.transfer, order.meeting
        plan = transfer.plan()
        if plan.hash != order.plan_hash:
            raise WeightSyncError(f"plan hash is {plan.hash} here and {order.plan_hash} at the driver")
        rank = transfer.target_rank(engine=envelope.engine, tp_rank=envelope.tp_rank)
        parameters = dict(model.named_parameters())
        check_holding(plan.target.by_rank[rank], specs_of(parameters.items()), holder=f"TP rank {envelope.tp_rank}")
        self._group = TransferGroup.join(
            meeting.address,
            name=meeting.name,
            peer=transfer.peer(rank),
            num_peers=transfer.num_peers,
            timeout_s=meeting.timeout_s,
            backend=meeting.backend,
            host=envelope.host,
        )
        self._receiver = Receiver(
            plan,
            rank,
            parameters,
            self._group,
            bucket_bytes=meeting.bucket_bytes,
            digest=fastest_digest(is_on_host=transfer.is_cpu_engine),
            shares_device=transfer.shares_devices,
            keeps_open=transfer.keeps_open,
        )

    def _commit(self, version: int) -> None:
        self._joined().commit(version)
        if torch.cuda.is_available():
            # The next forward pass runs on a stream of its own.
            torch.cuda.synchronize()

    def _abort(self) -> None:
        if self._receiver is not None:
            self._receiver.abort()

    def _leave(self) -> None:
        group, self._group, self._receiver = self._group, None, None
        if group is not None:
            group.close()

    def _listen(self, transfer: TransferSpec, envelope: Envelope, model: torch.nn.Module) -> None:
        if self._recorder is not None:
            self._recorder.close()
        rank = transfer.target_rank(engine=envelope.engine, tp_rank=envelope.tp_rank)
        self._recorder = EngineRecorder(model, transfer.engine_layout(), rank)

    def _record(self, folder: Path) -> WeightDigests:
        recorder, self._recorder = self._recorder, None
        if recorder is None:
            raise WeightSyncError("nothing was recorded; listen comes first")
        recorder.close()
        recorder.write(folder)
        return recorder.weight_digests()

    def _joined(self) -> Receiver:
        if self._receiver is None:
            raise WeightSyncError("not in a transfer group; join comes first")
        return self._receiver


_MEMBER = _Member()


def _fingerprint(tensor: torch.Tensor) -> str:
    raw = tensor.detach().cpu().contiguous().view(torch.uint8).numpy()
    return hashlib.blake2b(raw.data, digest_size=16).hexdigest()


def _dump(model: torch.nn.Module, path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    save_file({name: tensor.detach().cpu().contiguous() for name, tensor in model.named_parameters()}, path)


def _one_line(error: BaseException) -> str:
    lines = str(error).strip().splitlines()
    message = lines[0] if lines else ""
    return message if isinstance(error, WeightSyncError) else f"{type(error).__name__}: {message}"
