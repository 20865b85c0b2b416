"""The deadlines of an engine that a recipe leaves open: derived from the size of the model and of the longest response.

They are limits for something that hangs, not expectations: each is several times what a slow machine needs.
"""

from __future__ import annotations

from dataclasses import dataclass

from megarl.config.model import ModelShape
from megarl.config.roles import EngineRoleConfig
from megarl.config.section import Device, dtype_on
from megarl.rollout.lifecycle import RestartPolicy
from megarl.weights.algebra.slices import ITEM_BYTES
from megarl.weights.layouts.canonical import num_parameters

_BASE_S = 600.0
"""Imports, compiled kernels and captured graphs at a start; the queue and the prompt of a request."""
_START_S_PER_GB = 1.0
_TOKEN_S = 0.05
_TOKEN_S_PER_GB = 0.004
"""Per GB of weights on one GPU, which every step of decoding reads: 250 GB/s, a tenth of what GPUs reach."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineDeadlines:
    start_s: float
    request_s: float


def deadlines_of(
    rollout: EngineRoleConfig, shape: ModelShape, *, device: Device, max_response_tokens: int
) -> EngineDeadlines:
    """Return the recipe's deadlines, and derived ones where it has none; see `EngineRoleConfig`."""
    weights_gb = num_parameters(shape) * ITEM_BYTES[dtype_on(device)] / 1e9
    token_s = _TOKEN_S + _TOKEN_S_PER_GB * weights_gb / rollout.tensor
    return EngineDeadlines(
        start_s=rollout.start_timeout_s or _BASE_S + _START_S_PER_GB * weights_gb,
        request_s=rollout.request_timeout_s or _BASE_S + token_s * max_response_tokens,
    )


def restart_policy(config: EngineRoleConfig, start_timeout_s: float) -> RestartPolicy:
    return RestartPolicy(
        max_restarts=config.max_restarts,
        back_off_s=config.restart_back_off_s,
        silence_timeout_s=config.silence_timeout_s,
        start_timeout_s=start_timeout_s,
    )
