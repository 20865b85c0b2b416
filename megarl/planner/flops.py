"""Operations of a forward pass, by kind of work."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

from megarl.data.packing import SequenceCost
from megarl.families import family_of, uniform_shapes
from megarl.families.shape import ModelShape
from megarl.weights.layouts.canonical import num_active_parameters


@dataclass(frozen=True, slots=True, kw_only=True)
class ForwardWork:
    """Operations of a forward pass, by kind."""

    dense: float
    expert: float
    attention: float

    @property
    def total(self) -> float:
        return self.dense + self.expert + self.attention


def forward_work(shape: ModelShape, *, num_tokens: float, num_squared_tokens: float) -> ForwardWork:
    """Return two operations per weight and token, and those of the causal half of the attention matrix, or of states.

    `num_squared_tokens` is the sum over all sequences of their length squared.
    """
    in_experts = sum(
        layers * each.experts.per_token * 3 * each.ffn_hidden * each.hidden
        for each, layers in uniform_shapes(shape)
        if each.experts is not None
    )
    attention = 0.0
    for each, layers in uniform_shapes(shape):
        cost = family_of(each).attention(each)
        if cost.recurrence is None:
            attention += layers * (cost.queries + cost.outputs) * num_squared_tokens
        else:
            attention += layers * cost.recurrence.operations * num_tokens
    return ForwardWork(
        dense=2.0 * (num_multiplied(shape) - in_experts) * num_tokens,
        expert=2.0 * in_experts * num_tokens,
        attention=attention,
    )


def sequence_cost(shape: ModelShape) -> SequenceCost:
    """Return the operations of a forward pass over one sequence, of all kinds."""
    return SequenceCost(
        per_token=forward_work(shape, num_tokens=1, num_squared_tokens=0).total,
        per_squared_token=forward_work(shape, num_tokens=0, num_squared_tokens=1).total,
    )


@cache
def num_multiplied(shape: ModelShape) -> int:
    """Return the weights that a token is multiplied with: those of its experts, without an embedding table."""
    looked_up = 0 if shape.has_tied_embeddings else shape.vocab * shape.hidden
    return num_active_parameters(shape) - looked_up
