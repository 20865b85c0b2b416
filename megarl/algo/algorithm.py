"""Which groups are trained on, and what credit their tokens get. Knows scores and tokens, not losses or engines."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import assert_never

import numpy as np
import numpy.typing as npt
import torch

from megarl.algo.advantage import Outcomes, estimate, gae
from megarl.algo.kl_control import adapted
from megarl.algo.loss import kl
from megarl.algo.masking import are_scored, estimates_of, is_lost, scored_only, with_masked
from megarl.algo.overlong import length_penalty, without_cut
from megarl.algo.selection import Selection, component
from megarl.config.algorithm import (
    AlgorithmConfig,
    EstimatorConfig,
    GaeConfig,
    GdpoConfig,
    GroupConfig,
    GrpoConfig,
    KlLossConfig,
    KlRewardConfig,
    ReinforcePpConfig,
    RemaxConfig,
    SftConfig,
)
from megarl.stages import Algorithm
from megarl.types import BoolArray, Estimates, FloatArray, Rollout, Score, ScoredGroup, TrainSample


def build_algorithm(config: AlgorithmConfig, *, max_response_tokens: int, kl_coef: float | None = None) -> Algorithm:
    """With `kl_coef`, go on from where an adaptive coefficient stood."""
    match config:
        case SftConfig():
            return Sft()
        case _:
            return PolicyGradient(config, max_response_tokens=max_response_tokens, kl_coef=kl_coef)


class Sft:
    """Imitation: every token of a demonstration has advantage 1, whatever its score."""

    def keeps(self, group: ScoredGroup) -> bool:
        return True

    def take_dropped(self) -> dict[str, int]:
        return {}

    kl_coef: float | None = None

    def assign(self, groups: Sequence[ScoredGroup], estimates: Estimates) -> list[TrainSample]:
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
    """Learns from rewards: rollouts are compared with others of their prompt or step, or with what a critic expects."""

    def __init__(self, config: EstimatorConfig, *, max_response_tokens: int, kl_coef: float | None = None) -> None:
        self._config = config
        self._max_response_tokens = max_response_tokens
        self._selection = None if config.filter is None else Selection(config.filter)
        self._num_lost = 0
        self.kl_coef = config.kl.coef if config.kl is not None and kl_coef is None else kl_coef

    def keeps(self, group: ScoredGroup) -> bool:
        if is_lost(group):
            self._num_lost += 1
            return False
        return self._selection is None or self._selection.keeps(scored_only(group))

    def take_dropped(self) -> dict[str, int]:
        lost, self._num_lost = self._num_lost, 0
        filtered = {} if self._selection is None else self._selection.take_dropped()
        return {**filtered, "masked": lost} if lost else filtered

    def assign(self, groups: Sequence[ScoredGroup], estimates: Estimates) -> list[TrainSample]:
        kept = are_scored(groups)
        if all(kept):
            return self._assign(groups, estimates)
        samples = self._assign([scored_only(scored) for scored in groups], estimates_of(estimates, kept))
        return with_masked(samples, groups, kept)

    def _assign(self, groups: Sequence[ScoredGroup], estimates: Estimates) -> list[TrainSample]:
        config = self._config
        advantages, returns = self._credit(self._outcomes(groups, estimates))
        references = estimates.reference_logprobs if isinstance(config.kl, KlLossConfig) else None
        rollouts = [(scored.group.prompt, rollout) for scored in groups for rollout in scored.group.rollouts]
        samples = [
            TrainSample(
                prompt_ids=prompt.token_ids,
                rollout=rollout,
                advantages=advantages[index],
                old_logprobs=None if estimates.logprobs is None else estimates.logprobs[index],
                reference_logprobs=None if references is None else references[index],
                values=None if estimates.values is None else estimates.values[index],
                returns=None if returns is None else returns[index],
            )
            for index, (prompt, rollout) in enumerate(rollouts)
        ]
        if config.overlong is not None and config.overlong.is_filtered:
            return [without_cut(sample) for sample in samples]
        return samples

    def _credit(self, outcomes: Outcomes) -> tuple[tuple[FloatArray, ...], tuple[FloatArray, ...] | None]:
        """Advantages and, where a critic learns, returns."""
        config = self._config
        match config:
            case GaeConfig():
                result = gae(outcomes, gamma=config.gamma, lam=config.lam)
                return result.advantages, result.returns
            case GrpoConfig():
                return estimate("grpo", outcomes, normalize_std=config.normalize_std), None
            case GroupConfig():
                return estimate(config.kind, outcomes), None
            case ReinforcePpConfig():
                return estimate("reinforce_pp", outcomes, gamma=config.gamma), None
            case RemaxConfig():
                return estimate("remax", outcomes, gamma=config.gamma), None
            case GdpoConfig():
                return estimate("gdpo", outcomes, component_weights=config.weights), None
            case _:
                assert_never(config)

    def _outcomes(self, groups: Sequence[ScoredGroup], estimates: Estimates) -> Outcomes:
        config = self._config
        names = config.weights if isinstance(config, GdpoConfig) else ()
        loss_masks = tuple(rollout.loss_mask for scored in groups for rollout in scored.group.rollouts)
        return Outcomes(
            rewards=self._rewards([pair for scored in groups for pair in _judged(scored)]),
            groups=np.repeat(np.arange(len(groups)), [len(scored.scores) for scored in groups]),
            loss_masks=loss_masks,
            components={
                name: np.array([component(score, name, scored) for scored in groups for score in scored.scores])
                for name in names
            },
            baselines=self._baselines(groups) if isinstance(config, RemaxConfig) else None,
            penalties=self._penalties(estimates, loss_masks),
            values=estimates.values,
        )

    def _penalties(self, estimates: Estimates, loss_masks: tuple[BoolArray, ...]) -> tuple[FloatArray, ...] | None:
        """What the distance from the reference takes off the reward of each token; adapts what the next one costs."""
        config = self._config.kl
        if not isinstance(config, KlRewardConfig):
            return None
        assert estimates.logprobs is not None, "a penalty without log-probabilities"
        assert estimates.reference_logprobs is not None, "a penalty without a reference"
        assert self.kl_coef is not None, "a penalty without a coefficient"
        pairs = zip(estimates.logprobs, estimates.reference_logprobs, strict=True)
        distances = [
            kl(config.estimate, torch.from_numpy(policy), torch.from_numpy(reference)).numpy()
            for policy, reference in pairs
        ]
        penalties = tuple((self.kl_coef * distance).astype(np.float32) for distance in distances)
        if config.adaptive is not None:
            chosen = [distance[mask] for distance, mask in zip(distances, loss_masks, strict=True)]
            mean = float(np.concatenate(chosen).mean(dtype=np.float64))
            self.kl_coef = adapted(self.kl_coef, config.adaptive, kl=mean, num_sequences=len(chosen))
        return penalties

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
