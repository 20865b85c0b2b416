"""When trainer and engine have drifted apart: what to say, and what to do about it.

Pure. Every rank sees the same reduced numbers, so every rank decides the same.
"""

from __future__ import annotations

from megarl.config.algorithm import AlgorithmConfig, MismatchConfig, PolicyGradientConfig, TisConfig
from megarl.errors import NumericsError


class MismatchMonitor:
    """Holds the algorithm as the next update is to use it: the recipe's, until a correction is switched on."""

    def __init__(self, algorithm: AlgorithmConfig) -> None:
        self.algorithm = algorithm
        self._worst = 0.0
        """The highest threshold that was reported."""

    def stop_above(self, mean: float) -> None:
        """Before an update is applied: refuses it where the recipe says so."""
        limits = self._limits
        if limits is not None and limits.action == "stop" and mean > limits.act_above:
            raise NumericsError(
                f"{_sentence(mean, 'act_above', limits.act_above)}; this update was not applied. The engine samples "
                "from another policy than the one that is trained: compare their weights, precision and sampling"
            )

    def observe(self, mean: float) -> tuple[str, ...]:
        """After a step: what people should know, once per threshold; and the correction, if it is time for it."""
        limits = self._limits
        if limits is None:
            return ()
        if mean > limits.act_above > self._worst:
            self._worst = limits.act_above
            return (_sentence(mean, "act_above", limits.act_above) + self._act(limits),)
        if mean > limits.warn_above > self._worst:
            self._worst = limits.warn_above
            return (_sentence(mean, "warn_above", limits.warn_above),)
        return ()

    @property
    def _limits(self) -> MismatchConfig | None:
        return self.algorithm.mismatch if isinstance(self.algorithm, PolicyGradientConfig) else None

    def _act(self, limits: MismatchConfig) -> str:
        if limits.action != "correct":
            return "; consider algorithm.correction"
        self.algorithm = self.algorithm.model_copy(update={"correction": TisConfig(kind="tis")})
        return "; correcting with tis from the next step on"


def _sentence(mean: float, key: str, limit: float) -> str:
    return f"mean |p_train - p_rollout| is {mean:.4f}, above algorithm.mismatch.{key} {limit:g}"
