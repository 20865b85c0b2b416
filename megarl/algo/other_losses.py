"""Losses other than PPO's (gspo, gmpo, cispo, sapo, sppo, gpg), corrections, distillation; and the critic's loss.

Pure torch. A new loss of the policy is a function here and a `case` of `other_loss`.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal, TypeAlias, assert_never

import torch
from torch import Tensor

from megarl.algo.loss import (
    MAX_LOG_RATIO,
    PolicyTokens,
    Segments,
    TokenLoss,
    aggregate,
    clipped_loss,
    k3,
    kl,
    log_ratios,
    unclipped_loss,
)
from megarl.config.algorithm import (
    AlgorithmConfig,
    CispoLossConfig,
    CorrectionConfig,
    DistillationConfig,
    ForwardTopkConfig,
    FunctionLossConfig,
    GmpoLossConfig,
    GpgLossConfig,
    GspoLossConfig,
    IcepopConfig,
    MaskConfig,
    ReverseKlConfig,
    SapoLossConfig,
    SppoLossConfig,
    TisConfig,
)
from megarl.errors import DataError
from megarl.system.user_code import load_code

_Level: TypeAlias = Literal["token", "sequence"]

_LEAST_REST = 1e-6
"""A rest below this counts as this: the difference of 1 and a sum of float32 is not known more exactly."""


def other_loss(
    config: GspoLossConfig
    | CispoLossConfig
    | GpgLossConfig
    | SapoLossConfig
    | GmpoLossConfig
    | SppoLossConfig
    | FunctionLossConfig,
    tokens: PolicyTokens,
) -> TokenLoss:
    """Return the loss of each token, as the recipe's section defines it."""
    match config:
        case GspoLossConfig():
            return _gspo(config, tokens)
        case CispoLossConfig():
            return _cispo(config, tokens)
        case GpgLossConfig():
            return unclipped_loss(-tokens.advantages * tokens.logprobs)
        case SapoLossConfig():
            return _sapo(config, tokens)
        case GmpoLossConfig():
            return _gmpo(config, tokens)
        case SppoLossConfig():
            return _sppo(tokens)
        case FunctionLossConfig():
            return _own_loss(config, tokens)
        case _:
            assert_never(config)


def _gspo(config: GspoLossConfig, tokens: PolicyTokens) -> TokenLoss:
    """PPO with the sequence's ratio in place of each token's; the gradient is that of the token's log-probability."""
    of_sequence = tokens.segments.spread(tokens.segments.means(log_ratios(tokens).detach()))
    ratios = (tokens.logprobs - tokens.logprobs.detach() + of_sequence).exp()
    return clipped_loss(tokens.advantages, ratios, low=config.clip_low, high=config.clip_high)


def _cispo(config: CispoLossConfig, tokens: PolicyTokens) -> TokenLoss:
    """The policy gradient weighted by the clipped ratio: clipped tokens keep a gradient."""
    ratios = log_ratios(tokens).detach().exp()
    weights = ratios.clamp(1 - config.clip_low, 1 + config.clip_high)
    return TokenLoss(values=-weights * tokens.advantages * tokens.logprobs, is_clipped=weights != ratios)


def _sapo(config: SapoLossConfig, tokens: PolicyTokens) -> TokenLoss:
    """A sigmoid of the ratio, of slope 1 at ratio 1, in place of the clip."""
    taus = torch.where(tokens.advantages > 0, config.tau_positive, config.tau_negative)
    gates = (4 / taus) * torch.sigmoid(taus * (log_ratios(tokens).exp() - 1))
    return unclipped_loss(-tokens.advantages * gates)


def _gmpo(config: GmpoLossConfig, tokens: PolicyTokens) -> TokenLoss:
    """-A * geometric mean of the ratios, each clipped on the side to which the advantage pushes it."""
    free = log_ratios(tokens)
    clipped = torch.where(tokens.advantages > 0, free.clamp(max=config.clip_high), free.clamp(min=-config.clip_low))
    segments = tokens.segments
    values = -segments.means(tokens.advantages) * segments.means(clipped).exp()
    return TokenLoss(values=segments.spread(values), is_clipped=clipped != free)


