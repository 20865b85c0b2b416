"""Which groups are trained on, and what credit their tokens get. Knows scores and tokens, not losses or engines."""

from __future__ import annotations

from collections.abc import Sequence
from typing import assert_never

import numpy as np

from megarl.algo.advantage import Outcomes, estimate
from megarl.config.algorithm import AlgorithmConfig, GrpoConfig, SftConfig
from megarl.stages import Algorithm
from megarl.types import ScoredGroup, TrainSample


def build_algorithm(config: AlgorithmConfig) -> Algorithm:
    match config:
        case SftConfig():
            return Sft()
        case GrpoConfig():
            return Grpo(config)
        case _:
            assert_never(config)


class Sft:
    """Imitation: every token of a demonstration has advantage 1, whatever its score."""

    def keeps(self, group: ScoredGroup) -> bool:
        return True

    def assign(self, groups: Sequence[ScoredGroup]) -> list[TrainSample]:
        return [
            TrainSample(
                prompt_ids=scored.group.prompt.token_ids,
                rollout=rollout,
                advantages=rollout.loss_mask.astype(np.float32),
            )
            for scored in groups
            for rollout in scored.group.rollouts
        ]


class Grpo:
    """Group-relative advantages: a rollout is compared with the others of its prompt, without a critic."""

    def __init__(self, config: GrpoConfig) -> None:
        self._config = config

    def keeps(self, group: ScoredGroup) -> bool:
        return True

    def assign(self, groups: Sequence[ScoredGroup]) -> list[TrainSample]:
        rollouts = [(scored.group.prompt, rollout) for scored in groups for rollout in scored.group.rollouts]
        outcomes = Outcomes(
            rewards=np.array([score.value for scored in groups for score in scored.scores], dtype=np.float64),
            groups=np.repeat(np.arange(len(groups)), [len(scored.scores) for scored in groups]),
            loss_masks=tuple(rollout.loss_mask for _, rollout in rollouts),
        )
        advantages = estimate("grpo", outcomes, normalize_std=self._config.normalize_std)
        return [
            TrainSample(prompt_ids=prompt.token_ids, rollout=rollout, advantages=values)
            for (prompt, rollout), values in zip(rollouts, advantages, strict=True)
        ]
