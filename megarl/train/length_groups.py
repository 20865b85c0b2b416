"""Attention on a CPU, where all sequences of one length are one call of SDPA."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

import torch
from torch import Tensor

from megarl.train.softmax import Softmax, attend_on_host


@dataclass(frozen=True, slots=True, kw_only=True)
class LengthGroups:
    """Positions ordered by the length of their sequence: sequences of one length form one rectangle."""

    order: Tensor  # [N]
    inverse: Tensor  # [N]
    rectangles: list[tuple[int, int]]
    """(number of sequences, their length), shortest first."""


def attend_by_length(query: Tensor, key: Tensor, value: Tensor, groups: LengthGroups, softmax: Softmax) -> Tensor:
    def rectangles(tensor: Tensor) -> list[Tensor]:
        """Return rectangles of [sequences, heads, length, head_dim]."""
        sizes = [num * length for num, length in groups.rectangles]
        parts = torch.split(tensor.index_select(0, groups.order), sizes)
        shapes = [(num, length, *tensor.shape[1:]) for num, length in groups.rectangles]
        return [part.view(shape).transpose(1, 2) for part, shape in zip(parts, shapes, strict=True)]

    outputs = [
        attend_on_host(q, k, v, softmax)
        for q, k, v in zip(rectangles(query), rectangles(key), rectangles(value), strict=True)
    ]
    return torch.cat([output.transpose(1, 2).flatten(0, 1) for output in outputs]).index_select(0, groups.inverse)


def group_by_length(lengths: list[int]) -> LengthGroups:
    # Stable: sequences of one length keep their order, and each its tokens together.
    order = torch.tensor(lengths).repeat_interleave(torch.tensor(lengths)).argsort(stable=True)
    counts = Counter(lengths)
    return LengthGroups(
        order=order,
        inverse=order.argsort(),
        rectangles=[(counts[length], length) for length in sorted(counts)],
    )
