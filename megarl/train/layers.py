"""Norm and activation of a layer.

Megatron's own need Transformer Engine, do not support sequence parallelism, or move more bytes.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor
from torch.autograd.function import FunctionCtx, once_differentiable


class RMSNorm(torch.nn.Module):
    def __init__(self, config: TransformerConfig, hidden_size: int, eps: float) -> None:
        super().__init__()
        self.eps = eps
        device = "cpu" if config.use_cpu_initialization else torch.cuda.current_device()
        self.weight = torch.nn.Parameter(torch.ones(hidden_size, dtype=config.params_dtype, device=device))
        # With sequence parallelism each tensor-parallel rank sees its part of the sequence; Megatron sums the gradients
        # of parameters with this mark.
        self.weight.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]

    def forward(self, hidden: Tensor) -> Tensor:
        return F.rms_norm(hidden, (hidden.shape[-1],), self.weight, self.eps)


class GatedActivation(torch.nn.Module):
    """The activation between the two matrices of Megatron's MLP."""

    def __init__(self, *, config: TransformerConfig, is_fused: bool = True) -> None:
        super().__init__()
        del config
        self._is_fused = is_fused

    def forward(self, gate_up: Tensor) -> Tensor:
        return gated(gate_up, is_fused=self._is_fused)


def gated(gate_up: Tensor, *, is_fused: bool = True) -> Tensor:
    """silu(gate) * up. [..., 2 F] -> [..., F]"""
    if gate_up.is_cuda and is_fused:
        return _Gated.apply(gate_up)  # type: ignore[no-any-return, no-untyped-call]
    gate, up = gate_up.chunk(2, dim=-1)
    return F.silu(gate) * up


class _GateContext(FunctionCtx):
    saved_tensors: tuple[Tensor, ...]


class _Gated(torch.autograd.Function):
    @staticmethod
    def forward(ctx: _GateContext, gate_up: Tensor) -> Tensor:
        from megarl.train.kernels import gate  # noqa: PLC0415 - triton is only on GPU machines

        gate_up = gate_up.contiguous()
        ctx.save_for_backward(gate_up)
        return gate(gate_up)

    @staticmethod
    @once_differentiable
    def backward(ctx: _GateContext, grad: Tensor) -> Tensor:
        from megarl.train.kernels import grad_gate  # noqa: PLC0415 - triton is only on GPU machines

        (gate_up,) = ctx.saved_tensors
        return grad_gate(gate_up, grad.contiguous())
