"""The kernels of a publish on a GPU: digests, bit-equal to `digest_tensor`, and FP8 blocks, bit-equal to `quantise`.

Each reads every byte once. The pass of the digests over many matrices can copy them on the way.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

import torch
import triton
import triton.language as tl

_TILE_COLUMNS = 512
_TILE_ROWS = 64
_TRITON_TYPES = {
    torch.float8_e4m3fn: tl.float8e4nv,
    torch.bfloat16: tl.bfloat16,
    torch.float16: tl.float16,
    torch.float32: tl.float32,
}
_STEP = 2
"""Rows that are loaded at once; each element of them has an accumulator, so that nothing is reduced in the loop."""
_ALIGNED_BYTES = 16
"""Width of the largest load. Matrices that do not begin and end at multiples of it are loaded element by element."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MatrixKeys:
    """The factors of the elements of a matrix."""

    rows: torch.Tensor  # [rows], int64
    columns: torch.Tensor  # [columns], int64
    sum_index: int
    """Index of the sum that the matrix belongs to."""


@dataclass(frozen=True, slots=True)
class _Launch:
    places: torch.Tensor  # [matrices, fields], int64
    owners: torch.Tensor  # [tiles], int32: the matrix of each tile
    item_bytes: int
    is_aligned: bool


class MatrixSums:
    """The sums over many matrices, in one launch for each size of an element, or two if some are not aligned."""

    def __init__(self, keys: Sequence[MatrixKeys], *, num_sums: int) -> None:
        self._keys = keys  # the kernel has their addresses only
        self._num_sums = num_sums
        self._device = keys[0].rows.device
        self._known: list[tuple[int, int, int, int]] = []
        self._launches: list[_Launch] = []

    def compute(self, matrices: Sequence[torch.Tensor], targets: Sequence[torch.Tensor] | None = None) -> torch.Tensor:
        """Return [num_sums], int64, and copy each matrix to its target if there are any.

        Matrices are of integers, with contiguous columns, in the order of their keys; targets have the same shapes.
        """
        into = matrices if targets is None else targets
        known = [
            (matrix.data_ptr(), matrix.stride(0), target.data_ptr(), target.stride(0))
            for matrix, target in zip(matrices, into, strict=True)
        ]
        if known != self._known:
            self._known, self._launches = known, self._located(known, [each.element_size() for each in matrices])
        totals = torch.zeros(self._num_sums, dtype=torch.int64, device=self._device)
        for launch in self._launches:
            _sum_tiles[(len(launch.owners),)](
                launch.places,
                launch.owners,
                totals,
                1 << (8 * launch.item_bytes),
                FIELDS=launch.places.shape[1],
                ITEM_BYTES=launch.item_bytes,
                ALIGNMENT=_ALIGNED_BYTES // launch.item_bytes if launch.is_aligned else 1,
                COPIES=targets is not None,
                ROWS=_TILE_ROWS,
                STEP=_STEP,
                COLUMNS=_TILE_COLUMNS,
            )
        return totals

    def _located(self, known: Sequence[tuple[int, int, int, int]], sizes: Sequence[int]) -> list[_Launch]:
        """Return the launches, tables of addresses and sizes; `sizes` are the bytes of an element of each matrix."""
        tables: defaultdict[tuple[int, bool], list[list[int]]] = defaultdict(list)
        owners: defaultdict[tuple[int, bool], list[torch.Tensor]] = defaultdict(list)
        num_tiles: defaultdict[tuple[int, bool], int] = defaultdict(int)
        for each, (address, stride, target, target_stride), item_bytes in zip(self._keys, known, sizes, strict=True):
            rows, columns = len(each.rows), len(each.columns)
            steps = (stride, target_stride) if rows > 1 else ()
            is_aligned = not any(
                number % _ALIGNED_BYTES
                for number in (address, target, *(item_bytes * step for step in (*steps, columns)))
            )
            tiles_per_row = triton.cdiv(columns, _TILE_COLUMNS)
            count = triton.cdiv(rows, _TILE_ROWS) * tiles_per_row
            keys, kind = [each.rows.data_ptr(), each.columns.data_ptr()], (item_bytes, is_aligned)
            size = [rows, columns, stride if rows > 1 else 0, tiles_per_row, num_tiles[kind], each.sum_index]
            owners[kind].append(torch.full((count,), len(tables[kind]), dtype=torch.int32))
            tables[kind].append([address, *keys, *size, target, target_stride if rows > 1 else 0])
            num_tiles[kind] += count
        return [
            _Launch(
                torch.tensor(table, dtype=torch.int64).to(self._device),
                torch.cat(owners[kind]).to(self._device),
                *kind,
            )
            for kind, table in tables.items()
        ]


