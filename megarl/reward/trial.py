"""Tries the reward of a recipe on ground truths, before a run starts anything."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import islice

import numpy as np

from megarl.config.algorithm import AlgorithmNeeds
from megarl.config.reward import FrozenRewardConfig, RewardConfig, single_rewards
from megarl.errors import DataError
from megarl.reward.build import build_scorer
from megarl.tokens import Content
from megarl.types import FinishReason, Prompt, Rollout, RolloutGroup

_MAX_TRIED = 64
"""Data sources whose reward is tried before a run."""


async def try_reward(config: RewardConfig, needs: AlgorithmNeeds, prompts: Sequence[Prompt]) -> None:
    """Score the ground truth of the first prompt of each source; raise a DataError if a score or a part is missing."""
    if any(isinstance(single, FrozenRewardConfig) for _, single in single_rewards(config)):
        return  # its engines do not run yet
    firsts: dict[str, Prompt] = {}
    for prompt in prompts:
        firsts.setdefault(prompt.data_source, prompt)
    scorer = build_scorer(config)
    try:
        for prompt in islice(firsts.values(), _MAX_TRIED):
            scored = await scorer.score(_ground_truth(prompt))
            for key, name in needs.components:
                if not scored.scores[0].is_masked and name not in scored.scores[0].components:
                    names = ", ".join(scored.scores[0].components) or "none"
                    raise DataError(
                        f"{key}: the reward of prompt {prompt.uid} has no component {name}; it has {names}: return it "
                        "from the reward function or change the recipe"
                    )
    finally:
        scorer.close()


def _ground_truth(prompt: Prompt) -> RolloutGroup:
    """Return a group with one response: the ground truth."""
    nothing = np.zeros(1, dtype=np.int32)
    rollout = Rollout(
        content=Content(token_ids=nothing, logprobs=nothing.astype(np.float32), text=prompt.ground_truth),
        versions=nothing,
        loss_mask=nothing.astype(np.bool_),
        finish_reason=FinishReason.STOP,
    )
    return RolloutGroup(prompt=prompt, rollouts=(rollout,))
