"""The parts of a layer beside linear layers and attention: norm, gated activation, rotary position embedding.

Megatron's own versions need Transformer Engine, do not support sequence parallelism, or move more bytes. Activation and
rotation are one kernel each on a GPU, with a backward pass that keeps only its inputs; on a CPU they are torch's
operations.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import assert_never

import torch
import torch.nn.functional as F
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor
from torch.autograd.function import FunctionCtx, once_differentiable

from megarl.config.model import ModelShape, RopeScaling, YarnScaling


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


@dataclass(frozen=True, slots=True, kw_only=True)
class Rotation:
    """Rotary angles per position of a pack."""

    cosines: Tensor  # [N, head_dim / 2], float32
    sines: Tensor  # [N, head_dim / 2], float32
    is_fused: bool = True
    """Whether a kernel of Triton rotates, where there is a GPU."""

    @classmethod
    def by(cls, angles: Tensor, magnitude: float = 1.0, *, is_fused: bool = True) -> Rotation:
        """Return the rotation by these angles, which also multiplies by `magnitude`."""
        return cls(cosines=angles.cos() * magnitude, sines=angles.sin() * magnitude, is_fused=is_fused)


def rotary_frequencies(shape: ModelShape) -> Tensor:
    """Return the angle per position of each pair of channels. [head_dim / 2], float32"""
    exponents = torch.arange(0, shape.head_dim, 2, dtype=torch.float32) / shape.head_dim
    frequencies = 1.0 / (shape.rope_theta**exponents)
    match shape.rope_scaling:
        case None:
            return frequencies
        case RopeScaling() as scaling:
            return _stretched(frequencies, scaling)
        case YarnScaling() as scaling:
            return _interpolated(frequencies, scaling, shape.rope_theta)
        case _:
            assert_never(shape.rope_scaling)


def rotary_magnitude(shape: ModelShape) -> float:
    """Return the factor of rotated queries and keys."""
    return shape.rope_scaling.magnitude if isinstance(shape.rope_scaling, YarnScaling) else 1.0


def _stretched(frequencies: Tensor, scaling: RopeScaling) -> Tensor:
    """Scale as Llama 3.1 does: slow channels by 1 / `factor`, fast ones not at all, interpolated between."""
    wavelengths = 2 * math.pi / frequencies
    turns = scaling.original_max_position / wavelengths
    kept = (turns - scaling.low_freq_factor) / (scaling.high_freq_factor - scaling.low_freq_factor)
    kept = kept.clamp(0, 1)
    return kept * frequencies + (1 - kept) * frequencies / scaling.factor


def _interpolated(frequencies: Tensor, scaling: YarnScaling, theta: float) -> Tensor:
    """Scale as YaRN does: the channels between two bounds change from kept to stretched linearly by their number."""
    num_channels = 2 * len(frequencies)

    def channel(turns: float) -> float:
        """Return which channel turns so often in the original context."""
        wavelength = scaling.original_max_position / turns
        return num_channels * math.log(wavelength / (2 * math.pi)) / (2 * math.log(theta))

    low, high = channel(scaling.beta_fast), channel(scaling.beta_slow)
    if scaling.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, num_channels - 1)
    kept = 1 - ((torch.arange(len(frequencies)) - low) / max(high - low, 1e-3)).clamp(0, 1)
    return kept * frequencies + (1 - kept) * frequencies / scaling.factor


def gated(gate_up: Tensor, *, is_fused: bool = True) -> Tensor:
    """silu(gate) * up. [..., 2 F] -> [..., F]"""
    if gate_up.is_cuda and is_fused:
        return _Gated.apply(gate_up)  # type: ignore[no-any-return, no-untyped-call]
    gate, up = gate_up.chunk(2, dim=-1)
    return F.silu(gate) * up


def rotated(values: Tensor, rotation: Rotation) -> Tensor:
    """Rotary position embedding, the two halves of the channels as pairs. [N, heads, head_dim]"""
    if values.is_cuda and rotation.is_fused:
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


class _Rotated(torch.autograd.Function):
    @staticmethod
    def forward(ctx: _GateContext, values: Tensor, cosines: Tensor, sines: Tensor) -> Tensor:
        from megarl.train.kernels import rotate  # noqa: PLC0415 - triton is only on GPU machines

        ctx.save_for_backward(cosines, sines)
        return rotate(values, cosines, sines, direction=1.0)

    @staticmethod
    @once_differentiable
    def backward(ctx: _GateContext, grad: Tensor) -> tuple[Tensor, None, None]:
        from megarl.train.kernels import rotate  # noqa: PLC0415 - triton is only on GPU machines

        cosines, sines = ctx.saved_tensors
        return rotate(grad, cosines, sines, direction=-1.0), None, None
