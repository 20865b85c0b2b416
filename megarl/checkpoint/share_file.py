"""A rank's share of a save: whole tensors that it receives, and the file in which each is written once it is there.

Receiving is one thread, writing another: neither the network nor the disk waits for the other to be done.
"""

from __future__ import annotations

from collections.abc import Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import closing
from pathlib import Path

import torch

from megarl.checkpoint.manifest import FileDigest
from megarl.checkpoint.tensor_files import TensorFile
from megarl.system.faults import reach, step_in
from megarl.weights.algebra.buckets import DEFAULT_BUCKET_BYTES
from megarl.weights.algebra.plan import Plan
from megarl.weights.algebra.slices import header_dtype
from megarl.weights.executors.exchange import exchange
from megarl.weights.executors.group import TransferGroup
from megarl.weights.executors.tensors import box_of, bytes_of, torch_dtype


class UnfiniteError(Exception):
    """A tensor to be saved has NaN or infinite values."""


def receive_into(
    path: Path | None,
    moves: Plan,
    tensors: Mapping[str, torch.Tensor],
    group: TransferGroup,
    *,
    bucket_bytes: int = DEFAULT_BUCKET_BYTES,
) -> FileDigest | None:
    """Receive this peer's targets of a plan and write them to a new file, which is not synced; every peer calls this.

    A peer without targets has no path, and returns None. The file is whole only when this has returned: digests of
    what was received are compared last.
    """
    if path is None:
        exchange(moves, tensors, {}, group, bucket_bytes=bucket_bytes)
        return None
    specs = moves.target.by_rank[group.peer].tensors
    share = _room_for_share(moves, tensors, group.peer)
    headers = {name: (header_dtype(spec.dtype), spec.shape) for name, spec in specs.items()}
    with closing(TensorFile(path, headers)) as file, ThreadPoolExecutor(1) as writer:
        entries, written = {entry.name: entry for entry in file.entries}, dict[str, Future[None]]()

        def write(name: str) -> None:
            refuse_unfinite({name: share[name]})
            file.write(entries[name], [bytes_of(share[name])])

        def begin(name: str) -> None:
            written[name] = writer.submit(write, name)

        try:
            exchange(moves, tensors, share, group, bucket_bytes=bucket_bytes, filled=begin)
            reach("tensors_received", step=step_in(path), rank=group.peer)
            for name in share.keys() - written.keys():  # nothing is sent of an empty tensor
                begin(name)
            for future in written.values():
                future.result()
        finally:
            writer.shutdown(cancel_futures=True)
        return file.digest()


def _room_for_share(moves: Plan, tensors: Mapping[str, torch.Tensor], rank: int) -> dict[str, torch.Tensor]:
    """Return this rank's whole tensors in host memory, to be filled; those that it has already are not copied."""
    local = {
        move.target_name: box
        for move in moves.moves_to(rank)
        if move.source_rank == rank
        and (box := box_of(tensors[move.source_name], move.source_offsets, move.slice.shape)).device.type == "cpu"
        and box.is_contiguous()
    }
    return {
        name: local[name]
        if name in local and (local[name].shape, local[name].dtype) == (spec.shape, torch_dtype(spec.dtype))
        else torch.empty(spec.shape, dtype=torch_dtype(spec.dtype))
        for name, spec in moves.target.by_rank[rank].tensors.items()
    }


def refuse_unfinite(share: Mapping[str, torch.Tensor]) -> None:
    """Raise on NaN or infinite values: a checkpoint of broken weights would replace a good one."""
    # Sums need no second tensor of the same size; because they may overflow, what has a bad one is checked again.
    sums = [tensor.sum(dtype=torch.float32) for tensor in share.values()]
    if not sums or torch.isfinite(torch.stack(sums)).all():
        return
    for name, tensor in share.items():
        if not torch.isfinite(tensor).all():
            num_broken = int((~torch.isfinite(tensor)).sum())
            raise UnfiniteError(f"{num_broken} of {tensor.numel()} values of {name} are NaN or infinite")
