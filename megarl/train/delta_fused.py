"""Gated delta nets by our own Triton kernels: short convolution, delta rule and gated norm, with their gradients.

Used on GPUs only; `delta_rule` and `delta_net` compute the same in plain torch.
"""

from __future__ import annotations

import logging
from functools import cache
from importlib.util import find_spec

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import FunctionCtx, once_differentiable

from megarl.families.shape import DeltaWidths
from megarl.train.delta_rule import Blocks, blocks_of, chunks_of, delta_rule

logger = logging.getLogger(__name__)

_WIDTHS = (64, 128, 256)
"""Channels of a head that the kernels divide into blocks. For 16, Triton 3.6 reads behind a Hopper's shared memory."""
_LARGEST_ERROR = 0.03
"""Larger than the rounding of bfloat16 numbers; what compilers for Hopper have got wrong was wrong by half."""
_LENGTHS = [1, 65, 130]


def is_usable(widths: DeltaWidths) -> bool:
    """Whether there are kernels for heads of these widths, and they are right on this GPU with this Triton."""
    if not torch.cuda.is_available() or find_spec("triton") is None:
        return False
    return widths.key in _WIDTHS and widths.value in _WIDTHS and _is_right(widths.key, widths.value)


@cache
def _is_right(key: int, value: int) -> bool:
    error = delta_rule_error(key, value, torch.device("cuda", torch.cuda.current_device()), torch.bfloat16)
    if error <= _LARGEST_ERROR:
        return True
    import triton  # noqa: PLC0415 - on GPU machines only

    logger.warning(
        "delta nets in plain torch, which is slower: with Triton %s on this GPU their kernels are wrong by %.2g",
        triton.__version__,
        error,
    )
    return False


def delta_rule_error(key: int, value: int, device: torch.device, dtype: torch.dtype) -> float:
    """Return the largest distance of output and gradients from plain torch, relative to their norms."""
    from megarl.train import delta_triton  # noqa: PLC0415 - triton is only on GPU machines

    chance, num_tokens = torch.Generator(device).manual_seed(0), sum(_LENGTHS)

    def drawn(*shape: int) -> Tensor:
        return torch.randn(shape, generator=chance, device=device, dtype=torch.float32)

    query, keys = (F.normalize(drawn(num_tokens, 1, key) + 0.5, dim=-1) for _ in range(2))
    rounded = [each.to(dtype).float() for each in (query, keys, drawn(num_tokens, 2, value))]
    inputs = [*rounded, -drawn(num_tokens, 2).sigmoid() / 5, drawn(num_tokens, 2).sigmoid()]
    weight = drawn(num_tokens, 2, value)
    blocks, chunks = blocks_of(_LENGTHS, device, size=delta_triton.SIZE), chunks_of(_LENGTHS, device)

    def by_kernels(query: Tensor, key: Tensor, value: Tensor, decay: Tensor, strength: Tensor) -> Tensor:
        return delta_rule_fused(query.to(dtype), key.to(dtype), value.to(dtype), decay, strength, blocks)

    def plainly(query: Tensor, key: Tensor, value: Tensor, decay: Tensor, strength: Tensor) -> Tensor:
        query, key = (each.repeat_interleave(2, dim=1) for each in (query, key))
        return delta_rule(query * query.shape[-1] ** -0.5, key, value, decay, strength, chunks)

    found = []
    with torch.enable_grad():
        for call in (by_kernels, plainly):
            leaves = [each.clone().requires_grad_() for each in inputs]
            output = call(*leaves).float()
            found.append([output.detach(), *torch.autograd.grad(output, leaves, weight)])
    distances = [(one - right).norm() / right.norm() for one, right in zip(*found, strict=True)]
    return float(torch.stack(distances).max())


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
