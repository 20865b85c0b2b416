"""Which groups are trained on, and what credit their tokens get. Knows scores and tokens, not losses or engines."""

from __future__ import annotations

from collections.abc import Sequence
from typing import assert_never

import numpy as np

from megarl.algo.advantage import Outcomes, estimate
from megarl.algo.overlong import length_penalty, without_cut
from megarl.algo.selection import Selection, component
from megarl.config.algorithm import (
    AlgorithmConfig,
    GdpoConfig,
    GroupConfig,
    GrpoConfig,
    ReinforcePpConfig,
    SftConfig,
)
from megarl.stages import Algorithm
from megarl.types import FloatArray, ScoredGroup, TrainSample


def build_algorithm(config: AlgorithmConfig, *, max_response_tokens: int) -> Algorithm:
    match config:
        case SftConfig():
            return Sft()
        case GrpoConfig() | GroupConfig() | ReinforcePpConfig() | GdpoConfig():
            return PolicyGradient(config, max_response_tokens=max_response_tokens)
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


class PolicyGradient:
    """Learns from rewards, without a critic: rollouts are compared with others of their prompt or of their step."""

    def __init__(
        self, config: GrpoConfig | GroupConfig | ReinforcePpConfig | GdpoConfig, *, max_response_tokens: int
    ) -> None:
        self._config = config
        self._max_response_tokens = max_response_tokens
        self._selection = None if config.filter is None else Selection(config.filter)

    def keeps(self, group: ScoredGroup) -> bool:
        return self._selection is None or self._selection.keeps(group)

    def assign(self, groups: Sequence[ScoredGroup]) -> list[TrainSample]:
        advantages = iter(self._advantages(groups))
        samples = [
            TrainSample(prompt_ids=scored.group.prompt.token_ids, rollout=rollout, advantages=next(advantages))
            for scored in groups
            for rollout in scored.group.rollouts
        ]
        if self._config.overlong is not None and self._config.overlong.is_filtered:
            return [without_cut(sample) for sample in samples]
        return samples

    def _advantages(self, groups: Sequence[ScoredGroup]) -> tuple[FloatArray, ...]:
        config, outcomes = self._config, self._outcomes(groups)
        match config:
            case GrpoConfig():
                return estimate("grpo", outcomes, normalize_std=config.normalize_std)
            case GroupConfig():
                return estimate(config.kind, outcomes)
            case ReinforcePpConfig():
                return estimate("reinforce_pp", outcomes, gamma=config.gamma)
            case GdpoConfig():
                return estimate("gdpo", outcomes, component_weights=config.weights)
            case _:
                assert_never(config)

    def _outcomes(self, groups: Sequence[ScoredGroup]) -> Outcomes:
        config = self._config
        rollouts = [rollout for scored in groups for rollout in scored.group.rollouts]
        rewards = np.array([score.value for scored in groups for score in scored.scores], dtype=np.float64)
        if config.overlong is not None and config.overlong.buffer_tokens is not None:
            rewards += length_penalty(
                np.array([len(rollout.token_ids) for rollout in rollouts]),
                max_tokens=self._max_response_tokens,
                buffer_tokens=config.overlong.buffer_tokens,
                factor=config.overlong.factor,
            )
        names = config.weights if isinstance(config, GdpoConfig) else ()
        return Outcomes(
            rewards=rewards,
            groups=np.repeat(np.arange(len(groups)), [len(scored.scores) for scored in groups]),
            loss_masks=tuple(rollout.loss_mask for rollout in rollouts),
            components={
                name: np.array([component(score, name, scored) for scored in groups for score in scored.scores])
                for name in names
            },
        )
