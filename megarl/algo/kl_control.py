"""How much the distance from the reference costs: a coefficient that stays, or one that follows the distance."""

from __future__ import annotations

from megarl.config.algorithm import AdaptiveKlConfig

_MAX_CHANGE = 0.2


def adapted(coef: float, config: AdaptiveKlConfig, *, kl: float, num_sequences: int) -> float:
    """The next step's coefficient, from the KL this step was taken at."""
    error = min(max(kl / config.target - 1, -_MAX_CHANGE), _MAX_CHANGE)
    return coef * (1 + error * num_sequences / config.horizon)
