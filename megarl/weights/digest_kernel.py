"""The digest of a matrix on a GPU in one pass over its bytes: to the last bit what `digest` defines."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

_ROWS = 32
_COLUMNS = 1024


def digest_rows(
    bits: torch.Tensor, *, first_row: int, first_column: int, seeds: tuple[int, int], lift: int
) -> torch.Tensor:
    """The sum over a matrix of integers whose columns lie side by side, as an int64 scalar."""
    rows, columns = bits.shape
    total = torch.zeros((), dtype=torch.int64, device=bits.device)
    grid = (triton.cdiv(rows, _ROWS), triton.cdiv(columns, _COLUMNS))
    _digest[grid](
        bits, total, rows, columns, bits.stride(0), first_row, first_column, *seeds, lift, ROWS=_ROWS, COLUMNS=_COLUMNS
    )
    return total


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
