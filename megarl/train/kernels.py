"""The Triton kernels of `logprob`, `layers` and `seen_keys`. Each value is read once; arithmetic is in float32.

Imported on GPU machines only.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import triton
import triton.language as tl
from torch import Tensor

if TYPE_CHECKING:
    from megarl.train.logprob import RowGradients

_LOGIT_COLUMNS = 2048
_GATE_COLUMNS = 1024
_PLACE_COLUMNS = 512
_NUM_WARPS = 8


def sum_rows(logits: Tensor, columns: Tensor, temperature: float) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return per row the maximum, sum of exponentials, weighted sum and the logit in `columns` (0 where that is -1)."""
    sums = torch.empty((4, len(logits)), dtype=torch.float32, device=logits.device)
    _sum_rows[(len(logits),)](
        logits,
        columns,
        sums,
        len(logits),
        logits.shape[1],
        logits.stride(0),
        1.0 / temperature,
        COLUMNS=_LOGIT_COLUMNS,
        num_warps=_NUM_WARPS,
    )
    return sums[0], sums[1], sums[2], sums[3]


def grad_rows(logits: Tensor, columns: Tensor, rows: RowGradients, temperature: float) -> Tensor:
    """Overwrite each logit with its gradient."""
    grid = (len(logits), triton.cdiv(logits.shape[1], _LOGIT_COLUMNS))
    _grad_rows[grid](
        logits,
        columns,
        rows.log_norms,
        rows.entropy,
        rows.logprobs,
        rows.entropies,
        logits.shape[1],
        logits.stride(0),
        1.0 / temperature,
        COLUMNS=_LOGIT_COLUMNS,
        num_warps=_NUM_WARPS,
    )
    return logits


