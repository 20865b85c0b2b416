"""A 64-bit digest of canonical boxes that adds up: the digests of the parts sum to the digest of the whole.

Each element contributes its bits, lifted above zero, times a key of its canonical row times a key of its column; keys
are odd and follow from the tensor's name; contributions are summed modulo 2^64. So a sender and a receiver that cut the
same box differently agree, one flipped bit always changes the sum, and misplaced elements change it but for a chance of
about 2^-47. It finds accidents; it is not cryptographic. The rows of a tensor are all its axes but the last.
"""

from __future__ import annotations

import hashlib
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from math import prod
from typing import TYPE_CHECKING, Generic, TypeVar

import torch

from megarl.weights.algebra.slices import Index, Slice

if TYPE_CHECKING:
    from megarl.weights.executors.digest_kernel import MatrixKeys, MatrixSums

Key = TypeVar("Key", bound=Hashable)

MODULUS = 1 << 64

_MATRIX = 2
"""Dimensions; the kernel takes no more."""

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
    bits, lift = _bits(values.detach())
    seeds = _seeds(box.name)
    if bits.is_cuda and bits.dim() <= _MATRIX:
        # Not at the top: a machine without a GPU need not have Triton.
        from megarl.weights.executors.digest_kernel import digest_rows  # noqa: PLC0415

        first_row = box.offsets[0] if bits.dim() == _MATRIX else 0
        matrix = bits if bits.dim() == _MATRIX else bits[None]
        return digest_rows(matrix, first_row=first_row, first_column=box.offsets[-1], seeds=seeds, lift=lift)
    rows = _rows(box, canonical_shape, bits.device)
    columns = torch.arange(box.offsets[-1], box.offsets[-1] + box.shape[-1], device=bits.device)
    return _sum(bits.reshape(len(rows), len(columns)), _keys(rows, seeds[0]), _keys(columns, seeds[1]), lift)


@dataclass(frozen=True, slots=True, kw_only=True)
class Part(Generic[Key]):
    """A box whose digest, as `dtype`, is one summand of the sum `key`."""

    key: Key
    dtype: torch.dtype
    box: Slice
    canonical_shape: Index


class DigestSums(Generic[Key]):
    """Digests of the same boxes again and again: on a GPU one launch for all, what it needs prepared by the first."""

    def __init__(self, parts: Sequence[Part[Key]]) -> None:
        self._parts = parts
        self._keys = list(dict.fromkeys(part.key for part in parts))
        self._kernel: MatrixSums | None = None

    def compute(self, values: Sequence[torch.Tensor]) -> dict[Key, int]:
        """By key; `values` are those of the parts."""
        if self._suits_kernel(values):
            found = self._prepared(values[0].device).compute([_bits_of_matrix(tensor) for tensor in values]).tolist()
            return {key: value % MODULUS for key, value in zip(self._keys, found, strict=True)}
        sums: dict[Key, torch.Tensor] = {}
        for part, tensor in zip(self._parts, values, strict=True):
            found_one = digest_tensor(tensor.to(part.dtype), part.box, part.canonical_shape)
            sums[part.key] = sums[part.key] + found_one if part.key in sums else found_one
        return to_ints(sums)

    def _suits_kernel(self, values: Sequence[torch.Tensor]) -> bool:
        kinds = {(tensor.device.type, tensor.dtype) for tensor in values} | {
            ("cuda", part.dtype) for part in self._parts
        }
        return len(kinds) == 1 and all(tensor.stride(-1) == 1 and tensor.dim() <= _MATRIX for tensor in values)

    def _prepared(self, device: torch.device) -> MatrixSums:
        if self._kernel is None:
            from megarl.weights.executors.digest_kernel import MatrixSums  # noqa: PLC0415

            indices = {key: index for index, key in enumerate(self._keys)}
            self._kernel = MatrixSums(
                [_matrix_keys(part, indices[part.key], device) for part in self._parts],
                num_sums=len(self._keys),
                lift=1 << (8 * self._parts[0].dtype.itemsize),
            )
        return self._kernel


def to_ints(sums: Mapping[Key, torch.Tensor]) -> dict[Key, int]:
    """Read sums of `digest_tensor`s off their device, all at once."""
    if not sums:
        return {}
    return {key: value % MODULUS for key, value in zip(sums, torch.stack(list(sums.values())).tolist(), strict=True)}


def _bits_of_matrix(values: torch.Tensor) -> torch.Tensor:
    bits, _ = _bits(values.detach())
    return bits if bits.dim() == _MATRIX else bits[None]


def _matrix_keys(part: Part[Key], sum_index: int, device: torch.device) -> MatrixKeys:
    from megarl.weights.executors.digest_kernel import MatrixKeys  # noqa: PLC0415

    box, seeds = part.box, _seeds(part.box.name)
    columns = torch.arange(box.offsets[-1], box.offsets[-1] + box.shape[-1], device=device)
    return MatrixKeys(
        rows=_keys(_rows(box, part.canonical_shape, device), seeds[0]),
        columns=_keys(columns, seeds[1]),
        sum_index=sum_index,
    )


def _sum(bits: torch.Tensor, row_keys: torch.Tensor, column_keys: torch.Tensor, lift: int) -> torch.Tensor:
    rows = max(1, _MAX_ELEMENTS[bits.device.type] // max(1, bits.shape[1]))
    total = torch.zeros((), dtype=torch.int64, device=bits.device)
    for start in range(0, len(bits), rows):
        lifted = bits[start : start + rows].to(torch.int64).add_(lift)
        total += lifted.mul_(column_keys).sum(dim=1).mul_(row_keys[start : start + rows]).sum()
    return total


def _bits(values: torch.Tensor) -> tuple[torch.Tensor, int]:
    """The elements as integers, and what makes all of them positive, so that a zero counts too."""
    # A view as integers wants a contiguous last dimension, which a box of columns may not have.
    width = {4: torch.int32, 2: torch.int16}[values.element_size()]
    return (values if values.stride(-1) == 1 else values.contiguous()).view(width), 1 << (8 * values.element_size())


def _rows(box: Slice, canonical_shape: Index, device: torch.device) -> torch.Tensor:
    """The canonical number of each row of the box."""
    rows = torch.zeros((), dtype=torch.int64, device=device)
    for axis, (start, size) in enumerate(zip(box.offsets[:-1], box.shape[:-1], strict=True)):
        stride = prod(canonical_shape[axis + 1 : -1])
        rows = rows.unsqueeze(-1) + torch.arange(start, start + size, device=device) * stride
    return rows.flatten()


def _keys(places: torch.Tensor, seed: int) -> torch.Tensor:
    """Each place scattered over 64 bits; odd, so that a product with it loses nothing."""
    mixed = places * _INDEX_STEP + seed
    mixed.bitwise_xor_(_shifted(mixed, 30)).mul_(_FIRST_FACTOR)
    mixed.bitwise_xor_(_shifted(mixed, 27)).mul_(_SECOND_FACTOR)
    return mixed.bitwise_xor_(_shifted(mixed, 31)).bitwise_or_(1)


def _shifted(values: torch.Tensor, count: int) -> torch.Tensor:
    """A right shift that brings in zeros; torch's own repeats the sign."""
    return (values >> count).bitwise_and_((1 << (64 - count)) - 1)


@lru_cache(maxsize=65536)
def _seeds(name: str) -> tuple[int, int]:
    """For the keys of the rows and of the columns."""
    raw = hashlib.blake2b(name.encode(), digest_size=16).digest()
    return int.from_bytes(raw[:8], "little", signed=True), int.from_bytes(raw[8:], "little", signed=True)
