"""The parameters of a layer that a family describes, cut for one rank. Pure; the same for trainers and engines."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import groupby

from megarl.config.section import round_up
from megarl.families.interface import Cut, Param, Part
from megarl.weights.algebra.slices import Index, TensorSpec
from megarl.weights.layouts.canonical import EXPERT
from megarl.weights.layouts.pieces import LocalTensor, Segment, column_window, row_window, stacked

_LOCAL_EXPERT = "{i}"
"""In the name of a parameter: the number of an expert among those of its rank."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RankShare:
    """One of `size` ranks that divide a parameter."""

    rank: int
    size: int
    step: int = 1
    """The ranks together have a multiple of so many rows of what a family marks as padded; 1: nothing is padded."""

    @property
    def pads(self) -> bool:
        return self.step > 1


@dataclass(frozen=True, slots=True, kw_only=True)
class RankShares:
    """The shares that one rank has of every layer."""

    dense: RankShare
    """The share of all parameters outside the experts."""
    expert: RankShare
    experts: range
    """The experts of the rank; empty in a dense model."""

    def layer(self, params: Sequence[Param], specs: Mapping[str, TensorSpec]) -> Iterator[LocalTensor]:
        """Yield the parameters of a layer, named within it; `specs` has its tensors."""
        for is_each, group in groupby(params, key=lambda param: _LOCAL_EXPERT in param.name):
            if not is_each:
                for param in group:
                    yield self._tensor(param, specs)
                continue
            together = tuple(group)
            for index, expert in enumerate(self.experts):
                for param in together:
                    name = param.name.replace(_LOCAL_EXPERT, str(index))
                    yield _cut(_of_expert(param, expert, name), specs, self.expert)

    def _tensor(self, param: Param, specs: Mapping[str, TensorSpec]) -> LocalTensor:
        if not param.is_expert:
            return _cut(param, specs, self.dense)
        each = [_cut(_of_expert(param, expert, param.name), specs, self.expert) for expert in self.experts]
        return replace(stacked(param.name, each), dtype=param.dtype)


def _of_expert(param: Param, expert: int, name: str) -> Param:
    parts = tuple(replace(part, name=part.name.replace(EXPERT, str(expert))) for part in param.parts)
    return replace(param, name=name, parts=parts)


def _cut(param: Param, specs: Mapping[str, TensorSpec], share: RankShare) -> LocalTensor:
    tensor = _local(param, specs, share)
    return replace(tensor, dtype=param.dtype) if param.dtype is not None else tensor


def _local(param: Param, specs: Mapping[str, TensorSpec], share: RankShare) -> LocalTensor:
    spec = specs[param.parts[0].name]
    columns, rows = spec.shape[1:], [_num_rows(part, specs) for part in param.parts]
    match param.cut:
        case Cut.COLUMNS:
            start, size = _range(param, 0, spec.shape[1], share)
            return column_window(param.name, param.parts[0].name, spec, start=start, num_columns=size)
        case Cut.STACK:
            return _stack(param, rows, columns, share)
        case Cut.WHOLE:
            segments = [_segment(part, 0, count) for part, count in zip(param.parts, rows, strict=True)]
        case Cut.FIRST:
            held = [_segment(part, 0, count) for part, count in zip(param.parts, rows, strict=True)]
            segments = held if share.rank == 0 else [replace(segment, name=None) for segment in held]
        case Cut.EACH | Cut.HEADS:
            segments = [
                segment
                for place, (part, count) in enumerate(zip(param.parts, rows, strict=True))
                for segment in _padded(part, count, *_range(param, place, count, share))
            ]
    num_rows = sum(segment.num_rows for segment in segments)
    return row_window(param.name, segments, start=0, num_rows=num_rows, columns=columns)


def _stack(param: Param, rows: Sequence[int], columns: Index, share: RankShare) -> LocalTensor:
    """Return equal rows of [rows of the first group of each part | of the second | ...].

    With fewer groups than ranks a rank's rows end inside a group: Megatron gathers the activations, not the weights.
    """
    segments = [
        _segment(part, group * (count // param.groups), count // param.groups)
        for group in range(param.groups)
        for part, count in zip(param.parts, rows, strict=True)
    ]
    size = sum(rows) // share.size
    return row_window(param.name, segments, start=share.rank * size, num_rows=size, columns=columns)


def _range(param: Param, place: int, total: int, share: RankShare) -> tuple[int, int]:
    """Return the first of a rank's rows or columns of the part at `place`, which has `total`, and their number.

    An engine on a CPU pads heads and feed-forward blocks that its ranks do not divide.
    """
    copies = 1
    if param.heads:
        heads, groups = param.heads[place], param.groups
        width = total // heads
        if share.pads:
            total = heads // groups * round_up(groups, share.size) * width
        else:
            copies = max(1, share.size // heads)
    elif param.is_padded:
        total = round_up(total, share.step)
    size = total * copies // share.size
    return share.rank // copies * size, size


def _padded(part: Part, total: int, start: int, size: int) -> tuple[Segment, Segment]:
    """Return rows of a part that has `total`, padded to `size`."""
    first = min(start, total)
    held = min(first + size, total) - first
    return _segment(part, first, held), Segment(name=None, start=0, num_rows=size - held)


def _segment(part: Part, start: int, num_rows: int) -> Segment:
    return Segment(name=part.name, start=part.start + start, num_rows=num_rows)


def _num_rows(part: Part, specs: Mapping[str, TensorSpec]) -> int:
    return specs[part.name].shape[0] - part.start if part.num_rows is None else part.num_rows