@triton.jit
def _sum_tiles(  # type: ignore[no-untyped-def]
    places,
    owners,
    totals,
    lift,
    FIELDS: tl.constexpr,  # noqa: N803
    ITEM_BYTES: tl.constexpr,  # noqa: N803
    ALIGNMENT: tl.constexpr,  # noqa: N803
    COPIES: tl.constexpr,  # noqa: N803
    ROWS: tl.constexpr,  # noqa: N803
    STEP: tl.constexpr,  # noqa: N803
    COLUMNS: tl.constexpr,  # noqa: N803
):
    place = places + tl.load(owners + tl.program_id(0)) * FIELDS
    element = tl.int32 if ITEM_BYTES == 4 else tl.int16 if ITEM_BYTES == 2 else tl.int8
    bytes_of_alignment: tl.constexpr = ALIGNMENT * ITEM_BYTES
    source = tl.multiple_of(tl.load(place).to(tl.pointer_type(element)), bytes_of_alignment)
    target = tl.multiple_of(tl.load(place + 9).to(tl.pointer_type(element)), bytes_of_alignment)
    row_keys = tl.load(place + 1).to(tl.pointer_type(tl.int64))
    column_keys = tl.load(place + 2).to(tl.pointer_type(tl.int64))
    rows = tl.load(place + 3)
    columns = tl.multiple_of(tl.load(place + 4), ALIGNMENT)
    row_stride = tl.multiple_of(tl.load(place + 5), ALIGNMENT)
    target_stride = tl.multiple_of(tl.load(place + 10), ALIGNMENT)
    tiles_per_row = tl.load(place + 6)
    tile = tl.program_id(0) - tl.load(place + 7)
    start = (tile // tiles_per_row) * ROWS
    column = (tile % tiles_per_row) * COLUMNS + tl.arange(0, COLUMNS)
    is_column = column < columns
    low = tl.zeros([STEP, COLUMNS], dtype=tl.uint64)
    high = tl.zeros([STEP, COLUMNS], dtype=tl.uint32)
    for first in range(0, ROWS, STEP):
        row = start + first + tl.arange(0, STEP)
        is_row = row < rows
        # Rows outside the matrix have a key of zero.
        row_key = tl.load(row_keys + row, mask=is_row, other=0).to(tl.uint64, bitcast=True)
        is_inside = is_row[:, None] & is_column[None, :]
        value = tl.load(source + row[:, None] * row_stride + column[None, :], mask=is_inside, other=0)
        if COPIES:
            tl.store(target + row[:, None] * target_stride + column[None, :], value, mask=is_inside)
        if ITEM_BYTES == 4:
            low += (value.to(tl.int64) + lift).to(tl.uint64) * row_key[:, None]
        else:
            # A lifted value has 17 bits or fewer: two products of 32 bits do for one of 64, and no sum overflows.
            lifted = (value.to(tl.int32) + lift).to(tl.uint32)
            key_low, key_high = row_key.to(tl.uint32), (row_key >> 32).to(tl.uint32)
            low += lifted.to(tl.uint64) * key_low[:, None].to(tl.uint64)
            high += lifted * key_high[:, None]
    sums = (low + (high.to(tl.uint64) << 32)).to(tl.int64, bitcast=True)
    column_key = tl.load(column_keys + column, mask=is_column, other=0)
    tl.atomic_add(totals + tl.load(place + 8), tl.sum(tl.sum(sums * column_key[None, :], axis=1), axis=0))


@dataclass(frozen=True, slots=True)
class BlockPart:
    """A part of a matrix of whole blocks, but at the edges of the matrix, with its places in the results."""

    values: torch.Tensor  # [rows, columns], contiguous columns
    elements: torch.Tensor  # [rows, columns]
    scales: torch.Tensor  # [blocks of rows, blocks of columns]


class BlockQuantiser:
    """FP8 elements and scales of many parts, read where they lie: one launch for each dtype, or two if some are not
    aligned."""

    def __init__(self, parts: Sequence[BlockPart], *, block: int, largest: float) -> None:
        self._parts = parts
        self._block = block
        self._largest = largest
        self._known: list[tuple[int, int, int]] = []
        self._launches: list[_BlockLaunch] = []

    def run(self) -> None:
        """Write the results of the values as they are now; all storages may have moved."""
        known = [(each.values.data_ptr(), each.elements.data_ptr(), each.scales.data_ptr()) for each in self._parts]
        if known != self._known:
            self._known, self._launches = known, self._located(known)
        for launch in self._launches:
            _quantise_tiles[(len(launch.owners),)](
                launch.places,
                launch.owners,
                self._largest,
                FIELDS=launch.places.shape[1],
                VALUE=_TRITON_TYPES[launch.values_in],
                VALUE_BYTES=launch.values_in.itemsize,
                ELEMENT=_TRITON_TYPES[launch.elements_in],
                ALIGNED_BYTES=_ALIGNED_BYTES if launch.is_aligned else 1,
                BLOCK=self._block,
                num_warps=4,
            )

    def _located(self, known: Sequence[tuple[int, int, int]]) -> list[_BlockLaunch]:
        tables: defaultdict[tuple[torch.dtype, torch.dtype, bool], list[list[int]]] = defaultdict(list)
        owners: defaultdict[tuple[torch.dtype, torch.dtype, bool], list[torch.Tensor]] = defaultdict(list)
        num_tiles: defaultdict[tuple[torch.dtype, torch.dtype, bool], int] = defaultdict(int)
        for each, (values, elements, scales) in zip(self._parts, known, strict=True):
            (rows, columns), strides = each.values.shape, [part.stride(0) for part in (each.values, each.elements)]
            wide = each.values.element_size()
            steps = (strides[0] * wide, strides[1]) if rows > 1 else ()
            is_aligned = not any(number % _ALIGNED_BYTES for number in (values, elements, columns, *steps))
            kind = (each.values.dtype, each.elements.dtype, is_aligned)
            tiles_per_row = triton.cdiv(columns, self._block)
            count = triton.cdiv(rows, self._block) * tiles_per_row
            owners[kind].append(torch.full((count,), len(tables[kind]), dtype=torch.int32))
            sizes = [rows, columns, *strides, each.scales.stride(0), tiles_per_row, num_tiles[kind]]
            tables[kind].append([values, elements, scales, *sizes])
            num_tiles[kind] += count
        device = self._parts[0].values.device
        return [
            _BlockLaunch(torch.tensor(table, dtype=torch.int64).to(device), torch.cat(owners[kind]).to(device), *kind)
            for kind, table in tables.items()
        ]


@dataclass(frozen=True, slots=True)
class _BlockLaunch:
    places: torch.Tensor  # [parts, fields], int64
    owners: torch.Tensor  # [tiles], int32: the part of each block
    values_in: torch.dtype
    elements_in: torch.dtype
    is_aligned: bool


@triton.jit
def _divided(value, scale):  # type: ignore[no-untyped-def]
    """Return exact quotients, the host's to the last bit, in a third of the instructions of a division.

    The remainder of a first guess is exact, so that it leads to the quotient (Markstein 1990), if nothing underflows.
    """
    if scale < 1e-20:
        quotient = tl.div_rn(value, scale)
    else:
        inverse = tl.div_rn(1.0, scale)
        guess = value * inverse
        quotient = tl.fma(tl.fma(-guess, scale, value), inverse, guess)
    return quotient


@triton.jit
def _quantise_tiles(  # type: ignore[no-untyped-def]
    places,
    owners,
    largest,
    FIELDS: tl.constexpr,  # noqa: N803
    VALUE: tl.constexpr,  # noqa: N803
    VALUE_BYTES: tl.constexpr,  # noqa: N803
    ELEMENT: tl.constexpr,  # noqa: N803
    ALIGNED_BYTES: tl.constexpr,  # noqa: N803
    BLOCK: tl.constexpr,  # noqa: N803
):
    place = places + tl.load(owners + tl.program_id(0)) * FIELDS
    values = tl.multiple_of(tl.load(place).to(tl.pointer_type(VALUE)), ALIGNED_BYTES)
    elements = tl.multiple_of(tl.load(place + 1).to(tl.pointer_type(ELEMENT)), ALIGNED_BYTES)
    scales = tl.load(place + 2).to(tl.pointer_type(tl.float32))
    rows = tl.load(place + 3)
    columns = tl.load(place + 4)
    value_stride = tl.load(place + 5)
    element_stride = tl.load(place + 6)
    if ALIGNED_BYTES > 1:
        columns = tl.multiple_of(columns, ALIGNED_BYTES)
        value_stride = tl.multiple_of(value_stride, ALIGNED_BYTES // VALUE_BYTES)
        element_stride = tl.multiple_of(element_stride, ALIGNED_BYTES)
    tiles_per_row = tl.load(place + 8)
    tile = tl.program_id(0) - tl.load(place + 9)
    block_row = tile // tiles_per_row
    block_column = tile % tiles_per_row
    row = (block_row * BLOCK + tl.arange(0, BLOCK))[:, None]
    column = (block_column * BLOCK + tl.arange(0, BLOCK))[None, :]
    is_inside = (row < rows) & (column < columns)
    value = tl.load(values + row * value_stride + column, mask=is_inside, other=0).to(tl.float32)
    magnitude = tl.max(tl.max(tl.abs(value), axis=1), axis=0)
    scale = tl.where(magnitude > 0, tl.div_rn(magnitude, largest), 1.0)
    result = _divided(value, scale)
    result = tl.minimum(tl.maximum(result, -largest), largest)
    tl.store(elements + row * element_stride + column, result.to(ELEMENT), mask=is_inside)
    tl.store(scales + block_row * tl.load(place + 7) + block_column, scale)
