"""Compare tensors with their expected values, bit by bit, and sum the outcome by class of canonical tensor."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace

import torch

from megarl.weights.algebra.slices import Holding, Piece
from megarl.weights.executors.tensors import box_of
from megarl.weights.layouts.canonical import EMBEDDING, HEAD, ROUTER, VALUE_HEAD

PADDING = "padding"
"""The class of the elements that are outside all boxes of a holding."""


def tensor_class(name: str) -> str:
    """Return the kind of weight that a canonical tensor is."""
    for part, kind in (
        (EMBEDDING, "embedding"),
        (HEAD, "output"),
        (VALUE_HEAD, "value head"),
        ("norm", "norms"),
        (ROUTER, "router"),
        ("mlp.experts.", "experts"),
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
