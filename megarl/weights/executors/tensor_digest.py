"""Digests of boxes on a GPU, which do not depend on the cut: those of the parts sum to that of the whole.

Each element contributes its bits, lifted above zero, times a key of its canonical row times a key of its column; keys
are odd and follow from the tensor's name. One flipped bit always changes the sum, and misplaced elements change it but
for a chance of about 2^-47. The rows of a tensor are all its axes but the last.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping
from functools import lru_cache
from math import prod
from typing import TypeAlias

import torch

from megarl.weights.algebra.slices import Index, Slice

BoxDigest: TypeAlias = Callable[[torch.Tensor, Slice, Index], torch.Tensor]
"""(values of a box, the box, shape of its canonical tensor) -> int64 scalar."""

MODULUS = 1 << 64

MATRIX_DIMENSIONS = 2
"""Most dimensions that the kernel takes."""

_MAX_ELEMENTS: Mapping[str, int] = {"cpu": 1 << 18, "cuda": 1 << 23}
"""Elements hashed at once, by kind of device: intermediates stay in a core's cache, or launches stay few."""

# Multipliers and shifts of the splitmix64 generator (Steele, Lea, Flood 2014), as signed 64-bit integers.
_INDEX_STEP = 0x9E3779B97F4A7C15 - MODULUS
_FIRST_FACTOR = 0xBF58476D1CE4E5B9 - MODULUS
_SECOND_FACTOR = 0x94D049BB133111EB - MODULUS


def digest_tensor(values: torch.Tensor, box: Slice, canonical_shape: Index) -> torch.Tensor:
    """Return the digest of a box as an int64 scalar on the device of `values`, without a wait for the device."""
    assert tuple(values.shape) == box.shape, f"{box} has {tuple(values.shape)} values"
    row_keys, column_keys = box_keys(box, canonical_shape, values)
    bits, lift = _bits(values.detach(), canonical_shape)
    return _sum(bits.reshape(len(row_keys), len(column_keys)), row_keys, column_keys, lift)


def bits_of_matrix(values: torch.Tensor, canonical_shape: Index) -> torch.Tensor:
    bits, _ = _bits(values.detach(), canonical_shape)
    return bits if bits.dim() == MATRIX_DIMENSIONS else bits[None]


def _sum(bits: torch.Tensor, row_keys: torch.Tensor, column_keys: torch.Tensor, lift: int) -> torch.Tensor:
    rows = max(1, _MAX_ELEMENTS[bits.device.type] // max(1, bits.shape[1]))
    total = torch.zeros((), dtype=torch.int64, device=bits.device)
    for start in range(0, len(bits), rows):
        lifted = bits[start : start + rows].to(torch.int64).add_(lift)
        total += lifted.mul_(column_keys).sum(dim=1).mul_(row_keys[start : start + rows]).sum()
    return total


def _bits(values: torch.Tensor, canonical_shape: Index) -> tuple[torch.Tensor, int]:
    """Return the elements as integers, and a number that makes all of them positive: a zero counts too."""
    # A view as integers wants a contiguous last dimension, which a box of columns may not have.
    num_bytes = values.element_size() * _num_at_once(values, canonical_shape)
    width = {4: torch.int32, 2: torch.int16, 1: torch.int8}[num_bytes]
    return (values if values.stride(-1) == 1 else values.contiguous()).view(width), 1 << (8 * num_bytes)


def _num_at_once(values: torch.Tensor, canonical_shape: Index) -> int:
    """Return the number of elements that count as one."""
    return 2 if values.element_size() == 1 and canonical_shape[-1] % 2 == 0 else 1


def box_keys(box: Slice, canonical_shape: Index, values: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the keys of the canonical rows and columns of a box, for its values and on their device."""
    device, num_at_once = values.device, _num_at_once(values, canonical_shape)
    rows = torch.zeros((), dtype=torch.int64, device=device)
    for axis, (start, size) in enumerate(zip(box.offsets[:-1], box.shape[:-1], strict=True)):
        stride = prod(canonical_shape[axis + 1 : -1])
        rows = rows.unsqueeze(-1) + torch.arange(start, start + size, device=device) * stride
    first, size = box.offsets[-1], box.shape[-1]
    assert first % num_at_once == size % num_at_once == 0, f"{box} cuts through a pair of bytes"
    columns = torch.arange(first // num_at_once, (first + size) // num_at_once, device=device)
    row_seed, column_seed = _seeds(box.name)
    return _keys(rows.flatten(), row_seed), _keys(columns, column_seed)


def _keys(places: torch.Tensor, seed: int) -> torch.Tensor:
    """Return each place scattered over 64 bits; odd, so that a product with it loses nothing."""
    mixed = places * _INDEX_STEP + seed
    mixed.bitwise_xor_(_shifted(mixed, 30)).mul_(_FIRST_FACTOR)
    mixed.bitwise_xor_(_shifted(mixed, 27)).mul_(_SECOND_FACTOR)
    return mixed.bitwise_xor_(_shifted(mixed, 31)).bitwise_or_(1)


def _shifted(values: torch.Tensor, count: int) -> torch.Tensor:
    """Shift right and bring in zeros; torch's own shift repeats the sign."""
    return (values >> count).bitwise_and_((1 << (64 - count)) - 1)


@lru_cache(maxsize=65536)
def _seeds(name: str) -> tuple[int, int]:
    """Return the seeds of the row keys and of the column keys."""
    raw = hashlib.blake2b(name.encode(), digest_size=16).digest()
    return int.from_bytes(raw[:8], "little", signed=True), int.from_bytes(raw[8:], "little", signed=True)
