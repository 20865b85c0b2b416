"""Both ends of what need not travel: trainer and engine are processes on one device, and one sees the other's tensors.

Nothing is staged: the sender's tensors do not change before the version is committed. A sender that moves its tensors
between publishes has them opened each time and let go of once they are committed.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import torch

from megarl.weights.algebra.buckets import Bucket, Parcel
from megarl.weights.algebra.plan import Plan
from megarl.weights.executors.box_digest import BoxDigest
from megarl.weights.executors.digest import DigestSums, Part, digest_tensor, to_ints
from megarl.weights.executors.shared_memory import export_tensors, open_tensors
from megarl.weights.executors.tensors import box_of, torch_dtype


class Shown:
    """The sender's end."""

    def __init__(self, tensors: Mapping[str, torch.Tensor], *, keeps_open: bool) -> None:
        self._tensors = tensors
        self._keeps_open = keeps_open
        self._memory = b""

    def memory(self) -> bytes:
        """What another process opens: the same each time, unless it is not kept open; then it is for one reader."""
        if not self._memory or not self._keeps_open:
            self._memory = export_tensors(self._tensors)
        return self._memory


class Seen:
    """The receiver's end: boxes in the memory of one or more senders."""

    def __init__(
        self,
        plan: Plan,
        buckets: Sequence[Bucket],
        tensors: Mapping[str, torch.Tensor],
        *,
        digest: BoxDigest,
        keeps_open: bool,
    ) -> None:
        self._plan = plan
        self._parcels = [parcel for bucket in buckets for parcel in bucket.parcels]
        self._digest = digest
        self._keeps_open = keeps_open
        self.source_ranks = sorted({bucket.source_rank for bucket in buckets})
        self._memories: dict[int, bytes] = {}
        self._sums = DigestSums([self._part(parcel) for parcel in self._parcels])
        self._sources: dict[int, Mapping[str, torch.Tensor]] = {}
        self._boxes: list[torch.Tensor] = []
        self._targets = [
            box_of(tensors[parcel.move.target_name], parcel.move.target_offsets, parcel.move.slice.shape)
            for parcel in self._parcels
        ]

    def open(self, source_rank: int, memory: bytes) -> None:
        if memory != self._memories.get(source_rank):
            self._boxes = []
            self._sources[source_rank], self._memories[source_rank] = open_tensors(memory), memory

    def digests(self) -> dict[str, int]:
        """Per target tensor, of what the senders have there, cast as it will be."""
        if not self._boxes:
            self._boxes = [
                box_of(self._sources[move.source_rank][move.source_name], move.source_offsets, move.slice.shape)
                for move in (parcel.move for parcel in self._parcels)
            ]
        if self._digest is digest_tensor:
            return self._sums.compute(self._boxes)
        return to_ints(dict(self._one_by_one()))

    @torch.no_grad()
    def commit(self) -> None:
        if self._boxes:
            torch._foreach_copy_(self._targets, self._boxes)

    def finish(self) -> None:
        """A version is committed or given up: let go of the senders' memory, unless it is kept open."""
        if self._keeps_open:
            return
        if self._boxes and self._boxes[0].is_cuda:
            torch.cuda.synchronize(self._boxes[0].device)
        self._boxes, self._sources, self._memories = [], {}, {}

    def _part(self, parcel: Parcel) -> Part[str]:
        move = parcel.move
        shape = self._plan.target.canonical[move.slice.name].shape
        return Part(key=move.target_name, dtype=torch_dtype(move.dtype), box=move.slice, canonical_shape=shape)

    def _one_by_one(self) -> Iterator[tuple[str, torch.Tensor]]:
        sums: dict[str, torch.Tensor] = {}
        for parcel, values in zip(self._parcels, self._boxes, strict=True):
            part = self._part(parcel)
            found = self._digest(values.to(part.dtype), part.box, part.canonical_shape)
            sums[part.key] = sums[part.key] + found if part.key in sums else found
        yield from sums.items()
