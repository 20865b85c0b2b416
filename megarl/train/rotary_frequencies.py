"""The angles by which positions turn pairs of channels, also stretched to longer contexts (Llama 3.1, YaRN)."""

from __future__ import annotations

import math
from typing import assert_never

import torch
from torch import Tensor

from megarl.families.shape import ModelShape, RopeScaling, YarnScaling


def rotary_frequencies(shape: ModelShape) -> Tensor:
    """Return the angle per position of each pair of channels that turn, float32."""
    width = shape.rotary_dim or shape.head_dim
    exponents = torch.arange(0, width, 2, dtype=torch.float32) / width
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
    unchanged = (turns - scaling.low_freq_factor) / (scaling.high_freq_factor - scaling.low_freq_factor)
    unchanged = unchanged.clamp(0, 1)
    return unchanged * frequencies + (1 - unchanged) * frequencies / scaling.factor


def _interpolated(frequencies: Tensor, scaling: YarnScaling, theta: float) -> Tensor:
    """Scale as YaRN does: slow channels by 1 / `factor`, fast ones not at all, linearly by their number between."""
    num_channels = 2 * len(frequencies)

    def channel(turns: float) -> float:
        """Return which channel turns so often in the original context."""
        wavelength = scaling.original_max_position / turns
        return num_channels * math.log(wavelength / (2 * math.pi)) / (2 * math.log(theta))

    low, high = channel(scaling.beta_fast), channel(scaling.beta_slow)
    if scaling.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, num_channels - 1)
    unchanged = 1 - ((torch.arange(len(frequencies)) - low) / max(high - low, 1e-3)).clamp(0, 1)
    return unchanged * frequencies + (1 - unchanged) * frequencies / scaling.factor
