"""The Triton kernels of the gated delta rule, as `delta_fused` calls them.

What tokens of a chunk are to each other is computed for all chunks at once, with the inverse of the triangular system;
one program for each sequence, head and block of value channels then goes from chunk to chunk with its state in
registers, and back again for gradients. Operands of products are rounded to the dtype of the model, sums, states and
the inverse are in float32. Sums are in one order, whatever else is packed.

No product is transposed in registers: for this Triton 3.4 to 3.7.0 emit wrong code on Hopper
(https://github.com/fla-org/flash-linear-attention/pull/826). Imported on GPU machines only.
"""

# ruff: noqa: N803 - constants of kernels are written as Triton writes them

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

SIZE = 64
"""Tokens of a chunk."""
_VALUE_BLOCK = 32
_CHANNEL_BLOCK = 64
_WARPS = 4
_STAGES = 2
_PRECISION = "tf32x3"
"""How products of float32 numbers are computed for the inverse: to float32, in three products of tensor cores."""


class RuleInputs(NamedTuple):
    query: Tensor  # [N, key heads, key]
    key: Tensor  # [N, key heads, key]
    value: Tensor  # [N, heads, value]
    decay: Tensor  # [N, heads], logarithms in float32
    strength: Tensor  # [N, heads], float32
    bounds: Tensor  # [chunks, 2], int32: the first token of each chunk, and the first one behind it
    spans: Tensor  # [sequences, 3], int32: first token, the first one behind it, first chunk


class Kept(NamedTuple):
    """Tensors that gradients need besides the inputs."""

    totals: Tensor  # [N, heads], float32: sums of decays since the start of the chunk
    solve: Tensor  # [chunks, heads, size, size]: the inverse of the system of a chunk
    inner: Tensor  # [chunks, heads, size, size]: what each token reads of the corrections of each
    states: Tensor  # [chunks, heads, key, value]: before each chunk
    corrections: Tensor  # [N, heads, value]


class Gradients(NamedTuple):
    query: Tensor
    key: Tensor
    value: Tensor
    decay: Tensor
    strength: Tensor


