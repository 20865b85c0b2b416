"""The Triton kernels of `layers`. Each value is read and written once; arithmetic is in float32."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

_COLUMNS = 1024


def gate(gate_up: Tensor) -> Tensor:
    """silu(first half of each row) * second half."""
    columns = gate_up.shape[-1] // 2
    output = torch.empty((*gate_up.shape[:-1], columns), dtype=gate_up.dtype, device=gate_up.device)
    grid = (output.numel() // columns, triton.cdiv(columns, _COLUMNS))
    _gate[grid](gate_up, output, columns, COLUMNS=_COLUMNS)
    return output


def grad_gate(gate_up: Tensor, grad: Tensor) -> Tensor:
    columns = grad.shape[-1]
    output = torch.empty_like(gate_up)
    grid = (grad.numel() // columns, triton.cdiv(columns, _COLUMNS))
    _grad_gate[grid](gate_up, grad, output, columns, COLUMNS=_COLUMNS)
    return output


def rotate(values: Tensor, cosines: Tensor, sines: Tensor, *, direction: float) -> Tensor:
    """Rotate; `direction` -1 rotates back. [N, heads, head_dim], of which only the channels must be contiguous."""
    num_tokens, heads, size = values.shape
    values = values if values.stride(-1) == 1 else values.contiguous()
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
