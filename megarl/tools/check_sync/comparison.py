"""Compare tensors with their expected values, bit by bit, and rehearse a plan within one process.

With a tiny shape the layouts of a thousand ranks fit into one process. The rehearsal shows that the plan fills every
target box with the right elements; that the layouts are the engines' own is checked with real engines.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import TypeAlias

import numpy as np
import numpy.typing as npt
import torch

from megarl.weights.algebra.buckets import DEFAULT_BUCKET_BYTES, buckets_to
from megarl.weights.algebra.plan import Plan
from megarl.weights.algebra.slices import Holding, Index, Piece
from megarl.weights.executors.tensors import box_of, torch_dtype
from megarl.weights.layouts.canonical import EMBEDDING, HEAD, SHARED_BLOCK, SHARED_GATE, VALUE_HEAD

PADDING = "padding"
"""The class of the elements that are outside all boxes of a holding."""


def tensor_class(name: str) -> str:
    """Return the kind of weight that a canonical tensor is."""
    for part, kind in (
        (EMBEDDING, "embedding"),
        (HEAD, "output"),
        (VALUE_HEAD, "value head"),
        ("norm", "norms"),
        (".gate.weight", "router"),
        (".experts.", "experts"),
        (SHARED_BLOCK, "shared expert"),
        (SHARED_GATE, "shared expert"),
        ("o_proj", "attention output"),
        ("self_attn.", "qkv"),
        ("mlp.", "feed-forward"),
    ):
        if part in name:
            return kind
    raise AssertionError(f"{name} is of no known class")


@dataclass(frozen=True, slots=True, kw_only=True)
class ClassVerdict:
    """The comparison of one class of tensors: every byte compared, and the first element that differs."""

    name: str
    tensors: frozenset[str] = frozenset()
    """Canonical names."""
    num_bytes: int = 0
    num_differing: int = 0
    """Elements."""
    first_difference: str | None = None
    """The holder, the canonical place and both values; None where all are equal."""

    @property
    def is_equal(self) -> bool:
        return self.first_difference is None


def compare_holding(
    holding: Holding, actual: Mapping[str, torch.Tensor], expected: Mapping[str, torch.Tensor], *, holder: str
) -> list[ClassVerdict]:
    """Return a verdict per piece of a holding, and one per tensor whose padding differs."""
    verdicts = []
    differing = {
        name: _bits(actual[name]) != _bits(expected[name])
        for name in holding.tensors
        if not torch.equal(_bits(actual[name]), _bits(expected[name]))
    }
    for piece in holding.pieces:
        verdict = ClassVerdict(
            name=tensor_class(piece.slice.name),
            tensors=frozenset({piece.slice.name}),
            num_bytes=piece.slice.num_elements * actual[piece.local_name].element_size(),
        )
        if piece.local_name in differing:
            wrong = box_of(differing[piece.local_name], piece.local_offsets, piece.slice.shape)
            if wrong.any():
                verdict = _differing(verdict, piece, wrong, actual, expected, holder)
                # What is left in the end is padding.
                wrong.zero_()
        verdicts.append(verdict)
    for name, wrong in differing.items():
        if wrong.any():
            place = tuple(wrong.nonzero()[0].tolist())
            first = f"{holder}: {name}{list(place)} outside all boxes is {_values(actual, expected, name, place)}"
            verdicts.append(
                ClassVerdict(name=PADDING, num_bytes=0, num_differing=int(wrong.sum()), first_difference=first)
            )
    return verdicts


def sum_by_class(verdicts: Iterable[ClassVerdict]) -> list[ClassVerdict]:
    """Return one verdict per class, in the order in which the classes appear."""
    by_class: dict[str, list[ClassVerdict]] = {}
    for verdict in verdicts:
        by_class.setdefault(verdict.name, []).append(verdict)
    return [
        ClassVerdict(
            name=name,
            tensors=frozenset().union(*(part.tensors for part in parts)),
            num_bytes=sum(part.num_bytes for part in parts),
            num_differing=sum(part.num_differing for part in parts),
            first_difference=next((part.first_difference for part in parts if not part.is_equal), None),
        )
        for name, parts in by_class.items()
    ]


def _differing(
    verdict: ClassVerdict,
    piece: Piece,
    wrong: torch.Tensor,
    actual: Mapping[str, torch.Tensor],
    expected: Mapping[str, torch.Tensor],
    holder: str,
) -> ClassVerdict:
    place = tuple(wrong.nonzero()[0].tolist())
    canonical = [start + index for start, index in zip(piece.slice.offsets, place, strict=True)]
    lead = len(piece.local_offsets) - len(place)
    inner = (start + index for start, index in zip(piece.local_offsets[lead:], place, strict=True))
    values = _values(actual, expected, piece.local_name, (*piece.local_offsets[:lead], *inner))
    return replace(
        verdict,
        num_differing=int(wrong.sum()),
        first_difference=f"{holder}: {piece.slice.name}{canonical} is {values}",
    )


def _values(
    actual: Mapping[str, torch.Tensor], expected: Mapping[str, torch.Tensor], name: str, place: tuple[int, ...]
) -> str:
    return f"{actual[name][place].item():.9g}, expected {expected[name][place].item():.9g}"


def _bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().contiguous().view({4: torch.int32, 2: torch.int16}[tensor.element_size()])


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
    received_bits = {
        rank: {name: _integers(tensor) for name, tensor in held.items()} for rank, held in received.items()
    }
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
        return {name: _integers(tensor) for name, tensor in self.tensors(holding).items()}


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


def _integers(tensor: torch.Tensor) -> _Bits:
    """Return a view as integers."""
    bits: _Bits = tensor.view({4: torch.int32, 2: torch.int16}[tensor.element_size()]).numpy()
    return bits


def _indices(offsets: Index, shape: Index) -> tuple[int | slice, ...]:
    """Return the index of a box in an array; dimensions that the box lacks come first, as integers."""
    lead = len(offsets) - len(shape)
    inner = (slice(start, start + size) for start, size in zip(offsets[lead:], shape, strict=True))
    return (*offsets[:lead], *inner)
