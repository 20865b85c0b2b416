"""Whether tensors are those they should be, told by class of canonical tensor. No transport, no engine.

A verdict counts every byte that was compared and keeps the first element that differs, by its canonical place.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace

import torch

from megarl.weights.algebra.slices import Holding, Piece
from megarl.weights.executors.tensors import box_of
from megarl.weights.layouts.canonical import EMBEDDING, HEAD, ROUTER, VALUE_HEAD

PADDING = "padding"
"""What a holder has besides its boxes."""


def tensor_class(name: str) -> str:
    """What kind of weight a canonical tensor is."""
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
    """Of one class of tensors, over all holders."""

    name: str
    tensors: frozenset[str] = frozenset()
    """Canonical names."""
    num_bytes: int = 0
    num_differing: int = 0
    """Elements."""
    first_difference: str | None = None

    @property
    def is_equal(self) -> bool:
        return self.first_difference is None


def compare_holding(
    holding: Holding, found: Mapping[str, torch.Tensor], expected: Mapping[str, torch.Tensor], *, holder: str
) -> list[ClassVerdict]:
    """One holder's tensors against what they should be, to the last bit; padding too where both have it."""
    verdicts = []
    rest = {
        name: _bits(found[name]) != _bits(expected[name])
        for name in holding.tensors
        if not torch.equal(_bits(found[name]), _bits(expected[name]))
    }
    for piece in holding.pieces:
        verdict = ClassVerdict(
            name=tensor_class(piece.slice.name),
            tensors=frozenset({piece.slice.name}),
            num_bytes=piece.slice.num_elements * found[piece.local_name].element_size(),
        )
        if piece.local_name in rest:
            wrong = box_of(rest[piece.local_name], piece.local_offsets, piece.slice.shape)
            if wrong.any():
                verdict = _differing(verdict, piece, wrong, found, expected, holder)
                wrong.zero_()
        verdicts.append(verdict)
    for name, wrong in rest.items():
        if wrong.any():
            place = tuple(wrong.nonzero()[0].tolist())
            first = f"{holder}: {name}{list(place)} outside all boxes is {_told(found, expected, name, place)}"
            verdicts.append(
                ClassVerdict(name=PADDING, num_bytes=0, num_differing=int(wrong.sum()), first_difference=first)
            )
    return verdicts


def summed(verdicts: Iterable[ClassVerdict]) -> list[ClassVerdict]:
    """One verdict per class, in the order in which classes appear."""
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
    found: Mapping[str, torch.Tensor],
    expected: Mapping[str, torch.Tensor],
    holder: str,
) -> ClassVerdict:
    place = tuple(wrong.nonzero()[0].tolist())
    canonical = [start + index for start, index in zip(piece.slice.offsets, place, strict=True)]
    lead = len(piece.local_offsets) - len(place)
    inner = (start + index for start, index in zip(piece.local_offsets[lead:], place, strict=True))
    local = (*piece.local_offsets[:lead], *inner)
    told = _told(found, expected, piece.local_name, local)
    return replace(
        verdict,
        num_differing=int(wrong.sum()),
        first_difference=f"{holder}: {piece.slice.name}{canonical} is {told}",
    )


def _told(
    found: Mapping[str, torch.Tensor], expected: Mapping[str, torch.Tensor], name: str, place: tuple[int, ...]
) -> str:
    return f"{found[name][place].item():.9g}, expected {expected[name][place].item():.9g}"


def _bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().contiguous().view({4: torch.int32, 2: torch.int16}[tensor.element_size()])
