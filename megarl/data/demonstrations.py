"""What stands in for engine and reward when a data set is imitated: the group of one that is its own answer."""

from __future__ import annotations

import numpy as np

from megarl.data.tokenizer import Tokenizer
from megarl.types import DEMONSTRATION, FinishReason, Prompt, Rollout, RolloutGroup, Score, ScoredGroup


class Demonstrations:
    """Answers each prompt with the response of the data set. A `stages.Generator` without an engine."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer

    async def generate(self, prompt: Prompt) -> RolloutGroup:
        token_ids = prompt.demonstration
        assert token_ids is not None, f"prompt {prompt.uid} has no demonstration; it was not loaded as one"
        rollout = Rollout(
            token_ids=token_ids,
            logprobs=np.zeros(len(token_ids), dtype=np.float32),
            versions=np.full(len(token_ids), DEMONSTRATION, dtype=np.int32),
            loss_mask=np.ones(len(token_ids), dtype=np.bool_),
            finish_reason=FinishReason.STOP,
            text=self._tokenizer.decode_response(token_ids),
        )
        return RolloutGroup(prompt=prompt, rollouts=(rollout,))


class DemonstrationScorer:
    """A demonstration is what is wanted, by definition: each scores 1. A `stages.Scorer`."""

    async def score(self, group: RolloutGroup) -> ScoredGroup:
        return ScoredGroup(group=group, scores=tuple(Score(value=1.0, components={}) for _ in group.rollouts))
