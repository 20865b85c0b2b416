"""The learning rate of a step: a pure function of the recipe, so that a resumed run continues the same curve."""

from __future__ import annotations

import math
from typing import assert_never

from megarl.config.roles import OptimizerConfig


def learning_rate(step: int, config: OptimizerConfig, total_steps: int) -> float:
    """For `step` of 0 .. total_steps - 1: a linear warm-up that ends at the peak, then the decay.

    No step is wasted on a rate of zero: the warm-up begins one notch above it, the decay would reach its end at
    `total_steps`.
    """
    assert step >= 0, f"step {step}"
    peak, floor = config.learning_rate, config.min_learning_rate
    if step < config.warmup_steps:
        return peak * (step + 1) / config.warmup_steps
    decay_steps = max(total_steps - config.warmup_steps, 1)
    progress = min((step - config.warmup_steps) / decay_steps, 1.0)
    match config.decay:
        case "constant":
            return peak
        case "linear":
            return peak + (floor - peak) * progress
        case "cosine":
            return floor + (peak - floor) * 0.5 * (1 + math.cos(math.pi * progress))
        case _:
            assert_never(config.decay)
