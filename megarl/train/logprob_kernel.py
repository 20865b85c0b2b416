"""The Triton kernels of `logprob`, each reading every logit once. Definitions are the same as there."""

from __future__ import annotations

from typing import Protocol

import torch
import triton
import triton.language as tl
from torch import Tensor

_COLUMNS = 2048
_NUM_WARPS = 8


class RowGradients(Protocol):
    """Each [rows], float32, contiguous; defined in `logprob`."""

    @property
    def log_norms(self) -> Tensor: ...

    @property
    def entropy(self) -> Tensor: ...

    @property
    def logprobs(self) -> Tensor: ...

    @property
    def entropies(self) -> Tensor: ...


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
        COLUMNS=_COLUMNS,
        num_warps=_NUM_WARPS,
    )
    return sums[0], sums[1], sums[2], sums[3]


def grad_rows(logits: Tensor, columns: Tensor, rows: RowGradients, temperature: float) -> Tensor:
    """Overwrite each logit with its gradient."""
    grid = (len(logits), triton.cdiv(logits.shape[1], _COLUMNS))
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
        COLUMNS=_COLUMNS,
        num_warps=_NUM_WARPS,
    )
    return logits


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
