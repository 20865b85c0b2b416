"""The pieces of a layer between its matrices: gated activation and rotation of queries and keys.

On a GPU each is one kernel with a backward pass of its own, which keeps nothing but its inputs; on a CPU torch's own
operations. For Megatron's local layer spec, whose own versions want Transformer Engine or move far more bytes than they
have to.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor
from torch.autograd.function import FunctionCtx, once_differentiable


class GatedActivation(torch.nn.Module):
    """What Megatron's MLP calls between its two matrices."""

    def __init__(self, *, config: TransformerConfig) -> None:
        super().__init__()
        del config

    def forward(self, gate_up: Tensor) -> Tensor:
        return gated(gate_up)


@dataclass(frozen=True, slots=True, kw_only=True)
class Rotation:
    """Of each position, whichever sequence it is in."""

    cosines: Tensor  # [N, head_dim / 2], float32
    sines: Tensor  # [N, head_dim / 2], float32

    @classmethod
    def by(cls, angles: Tensor) -> Rotation:
        return cls(cosines=angles.cos(), sines=angles.sin())


def gated(gate_up: Tensor) -> Tensor:
    """silu(gate) * up. [..., 2 F] -> [..., F]"""
    if gate_up.is_cuda:
        return _Gated.apply(gate_up)  # type: ignore[no-any-return, no-untyped-call]
    gate, up = gate_up.chunk(2, dim=-1)
    return F.silu(gate) * up


def rotated(values: Tensor, rotation: Rotation) -> Tensor:
    """Rotary position embedding, the two halves of the channels as pairs. [N, heads, head_dim]"""
    if values.is_cuda:
        return _Rotated.apply(values, rotation.cosines, rotation.sines)  # type: ignore[no-any-return, no-untyped-call]
    cosines, sines = (torch.cat((half, half), dim=-1)[:, None].to(values.dtype) for half in _halves(rotation))
    first, second = values.chunk(2, dim=-1)
    return values * cosines + torch.cat((-second, first), dim=-1) * sines


def _halves(rotation: Rotation) -> tuple[Tensor, Tensor]:
    return rotation.cosines, rotation.sines


class _GateContext(FunctionCtx):
    saved_tensors: tuple[Tensor, ...]


class _Gated(torch.autograd.Function):
    @staticmethod
    def forward(ctx: _GateContext, gate_up: Tensor) -> Tensor:
        # Not at the top: a machine without a GPU need not have Triton.
        from megarl.train.fused_kernels import gate  # noqa: PLC0415

        gate_up = gate_up.contiguous()
        ctx.save_for_backward(gate_up)
        return gate(gate_up)

    @staticmethod
    @once_differentiable
    def backward(ctx: _GateContext, grad: Tensor) -> Tensor:
        from megarl.train.fused_kernels import grad_gate  # noqa: PLC0415

        (gate_up,) = ctx.saved_tensors
        return grad_gate(gate_up, grad.contiguous())


class _Rotated(torch.autograd.Function):
    @staticmethod
    def forward(ctx: _GateContext, values: Tensor, cosines: Tensor, sines: Tensor) -> Tensor:
        from megarl.train.fused_kernels import rotate  # noqa: PLC0415

        ctx.save_for_backward(cosines, sines)
        return rotate(values, cosines, sines, direction=1.0)

    @staticmethod
    @once_differentiable
    def backward(ctx: _GateContext, grad: Tensor) -> tuple[Tensor, None, None]:
        from megarl.train.fused_kernels import rotate  # noqa: PLC0415

        cosines, sines = ctx.saved_tensors
        return rotate(grad, cosines, sines, direction=-1.0), None, None
