"""The operations that SGLang lacks on a CPU, in torch; `cpu` installs them."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F

ROWS_PER_BLOCK = 16
"""Rows per block of a matrix product, so that a row's result does not depend on its neighbours."""
_MASK = 0xFFFFFFFF


def unpinned(make: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    """Return a function that ignores the wish for pinned memory, which only CUDA can fulfil."""
    return lambda *arguments, pin_memory=False, **options: make(*arguments, **options)  # noqa: ARG005 - on purpose


def assign_req_to_token_pool(
    rows: torch.Tensor,  # [R]
    table: torch.Tensor,  # [requests, positions], updated
    starts: torch.Tensor,  # [R]
    ends: torch.Tensor,  # [R]
    locations: torch.Tensor,  # [sum of ends - starts]
    _num_positions: int,
) -> None:
    """Write the cache locations of the new tokens of each request into `table`."""
    done = 0
    for row, start, end in zip(rows.tolist(), starts.tolist(), ends.tolist(), strict=True):
        table[row, start:end] = locations[done : done + end - start].to(table.dtype)
        done += end - start


def murmur_hash32(seed: torch.Tensor, positions: torch.Tensor, cols: torch.Tensor) -> torch.Tensor:
    """Return MurmurHash3 of (64-bit seed [n], position [n], column [m]) as uint32 [n, m], equal to the GPU's.

    int64 products wrap, which leaves their low 32 bits right.
    """
    seed = seed.view(torch.int64) if seed.dtype == torch.uint64 else seed.to(torch.int64)
    state = torch.zeros_like(seed)
    for word in (seed, seed >> 32, positions.to(torch.int64)):
        state = _mix(state, word & _MASK)
    state = _mix(state[:, None], (cols.to(torch.int64) & _MASK)[None, :]) ^ 16  # bytes hashed
    state = ((state ^ (state >> 16)) * 0x85EBCA6B) & _MASK
    state = ((state ^ (state >> 13)) * 0xC2B2AE35) & _MASK
    return (state ^ (state >> 16)).to(torch.uint32)


def _mix(state: torch.Tensor, word: torch.Tensor) -> torch.Tensor:
    word = (word * 0xCC9E2D51) & _MASK
    word = ((word << 15) | (word >> 17)) & _MASK
    state = state ^ ((word * 0x1B873593) & _MASK)
    state = ((state << 13) | (state >> 19)) & _MASK
    return (state * 5 + 0xE6546B64) & _MASK


def mm_in_blocks(left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
    """Return `left @ right` from products of one shape: BLAS chooses its kernel by rows, and kernels round differently.

    The last block is padded with zeros. Uses `bmm`, so that it can replace `mm` itself.
    """
    num_rows, width = left.shape
    num_blocks = -(-num_rows // ROWS_PER_BLOCK)
    blocks = left.new_zeros(num_blocks * ROWS_PER_BLOCK, width)
    blocks[:num_rows] = left
    product = torch.bmm(blocks.view(num_blocks, ROWS_PER_BLOCK, width), right.expand(num_blocks, *right.shape))
    return product.view(num_blocks * ROWS_PER_BLOCK, right.shape[1])[:num_rows]


def addmm_in_blocks(
    bias: torch.Tensor, left: torch.Tensor, right: torch.Tensor, *, beta: float = 1, alpha: float = 1
) -> torch.Tensor:
    return mm_in_blocks(left, right) * alpha + bias * beta


def add_product_in_blocks(
    total: torch.Tensor, left: torch.Tensor, right: torch.Tensor, *, beta: float = 1, alpha: float = 1
) -> torch.Tensor:
    """Do as `addmm_in_blocks`, in place."""
    product = mm_in_blocks(left, right) * alpha
    return total.copy_(product if beta == 0 else product + total * beta)


def own_experts(
    tokens: torch.Tensor,  # [N, hidden]
    weights: torch.Tensor,  # [N, experts of a token]
    ids: torch.Tensor,  # [N, experts of a token]; negative where another rank has the expert
    gate_up: torch.Tensor,  # [experts of this rank, 2 * ffn, hidden]
    down: torch.Tensor,  # [experts of this rank, hidden, ffn]
) -> torch.Tensor:
    """Return the weighted sum over the experts of this rank for each token; other ranks add theirs."""
    output = torch.zeros_like(tokens)
    for expert in range(len(gate_up)):
        rows, choices = (ids == expert).nonzero(as_tuple=True)
        if not len(rows):
            continue
        gate, up = F.linear(tokens[rows], gate_up[expert]).chunk(2, dim=-1)
        made = F.linear(F.silu(gate) * up, down[expert])
        output.index_add_(0, rows, made * weights[rows, choices, None].to(made.dtype))
    return output


def add_gated(
    tokens: torch.Tensor,  # [N, hidden]
    gate: torch.Tensor,  # [hidden]
    shared: torch.Tensor,  # [N, hidden]
    output: torch.Tensor,  # [N, hidden]
) -> None:
    """Add the output of a shared expert, times the sigmoid of its gate, to that of the others, in place."""
    output += torch.sigmoid(F.linear(tokens, gate[None])) * shared
