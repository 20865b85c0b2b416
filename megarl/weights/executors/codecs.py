"""Reads and writes the forms of tensors in `layouts.stored`. Knows no file format."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TypeAlias, assert_never

import torch
from torch import Tensor

from megarl.weights.algebra.slices import Index
from megarl.weights.layouts.stored import (
    FP8_BLOCK,
    FP8_SCALES,
    MXFP4_BLOCKS,
    MXFP4_GROUP,
    MXFP4_SCALES,
    StoredTensor,
    is_turned,
    place_of,
)

Take: TypeAlias = Callable[[str, tuple[slice, ...]], Tensor]
"""(name of a tensor in the files, ranges) -> these elements."""

_MXFP4_VALUES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
_EXPONENT_BIAS = 127


def read_box(stored: StoredTensor, offsets: Index, shape: Index, take: Take) -> Tensor:
    """Return a box; `offsets` may have one number more than `shape`: the place in a stack."""
    place = tuple(slice(index, index + 1) for index in offsets[: -len(shape)])
    ranges = tuple(slice(first, first + size) for first, size in zip(offsets[-len(shape) :], shape, strict=True))
    match stored.form:
        case "plain":
            values = take(stored.name, place + ranges)
        case "transposed":
            values = take(stored.name, place + ranges[::-1]).transpose(-1, -2)
        case "fp8":
            values = _read_fp8(stored.name, ranges, take)
        case "mxfp4":
            values = _read_mxfp4(stored.name, place, ranges, take)
        case _:
            assert_never(stored.form)
    return values.reshape(shape)


def _read_fp8(name: str, ranges: tuple[slice, ...], take: Take) -> Tensor:
    blocks = tuple(_covering(each, FP8_BLOCK) for each in ranges)
    scales = take(name + FP8_SCALES, blocks).float()
    for axis, (wanted, block) in enumerate(zip(ranges, blocks, strict=True)):
        scales = scales.repeat_interleave(FP8_BLOCK, dim=axis)
        scales = scales.narrow(axis, wanted.start - block.start * FP8_BLOCK, wanted.stop - wanted.start)
    return take(name, ranges).float() * scales


def _read_mxfp4(name: str, place: tuple[slice, ...], ranges: tuple[slice, ...], take: Take) -> Tensor:
    *rows, columns = ranges
    groups = _covering(columns, MXFP4_GROUP)
    where = (*place, *rows, groups)
    values = decode_mxfp4(take(name + MXFP4_BLOCKS, where), take(name + MXFP4_SCALES, where))
    return values.narrow(-1, columns.start - groups.start * MXFP4_GROUP, columns.stop - columns.start)


def decode_mxfp4(blocks: Tensor, scales: Tensor) -> Tensor:
    """Return the values of blocks of 16 bytes, each with two numbers, low bits first. [..., G, 16] -> [..., 32 G]"""
    table = torch.tensor([*_MXFP4_VALUES, *(-value for value in _MXFP4_VALUES)])
    numbers = torch.stack((blocks & 0xF, blocks >> 4), dim=-1).flatten(-2)
    exponents = scales.int()[..., None] - _EXPONENT_BIAS
    return torch.ldexp(table[numbers.long()], exponents).flatten(-2)


def as_in_file(name: str, values: Tensor) -> Tensor:
    """Return a tensor in the orientation that it has in files."""
    return values.transpose(-1, -2).contiguous() if is_turned(name, tuple(values.shape)) else values


def as_files(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return canonical tensors as a folder has them; experts of a stack come in their order."""
    held: dict[str, list[Tensor]] = {}
    for name, tensor in tensors.items():
        held.setdefault(place_of(name)[0], []).append(tensor)
    return {name: each[0] if name in tensors else as_in_file(name, torch.stack(each)) for name, each in held.items()}


def _covering(wanted: slice, size: int) -> slice:
    """Return the blocks of `size` that cover a range."""
    return slice(wanted.start // size, -(-wanted.stop // size))
