"""When trainer and engine have drifted apart: what to say, and what to do about it.

Pure. Every rank sees the same reduced numbers, so every rank decides the same.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from megarl.config.algorithm import AlgorithmConfig, MismatchConfig, PolicyGradientConfig, TisConfig
from megarl.errors import NumericsError


@dataclass(frozen=True, slots=True, kw_only=True)
class MonitorState:
    """What a monitor has decided so far."""

    worst_reported: float = 0.0
    """The highest threshold that was reported."""
    has_switched_correction_on: bool = False


class MismatchMonitor:
    """Holds the algorithm as the next update is to use it: the recipe's, until a correction is switched on."""

    def __init__(self, algorithm: AlgorithmConfig, state: MonitorState | None = None) -> None:
        """With `state`, go on where another monitor stood."""
        self.algorithm = algorithm
        self.state = state or MonitorState()
        if self.state.has_switched_correction_on:
            self._switch_correction_on()

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
        worst = self.state.worst_reported
        if mean > limits.act_above > worst:
            self.state = replace(self.state, worst_reported=limits.act_above)
            return (_sentence(mean, "act_above", limits.act_above) + self._act(limits),)
        if mean > limits.warn_above > worst:
            self.state = replace(self.state, worst_reported=limits.warn_above)
            return (_sentence(mean, "warn_above", limits.warn_above),)
        return ()

    @property
    def _limits(self) -> MismatchConfig | None:
        return self.algorithm.mismatch if isinstance(self.algorithm, PolicyGradientConfig) else None

    def _act(self, limits: MismatchConfig) -> str:
        if limits.action != "correct":
            return "; consider algorithm.correction"
        self.state = replace(self.state, has_switched_correction_on=True)
        self._switch_correction_on()
        return "; correcting with tis from the next step on"

    def _switch_correction_on(self) -> None:
        self.algorithm = self.algorithm.model_copy(update={"correction": TisConfig(kind="tis")})


def _sentence(mean: float, key: str, limit: float) -> str:
    return f"mean |p_train - p_rollout| is {mean:.4f}, above algorithm.mismatch.{key} {limit:g}"
