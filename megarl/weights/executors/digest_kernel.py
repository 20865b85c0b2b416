"""Digests on a GPU in one pass over the bytes, of one matrix or of many: bit-equal to `digest_tensor`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import triton
import triton.language as tl

_ROWS = 32
_COLUMNS = 1024
_TILE_COLUMNS = 512
_TILE_ROWS = 64
_STEP = 8
"""Rows that are loaded at once."""


def digest_rows(
    bits: torch.Tensor, *, first_row: int, first_column: int, seeds: tuple[int, int], lift: int
) -> torch.Tensor:
    """Return the sum over a matrix of integers with contiguous columns, as an int64 scalar."""
    rows, columns = bits.shape
    total = torch.zeros((), dtype=torch.int64, device=bits.device)
    grid = (triton.cdiv(rows, _ROWS), triton.cdiv(columns, _COLUMNS))
    _digest[grid](
        bits, total, rows, columns, bits.stride(0), first_row, first_column, *seeds, lift, ROWS=_ROWS, COLUMNS=_COLUMNS
    )
    return total


@dataclass(frozen=True, slots=True, kw_only=True)
class MatrixKeys:
    """The factors of the elements of a matrix."""

    rows: torch.Tensor  # [rows], int64
    columns: torch.Tensor  # [columns], int64
    sum_index: int
    """Index of the sum that the matrix belongs to."""


class MatrixSums:
    """The sums over many matrices of one dtype, in one launch."""

    def __init__(self, keys: Sequence[MatrixKeys], *, num_sums: int, lift: int) -> None:
        self._keys = keys  # the kernel has their addresses only
        self._num_sums = num_sums
        self._lift = lift
        self._device = keys[0].rows.device
        self._first_tiles, owners, num_tiles = [], [], 0
        for index, each in enumerate(keys):
            count = triton.cdiv(len(each.rows), _TILE_ROWS) * triton.cdiv(len(each.columns), _TILE_COLUMNS)
            self._first_tiles.append(num_tiles)
            owners.append(torch.full((count,), index, dtype=torch.int32))
            num_tiles += count
        self._owners = torch.cat(owners).to(self._device)
        self._known: list[tuple[int, int]] = []
        self._places = torch.empty(0)

    def compute(self, matrices: Sequence[torch.Tensor]) -> torch.Tensor:
        """Return [num_sums], int64. Matrices are of integers, with contiguous columns, in the order of their keys."""
        known = [(matrix.data_ptr(), matrix.stride(0)) for matrix in matrices]
        if known != self._known:
            self._known, self._places = known, self._located(known)
        totals = torch.zeros(self._num_sums, dtype=torch.int64, device=self._device)
        _sum_tiles[(len(self._owners),)](
            self._places,
            self._owners,
            totals,
            self._lift,
            FIELDS=self._places.shape[1],
            IS_WIDE=matrices[0].element_size() == torch.int32.itemsize,
            ROWS=_TILE_ROWS,
            STEP=_STEP,
            COLUMNS=_TILE_COLUMNS,
        )
        return totals

    def _located(self, known: Sequence[tuple[int, int]]) -> torch.Tensor:
        places = []
        for each, first_tile, (address, stride) in zip(self._keys, self._first_tiles, known, strict=True):
            addresses = [address, each.rows.data_ptr(), each.columns.data_ptr()]
            size = [len(each.rows), len(each.columns), stride, triton.cdiv(len(each.columns), _TILE_COLUMNS)]
            places.append([*addresses, *size, first_tile, each.sum_index])
        return torch.tensor(places, dtype=torch.int64).to(self._device)


@triton.jit
def _sum_tiles(  # type: ignore[no-untyped-def]
    places,
    owners,
    totals,
    lift,
    FIELDS: tl.constexpr,  # noqa: N803
    IS_WIDE: tl.constexpr,  # noqa: N803
    ROWS: tl.constexpr,  # noqa: N803
    STEP: tl.constexpr,  # noqa: N803
    COLUMNS: tl.constexpr,  # noqa: N803
):
    place = places + tl.load(owners + tl.program_id(0)) * FIELDS
    address = tl.load(place)
    row_keys = tl.load(place + 1).to(tl.pointer_type(tl.int64))
    column_keys = tl.load(place + 2).to(tl.pointer_type(tl.int64))
    rows, columns, row_stride = tl.load(place + 3), tl.load(place + 4), tl.load(place + 5)
    tiles_per_row = tl.load(place + 6)
    tile = tl.program_id(0) - tl.load(place + 7)
    start = (tile // tiles_per_row) * ROWS
    column = (tile % tiles_per_row) * COLUMNS + tl.arange(0, COLUMNS)
    is_column = column < columns
    low = tl.zeros([COLUMNS], dtype=tl.uint64)
    high = tl.zeros([COLUMNS], dtype=tl.uint64 if IS_WIDE else tl.uint32)
    for first in range(0, ROWS, STEP):
        row = start + first + tl.arange(0, STEP)
        is_row = row < rows
        # Rows outside the matrix have a key of zero.
        row_key = tl.load(row_keys + row, mask=is_row, other=0).to(tl.uint64, bitcast=True)
        offsets = row[:, None] * row_stride + column[None, :]
        is_inside = is_row[:, None] & is_column[None, :]
        if IS_WIDE:
            wide = tl.load(address.to(tl.pointer_type(tl.int32)) + offsets, mask=is_inside, other=0).to(tl.int64) + lift
            low += tl.sum(wide.to(tl.uint64) * row_key[:, None], axis=0)
        else:
            # A lifted value has 17 bits: two products of 32 bits do the work of one of 64, and no sum overflows.
            value = tl.load(address.to(tl.pointer_type(tl.int16)) + offsets, mask=is_inside, other=0)
            lifted = (value.to(tl.int32) + lift).to(tl.uint32)
            key_low, key_high = row_key.to(tl.uint32), (row_key >> 32).to(tl.uint32)
            low += tl.sum(lifted.to(tl.uint64) * key_low[:, None].to(tl.uint64), axis=0)
            high += tl.sum(lifted * key_high[:, None], axis=0)
    sums = (low + (high.to(tl.uint64) << 32)).to(tl.int64, bitcast=True)
    column_key = tl.load(column_keys + column, mask=is_column, other=0)
    tl.atomic_add(totals + tl.load(place + 8), tl.sum(sums * column_key))


@triton.jit
def _key(place, seed):  # type: ignore[no-untyped-def]
    mixed = (place.to(tl.int64) * -7046029254386353131 + seed).to(tl.uint64)
    mixed = ((mixed ^ (mixed >> 30)).to(tl.int64, bitcast=True) * -4658895280553007687).to(tl.uint64, bitcast=True)
    mixed = ((mixed ^ (mixed >> 27)).to(tl.int64, bitcast=True) * -7723592293110705685).to(tl.uint64, bitcast=True)
    return (mixed ^ (mixed >> 31)).to(tl.int64, bitcast=True) | 1


@triton.jit(do_not_specialize=["first_row", "first_column", "row_seed", "column_seed"])
def _digest(  # type: ignore[no-untyped-def]
    bits,
    total,
    rows,
    columns,
    row_stride,
    first_row,
    first_column,
    row_seed,
    column_seed,
    lift,
    ROWS: tl.constexpr,  # noqa: N803
    COLUMNS: tl.constexpr,  # noqa: N803
):
    start = tl.program_id(0) * ROWS
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    is_column = column < columns
    sums = tl.zeros([COLUMNS], dtype=tl.int64)
    for step in range(ROWS):
        row = start + step
        is_inside = is_column & (row < rows)
        value = tl.load(bits + row.to(tl.int64) * row_stride + column, mask=is_inside, other=0)
        weighted = (value.to(tl.int64) + lift) * _key(row + first_row, row_seed)
        sums += tl.where(is_inside, weighted, 0)
    tl.atomic_add(total, tl.sum(sums * _key(column + first_column, column_seed)))
