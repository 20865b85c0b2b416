"""Gated delta nets by our own Triton kernels: short convolution, delta rule and gated norm, with their gradients.

Used on GPUs only; `delta_rule` and `delta_net` compute the same in plain torch.
"""

from __future__ import annotations

from functools import cache
from importlib.util import find_spec

import torch
from torch import Tensor
from torch.autograd.function import FunctionCtx, once_differentiable

from megarl.families.shape import DeltaWidths
from megarl.train.delta_rule import Blocks

_WIDTHS = (16, 32, 64, 128, 256)
"""Channels of a head that the kernels divide into blocks."""


WAS_SEEN_RIGHT = False
"""Whether they ran on a GPU and were right; until then nobody gets them unasked."""


@cache
def _has_triton() -> bool:
    return torch.cuda.is_available() and find_spec("triton") is not None


def is_possible(widths: DeltaWidths) -> bool:
    """Whether this machine has what the kernels need, and they have blocks for heads of these widths."""
    return _has_triton() and widths.key in _WIDTHS and widths.value in _WIDTHS


def convolved(values: Tensor, weight: Tensor, widths: DeltaWidths, ages: Tensor, eps: float) -> list[Tensor]:
    """Return queries and keys of unit length, and values, after convolution and activation.

    `values` are the rows of each key head, [N, key heads, channels], `weight` is [key heads, channels, kernel].
    """
    per_key = widths.value_heads // widths.key_heads
    return list(_Convolved.apply(values, weight, ages, (widths.key, widths.value, per_key), eps))  # type: ignore[no-untyped-call]


def delta_rule_fused(
    query: Tensor,  # [N, key heads, key], of unit length
    key: Tensor,  # [N, key heads, key]
    value: Tensor,  # [N, heads, value]
    decay: Tensor,  # [N, heads], logarithms in float32
    strength: Tensor,  # [N, heads], float32
    blocks: Blocks,
) -> Tensor:
    """Return what the queries, divided by the root of their width, read. [N, heads, value]"""
    tensors = (each.contiguous() for each in (query, key, value, decay, strength))
    return _DeltaRule.apply(*tensors, blocks.bounds, blocks.spans)  # type: ignore[no-any-return, no-untyped-call]


def gated_norm(output: Tensor, gate: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Return the norm of each head times silu(gate). [N, heads, value]; `gate` is [N, key heads, ...]"""
    return _GatedNorm.apply(output.contiguous(), gate, weight, eps)  # type: ignore[no-any-return, no-untyped-call]


class _Context(FunctionCtx):
    saved_tensors: tuple[Tensor, ...]
    widths: tuple[int, int, int]
    eps: float


class _Convolved(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: _Context, values: Tensor, weight: Tensor, ages: Tensor, widths: tuple[int, int, int], eps: float
    ) -> tuple[Tensor, Tensor, Tensor]:
        from megarl.train.delta_ends import convolve  # noqa: PLC0415 - triton is only on GPU machines

        weight = weight.contiguous()
        ctx.save_for_backward(values, weight, ages)
        ctx.widths, ctx.eps = widths, eps
        return convolve(values, weight, ages, widths, eps)

    @staticmethod
    @once_differentiable
    def backward(ctx: _Context, query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor, None, None, None]:
        from megarl.train.delta_ends import grad_convolve  # noqa: PLC0415 - triton is only on GPU machines

        values, weight, ages = ctx.saved_tensors
        grads = (query.contiguous(), key.contiguous(), value.contiguous())
        grad_values, grad_weight = grad_convolve(values, weight, ages, grads, ctx.widths, ctx.eps)
        return grad_values, grad_weight, None, None, None


class _DeltaRule(torch.autograd.Function):
    @staticmethod
    def forward(ctx: _Context, *tensors: Tensor) -> Tensor:
        from megarl.train.delta_triton import RuleInputs, compute  # noqa: PLC0415 - triton is only on GPU machines

        output, kept = compute(RuleInputs(*tensors))
        ctx.save_for_backward(*tensors, *kept)
        return output

    @staticmethod
    @once_differentiable
    def backward(ctx: _Context, grad: Tensor) -> tuple[Tensor | None, ...]:
        from megarl.train.delta_triton import (  # noqa: PLC0415 - triton is only on GPU machines
            Kept,
            RuleInputs,
            compute_gradients,
        )

        saved, num_inputs = ctx.saved_tensors, len(RuleInputs._fields)
        grads = compute_gradients(RuleInputs(*saved[:num_inputs]), Kept(*saved[num_inputs:]), grad.contiguous())
        return *grads, None, None


class _GatedNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: _Context, output: Tensor, gate: Tensor, weight: Tensor, eps: float) -> Tensor:
        from megarl.train.delta_ends import norm_and_gate  # noqa: PLC0415 - triton is only on GPU machines

        ctx.save_for_backward(output, gate, weight)
        ctx.eps = eps
        return norm_and_gate(output, gate, weight, eps)

    @staticmethod
    @once_differentiable
    def backward(ctx: _Context, grad: Tensor) -> tuple[Tensor, Tensor, Tensor, None]:
        from megarl.train.delta_ends import grad_norm_and_gate  # noqa: PLC0415 - triton is only on GPU machines

        output, gate, weight = ctx.saved_tensors
        return *grad_norm_and_gate(output, gate, weight, grad.contiguous(), ctx.eps), None
