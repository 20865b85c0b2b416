"""Whether a model computes the common beginnings of rows once, and what that saves of the groups of a step.

Histories of episodes are shared as well; how many rows an episode will have is not known to a plan.
"""

from __future__ import annotations

from dataclasses import dataclass

from megarl.config.recipe import Recipe, TrainConfig
from megarl.config.roles import ModelParallelConfig
from megarl.families.shape import ModelShape


def sharing_obstacle(train: TrainConfig, split: ModelParallelConfig, shape: ModelShape) -> str | None:
    """Return why rows stay apart; None where their common beginnings are computed once."""
    if not train.share_prefixes:
        return "train.share_prefixes is false"
    if split.context > 1 and split.context_exchange != "gather":
        return f"context_exchange: {split.context_exchange} sends whole rows between ranks; gather does not"
    if shape.delta_layers:
        return "delta nets carry a state from token to token, which has no branches"
    return None


def prompt_obstacle(recipe: Recipe, split: ModelParallelConfig, shape: ModelShape) -> str | None:
    """Return why the rows of a group do not share their prompt in a model; None where they do."""
    if (obstacle := sharing_obstacle(recipe.train, split, shape)) is not None:
        return obstacle
    if recipe.samples_per_prompt == 1:
        return "each prompt has one answer"
    return None


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupTokens:
    """The tokens of a step, of which rows of a group have their prompt in common."""

    num_rows: int
    prompt_tokens: int
    response_tokens: int
    rows_per_prompt: float
    """Rows for which a micro-batch computes a prompt once, in the mean; 1 where rows stay apart."""

    @classmethod
    def of(
        cls, *, group: int, num_rows: int, prompt_tokens: int, response_tokens: int, tokens_per_micro_batch: int
    ) -> GroupTokens:
        """Assume groups of equal rows, each in as few micro-batches as can hold it; `group` is 1 for rows apart."""
        room = max(tokens_per_micro_batch - prompt_tokens, response_tokens)
        return cls(
            num_rows=num_rows,
            prompt_tokens=prompt_tokens,
            response_tokens=response_tokens,
            rows_per_prompt=group / -(-group * response_tokens // room),
        )

    @property
    def num_trained(self) -> int:
        return self.num_rows * (self.prompt_tokens + self.response_tokens)

    @property
    def num_computed(self) -> float:
        return self.num_rows * (self.prompt_tokens / self.rows_per_prompt + self.response_tokens)

    @property
    def num_squared_shared(self) -> float:
        """Pairs of tokens, in twice their number, whose attention is not computed."""
        return self.num_rows * (1 - 1 / self.rows_per_prompt) * self.prompt_tokens**2
