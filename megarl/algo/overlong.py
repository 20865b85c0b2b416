"""Responses near or at the length limit: a reward that falls towards it, and a way out of the loss for what was cut."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import numpy.typing as npt

from megarl.types import FinishReason, TrainSample


def length_penalty(
    lengths: npt.NDArray[np.int64], *, max_tokens: int, buffer_tokens: int, factor: float
) -> npt.NDArray[np.float64]:
    """0 up to the buffer before the limit, then straight down to -factor at the limit. [B]"""
    excess = lengths - (max_tokens - buffer_tokens)
    penalty: npt.NDArray[np.float64] = np.minimum(0.0, -excess / buffer_tokens * factor)
    return penalty


def without_cut(sample: TrainSample) -> TrainSample:
    """The same sample, or, where the limit cut its rollout, one without loss tokens: its reward says little."""
    rollout = sample.rollout
    if rollout.finish_reason is not FinishReason.LENGTH:
        return sample
    return replace(
        sample,
        rollout=replace(rollout, loss_mask=np.zeros_like(rollout.loss_mask)),
        advantages=np.zeros_like(sample.advantages),
    )