def _sppo(tokens: PolicyTokens) -> TokenLoss:
    """Return (log-ratio of the sequence - its advantage)^2, the same for all tokens of a sequence."""
    segments = tokens.segments
    of_sequence = segments.sums(tokens.logprobs - tokens.old_logprobs)
    return unclipped_loss(segments.spread((of_sequence - segments.means(tokens.advantages)).square()))


def _own_loss(config: FunctionLossConfig, tokens: PolicyTokens) -> TokenLoss:
    loss = load_code(config.code, key="algorithm.loss.code")(tokens)
    if isinstance(loss, Tensor):
        loss = unclipped_loss(loss)
    if not isinstance(loss, TokenLoss) or loss.values.shape != tokens.logprobs.shape:
        shape = tuple(loss.values.shape) if isinstance(loss, TokenLoss) else type(loss).__name__
        raise DataError(
            f"algorithm.loss.code: {config.code} returned {shape}; it must be one loss per token, "
            f"{tuple(tokens.logprobs.shape)}"
        )
    return loss


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


def value_loss(values: Tensor, old_values: Tensor, returns: Tensor, *, clip: float) -> Tensor:
    """Half the squared error, the larger of that of the values and of the values clipped around the old ones. [N]"""
    near = old_values + (values - old_values).clamp(-clip, clip)
    return torch.maximum((values - returns).square(), (near - returns).square()) / 2


@dataclass(frozen=True, slots=True, kw_only=True)
class OutcomeTokens:
    """The targets of `prime`'s reward model: whether answers are right, and what it gave them. [N] each"""

    losses: Tensor
    """Cross-entropy of the label and the probability of being right."""
    labels: Tensor
    """1 in right answers, else 0."""
    residuals: Tensor
    """Label - probability: the negative gradient of the loss by the sum of the answer's rewards."""

    @classmethod
    def of(cls, signed_losses: Tensor) -> OutcomeTokens:
        """`signed_losses` are negative, -0 included, where the answer is wrong."""
        losses = signed_losses.abs()
        return cls(
            losses=losses,
            labels=(~signed_losses.signbit()).to(losses.dtype),
            residuals=torch.copysign(-torch.expm1(-losses), signed_losses),
        )


@torch.no_grad()
def correction_weights(
    config: CorrectionConfig, *, old_logprobs: Tensor, rollout_logprobs: Tensor, segments: Segments
) -> Tensor:
    """Return the factor of each token's policy loss. [N]"""
    match config:
        case TisConfig():
            return _ratios(old_logprobs, rollout_logprobs, segments, config.level).clamp(max=config.max_weight)
        case IcepopConfig():
            ratios = _ratios(old_logprobs, rollout_logprobs, segments, config.level)
            is_inside = (ratios >= config.min_weight) & (ratios <= config.max_weight)
            return torch.where(is_inside, ratios, torch.zeros_like(ratios))
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
    is_inside = measures <= config.highest
    if config.lowest is not None:
        is_inside &= measures >= config.lowest
    return is_inside.to(measures.dtype)


@dataclass(frozen=True, slots=True, kw_only=True)
class Distillation:
    """The tokens that a policy loss sees, and what is added to it. Meaningful where the loss mask is set."""

    tokens: PolicyTokens
    distances: Tensor  # [N], detached: the distance from the teacher
    added: Tensor | None  # [N], with gradient; None if the distance is in the advantages


def distil(config: DistillationConfig, tokens: PolicyTokens) -> Distillation:
    """Return the tokens with the teacher's part in their advantages, or the term that the loss gets instead."""
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
    # Log-probability -inf has weight 0, and 0 times infinity is not 0.
    finite = teacher.clamp(min=torch.finfo(teacher.dtype).min)
    of_top = (weights * (finite - policy)).sum(dim=-1)
    rest, policy_rest = _rest(weights), _rest(policy.exp())
    return of_top + rest * (rest.log() - policy_rest.log())


def _rest(probabilities: Tensor) -> Tensor:
    return (1 - probabilities.sum(dim=-1)).clamp(min=_LEAST_REST)