def compute(inputs: RuleInputs) -> tuple[Tensor, Kept]:
    """Return what the queries, divided by the root of their width, read. [N, heads, value]"""
    key, value, bounds = inputs.key, inputs.value, inputs.bounds
    (_, key_heads, width), (_, heads, value_width) = key.shape, value.shape
    pairs = (len(bounds), heads, SIZE, SIZE)
    kept = Kept(
        totals=torch.empty_like(inputs.decay),
        solve=key.new_empty(pairs),
        inner=key.new_empty(pairs),
        states=key.new_empty(len(bounds), heads, width, value_width),
        corrections=torch.empty_like(value),
    )
    output = torch.empty_like(value)
    scale = width**-0.5
    _relate[(len(bounds), heads)](
        inputs.query,
        key,
        inputs.decay,
        inputs.strength,
        kept.totals,
        kept.solve,
        kept.inner,
        bounds,
        scale,
        HEADS=heads,
        KEY_HEADS=key_heads,
        KEY=width,
        SIZE=SIZE,
        LEVELS=SIZE.bit_length() - 1,
        BLOCK=min(width, _CHANNEL_BLOCK),
        PRECISION=_PRECISION,
        num_warps=_WARPS,
    )
    block = min(value_width, _VALUE_BLOCK)
    _go_on[(value_width // block, len(inputs.spans) * heads)](
        inputs.query,
        key,
        value,
        kept.totals,
        inputs.strength,
        kept.solve,
        kept.inner,
        output,
        kept.states,
        kept.corrections,
        inputs.spans,
        scale,
        HEADS=heads,
        KEY_HEADS=key_heads,
        KEY=width,
        VALUE=value_width,
        SIZE=SIZE,
        BLOCK=block,
        num_warps=_WARPS,
        num_stages=_STAGES,
    )
    return output, kept


def compute_gradients(inputs: RuleInputs, kept: Kept, grad: Tensor) -> Gradients:
    key, bounds = inputs.key, inputs.bounds
    (num_tokens, key_heads, width), heads = key.shape, inputs.value.shape[1]
    sizes, channels = _sizes(inputs), min(width, _CHANNEL_BLOCK)
    grad_states, grad_wanted, grad_value = _grads_of_states(inputs, kept, grad)
    # One part by the pairs of tokens, and one by each block of channels.
    num_parts = 1 + width // channels
    grad_totals, grad_strengths = (inputs.decay.new_empty(num_parts, num_tokens, heads) for _ in range(2))
    pairs = _grads_of_pairs(inputs, kept, grad, grad_wanted, grad_totals, grad_strengths)
    grad_query, grad_key = (key.new_empty(num_tokens, heads, width) for _ in range(2))
    _grad_channels[(width // channels, len(bounds), heads)](
        inputs.query,
        key,
        kept.totals,
        inputs.strength,
        kept.states,
        kept.corrections,
        grad,
        grad_states,
        grad_wanted,
        *pairs,
        grad_query,
        grad_key,
        grad_totals,
        grad_strengths,
        bounds,
        num_tokens,
        width**-0.5,
        **sizes,
        num_warps=_WARPS,
    )
    grad_decay = torch.empty_like(inputs.decay)
    _grad_decay[(len(bounds), heads)](grad_totals, grad_decay, bounds, num_tokens, heads, PARTS=num_parts, SIZE=SIZE)
    # Heads of values that share a key head.
    grad_query, grad_key = (
        torch.unflatten(each, 1, (key_heads, -1)).sum(dim=2) if heads > key_heads else each
        for each in (grad_query, grad_key)
    )
    strength = grad_strengths.sum(dim=0)
    return Gradients(query=grad_query, key=grad_key, value=grad_value, decay=grad_decay, strength=strength)


def _sizes(inputs: RuleInputs) -> dict[str, int]:
    (_, key_heads, width), (_, heads, value) = inputs.key.shape, inputs.value.shape
    blocks = {"BLOCK": min(width, _CHANNEL_BLOCK), "VALUE_BLOCK": min(value, _CHANNEL_BLOCK)}
    return {"HEADS": heads, "KEY_HEADS": key_heads, "KEY": width, "VALUE": value, "SIZE": SIZE, **blocks}


def _grads_of_states(inputs: RuleInputs, kept: Kept, grad: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients of states behind chunks, of what a token wants its value to be, and of values."""
    value = inputs.value
    grad_states, grad_wanted, grad_value = (torch.empty_like(each) for each in (kept.states, value, value))
    block = min(value.shape[2], _VALUE_BLOCK)
    _go_back[(value.shape[2] // block, len(inputs.spans) * value.shape[1])](
        inputs.query,
        inputs.key,
        kept.totals,
        inputs.strength,
        kept.solve,
        kept.inner,
        grad,
        grad_states,
        grad_wanted,
        grad_value,
        inputs.spans,
        inputs.key.shape[2] ** -0.5,
        **{name: size for name, size in _sizes(inputs).items() if "BLOCK" not in name},
        BLOCK=block,
        num_warps=_WARPS,
        num_stages=_STAGES,
    )
    return grad_states, grad_wanted, grad_value


def _grads_of_pairs(
    inputs: RuleInputs, kept: Kept, grad: Tensor, grad_wanted: Tensor, grad_totals: Tensor, grad_strengths: Tensor
) -> tuple[Tensor, Tensor]:
    """Return the gradients of products of queries and keys, and of keys; fill the first parts of the others."""
    read, system = torch.empty_like(kept.inner), torch.empty_like(kept.solve)
    _grad_pairs[(len(inputs.bounds), inputs.value.shape[1])](
        inputs.key,
        inputs.value,
        kept.totals,
        inputs.strength,
        kept.inner,
        kept.corrections,
        grad,
        grad_wanted,
        read,
        system,
        grad_totals,
        grad_strengths,
        inputs.bounds,
        inputs.key.shape[2] ** -0.5,
        **_sizes(inputs),
        num_warps=_WARPS,
    )
    return read, system


@triton.jit
def _between(total, place):  # type: ignore[no-untyped-def]
    """Return what is left of each token's correction when a later one reads it; 1 where it comes earlier."""
    is_later = place[:, None] >= place[None, :]
    return tl.exp(tl.where(is_later, total[:, None] - total[None, :], 0.0))


@triton.jit
def _relate(  # type: ignore[no-untyped-def]
    query, key, decay, strength, totals, solve, inner, bounds, scale,
    HEADS: tl.constexpr, KEY_HEADS: tl.constexpr, KEY: tl.constexpr, SIZE: tl.constexpr,
    LEVELS: tl.constexpr, BLOCK: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    chunk = tl.program_id(0)
    head = tl.program_id(1)
    place = tl.arange(0, SIZE)
    token = tl.load(bounds + 2 * chunk).to(tl.int64) + place
    is_token = token < tl.load(bounds + 2 * chunk + 1)
    number = token * HEADS + head
    total = tl.cumsum(tl.load(decay + number, mask=is_token, other=0.0), axis=0)
    tl.store(totals + number, total, mask=is_token)
    strengths = tl.load(strength + number, mask=is_token, other=0.0)
    rows = (token * KEY_HEADS + head // (HEADS // KEY_HEADS)) * KEY
    own = tl.zeros([SIZE, SIZE], dtype=tl.float32)
    crossed = tl.zeros([SIZE, SIZE], dtype=tl.float32)
    for start in tl.static_range(0, KEY, BLOCK):
        columns = rows[:, None] + start + tl.arange(0, BLOCK)[None, :]
        k = tl.load(key + columns, mask=is_token[:, None], other=0.0)
        q = tl.load(query + columns, mask=is_token[:, None], other=0.0)
        own = tl.dot(k, tl.trans(k), own)
        crossed = tl.dot(q, tl.trans(k), crossed)
    row = place[:, None]
    column = place[None, :]
    between = _between(total, place)
    pair = (chunk.to(tl.int64) * HEADS + head) * SIZE * SIZE + row * SIZE + column
    tl.store(inner + pair, tl.where(row >= column, crossed * between * scale, 0.0).to(inner.dtype.element_ty))
    system = tl.where(row > column, own * between * strengths[:, None], 0.0)
    # The inverse of two triangles and the square below them from the inverses of the triangles, from 1 token on.
    inverse = tl.where(row == column, 1.0, 0.0) - tl.where(row // 2 == column // 2, system, 0.0)
    for level in range(1, LEVELS):
        is_square = (row >> (level + 1) == column >> (level + 1)) & (row >> level != column >> level)
        square = tl.where(is_square, system, 0.0)
        left = tl.dot(inverse, square, input_precision=PRECISION)
        inverse -= tl.dot(left, inverse, input_precision=PRECISION)
    tl.store(solve + pair, inverse.to(solve.dtype.element_ty))


@triton.jit
def _go_on(  # type: ignore[no-untyped-def]
    query, key, value, totals, strength, solve, inner, output, states, corrections, spans, scale,
    HEADS: tl.constexpr, KEY_HEADS: tl.constexpr, KEY: tl.constexpr, VALUE: tl.constexpr, SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    sequence = tl.program_id(1) // HEADS
    head = tl.program_id(1) % HEADS
    first = tl.load(spans + 3 * sequence)
    end = tl.load(spans + 3 * sequence + 1)
    chunk = tl.load(spans + 3 * sequence + 2).to(tl.int64)
    place = tl.arange(0, SIZE)
    channel = tl.arange(0, KEY)
    column = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    pair = place[:, None] * SIZE + place[None, :]
    state = tl.zeros([KEY, BLOCK], dtype=tl.float32)
    for start in range(first, end, SIZE):
        token = start + place.to(tl.int64)
        is_token = token < end
        number = token * HEADS + head
        total = tl.load(totals + number, mask=is_token, other=0.0)
        last = tl.load(totals + (tl.minimum(start + SIZE, end) - 1).to(tl.int64) * HEADS + head)
        strengths = tl.load(strength + number, mask=is_token, other=0.0)
        at = (token * KEY_HEADS + head // (HEADS // KEY_HEADS))[:, None] * KEY + channel[None, :]
        k = tl.load(key + at, mask=is_token[:, None], other=0.0)
        q = tl.load(query + at, mask=is_token[:, None], other=0.0)
        values = number[:, None] * VALUE + column[None, :]
        v = tl.load(value + values, mask=is_token[:, None], other=0.0).to(tl.float32)
        pairs = (chunk * HEADS + head) * SIZE * SIZE + pair
        solved = tl.load(solve + pairs)
        seen = tl.load(inner + pairs)
        entering = state.to(k.dtype)
        tl.store(states + ((chunk * HEADS + head) * KEY + channel[:, None]) * VALUE + column[None, :], entering)
        since = tl.exp(total)[:, None]
        wanted = (v - tl.dot(k, entering) * since) * strengths[:, None]
        correction = tl.dot(solved, wanted.to(k.dtype))
        rounded = correction.to(k.dtype)
        tl.store(corrections + values, rounded, mask=is_token[:, None])
        result = tl.dot(q, entering) * (since * scale)
        result = tl.dot(seen, rounded, result)
        tl.store(output + values, result.to(output.dtype.element_ty), mask=is_token[:, None])
        left = (correction * tl.exp(last - total)[:, None]).to(k.dtype)
        state = tl.dot(tl.trans(k), left, state * tl.exp(last))
        chunk += 1


@triton.jit
def _go_back(  # type: ignore[no-untyped-def]
    query, key, totals, strength, solve, inner, grad, grad_states, grad_wanted, grad_value, spans, scale,
    HEADS: tl.constexpr, KEY_HEADS: tl.constexpr, KEY: tl.constexpr, VALUE: tl.constexpr, SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    sequence = tl.program_id(1) // HEADS
    head = tl.program_id(1) % HEADS
    first = tl.load(spans + 3 * sequence)
    end = tl.load(spans + 3 * sequence + 1)
    first_chunk = tl.load(spans + 3 * sequence + 2).to(tl.int64)
    num_chunks = tl.cdiv(end - first, SIZE)
    place = tl.arange(0, SIZE)
    channel = tl.arange(0, KEY)
    column = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    turned = place[None, :] * SIZE + place[:, None]
    state = tl.zeros([KEY, BLOCK], dtype=tl.float32)
    for done in range(num_chunks):
        index = num_chunks - 1 - done
        chunk = first_chunk + index
        start = first + index * SIZE
        token = start + place.to(tl.int64)
        is_token = token < end
        number = token * HEADS + head
        total = tl.load(totals + number, mask=is_token, other=0.0)
        last = tl.load(totals + (tl.minimum(start + SIZE, end) - 1).to(tl.int64) * HEADS + head)
        strengths = tl.load(strength + number, mask=is_token, other=0.0)
        at = (token * KEY_HEADS + head // (HEADS // KEY_HEADS))[:, None] * KEY + channel[None, :]
        k = tl.load(key + at, mask=is_token[:, None], other=0.0)
        q = tl.load(query + at, mask=is_token[:, None], other=0.0)
        values = number[:, None] * VALUE + column[None, :]
        arrived = tl.load(grad + values, mask=is_token[:, None], other=0.0)
        pairs = (chunk * HEADS + head) * SIZE * SIZE + turned
        solved = tl.load(solve + pairs)
        seen = tl.load(inner + pairs)
        leaving = state.to(k.dtype)
        tl.store(grad_states + ((chunk * HEADS + head) * KEY + channel[:, None]) * VALUE + column[None, :], leaving)
        grad_correction = tl.dot(k, leaving) * tl.exp(last - total)[:, None]
        grad_correction = tl.dot(seen, arrived, grad_correction)
        wanted = tl.dot(solved, grad_correction.to(k.dtype))
        tl.store(grad_wanted + values, wanted.to(k.dtype), mask=is_token[:, None])
        stronger = wanted * strengths[:, None]
        tl.store(grad_value + values, stronger.to(k.dtype), mask=is_token[:, None])
        since = tl.exp(total)[:, None]
        state = tl.dot(tl.trans(q), (arrived.to(tl.float32) * (since * scale)).to(k.dtype), state * tl.exp(last))
        state = tl.dot(tl.trans(k), (-stronger * since).to(k.dtype), state)


@triton.jit
def _grad_pairs(  # type: ignore[no-untyped-def]
    key, value, totals, strength, inner, corrections, grad, grad_wanted, read, system, grad_totals,
    grad_strengths, bounds, scale,
    HEADS: tl.constexpr, KEY_HEADS: tl.constexpr, KEY: tl.constexpr, VALUE: tl.constexpr, SIZE: tl.constexpr,
    BLOCK: tl.constexpr, VALUE_BLOCK: tl.constexpr,
):  # fmt: skip
    chunk = tl.program_id(0)
    head = tl.program_id(1)
    place = tl.arange(0, SIZE)
    token = tl.load(bounds + 2 * chunk).to(tl.int64) + place
    is_token = token < tl.load(bounds + 2 * chunk + 1)
    number = token * HEADS + head
    total = tl.load(totals + number, mask=is_token, other=0.0)
    strengths = tl.load(strength + number, mask=is_token, other=0.0)
    own = tl.zeros([SIZE, SIZE], dtype=tl.float32)
    rows = (token * KEY_HEADS + head // (HEADS // KEY_HEADS)) * KEY
    for start in tl.static_range(0, KEY, BLOCK):
        k = tl.load(key + rows[:, None] + start + tl.arange(0, BLOCK)[None, :], mask=is_token[:, None], other=0.0)
        own = tl.dot(k, tl.trans(k), own)
    grad_inner = tl.zeros([SIZE, SIZE], dtype=tl.float32)
    grad_system = tl.zeros([SIZE, SIZE], dtype=tl.float32)
    grad_strength = tl.zeros([SIZE], dtype=tl.float32)
    for start in tl.static_range(0, VALUE, VALUE_BLOCK):
        columns = number[:, None] * VALUE + start + tl.arange(0, VALUE_BLOCK)[None, :]
        arrived = tl.load(grad + columns, mask=is_token[:, None], other=0.0)
        correction = tl.load(corrections + columns, mask=is_token[:, None], other=0.0)
        wanted = tl.load(grad_wanted + columns, mask=is_token[:, None], other=0.0)
        v = tl.load(value + columns, mask=is_token[:, None], other=0.0)
        grad_inner = tl.dot(arrived, tl.trans(correction), grad_inner)
        grad_system = tl.dot(wanted, tl.trans(correction), grad_system)
        grad_strength += tl.sum(wanted.to(tl.float32) * v.to(tl.float32), axis=1)
    row = place[:, None]
    column = place[None, :]
    between = _between(total, place)
    pair = (chunk.to(tl.int64) * HEADS + head) * SIZE * SIZE + row * SIZE + column
    grad_system = tl.where(row > column, -grad_system, 0.0) * between
    products = grad_inner * tl.load(inner + pair).to(tl.float32)
    grad_inner = tl.where(row >= column, grad_inner * between * scale, 0.0)
    tl.store(read + pair, grad_inner.to(read.dtype.element_ty))
    tl.store(system + pair, (grad_system * strengths[:, None]).to(system.dtype.element_ty))
    grad_system *= own
    grad_strength += tl.sum(grad_system, axis=1)
    products += grad_system * strengths[:, None]
    # The decays between two tokens are a difference of sums.
    tl.store(grad_totals + number, tl.sum(products, axis=1) - tl.sum(products, axis=0), mask=is_token)
    tl.store(grad_strengths + number, grad_strength, mask=is_token)


@triton.jit
def _grad_channels(  # type: ignore[no-untyped-def]
    query, key, totals, strength, states, corrections, grad, grad_states, grad_wanted, read, system,
    grad_query, grad_key, grad_totals, grad_strengths, bounds, num_tokens, scale,
    HEADS: tl.constexpr, KEY_HEADS: tl.constexpr, KEY: tl.constexpr, VALUE: tl.constexpr, SIZE: tl.constexpr,
    BLOCK: tl.constexpr, VALUE_BLOCK: tl.constexpr,
):  # fmt: skip
    chunk = tl.program_id(1)
    head = tl.program_id(2)
    place = tl.arange(0, SIZE)
    channel = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    token = tl.load(bounds + 2 * chunk).to(tl.int64) + place
    end = tl.load(bounds + 2 * chunk + 1)
    is_token = token < end
    number = token * HEADS + head
    by_query = tl.zeros([SIZE, BLOCK], dtype=tl.float32)
    by_key, by_wanted = by_query, by_query
    grad_kept = 0.0
    state_rows = ((chunk.to(tl.int64) * HEADS + head) * KEY + channel[:, None]) * VALUE
    for start in tl.static_range(0, VALUE, VALUE_BLOCK):
        value_channel = start + tl.arange(0, VALUE_BLOCK)[None, :]
        columns = number[:, None] * VALUE + value_channel
        arrived = tl.load(grad + columns, mask=is_token[:, None], other=0.0)
        correction = tl.load(corrections + columns, mask=is_token[:, None], other=0.0)
        wanted = tl.load(grad_wanted + columns, mask=is_token[:, None], other=0.0)
        state = tl.load(states + state_rows + value_channel)
        leaving = tl.load(grad_states + state_rows + value_channel)
        by_query = tl.dot(arrived, tl.trans(state), by_query)
        by_key = tl.dot(correction, tl.trans(leaving), by_key)
        by_wanted = tl.dot(wanted, tl.trans(state), by_wanted)
        grad_kept += tl.sum(state.to(tl.float32) * leaving.to(tl.float32))
    total = tl.load(totals + number, mask=is_token, other=0.0)
    last = tl.load(totals + (end.to(tl.int64) - 1) * HEADS + head)
    strengths = tl.load(strength + number, mask=is_token, other=0.0)
    at = (token * KEY_HEADS + head // (HEADS // KEY_HEADS))[:, None] * KEY + channel[None, :]
    k = tl.load(key + at, mask=is_token[:, None], other=0.0)
    q = tl.load(query + at, mask=is_token[:, None], other=0.0)
    exact = k.to(tl.float32)
    since = tl.exp(total)[:, None]
    by_query *= since * scale
    by_key *= tl.exp(last - total)[:, None]
    by_wanted *= -since
    reads = tl.sum(q.to(tl.float32) * by_query, axis=1)
    leaves = tl.sum(exact * by_key, axis=1)
    holds = tl.sum(exact * by_wanted, axis=1)
    grad_last = tl.sum(leaves, axis=0) + tl.exp(last) * grad_kept
    grad_total = reads - leaves + holds * strengths + tl.where(token == end - 1, grad_last, 0.0)
    part = (tl.program_id(0).to(tl.int64) + 1) * num_tokens * HEADS + number
    tl.store(grad_totals + part, grad_total, mask=is_token)
    tl.store(grad_strengths + part, holds, mask=is_token)
    pairs = (chunk.to(tl.int64) * HEADS + head) * SIZE * SIZE
    pair = pairs + place[:, None] * SIZE + place[None, :]
    turned = pairs + place[None, :] * SIZE + place[:, None]
    by_query = tl.dot(tl.load(read + pair), k, by_query)
    by_key = tl.dot(tl.load(read + turned), q, by_key + by_wanted * strengths[:, None])
    by_key = tl.dot(tl.load(system + pair), k, by_key)
    by_key = tl.dot(tl.load(system + turned), k, by_key)
    target = number[:, None] * KEY + channel[None, :]
    tl.store(grad_query + target, by_query.to(grad_query.dtype.element_ty), mask=is_token[:, None])
    tl.store(grad_key + target, by_key.to(grad_key.dtype.element_ty), mask=is_token[:, None])


@triton.jit
def _grad_decay(  # type: ignore[no-untyped-def]
    grad_totals, grad_decay, bounds, num_tokens, heads,
    PARTS: tl.constexpr, SIZE: tl.constexpr,
):  # fmt: skip
    chunk = tl.program_id(0)
    token = tl.load(bounds + 2 * chunk).to(tl.int64) + tl.arange(0, SIZE)
    is_token = token < tl.load(bounds + 2 * chunk + 1)
    number = token * heads + tl.program_id(1)
    grad = tl.zeros([SIZE], dtype=tl.float32)
    for part in tl.static_range(PARTS):
        grad += tl.load(grad_totals + part * num_tokens * heads + number, mask=is_token, other=0.0)
    # A decay is in the sums of all later tokens of its chunk.
    tl.store(grad_decay + number, tl.sum(grad, axis=0) - tl.cumsum(grad, axis=0) + grad, mask=is_token)
