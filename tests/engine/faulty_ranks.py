"""Trainer ranks in processes of their own, one of which has an accident in the middle of a publish."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from enum import StrEnum
from pathlib import Path

import torch
from safetensors.torch import load_file

from megarl.engine.commands import Rendezvous
from megarl.weights.executors.digest import fastest_digest
from megarl.weights.executors.group import Message, TransferGroup
from megarl.weights.executors.transfer import Sender
from megarl.weights.layouts.transfer_spec import TransferSpec
from tests.weights.transfer_peers import cut

Digests = dict[tuple[int, str], int]


class Accident(StrEnum):
    KILLED = "killed"
    """In the middle of its buckets."""
    FLIPPED = "flipped"
    """One bit of one bucket."""
    TRUNCATED = "truncated"
    """One bucket ends too early."""
    DUPLICATED = "duplicated"
    """One bucket is sent twice."""
    LATE = "late"
    """Nothing is sent before the deadline."""
    OLD = "old"
    """The buckets of another version are sent."""


class _AccidentGroup(TransferGroup):
    accident: Accident | None = None
    num_sent = 0

    def exchange(self, outgoing: Message | None, incoming: Message | None, *, tag: int, deadline: float) -> None:
        assert outgoing is not None, "a sender only sends"
        buffer = outgoing.buffer
        self.num_sent += 1
        if self.num_sent == 3:
            match self.accident:
                case Accident.KILLED:
                    os.kill(os.getpid(), signal.SIGKILL)
                case Accident.FLIPPED:
                    buffer[len(buffer) // 2] ^= 8
                case Accident.TRUNCATED:
                    buffer = buffer[: len(buffer) // 2]
                case Accident.DUPLICATED:
                    super().exchange(replace(outgoing, buffer=buffer.clone()), incoming, tag=tag, deadline=deadline)
                case _:
                    pass
        super().exchange(replace(outgoing, buffer=buffer), incoming, tag=tag, deadline=deadline)


def run_rank(
    transfer: TransferSpec, rendezvous: Rendezvous, folder: Path, rank: int, version: int, accident: Accident | None
) -> Digests:
    """Join and send one version of the weights in `folder`."""
    torch.set_num_threads(1)
    group = _AccidentGroup.join(
        rendezvous.address,
        name=rendezvous.name,
        peer=rank,
        num_peers=transfer.num_peers,
        timeout_s=rendezvous.timeout_s,
    )
    assert isinstance(group, _AccidentGroup)
    group.accident = accident
    plan = transfer.plan()
    tensors = cut(plan.source.by_rank[rank], load_file(folder / "model.safetensors"), padding=float("nan"))
    sender = Sender(
        plan, rank, tensors, group, bucket_bytes=rendezvous.bucket_bytes, digest=fastest_digest(is_on_host=True)
    )
    if accident is Accident.LATE:
        time.sleep(1.5 * rendezvous.timeout_s)
    return sender.send(version + 100 if accident is Accident.OLD else version)


Call = tuple[Callable[..., Digests], tuple[object, ...]]


def rank_calls(
    transfer: TransferSpec, rendezvous: Rendezvous, folder: Path, *, version: int, accidents: Mapping[int, Accident]
) -> list[Call]:
    """One per rank, for `run_processes`."""
    return [
        (run_rank, (transfer, rendezvous, folder, rank, version, accidents.get(rank)))
        for rank in range(transfer.parallel.world_size)
    ]
