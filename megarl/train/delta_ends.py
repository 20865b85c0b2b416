"""The Triton kernels before and behind a gated delta rule: the short convolution, and the gated norm.

Arithmetic is in float32; what comes from a convolution is rounded before its length is taken, as engines do.
Imported on GPU machines only.
"""

# ruff: noqa: N803 - constants of kernels are written as Triton writes them

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

_TOKENS = 32
_ROWS = 32
_WARPS = 4


def convolve(
    values: Tensor,  # [N, key heads, channels]
    weight: Tensor,  # [key heads, channels, kernel]
    ages: Tensor,  # [N]
    widths: tuple[int, int, int],
    eps: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return queries, keys and values; `widths` are those of a key and of a value, and the values for a key."""
    (num_tokens, key_heads, _), (key, value, per_key) = values.shape, widths
    query, keys = (values.new_empty(num_tokens, key_heads, key) for _ in range(2))
    given = values.new_empty(num_tokens, key_heads * per_key, value)
    _convolve[_grid(values, widths)](
        values,
        weight,
        ages,
        query,
        keys,
        given,
        num_tokens,
        values.stride(0),
        values.stride(1),
        eps,
        HEADS=key_heads,
        KEY=key,
        VALUE=value,
        PER_KEY=per_key,
        KERNEL=weight.shape[-1],
        TOKENS=_TOKENS,
        WIDTH=max(key, value),
        num_warps=_WARPS,
    )
    return query, keys, given


def grad_convolve(
    values: Tensor,
    weight: Tensor,
    ages: Tensor,
    grads: tuple[Tensor, Tensor, Tensor],
    widths: tuple[int, int, int],
    eps: float,
) -> tuple[Tensor, Tensor]:
    (num_tokens, key_heads, channels), (key, value, per_key) = values.shape, widths
    grid = _grid(values, widths)
    sizes = {
        "HEADS": key_heads,
        "KEY": key,
        "VALUE": value,
        "PER_KEY": per_key,
        "KERNEL": weight.shape[-1],
        "TOKENS": _TOKENS,
        "WIDTH": max(key, value),
    }
    grad_sums = values.new_empty(num_tokens, key_heads, channels)
    grad_weights = weight.new_empty(grid[0], *weight.shape)
    _grad_activation[grid](
        values,
        weight,
        ages,
        *grads,
        grad_sums,
        grad_weights,
        num_tokens,
        values.stride(0),
        values.stride(1),
        eps,
        **sizes,
        num_warps=_WARPS,
    )
    grad_values = torch.empty_like(grad_sums)
    _grad_convolve[grid](grad_sums, weight, ages, grad_values, num_tokens, **sizes, num_warps=_WARPS)
    return grad_values, grad_weights.sum(dim=0)


def norm_and_gate(output: Tensor, gate: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Return the gated norm of [N, heads, value]; the gates of a key head lie together: [N, key heads, ...]."""
    num_tokens, heads, width = output.shape
    result = torch.empty_like(output)
    _norm_and_gate[(triton.cdiv(num_tokens * heads, _ROWS),)](
        output,
        gate,
        weight,
        result,
        num_tokens * heads,
        gate.stride(0),
        gate.stride(1),
        eps,
        HEADS=heads,
        PER_KEY=heads // gate.shape[1],
        WIDTH=width,
        ROWS=_ROWS,
        num_warps=_WARPS,
    )
    return result


def grad_norm_and_gate(
    output: Tensor, gate: Tensor, weight: Tensor, grad: Tensor, eps: float
) -> tuple[Tensor, Tensor, Tensor]:
    num_tokens, heads, width = output.shape
    num_blocks = triton.cdiv(num_tokens * heads, _ROWS)
    grad_output, grad_gate = torch.empty_like(output), torch.empty_like(output)
    grad_weights = weight.new_empty(num_blocks, width, dtype=torch.float32)
    _grad_norm_and_gate[(num_blocks,)](
        output,
        gate,
        weight,
        grad,
        grad_output,
        grad_gate,
        grad_weights,
        num_tokens * heads,
        gate.stride(0),
        gate.stride(1),
        eps,
        HEADS=heads,
        PER_KEY=heads // gate.shape[1],
        WIDTH=width,
        ROWS=_ROWS,
        num_warps=_WARPS,
    )
    return grad_output, grad_gate.view(gate.shape), grad_weights.sum(dim=0).to(weight.dtype)


def _grid(values: Tensor, widths: tuple[int, int, int]) -> tuple[int, int, int]:
    num_tokens, key_heads, _ = values.shape
    return triton.cdiv(num_tokens, _TOKENS), key_heads, 2 + widths[2]


@triton.jit
def _earlier(values, token, age, channel, ago, token_stride, is_channel):  # type: ignore[no-untyped-def]
    """Return the channels of the token that many places before, in the same sequence. [tokens, channels], float32"""
    mask = (age >= ago)[:, None] & is_channel[None, :]
    return tl.load(values + (token - ago)[:, None] * token_stride + channel[None, :], mask=mask, other=0.0).to(
        tl.float32
    )


@triton.jit
def _convolve(  # type: ignore[no-untyped-def]
    values, weight, ages, query, key, value, num_tokens, token_stride, head_stride, eps,
    HEADS: tl.constexpr, KEY: tl.constexpr, VALUE: tl.constexpr, PER_KEY: tl.constexpr, KERNEL: tl.constexpr,
    TOKENS: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    head = tl.program_id(1)
    part = tl.program_id(2)
    token = tl.program_id(0).to(tl.int64) * TOKENS + tl.arange(0, TOKENS)
    # Negative behind the last token: nothing is read there.
    age = tl.load(ages + token, mask=token < num_tokens, other=-1)
    lane = tl.arange(0, WIDTH)
    is_channel = lane < tl.where(part < 2, KEY, VALUE)
    channel = tl.where(part < 2, part * KEY, 2 * KEY + (part - 2) * VALUE) + lane
    rows = values + head.to(tl.int64) * head_stride
    weights = weight + (head * (2 * KEY + PER_KEY * VALUE) + channel) * KERNEL
    total = tl.zeros([TOKENS, WIDTH], dtype=tl.float32)
    for ago in tl.static_range(KERNEL):
        factor = tl.load(weights + KERNEL - 1 - ago, mask=is_channel, other=0.0)
        total += _earlier(rows, token, age, channel, ago, token_stride, is_channel) * factor[None, :]
    total = (total * tl.sigmoid(total)).to(values.dtype.element_ty)
    mask = (token < num_tokens)[:, None] & is_channel[None, :]
    if part < 2:
        exact = total.to(tl.float32)
        exact *= tl.rsqrt(tl.sum(exact * exact, axis=1) + eps)[:, None]
        target = (token[:, None] * HEADS + head) * KEY + lane[None, :]
        if part == 0:
            tl.store(query + target, exact.to(values.dtype.element_ty), mask=mask)
        else:
            tl.store(key + target, exact.to(values.dtype.element_ty), mask=mask)
    else:
        number = (token[:, None] * HEADS + head) * PER_KEY + part - 2
        tl.store(value + number * VALUE + lane[None, :], total, mask=mask)


@triton.jit
def _grad_activation(  # type: ignore[no-untyped-def]
    values, weight, ages, grad_query, grad_key, grad_value, grad_sums, grad_weights, num_tokens,
    token_stride, head_stride, eps,
    HEADS: tl.constexpr, KEY: tl.constexpr, VALUE: tl.constexpr, PER_KEY: tl.constexpr, KERNEL: tl.constexpr,
    TOKENS: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    head = tl.program_id(1)
    part = tl.program_id(2)
    token = tl.program_id(0).to(tl.int64) * TOKENS + tl.arange(0, TOKENS)
    age = tl.load(ages + token, mask=token < num_tokens, other=-1)
    lane = tl.arange(0, WIDTH)
    is_channel = lane < tl.where(part < 2, KEY, VALUE)
    channel = tl.where(part < 2, part * KEY, 2 * KEY + (part - 2) * VALUE) + lane
    rows = values + head.to(tl.int64) * head_stride
    channels = head * (2 * KEY + PER_KEY * VALUE) + channel
    total = tl.zeros([TOKENS, WIDTH], dtype=tl.float32)
    for ago in tl.static_range(KERNEL):
        factor = tl.load(weight + channels * KERNEL + KERNEL - 1 - ago, mask=is_channel, other=0.0)
        total += _earlier(rows, token, age, channel, ago, token_stride, is_channel) * factor[None, :]
    share = tl.sigmoid(total)
    mask = (token < num_tokens)[:, None] & is_channel[None, :]
    if part < 2:
        target = (token[:, None] * HEADS + head) * KEY + lane[None, :]
        grad = tl.load(tl.where(part == 0, grad_query, grad_key) + target, mask=mask, other=0.0).to(tl.float32)
        active = (total * share).to(values.dtype.element_ty).to(tl.float32)
        length = tl.rsqrt(tl.sum(active * active, axis=1) + eps)[:, None]
        active *= length
        grad = (grad - active * tl.sum(grad * active, axis=1)[:, None]) * length
    else:
        number = (token[:, None] * HEADS + head) * PER_KEY + part - 2
        grad = tl.load(grad_value + number * VALUE + lane[None, :], mask=mask, other=0.0).to(tl.float32)
    grad *= share * (1.0 + total * (1.0 - share))
    span = HEADS * (2 * KEY + PER_KEY * VALUE)
    tl.store(grad_sums + token[:, None] * span + channels[None, :], grad.to(grad_sums.dtype.element_ty), mask=mask)
    block = tl.program_id(0).to(tl.int64) * span * KERNEL
    for ago in tl.static_range(KERNEL):
        products = grad * _earlier(rows, token, age, channel, ago, token_stride, is_channel)
        target = grad_weights + block + channels * KERNEL + KERNEL - 1 - ago
        tl.store(target, tl.sum(products, axis=0), mask=is_channel)


@triton.jit
def _grad_convolve(  # type: ignore[no-untyped-def]
    grad_sums, weight, ages, grad_values, num_tokens,
    HEADS: tl.constexpr, KEY: tl.constexpr, VALUE: tl.constexpr, PER_KEY: tl.constexpr, KERNEL: tl.constexpr,
    TOKENS: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    head = tl.program_id(1)
    part = tl.program_id(2)
    token = tl.program_id(0).to(tl.int64) * TOKENS + tl.arange(0, TOKENS)
    lane = tl.arange(0, WIDTH)
    is_channel = lane < tl.where(part < 2, KEY, VALUE)
    channels = head * (2 * KEY + PER_KEY * VALUE) + tl.where(part < 2, part * KEY, 2 * KEY + (part - 2) * VALUE) + lane
    span = HEADS * (2 * KEY + PER_KEY * VALUE)
    total = tl.zeros([TOKENS, WIDTH], dtype=tl.float32)
    for ago in tl.static_range(KERNEL):
        later = token + ago
        has_read = tl.load(ages + later, mask=later < num_tokens, other=-1) >= ago
        mask = has_read[:, None] & is_channel[None, :]
        factor = tl.load(weight + channels * KERNEL + KERNEL - 1 - ago, mask=is_channel, other=0.0)
        grad = tl.load(grad_sums + later[:, None] * span + channels[None, :], mask=mask, other=0.0)
        total += grad.to(tl.float32) * factor[None, :]
    mask = (token < num_tokens)[:, None] & is_channel[None, :]
    target = grad_values + token[:, None] * span + channels[None, :]
    tl.store(target, total.to(grad_values.dtype.element_ty), mask=mask)


@triton.jit
def _norm_and_gate(  # type: ignore[no-untyped-def]
    output, gate, weight, result, num_rows, token_stride, head_stride, eps,
    HEADS: tl.constexpr, PER_KEY: tl.constexpr, WIDTH: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    lane = tl.arange(0, WIDTH)[None, :]
    mask = (row < num_rows)[:, None]
    head = row % HEADS
    opening = (row // HEADS) * token_stride + (head // PER_KEY) * head_stride + (head % PER_KEY) * WIDTH
    place = row[:, None] * WIDTH + lane
    values = tl.load(output + place, mask=mask, other=0.0).to(tl.float32)
    gates = tl.load(gate + opening[:, None] + lane, mask=mask, other=0.0).to(tl.float32)
    values *= tl.rsqrt(tl.sum(values * values, axis=1) / WIDTH + eps)[:, None]
    values *= tl.load(weight + lane).to(tl.float32) * gates * tl.sigmoid(gates)
    tl.store(result + place, values.to(result.dtype.element_ty), mask=mask)


@triton.jit
def _grad_norm_and_gate(  # type: ignore[no-untyped-def]
    output, gate, weight, grad, grad_output, grad_gate, grad_weights, num_rows, token_stride, head_stride,
    eps,
    HEADS: tl.constexpr, PER_KEY: tl.constexpr, WIDTH: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    lane = tl.arange(0, WIDTH)[None, :]
    mask = (row < num_rows)[:, None]
    head = row % HEADS
    opening = (row // HEADS) * token_stride + (head // PER_KEY) * head_stride + (head % PER_KEY) * WIDTH
    place = row[:, None] * WIDTH + lane
    values = tl.load(output + place, mask=mask, other=0.0).to(tl.float32)
    gates = tl.load(gate + opening[:, None] + lane, mask=mask, other=0.0).to(tl.float32)
    arrived = tl.load(grad + place, mask=mask, other=0.0).to(tl.float32)
    factor = tl.load(weight + lane).to(tl.float32)
    length = tl.rsqrt(tl.sum(values * values, axis=1) / WIDTH + eps)[:, None]
    values *= length
    share = tl.sigmoid(gates)
    grad_gates = arrived * values * factor * share * (1.0 + gates * (1.0 - share))
    tl.store(grad_gate + place, grad_gates.to(grad_gate.dtype.element_ty), mask=mask)
    arrived *= gates * share
    weights = tl.sum(arrived * values, axis=0)
    tl.store(grad_weights + tl.program_id(0).to(tl.int64) * WIDTH + tl.arange(0, WIDTH), weights)
    arrived *= factor
    arrived = (arrived - values * (tl.sum(arrived * values, axis=1) / WIDTH)[:, None]) * length
    tl.store(grad_output + place, arrived.to(grad_output.dtype.element_ty), mask=mask)
