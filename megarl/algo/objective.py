"""The objectives of actor and critic: losses, correction, entropy bonus and KL, summed over a mini-batch."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal, TypeAlias, assert_never

import torch
from torch import Tensor

from megarl.algo.loss import MAX_LOG_RATIO, PolicyTokens, Segments, aggregate, k3, kl, policy_loss, value_loss
from megarl.config.algorithm import (
    AlgorithmConfig,
    CorrectionConfig,
    DistillationConfig,
    ForwardTopkConfig,
    IcepopConfig,
    KlLossConfig,
    MaskConfig,
    PolicyGradientConfig,
    ReverseKlConfig,
    SftConfig,
    TisConfig,
)


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
            return _policy_gradient(config, tokens, num_loss_tokens=num_loss_tokens, num_sequences=num_sequences)
        case _:
            assert_never(config)


def _policy_gradient(
    config: PolicyGradientConfig, tokens: PolicyTokens, *, num_loss_tokens: int, num_sequences: int
) -> ActorLoss:
    distillation = distil(config.distillation, tokens)
    loss = policy_loss(config.loss, distillation.tokens)
    values = loss.values
    is_rejected = torch.zeros_like(loss.is_clipped)
    if config.correction is not None:
        factors = weights(
            config.correction,
            old_logprobs=tokens.old_logprobs,
            rollout_logprobs=tokens.rollout_logprobs,
            segments=tokens.segments,
        )
        # Not a product outside the mask: a factor that is not finite there would reach the gradient.
        factors = torch.where(tokens.segments.loss_mask, factors, torch.zeros_like(factors))
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
    if distillation.added is not None:
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
        teacher_kl=distillation.distances,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class ValueTokens:
    """One micro-batch: the inputs of the critic's loss."""

    values: Tensor  # [N], with gradient
    old_values: Tensor  # [N], before the step's first update
    returns: Tensor  # [N]
    segments: Segments


@dataclass(frozen=True, slots=True, kw_only=True)
class CriticLoss:
    value: Tensor  # [], with gradient: this micro-batch's part of the mini-batch's loss
    is_clipped: Tensor  # [N]


def critic_loss(
    config: AlgorithmConfig, tokens: ValueTokens, *, clip: float, num_loss_tokens: int, num_sequences: int
) -> CriticLoss:
    """Return the part of one micro-batch, aggregated like the actor's loss."""
    losses = value_loss(tokens.values, tokens.old_values, tokens.returns, clip=clip)
    value = aggregate(
        config.aggregation,
        losses,
        tokens.segments,
        num_loss_tokens=num_loss_tokens,
        num_sequences=num_sequences,
        horizon_tokens=config.horizon_tokens,
    )
    errors = (tokens.values - tokens.returns).detach().square() / 2
    return CriticLoss(value=value, is_clipped=losses.detach() > errors)


_Level: TypeAlias = Literal["token", "sequence"]

_ESS_MAX_WEIGHT = 2.0
"""Cut-off of the weights in the effective sample size: the same for every recipe, so that runs can be compared."""


@torch.no_grad()
def weights(config: CorrectionConfig, *, old_logprobs: Tensor, rollout_logprobs: Tensor, segments: Segments) -> Tensor:
    """Return the factor of each token's policy loss. [N]"""
    match config:
        case TisConfig():
            return _ratios(old_logprobs, rollout_logprobs, segments, config.level).clamp(max=config.max_weight)
        case IcepopConfig():
            ratios = _ratios(old_logprobs, rollout_logprobs, segments, config.level)
            is_kept = (ratios >= config.min_weight) & (ratios <= config.max_weight)
            return torch.where(is_kept, ratios, torch.zeros_like(ratios))
        case MaskConfig():
            log_ratios = rollout_logprobs - old_logprobs
            is_k3 = config.measure == "k3"
            measures = k3(log_ratios) if is_k3 else kl(config.measure, rollout_logprobs, old_logprobs)
            return _mask(config, measures, segments)
        case _:
            assert_never(config)


def _ratios(old_logprobs: Tensor, rollout_logprobs: Tensor, segments: Segments, level: _Level) -> Tensor:
    """p_train / p_rollout of the token, or of all tokens that the policy chose in its sequence. [N]"""
    log_ratios = old_logprobs - rollout_logprobs
    if level == "sequence":
        log_ratios = segments.spread(segments.sums(log_ratios))
    return log_ratios.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp()


def _mask(config: MaskConfig, measures: Tensor, segments: Segments) -> Tensor:
    if config.level == "sequence":
        measures = segments.spread(segments.means(measures))
    is_kept = measures <= config.highest
    if config.lowest is not None:
        is_kept &= measures >= config.lowest
    return is_kept.to(measures.dtype)


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


_LEAST_REST = 1e-6
"""A rest below this counts as this: the difference of 1 and a sum of float32 is not known more exactly."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Distillation:
    """The tokens that a policy loss sees, and what is added to it. Meaningful where the loss mask is set."""

    tokens: PolicyTokens
    distances: Tensor | None  # [N], detached: the distance from the teacher; None without one
    added: Tensor | None  # [N], with gradient; None if the distance is in the advantages


def distil(config: DistillationConfig | None, tokens: PolicyTokens) -> Distillation:
    """Return the tokens with the teacher's part in their advantages, or the term that the loss gets instead."""
    if config is None:
        return Distillation(tokens=tokens, distances=None, added=None)
    assert tokens.teacher is not None, "distillation without a teacher"
    match config:
        case ReverseKlConfig():
            # Estimate k1 of KL(policy || teacher). With the score function of a policy gradient its expectation has the
            # gradient of the KL at the sampled states; later tokens of the sequence are not charged to this one.
            distances = (tokens.old_logprobs - tokens.teacher[:, 0]).detach()
            taught = replace(tokens, advantages=tokens.advantages - config.coef * distances)
            return Distillation(tokens=taught, distances=distances, added=None)
        case ForwardTopkConfig():
            assert tokens.candidates is not None, "forward_topk without likeliest tokens"
            num_top = tokens.candidates.shape[1]
            distances = forward_topk(tokens.teacher[:, 1 : 1 + num_top], tokens.candidates)
            return Distillation(tokens=tokens, distances=distances.detach(), added=config.coef * distances)
        case _:
            assert_never(config)


def forward_topk(teacher: Tensor, policy: Tensor) -> Tensor:
    """Return KL(teacher || policy) over K tokens and all others as one; both arguments are log-probabilities. [N]

    It is never negative, at most the KL over the whole vocabulary, and 0 with gradient 0 where both are equal.
    """
    weights = teacher.exp()
    known = (weights * (teacher - policy)).sum(dim=-1)
    rest, policy_rest = _rest(weights), _rest(policy.exp())
    return known + rest * (rest.log() - policy_rest.log())


def _rest(probabilities: Tensor) -> Tensor:
    return (1 - probabilities.sum(dim=-1)).clamp(min=_LEAST_REST)
