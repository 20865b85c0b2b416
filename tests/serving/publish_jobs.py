"""What rank processes of a `Cluster` do in tests of a publish: real Megatron ranks that load a folder and send it."""

from __future__ import annotations

from pathlib import Path

from megarl.config.roles import ModelParallelConfig
from megarl.engine.commands import Rendezvous
from megarl.families.shape import ModelShape
from megarl.train.rank import ModelRank
from megarl.train.rank_spec import RankSpec
from megarl.weights.executors.digest import fastest_digest
from megarl.weights.executors.group import TransferGroup
from megarl.weights.executors.transfer import Sender
from megarl.weights.layouts.transfer_spec import TransferSpec

Digests = dict[tuple[int, str], int]


def load_and_send(
    rank: int,
    world: int,
    port: int,
    split: ModelParallelConfig,
    shape: ModelShape,
    folder: Path,
    transfer: TransferSpec,
    rendezvous: Rendezvous,
    version: int,
) -> Digests:
    spec = RankSpec(
        rank=rank,
        world=world,
        master_address="127.0.0.1",
        master_port=port,
        device="cpu",
        split=split,
        shape=shape,
        seed=1,
        timeout_s=rendezvous.timeout_s,
    )
    model = ModelRank(spec)
    try:
        model.load(folder)
        group = TransferGroup.join(
            rendezvous.address,
            name=rendezvous.name,
            peer=rank,
            num_peers=transfer.num_peers,
            timeout_s=rendezvous.timeout_s,
        )
        try:
            sender = Sender(
                transfer.plan(),
                rank,
                model.tensors(),
                group,
                bucket_bytes=rendezvous.bucket_bytes,
                digest=fastest_digest(is_on_host=True),
            )
            return sender.send(version)
        finally:
            group.close()
    finally:
        model.close()
