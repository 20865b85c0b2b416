"""Distillation: the distance of the policy from a teacher, in the advantages or as a term of the loss. Pure torch."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import assert_never

from torch import Tensor

from megarl.algo.loss import PolicyTokens
from megarl.config.algorithm import DistillationConfig, ForwardTopkConfig, ReverseKlConfig

_LEAST_REST = 1e-6
"""A rest below this counts as this: the difference of 1 and a sum of float32 is not known more exactly."""


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
    of_top = (weights * (teacher - policy)).sum(dim=-1)
    rest, policy_rest = _rest(weights), _rest(policy.exp())
    return of_top + rest * (rest.log() - policy_rest.log())


def _rest(probabilities: Tensor) -> Tensor:
    return (1 - probabilities.sum(dim=-1)).clamp(min=_LEAST_REST)
