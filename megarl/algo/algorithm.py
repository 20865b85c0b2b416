"""Which groups are trained on, and what credit their tokens get. Knows scores and tokens, not losses or engines."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import assert_never

import numpy as np
import numpy.typing as npt

from megarl.algo.advantage import Outcomes, estimate
from megarl.algo.overlong import length_penalty, without_cut
from megarl.algo.selection import Selection, component
from megarl.config.algorithm import (
    AlgorithmConfig,
    GdpoConfig,
    GroupConfig,
    GrpoConfig,
    ReinforcePpConfig,
    RemaxConfig,
    SftConfig,
)
from megarl.stages import Algorithm
from megarl.types import FloatArray, Rollout, Score, ScoredGroup, TrainSample


def build_algorithm(config: AlgorithmConfig, *, max_response_tokens: int) -> Algorithm:
    match config:
        case SftConfig():
            return Sft()
        case GrpoConfig() | GroupConfig() | ReinforcePpConfig() | RemaxConfig() | GdpoConfig():
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
        self,
        config: GrpoConfig | GroupConfig | ReinforcePpConfig | RemaxConfig | GdpoConfig,
        *,
        max_response_tokens: int,
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
            case RemaxConfig():
                return estimate("remax", outcomes, gamma=config.gamma)
            case GdpoConfig():
                return estimate("gdpo", outcomes, component_weights=config.weights)
            case _:
                assert_never(config)

    def _outcomes(self, groups: Sequence[ScoredGroup]) -> Outcomes:
        config = self._config
        names = config.weights if isinstance(config, GdpoConfig) else ()
        return Outcomes(
            rewards=self._rewards([pair for scored in groups for pair in _judged(scored)]),
            groups=np.repeat(np.arange(len(groups)), [len(scored.scores) for scored in groups]),
            loss_masks=tuple(rollout.loss_mask for scored in groups for rollout in scored.group.rollouts),
            components={
                name: np.array([component(score, name, scored) for scored in groups for score in scored.scores])
                for name in names
            },
            baselines=self._baselines(groups) if isinstance(config, RemaxConfig) else None,
        )

    def _baselines(self, groups: Sequence[ScoredGroup]) -> npt.NDArray[np.float64]:
        """For each rollout, the reward of its group's greedy one."""
        return np.repeat(
            self._rewards([_judged_baseline(scored) for scored in groups]), [len(scored.scores) for scored in groups]
        )

    def _rewards(self, judged: Sequence[tuple[Rollout, Score]]) -> npt.NDArray[np.float64]:
        """The scores, less what being overlong costs."""
        rewards = np.array([score.value for _, score in judged], dtype=np.float64)
        overlong = self._config.overlong
        if overlong is None or overlong.buffer_tokens is None:
            return rewards
        return rewards + length_penalty(
            np.array([len(rollout.token_ids) for rollout, _ in judged]),
            max_tokens=self._max_response_tokens,
            buffer_tokens=overlong.buffer_tokens,
            factor=overlong.factor,
        )


def _judged(scored: ScoredGroup) -> Iterator[tuple[Rollout, Score]]:
    return zip(scored.group.rollouts, scored.scores, strict=True)


def _judged_baseline(scored: ScoredGroup) -> tuple[Rollout, Score]:
    rollout, score = scored.group.baseline, scored.baseline
    assert rollout is not None, f"prompt {scored.group.prompt.uid} has no greedy rollout"
    assert score is not None, f"the greedy rollout of prompt {scored.group.prompt.uid} has no score"
    return rollout, score
