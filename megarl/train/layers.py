"""Norm and activation of a layer.

Megatron's own need Transformer Engine, do not support sequence parallelism, or move more bytes.
"""

from __future__ import annotations

from typing import assert_never

import torch
import torch.nn.functional as F
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor
from torch.autograd.function import FunctionCtx, once_differentiable

from megarl.families.shape import Activation

_LIMIT, _SLOPE = 7.0, 1.702
"""Constants of gpt-oss's activation, in transformers and in SGLang."""


class RMSNorm(torch.nn.Module):
    def __init__(self, config: TransformerConfig, hidden_size: int, eps: float) -> None:
        super().__init__()
        self.eps = eps
        self.is_centred = config.layernorm_zero_centered_gamma
        device = "cpu" if config.use_cpu_initialization else torch.cuda.current_device()
        initial = torch.zeros if self.is_centred else torch.ones
        self.weight = torch.nn.Parameter(initial(hidden_size, dtype=config.params_dtype, device=device))
        # With sequence parallelism each tensor-parallel rank sees its part of the sequence; Megatron sums the gradients
        # of parameters with this mark.
        self.weight.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]

    def forward(self, hidden: Tensor) -> Tensor:
        if not self.is_centred:
            return F.rms_norm(hidden, (hidden.shape[-1],), self.weight, self.eps)
        # The factor is 1 + weight, in float32: bfloat16 would round the weight away.
        normed = F.rms_norm(hidden.float(), (hidden.shape[-1],), self.weight.float() + 1, self.eps)
        return normed.type_as(hidden)


class GatedActivation(torch.nn.Module):
    """The activation between the two matrices of Megatron's MLP."""

    def __init__(self, *, config: TransformerConfig, is_fused: bool = True, kind: Activation = "silu") -> None:
        super().__init__()
        del config
        self._is_fused, self._kind = is_fused, kind

    def forward(self, gate_up: Tensor) -> Tensor:
        match self._kind:
            case "silu":
                return gated(gate_up, is_fused=self._is_fused)
            case "gelu_tanh":
                gate, up = gate_up.chunk(2, dim=-1)
                return F.gelu(gate, approximate="tanh") * up
            case "clamped":
                return clamped(gate_up)
            case _:
                assert_never(self._kind)


def clamped(gate_up: Tensor) -> Tensor:
    """Return gpt-oss's activation of rows that are gate and up by turns. [..., 2 F] -> [..., F]"""
    gate, up = gate_up[..., ::2].clamp(max=_LIMIT), gate_up[..., 1::2].clamp(min=-_LIMIT, max=_LIMIT)
    return (up + 1) * gate * torch.sigmoid(_SLOPE * gate)


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
