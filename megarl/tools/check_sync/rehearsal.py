"""Carry out a plan within one process, bucket by bucket, and compare the outcome with the target's layout.

With a tiny shape the layouts of a thousand ranks fit into one process. The rehearsal shows that the plan fills every
target box with the right elements; that the layouts are the engines' own is checked with real engines.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TypeAlias

import numpy as np
import numpy.typing as npt
import torch

from megarl.tools.check_sync.comparison import ClassVerdict, compare_holding, sum_by_class
from megarl.weights.algebra.buckets import DEFAULT_BUCKET_BYTES, buckets_to
from megarl.weights.algebra.plan import Plan
from megarl.weights.algebra.slices import Holding, Index
from megarl.weights.executors.tensors import box_of, torch_dtype

_Bits: TypeAlias = npt.NDArray[np.signedinteger[npt.NBitBase]]
"""The elements as integers: numpy cuts boxes many times faster than torch, and has no bfloat16."""

_SOURCE_PADDING = float("nan")
"""Shows in the target where padding is moved by mistake."""
_TARGET_PADDING = 0.0


def rehearse(plan: Plan, model: Mapping[str, torch.Tensor]) -> list[ClassVerdict]:
    """Return a verdict per class over all target ranks; `model` has all canonical tensors, both sides one dtype."""
    sources = _Replicas(model, _SOURCE_PADDING)
    targets = _Replicas(model, _TARGET_PADDING)
    by_rank = {holding.rank: sources.bits(holding) for holding in plan.source.holdings}
    received = {holding.rank: _empty(holding, _TARGET_PADDING) for holding in plan.target.holdings}
    received_bits = {rank: {name: _bits(tensor) for name, tensor in held.items()} for rank, held in received.items()}
    buckets = [
        bucket
        for holding in plan.target.holdings
        for bucket in buckets_to(plan, holding.rank, bucket_bytes=DEFAULT_BUCKET_BYTES)
    ]
    for bucket in sorted(buckets, key=lambda bucket: bucket.hop):
        senders = received_bits if bucket.is_forwarded else by_rank
        for move in bucket.moves:
            source = senders[move.source_rank][move.source_name]
            values = source[_indices(move.source_offsets, move.slice.shape)]
            received_bits[move.target_rank][move.target_name][_indices(move.target_offsets, move.slice.shape)] = values
    verdicts = [
        verdict
        for holding in plan.target.holdings
        for verdict in compare_holding(
            holding, received[holding.rank], targets.tensors(holding), holder=f"target rank {holding.rank}"
        )
    ]
    return sum_by_class(verdicts)


class _Replicas:
    """The tensors that holders should have; holders with the same pieces share them."""

    def __init__(self, model: Mapping[str, torch.Tensor], padding: float) -> None:
        self._model = model
        self._padding = padding
        self._by_pieces: dict[int, dict[str, torch.Tensor]] = {}

    def tensors(self, holding: Holding) -> dict[str, torch.Tensor]:
        key = id(holding.pieces)
        if key not in self._by_pieces:
            self._by_pieces[key] = hold(holding, self._model, padding=self._padding)
        return self._by_pieces[key]

    def bits(self, holding: Holding) -> dict[str, _Bits]:
        return {name: _bits(tensor) for name, tensor in self.tensors(holding).items()}


def hold(holding: Holding, model: Mapping[str, torch.Tensor], *, padding: float) -> dict[str, torch.Tensor]:
    """Return the tensors of a holder, filled from `model` as its layout describes."""
    tensors = _empty(holding, padding)
    for piece in holding.pieces:
        values = box_of(model[piece.slice.name], piece.slice.offsets, piece.slice.shape)
        box_of(tensors[piece.local_name], piece.local_offsets, piece.slice.shape).copy_(values)
    return tensors


def _empty(holding: Holding, padding: float) -> dict[str, torch.Tensor]:
    return {
        name: torch.full(spec.shape, padding, dtype=torch_dtype(spec.dtype)) for name, spec in holding.tensors.items()
    }


def _bits(tensor: torch.Tensor) -> _Bits:
    """Return a view as integers."""
    bits: _Bits = tensor.view({4: torch.int32, 2: torch.int16}[tensor.element_size()]).numpy()
    return bits


def _indices(offsets: Index, shape: Index) -> tuple[int | slice, ...]:
    """Return the index of a box in an array; dimensions that the box lacks come first, as integers."""
    lead = len(offsets) - len(shape)
    inner = (slice(start, start + size) for start, size in zip(offsets[lead:], shape, strict=True))
    return (*offsets[:lead], *inner)
