"""Watches the mismatch between trainer and engine: warns, switches a correction on, or stops the run.

Pure. Every rank sees the same reduced numbers and so takes the same decision.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from megarl.config.algorithm import AlgorithmConfig, MismatchConfig, TisConfig
from megarl.errors import NumericsError


@dataclass(frozen=True, slots=True, kw_only=True)
class MonitorState:
    """The state of a monitor, saved in checkpoints."""

    worst_reported: float = 0.0
    """The highest threshold reported so far."""
    has_switched_correction_on: bool = False
    baseline_sum: float = 0.0
    """Sum of the mismatch over the steps of the baseline, if the recipe asks for one."""
    num_baseline_steps: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class _Threshold:
    limit: float
    text: str
    """The limit, with the key it comes from."""

    def sentence(self, mean: float) -> str:
        return f"mean |p_train - p_rollout| is {mean:.4g}, above {self.text}"


class MismatchMonitor:
    """Owns the algorithm that updates use: the recipe's, until a correction is switched on."""

    def __init__(self, algorithm: AlgorithmConfig, state: MonitorState | None = None) -> None:
        """`state` is that of a monitor to continue."""
        self.algorithm = algorithm
        self.state = state or MonitorState()
        if self.state.has_switched_correction_on:
            self._switch_correction_on()

    def stop_above(self, mean: float) -> None:
        """Raise before an update is applied if the recipe's action is `stop` and the mismatch is too high."""
        config = self._config
        if config is None or config.action != "stop":
            return
        thresholds = self._thresholds(config)
        if thresholds is not None and mean > thresholds[1].limit:
            raise NumericsError(
                f"{thresholds[1].sentence(mean)}; this update was not applied. The engine does not sample from the "
                "policy that is trained: compare their weights, precision and sampling"
            )

    def observe(self, mean: float) -> tuple[str, ...]:
        """Return warnings after a step, once per threshold; switch the correction on if the recipe asks for it."""
        config = self._config
        if config is None:
            return ()
        thresholds = self._thresholds(config)
        if thresholds is None:
            self.state = replace(
                self.state,
                baseline_sum=self.state.baseline_sum + mean,
                num_baseline_steps=self.state.num_baseline_steps + 1,
            )
            return ()
        warn, act = thresholds
        worst = self.state.worst_reported
        if mean > act.limit > worst:
            self.state = replace(self.state, worst_reported=act.limit)
            return (act.sentence(mean) + self._act(config),)
        if mean > warn.limit > worst:
            self.state = replace(self.state, worst_reported=warn.limit)
            return (warn.sentence(mean),)
        return ()

    @property
    def _config(self) -> MismatchConfig | None:
        return self.algorithm.mismatch

    def _thresholds(self, config: MismatchConfig) -> tuple[_Threshold, _Threshold] | None:
        """Return the thresholds of warning and action; None until the steps of the baseline are complete."""
        key, baseline = "algorithm.mismatch", config.baseline
        if baseline is None:
            return (
                _Threshold(limit=config.warn_above, text=f"{key}.warn_above {config.warn_above:g}"),
                _Threshold(limit=config.act_above, text=f"{key}.act_above {config.act_above:g}"),
            )
        if self.state.num_baseline_steps < baseline.steps:
            return None
        level = max(self.state.baseline_sum / self.state.num_baseline_steps, baseline.lowest)
        warn, act = (
            _Threshold(
                limit=times * level,
                text=f"{times * level:.4g} ({key}.baseline.{name} {times:g} x the run's baseline {level:.4g})",
            )
            for name, times in (("warn_times", baseline.warn_times), ("act_times", baseline.act_times))
        )
        return warn, act

    def _act(self, config: MismatchConfig) -> str:
        if config.action != "correct":
            return "; consider algorithm.correction"
        self.state = replace(self.state, has_switched_correction_on=True)
        self._switch_correction_on()
        return "; correcting with tis from the next step on"

    def _switch_correction_on(self) -> None:
        self.algorithm = self.algorithm.model_copy(update={"correction": TisConfig(kind="tis")})
