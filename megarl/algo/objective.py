"""The actor's objective: policy loss, correction, entropy bonus, KL and distillation, summed over a mini-batch.

Beside it the mismatch of trainer and engine, which every update measures, and the monitor that warns of it, switches a
correction on, or stops the run. Pure torch; every rank sees the same reduced numbers and so takes the same decision.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import assert_never

import torch
from torch import Tensor

from megarl.algo.loss import MAX_LOG_RATIO, PolicyTokens, TokenLoss, aggregate, k3, kl, ppo_loss
from megarl.algo.other_losses import correction_weights, distil, other_loss
from megarl.config.algorithm import (
    AlgorithmConfig,
    KlLossConfig,
    LossConfig,
    MismatchConfig,
    PolicyGradientConfig,
    PpoLossConfig,
    SftConfig,
    TisConfig,
)
from megarl.config.section import DtypeName
from megarl.errors import NumericsError
from megarl.results import MonitorState

_ESS_MAX_WEIGHT = 2.0
"""Cut-off of the weights in the effective sample size: the same for every recipe, so that runs can be compared."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ActorLoss:
    """Loss of one micro-batch; the token columns are meaningful where the loss mask is set."""

    value: Tensor  # [], with gradient: this micro-batch's part of the mini-batch's loss
    is_clipped: Tensor  # [N]
    is_rejected: Tensor  # [N], True where the correction removed the token from the loss
    reference_kl: Tensor | None  # [N], detached; None if the loss has no such term
    teacher_kl: Tensor | None = None  # [N], detached; None without a teacher


def actor_loss(config: AlgorithmConfig, tokens: PolicyTokens, *, num_loss_tokens: int, num_sequences: int) -> ActorLoss:
    """Return the part of one micro-batch; the counts are those of its whole mini-batch."""
    match config:
        case SftConfig():
            none = torch.zeros_like(tokens.segments.loss_mask)
            value = aggregate(
                "token_mean",
                -tokens.logprobs,
                tokens.segments,
                num_loss_tokens=num_loss_tokens,
                num_sequences=num_sequences,
            )
            return ActorLoss(value=value, is_clipped=none, is_rejected=none, reference_kl=None)
        case PolicyGradientConfig():
            return _policy_gradient(
                config, tokens.masked(), num_loss_tokens=num_loss_tokens, num_sequences=num_sequences
            )
        case _:
            assert_never(config)


def _policy_gradient(
    config: PolicyGradientConfig, tokens: PolicyTokens, *, num_loss_tokens: int, num_sequences: int
) -> ActorLoss:
    distillation = None if config.distillation is None else distil(config.distillation, tokens)
    taught = tokens if distillation is None else distillation.tokens
    loss = policy_loss(config.loss, taught)
    values = loss.values
    is_rejected = torch.zeros_like(loss.is_clipped)
    if config.correction is not None:
        factors = correction_weights(
            config.correction,
            old_logprobs=tokens.old_logprobs,
            rollout_logprobs=tokens.rollout_logprobs,
            segments=tokens.segments,
        )
        values = values * factors
        is_rejected = factors == 0
    if config.entropy_coef != 0:
        values = values - config.entropy_coef * tokens.entropy
    reference_kl = None
    if isinstance(config.kl, KlLossConfig):
        assert tokens.reference_logprobs is not None, "a KL term without a reference"
        distances = kl(config.kl.estimate, tokens.logprobs, tokens.reference_logprobs)
        values = values + config.kl.coef * distances
        reference_kl = distances.detach()
    if distillation is not None and distillation.added is not None:
        values = values + distillation.added
    value = aggregate(
        config.aggregation,
        values,
        tokens.segments,
        num_loss_tokens=num_loss_tokens,
        num_sequences=num_sequences,
        horizon_tokens=config.horizon_tokens,
    )
    return ActorLoss(
        value=value,
        is_clipped=loss.is_clipped,
        is_rejected=is_rejected,
        reference_kl=reference_kl,
        teacher_kl=None if distillation is None else distillation.distances,
    )


def policy_loss(config: LossConfig, tokens: PolicyTokens) -> TokenLoss:
    """Return the loss of each token, as the recipe's section defines it."""
    return ppo_loss(config, tokens) if isinstance(config, PpoLossConfig) else other_loss(config, tokens)


@dataclass(frozen=True, slots=True, kw_only=True)
class Mismatch:
    """Mismatch per token, [N] each; the means over loss tokens are statistics of an update."""

    distance: Tensor
    """|p_train - p_rollout|"""
    kl: Tensor
    """log(p_rollout / p_train), whose mean is KL(rollout || train)."""
    k3: Tensor
    """Estimate k3 of the same KL, never negative."""
    chi2: Tensor
    """The squared ratio p_train / p_rollout, minus 1."""
    weight: Tensor
    """The ratio, cut off; (sum)^2 / (n * sum of squares) is the effective sample size as a share of n."""


@torch.no_grad()
def mismatch(old_logprobs: Tensor, rollout_logprobs: Tensor) -> Mismatch:
    old, rollout = old_logprobs.double(), rollout_logprobs.double()
    ratios = (old - rollout).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp()
    return Mismatch(
        distance=(old.exp() - rollout.exp()).abs(),
        kl=kl("k1", rollout, old),
        k3=k3(rollout - old),
        chi2=ratios.square() - 1,
        weight=ratios.clamp(max=_ESS_MAX_WEIGHT),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class _Threshold:
    limit: float
    text: str
    """The limit, with the key it comes from."""

    def sentence(self, mean: float) -> str:
        return f"mean |p_train - p_rollout| is {mean:.4g}, above {self.text}"


class MismatchMonitor:
    """Owns the algorithm that updates use: the recipe's, until a correction is switched on."""

    def __init__(self, algorithm: AlgorithmConfig, dtype: DtypeName, state: MonitorState | None = None) -> None:
        """`dtype` is that of the weights; `state` is that of a monitor to continue."""
        self.algorithm = algorithm
        self._limits = None if algorithm.mismatch is None else algorithm.mismatch.limits(dtype)
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
            assert self._limits is not None, "a recipe without limits has no thresholds"
            warn_above, act_above = self._limits
            return (
                _Threshold(limit=warn_above, text=f"{key}.warn_above {warn_above:g}"),
                _Threshold(limit=act_above, text=f"{key}.act_above {act_above:g}"),
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