def gate(gate_up: Tensor) -> Tensor:
    """silu(first half of each row) * second half."""
    columns = gate_up.shape[-1] // 2
    output = torch.empty((*gate_up.shape[:-1], columns), dtype=gate_up.dtype, device=gate_up.device)
    grid = (output.numel() // columns, triton.cdiv(columns, _GATE_COLUMNS))
    _gate[grid](gate_up, output, columns, COLUMNS=_GATE_COLUMNS)
    return output


def grad_gate(gate_up: Tensor, grad: Tensor) -> Tensor:
    columns = grad.shape[-1]
    output = torch.empty_like(gate_up)
    grid = (grad.numel() // columns, triton.cdiv(columns, _GATE_COLUMNS))
    _grad_gate[grid](gate_up, grad, output, columns, COLUMNS=_GATE_COLUMNS)
    return output


def rotate(values: Tensor, cosines: Tensor, sines: Tensor, *, direction: float) -> Tensor:
    """Rotate; `direction` -1 rotates back. [N, heads, head_dim], with the angles of each pair: [N, head_dim / 2]."""
    num_tokens, heads, size = values.shape
    values = values if values.stride(-1) == 1 else values.contiguous()
    cosines, sines = cosines.contiguous(), sines.contiguous()
    output = torch.empty((num_tokens, heads, size), dtype=values.dtype, device=values.device)
    _rotate[(num_tokens,)](
        values,
        output,
        cosines,
        sines,
        values.stride(0),
        values.stride(1),
        heads,
        size // 2,
        direction,
        HEADS=triton.next_power_of_2(heads),
        HALF=triton.next_power_of_2(size // 2),
    )
    return output


def sum_places(values: Tensor, order: Tensor, bounds: Tensor) -> Tensor:
    """Return sums of rows of `values`: of those that `order` names between two of `bounds`. [bounds - 1, ...]"""
    values = values.contiguous()
    output = torch.empty((len(bounds) - 1, *values.shape[1:]), dtype=values.dtype, device=values.device)
    columns = values[0].numel()
    grid = (len(output), triton.cdiv(columns, _PLACE_COLUMNS))
    _sum_places[grid](values, order, bounds, output, columns, COLUMNS=_PLACE_COLUMNS)
    return output


@triton.jit
def _sum_rows(  # type: ignore[no-untyped-def]
    logits,
    columns,
    sums,
    num_rows,
    num_columns,
    stride,
    scale,
    COLUMNS: tl.constexpr,  # noqa: N803
):
    row = tl.program_id(0)
    start = logits + row.to(tl.int64) * stride
    # Each lane sums its own columns, relative to the largest so far; lanes are combined once, at the end.
    # Far below any logit, but finite: a difference of two infinities is not a number.
    largest = tl.full([COLUMNS], -1e30, dtype=tl.float32)
    total = tl.zeros([COLUMNS], dtype=tl.float32)
    weighted = tl.zeros([COLUMNS], dtype=tl.float32)
    for first in range(0, num_columns, COLUMNS):
        column = first + tl.arange(0, COLUMNS)
        is_inside = column < num_columns
        value = tl.load(start + column, mask=is_inside, other=0.0).to(tl.float32) * scale
        value = tl.where(is_inside, value, -1e30)
        now = tl.maximum(largest, value)
        step, below = largest - now, value - now
        shrunk, exponential = tl.exp(step), tl.exp(below)
        weighted = (weighted + step * total) * shrunk + below * exponential
        total = total * shrunk + exponential
        largest = now
    maximum = tl.max(largest, axis=0)
    step = largest - maximum
    shrunk = tl.exp(step)
    target = tl.load(columns + row)
    own = tl.load(start + tl.maximum(target, 0)).to(tl.float32) * scale
    tl.store(sums + row, maximum)
    tl.store(sums + num_rows + row, tl.sum(total * shrunk, axis=0))
    tl.store(sums + 2 * num_rows + row, tl.sum((weighted + step * total) * shrunk, axis=0))
    tl.store(sums + 3 * num_rows + row, tl.where(target >= 0, own, 0.0))


@triton.jit
def _grad_rows(  # type: ignore[no-untyped-def]
    logits,
    columns,
    log_norms,
    entropy,
    grad_logprobs,
    grad_entropies,
    num_columns,
    stride,
    scale,
    COLUMNS: tl.constexpr,  # noqa: N803
):
    row = tl.program_id(0)
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    is_inside = column < num_columns
    place = logits + row.to(tl.int64) * stride + column
    value = tl.load(place, mask=is_inside, other=0.0).to(tl.float32) * scale
    log_prob = value - tl.load(log_norms + row)
    grad_logprob = tl.load(grad_logprobs + row)
    wanted = (log_prob + tl.load(entropy + row)) * tl.load(grad_entropies + row) + grad_logprob
    gradient = tl.where(column == tl.load(columns + row), grad_logprob, 0.0) - tl.exp(log_prob) * wanted
    tl.store(place, (gradient * scale).to(logits.dtype.element_ty), mask=is_inside)


@triton.jit
def _gate(gate_up, output, columns, COLUMNS: tl.constexpr):  # type: ignore[no-untyped-def]  # noqa: N803
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    is_inside = column < columns
    start = gate_up + row * 2 * columns + column
    gates = tl.load(start, mask=is_inside, other=0.0).to(tl.float32)
    ups = tl.load(start + columns, mask=is_inside, other=0.0).to(tl.float32)
    result = gates * tl.sigmoid(gates) * ups
    tl.store(output + row * columns + column, result.to(output.dtype.element_ty), mask=is_inside)


@triton.jit
def _grad_gate(gate_up, grad, output, columns, COLUMNS: tl.constexpr):  # type: ignore[no-untyped-def]  # noqa: N803
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    is_inside = column < columns
    place = row * 2 * columns + column
    gates = tl.load(gate_up + place, mask=is_inside, other=0.0).to(tl.float32)
    ups = tl.load(gate_up + place + columns, mask=is_inside, other=0.0).to(tl.float32)
    arrived = tl.load(grad + row * columns + column, mask=is_inside, other=0.0).to(tl.float32)
    share = tl.sigmoid(gates)
    grad_gates = arrived * ups * share * (1.0 + gates * (1.0 - share))
    grad_ups = arrived * gates * share
    tl.store(output + place, grad_gates.to(output.dtype.element_ty), mask=is_inside)
    tl.store(output + place + columns, grad_ups.to(output.dtype.element_ty), mask=is_inside)


@triton.jit
def _rotate(  # type: ignore[no-untyped-def]
    values,
    output,
    cosines,
    sines,
    token_stride,
    head_stride,
    heads,
    half,
    direction,
    HEADS: tl.constexpr,  # noqa: N803
    HALF: tl.constexpr,  # noqa: N803
):
    token = tl.program_id(0).to(tl.int64)
    head = tl.arange(0, HEADS)[:, None]
    channel = tl.arange(0, HALF)[None, :]
    is_channel = channel < half
    is_inside = (head < heads) & is_channel
    cosine = tl.load(cosines + token * half + channel, mask=is_channel, other=0.0)
    sine = tl.load(sines + token * half + channel, mask=is_channel, other=0.0) * direction
    place = values + token * token_stride + head * head_stride + channel
    first = tl.load(place, mask=is_inside, other=0.0).to(tl.float32)
    second = tl.load(place + half, mask=is_inside, other=0.0).to(tl.float32)
    target = output + token * heads * 2 * half + head * 2 * half + channel
    tl.store(target, (first * cosine - second * sine).to(output.dtype.element_ty), mask=is_inside)
    tl.store(target + half, (second * cosine + first * sine).to(output.dtype.element_ty), mask=is_inside)


@triton.jit
def _sum_places(  # type: ignore[no-untyped-def]
    values,
    order,
    bounds,
    output,
    columns,
    COLUMNS: tl.constexpr,  # noqa: N803
):
    row = tl.program_id(0)
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    is_inside = column < columns
    total = tl.zeros([COLUMNS], dtype=tl.float32)
    place = tl.load(bounds + row)
    end = tl.load(bounds + row + 1)
    while place < end:
        source = tl.load(order + place).to(tl.int64)
        total += tl.load(values + source * columns + column, mask=is_inside, other=0.0).to(tl.float32)
        place += 1
    tl.store(output + row.to(tl.int64) * columns + column, total.to(output.dtype.element_ty), mask=is_inside)
