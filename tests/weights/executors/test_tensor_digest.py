from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from megarl.weights.algebra.slices import Slice
from megarl.weights.executors import tensor_digest
from megarl.weights.executors.tensor_digest import MODULUS
from tests.weights.digests import digest

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
SHAPE = (12, 10)


def values_of(dtype: torch.dtype) -> torch.Tensor:
    return torch.randn(SHAPE, generator=torch.Generator().manual_seed(0)).to(dtype)


def part(values: torch.Tensor, rows: slice, columns: slice) -> int:
    cut = values[rows, columns]
    box = Slice(name="w", offsets=(rows.start, columns.start), shape=tuple(cut.shape))
    return digest(cut, box, SHAPE)


def whole(values: torch.Tensor, name: str = "w") -> int:
    return digest(values, Slice(name=name, offsets=(0, 0), shape=SHAPE), SHAPE)


def slow(values: torch.Tensor, name: str) -> int:
    """The definition, element by element."""
    row_seed, column_seed = tensor_digest._seeds(name)
    width = 8 * values.element_size()
    total = 0
    bits = values.view(torch.int16 if width == 16 else torch.int32).tolist()
    for row, line in enumerate(bits):
        for column, value in enumerate(line):
            total += (value + (1 << width)) * key(row, row_seed) * key(column, column_seed)
    return total % MODULUS


def key(place: int, seed: int) -> int:
    mixed = (seed + place * 0x9E3779B97F4A7C15) % MODULUS
    mixed = (mixed ^ (mixed >> 30)) * 0xBF58476D1CE4E5B9 % MODULUS
    mixed = (mixed ^ (mixed >> 27)) * 0x94D049BB133111EB % MODULUS
    return (mixed ^ (mixed >> 31)) | 1


@pytest.mark.parametrize("dtype", DTYPES)
def test_it_is_what_its_definition_says(dtype: torch.dtype) -> None:
    assert whole(values_of(dtype)) == slow(values_of(dtype), "w")


@given(row=st.integers(1, 11), column=st.integers(1, 9), dtype=st.sampled_from(DTYPES))
def test_parts_add_up_to_the_whole_however_they_are_cut(row: int, column: int, dtype: torch.dtype) -> None:
    values = values_of(dtype)
    parts = [
        part(values, rows, columns)
        for rows in (slice(0, row), slice(row, 12))
        for columns in (slice(0, column), slice(column, 10))
    ]
    assert sum(parts) % MODULUS == whole(values)


def test_bytes_count_in_pairs_and_parts_of_whole_pairs_add_up() -> None:
    values = values_of(torch.float8_e4m3fn)
    assert whole(values) == slow(values.view(torch.int16), "w")
    parts = [part(values, rows, slice(*ends)) for rows in (slice(0, 5), slice(5, 12)) for ends in ((0, 4), (4, 10))]
    assert sum(parts) % MODULUS == whole(values)
    with pytest.raises(AssertionError, match="cuts through a pair of bytes"):
        part(values, slice(0, 5), slice(3, 10))


def test_bytes_of_odd_rows_count_alone() -> None:
    values, shape = values_of(torch.float8_e4m3fn)[:, :9], (12, 9)
    boxes = [Slice(name="w", offsets=(0, start), shape=(12, end - start)) for start, end in ((0, 9), (0, 4), (4, 9))]
    total, *parts = (digest(values[:, box.offsets[1] :][:, : box.shape[1]], box, shape) for box in boxes)
    assert sum(parts) % MODULUS == total


def test_large_tensors_are_hashed_in_chunks_with_the_same_result(monkeypatch: pytest.MonkeyPatch) -> None:
    expected = whole(values_of(torch.float32))
    monkeypatch.setattr(tensor_digest, "_MAX_ELEMENTS", {"cpu": 7})
    assert whole(values_of(torch.float32)) == expected


@given(place=st.integers(0, 119), bit=st.integers(0, 15), dtype=st.sampled_from(DTYPES))
def test_one_flipped_bit_changes_it(place: int, bit: int, dtype: torch.dtype) -> None:
    values = values_of(dtype)
    before = whole(values)
    values.view(torch.int16).flatten()[place] ^= 1 << bit if bit < 15 else -(1 << 15)
    assert whole(values) != before


def test_places_names_and_the_sign_of_zero_count() -> None:
    values = values_of(torch.float32)
    swapped = values.clone()
    swapped[0, 0], swapped[7, 3] = values[7, 3], values[0, 0]
    digests = [whole(values), whole(swapped), whole(values, name="v")]
    digests += [whole(torch.zeros(SHAPE)), whole(-torch.zeros(SHAPE))]
    assert len(set(digests)) == len(digests)


def test_zeros_count() -> None:
    values = torch.zeros(SHAPE)
    assert part(values, slice(0, 6), slice(0, 10)) not in {0, whole(values)}


@pytest.mark.parametrize("shape", [(7,), (3, 4, 5)])
def test_tensors_of_any_rank_add_up(shape: tuple[int, ...]) -> None:
    values = torch.randn(shape, generator=torch.Generator().manual_seed(0))
    zeros = (0,) * (len(shape) - 1)
    total = digest(values, Slice(name="w", offsets=(0, *zeros), shape=shape), shape)
    parts = [
        digest(part, Slice(name="w", offsets=(start, *zeros), shape=tuple(part.shape)), shape)
        for start, part in ((0, values[:2]), (2, values[2:]))
    ]
    assert sum(parts) % MODULUS == total


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", DTYPES)
def test_it_is_the_same_on_a_gpu(dtype: torch.dtype) -> None:
    assert whole(values_of(dtype).cuda()) == whole(values_of(dtype))
