"""The trainer's end of a publish, played by threads of the test: a sender per Megatron rank, weights from a folder."""

from __future__ import annotations

import asyncio
from pathlib import Path
from uuid import uuid4

from safetensors.torch import load_file

from megarl.engine.commands import Rendezvous
from megarl.engine.tool_commands import ToolControl
from megarl.types import PolicyVersion
from megarl.weights.executors.digest import check_digests, fastest_digest
from megarl.weights.executors.group import Message, TransferGroup
from megarl.weights.executors.transfer import Sender
from megarl.weights.layouts.megatron import MegatronParallel
from megarl.weights.layouts.transfer_spec import TransferSpec
from tests.engine.engines import ServedModel
from tests.weights.transfer_peers import cut

GROUP_TIMEOUT_S = 120.0
BUCKET_BYTES = 16 << 10
"""Small, so that tiny models travel in many buckets."""


SPLIT = MegatronParallel(tensor=2, pipeline=2)


def transfer_to(served: ServedModel, parallel: MegatronParallel = SPLIT) -> TransferSpec:
    return TransferSpec(
        shape=served.shape,
        parallel=parallel,
        trainer_dtype="float32",
        num_engines=1,
        tensor=served.process.endpoint.tensor,
        engine_dtype="float32",
        is_cpu_engine=True,
        expert=served.process.spec.config.expert,
    )


def rendezvous_at(control: ToolControl) -> Rendezvous:
    return Rendezvous(
        address=control.address,
        name=uuid4().hex,
        timeout_s=GROUP_TIMEOUT_S,
        backend="gloo",
        bucket_bytes=BUCKET_BYTES,
    )


class FlippingGroup(TransferGroup):
    """A wire that flips one bit of the first buffer it carries."""

    is_honest = False

    def exchange(self, outgoing: Message | None, incoming: Message | None, *, tag: int, deadline: float) -> None:
        if not self.is_honest and outgoing is not None:
            outgoing.buffer[3] ^= 1
            self.is_honest = True
        super().exchange(outgoing, incoming, tag=tag, deadline=deadline)


class Trainers:
    """Every rank of a transfer's trainer, ready to send the weights of `folder`."""

    def __init__(
        self,
        transfer: TransferSpec,
        control: ToolControl,
        folder: Path,
        *,
        group_type: type[TransferGroup] = TransferGroup,
    ) -> None:
        self._plan = transfer.plan()
        self._transfer = transfer
        self._control = control
        self._folder = folder
        self._group_type = group_type
        self._senders: list[Sender] = []
        self._groups: list[TransferGroup] = []

    async def join(self) -> None:
        """Meet the engines."""
        rendezvous = rendezvous_at(self._control)
        ranks = [
            asyncio.to_thread(self._join_rank, rank, rendezvous) for rank in range(self._transfer.parallel.world_size)
        ]
        engines = self._control.join(self._transfer, plan_hash=self._plan.hash, rendezvous=rendezvous)
        self._groups, _ = await asyncio.gather(asyncio.gather(*ranks), engines)
        tensors = load_file(self._folder / "model.safetensors")
        self._senders = [
            Sender(
                self._plan,
                rank,
                # Padding is garbage that must never travel.
                cut(self._plan.source.by_rank[rank], tensors, padding=float("nan")),
                group,
                bucket_bytes=BUCKET_BYTES,
                digest=fastest_digest(is_on_host=True),
            )
            for rank, group in enumerate(self._groups)
        ]

    async def send(self, version: PolicyVersion) -> list[dict[tuple[int, str], int]]:
        return list(await asyncio.gather(*(asyncio.to_thread(sender.send, version) for sender in self._senders)))

    async def publish(self, version: PolicyVersion) -> None:
        """The transaction: receive, compare, serve."""
        arrived, sent = await asyncio.gather(self._control.receive(version), self.send(version))
        check_digests(sent, arrived)
        await self._control.confirm(version)

    def close(self) -> None:
        for group in self._groups:
            group.close()

    def _join_rank(self, rank: int, rendezvous: Rendezvous) -> TransferGroup:
        return self._group_type.join(
            rendezvous.address,
            name=rendezvous.name,
            peer=rank,
            num_peers=self._transfer.num_peers,
            timeout_s=rendezvous.timeout_s,
        )
