"""The stand-ins for SGLang's compiled kernels."""

from __future__ import annotations

import pytest
import torch

from megarl.engine.cpu_kernels import (
    add_gated,
    addmm_in_blocks,
    assign_req_to_token_pool,
    mm_in_blocks,
    murmur_hash32,
    own_experts,
)

MASK = 0xFFFFFFFF


def rotated(word: int, count: int) -> int:
    return ((word << count) | (word >> (32 - count))) & MASK


def murmur_reference(words: list[int]) -> int:
    """MurmurHash3 x86_32 with seed 0 of whole 32-bit words, as published."""
    state = 0
    for word in words:
        word = rotated(word * 0xCC9E2D51 & MASK, 15) * 0x1B873593 & MASK
        state = (rotated(state ^ word, 13) * 5 + 0xE6546B64) & MASK
    state ^= 4 * len(words)
    state = (state ^ state >> 16) * 0x85EBCA6B & MASK
    state = (state ^ state >> 13) * 0xC2B2AE35 & MASK
    return state ^ state >> 16


def test_the_hash_is_murmur3_of_seed_position_and_column() -> None:
    seeds = [0, 1, 42, 2**32 + 5, 2**63 - 1]
    positions = [0, 1, 100, 7, 2**31 - 1]
    columns = [0, 1, 98, 151_000]
    hashes = murmur_hash32(
        torch.tensor(seeds, dtype=torch.int64).to(torch.uint64), torch.tensor(positions), torch.tensor(columns)
    )
    assert hashes.dtype == torch.uint32
    expected = [
        [murmur_reference([seed & MASK, seed >> 32, position, column]) for column in columns]
        for seed, position in zip(seeds, positions, strict=True)
    ]
    assert hashes.to(torch.int64).tolist() == expected


@pytest.mark.parametrize("num_rows", [1, 2, 15, 16, 17, 33])
def test_a_product_in_blocks_is_the_product(num_rows: int) -> None:
    generator = torch.Generator().manual_seed(num_rows)
    left, right = torch.randn(num_rows, 24, generator=generator), torch.randn(10, 24, generator=generator).T
    bias = torch.randn(10, generator=generator)
    torch.testing.assert_close(mm_in_blocks(left, right), left @ right)
    torch.testing.assert_close(addmm_in_blocks(bias, left, right), left @ right + bias)


def test_a_row_does_not_depend_on_the_rows_around_it() -> None:
    generator = torch.Generator().manual_seed(0)
    left, right = torch.randn(70, 64, generator=generator), torch.randn(99, 64, generator=generator).T
    whole = mm_in_blocks(left, right)
    order = torch.randperm(70, generator=generator)
    assert torch.equal(mm_in_blocks(left[order], right), whole[order])
    for num_rows in range(1, 40):
        assert torch.equal(mm_in_blocks(left[3 : 3 + num_rows], right), whole[3 : 3 + num_rows])


def test_new_cache_locations_go_to_their_requests() -> None:
    table = torch.zeros(3, 5, dtype=torch.int32)
    assign_req_to_token_pool(
        torch.tensor([2, 0]), table, torch.tensor([1, 0]), torch.tensor([3, 1]), torch.tensor([7, 8, 9]), 5
    )
    assert table.tolist() == [[9, 0, 0, 0, 0], [0, 0, 0, 0, 0], [0, 7, 8, 0, 0]]


def test_ranks_with_some_experts_each_add_up_to_all_of_them() -> None:
    generator = torch.Generator().manual_seed(0)
    tokens, weights = (torch.rand(shape, generator=generator) for shape in ((5, 6), (5, 2)))
    gate_up, down = (torch.randn(shape, generator=generator) for shape in ((4, 8, 6), (4, 6, 4)))
    ids = torch.tensor([[0, 1], [3, 2], [1, 3], [2, 0], [3, 1]])
    output = torch.zeros_like(tokens)
    for first in (0, 2):
        local = torch.where((ids >= first) & (ids < first + 2), ids - first, -1)
        output += own_experts(tokens, weights, local, gate_up[first : first + 2], down[first : first + 2])
    for row, token in enumerate(tokens):
        expected = torch.zeros(6)
        for expert, weight in zip(ids[row].tolist(), weights[row].tolist(), strict=True):
            gate, up = (gate_up[expert] @ token).chunk(2)
            expected += weight * (down[expert] @ (torch.nn.functional.silu(gate) * up))
        torch.testing.assert_close(output[row], expected)


def test_a_shared_expert_is_added_as_its_gate_says() -> None:
    generator = torch.Generator().manual_seed(0)
    tokens, shared, routed = (torch.randn(5, 6, generator=generator) for _ in range(3))
    gate, output = torch.randn(6, generator=generator), routed.clone()
    add_gated(tokens, gate, shared, output)
    for row, token in enumerate(tokens):
        share = 1 / (1 + (-(gate * token).sum()).exp())
        torch.testing.assert_close(output[row], routed[row] + share * shared[row])
