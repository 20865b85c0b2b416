"""A 64-bit digest of canonical boxes that adds up: the digests of the parts sum to the digest of the whole.

Each element contributes a hash of its bits, its place in its canonical tensor and that tensor's name; contributions are
summed modulo 2^64. So a sender and a receiver that cut the same box differently agree, one flipped bit always changes
the sum, and misplaced elements change it but for a chance of 2^-64. It finds accidents; it is not cryptographic.
"""

from __future__ import annotations

import hashlib
from collections.abc import Hashable, Mapping
from functools import lru_cache
from math import prod
from typing import TypeVar

import torch

from megarl.weights.slices import Index, Slice

Key = TypeVar("Key", bound=Hashable)

MODULUS = 1 << 64

_MAX_ELEMENTS: Mapping[str, int] = {"cpu": 1 << 18, "cuda": 1 << 23}
"""Elements hashed at once, by kind of device: intermediates stay in a core's cache, or launches stay few."""

# Multipliers and shifts of the splitmix64 generator (Steele, Lea, Flood 2014), as signed 64-bit integers.
_INDEX_STEP = 0x9E3779B97F4A7C15 - MODULUS
_FIRST_FACTOR = 0xBF58476D1CE4E5B9 - MODULUS
_SECOND_FACTOR = 0x94D049BB133111EB - MODULUS


def digest(values: torch.Tensor, box: Slice, canonical_shape: Index) -> int:
    """The digest of one box whose elements are `values`, shaped like it."""
    return to_ints({"": digest_tensor(values, box, canonical_shape)})[""]


def digest_tensor(values: torch.Tensor, box: Slice, canonical_shape: Index) -> torch.Tensor:
    """Like `digest`, as an int64 scalar on the device of `values`: no wait for the device."""
    assert tuple(values.shape) == box.shape, f"{box} has {tuple(values.shape)} values"
    strides = tuple(prod(canonical_shape[axis + 1 :]) for axis in range(len(canonical_shape)))
    return _sum(values.detach(), box.offsets, strides, _name_seed(box.name))


def to_ints(sums: Mapping[Key, torch.Tensor]) -> dict[Key, int]:
    """Read sums of `digest_tensor`s off their device, all at once."""
    if not sums:
        return {}
    return {key: value % MODULUS for key, value in zip(sums, torch.stack(list(sums.values())).tolist(), strict=True)}


def _sum(values: torch.Tensor, offsets: Index, strides: Index, seed: int) -> torch.Tensor:
    max_elements = _MAX_ELEMENTS[values.device.type]
    if values.numel() <= max_elements:
        return _mix(_places(values, offsets, strides, seed).add_(_bits(values))).sum()
    axis = next(axis for axis, size in enumerate(values.shape) if size > 1)
    rows = max(1, max_elements * values.shape[axis] // values.numel())
    total = torch.zeros((), dtype=torch.int64, device=values.device)
    for start in range(0, values.shape[axis], rows):
        part = values.narrow(axis, start, min(rows, values.shape[axis] - start))
        total += _sum(part, (*offsets[:axis], offsets[axis] + start, *offsets[axis + 1 :]), strides, seed)
    return total


def _bits(values: torch.Tensor) -> torch.Tensor:
    # A view as integers wants a contiguous last dimension, which a box of columns may not have.
    width = {4: torch.int32, 2: torch.int16}[values.element_size()]
    return values.contiguous().view(width)


def _places(values: torch.Tensor, offsets: Index, strides: Index, seed: int) -> torch.Tensor:
    """The flat index of each element in its canonical tensor, scattered over 64 bits."""
    places = torch.full((), seed, dtype=torch.int64, device=values.device)
    for start, size, stride in zip(offsets, values.shape, strides, strict=True):
        steps = torch.arange(start, start + size, device=values.device) * stride * _INDEX_STEP
        places = places.unsqueeze(-1) + steps
    return places


def _mix(mixed: torch.Tensor) -> torch.Tensor:
    mixed.bitwise_xor_(_shifted(mixed, 30)).mul_(_FIRST_FACTOR)
    mixed.bitwise_xor_(_shifted(mixed, 27)).mul_(_SECOND_FACTOR)
    return mixed.bitwise_xor_(_shifted(mixed, 31))


def _shifted(values: torch.Tensor, count: int) -> torch.Tensor:
    """A right shift that brings in zeros; torch's own repeats the sign."""
    return (values >> count).bitwise_and_((1 << (64 - count)) - 1)


@lru_cache(maxsize=65536)
def _name_seed(name: str) -> int:
    return int.from_bytes(hashlib.blake2b(name.encode(), digest_size=8).digest(), "little", signed=True)
