"""Selects the groups to train on and assigns credit to their tokens. Knows scores and tokens, not losses or engines."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeAlias

import numpy as np

from megarl.algo.advantage import Credit, Float64Array, Outcomes, earlier_rewards, sum_of_parts
from megarl.algo.estimators import choose_estimator
from megarl.algo.grade import is_right
from megarl.algo.imitation import Sft
from megarl.algo.pairs import find_pairs, implicit_rewards, measure_pairs
from megarl.algo.shaping import (
    KlPenalty,
    Selection,
    component,
    estimates_of,
    length_penalty,
    penalised_length,
    scored_only,
    with_unscored,
    without_cut,
)
from megarl.algo.token_credit import CreditTask
from megarl.config.algorithm import (
    AlgorithmConfig,
    EstimatorConfig,
    GdpoConfig,
    KlLossConfig,
    KlRewardConfig,
    PairConfig,
    PrimeConfig,
    SftConfig,
)
from megarl.results import PreferenceStats
from megarl.tokens import RolloutSums, repeated
from megarl.types import Estimates, Rollout, Score, ScoredGroup, TrainSample


def build_algorithm(config: AlgorithmConfig, *, max_response_tokens: int, kl_coef: float | None = None) -> AnyAlgorithm:
    """`kl_coef` is the adaptive coefficient to resume from."""
    match config:
        case SftConfig():
            return Sft()
        case _:
            return PolicyGradient(config, max_response_tokens=max_response_tokens, kl_coef=kl_coef)


class PolicyGradient:
    """Learns from rewards: compares rollouts with others of their prompt or step, or with a critic's estimates."""

    def __init__(self, config: EstimatorConfig, *, max_response_tokens: int, kl_coef: float | None = None) -> None:
        self._config = config
        self._needs = config.needs
        self._estimate = choose_estimator(config)
        self._max_response_tokens = max_response_tokens
        self._selection = None if config.filter is None else Selection(config.filter)
        self._num_lost = 0
        self.pairs: PreferenceStats | None = None
        """The pairs of the last step; None without any."""
        self._penalty: KlPenalty | None = None
        if isinstance(config.kl, KlRewardConfig) and not isinstance(config, PairConfig):
            self._penalty = KlPenalty(config.kl, kl_coef)

    @property
    def kl_coef(self) -> float | None:
        if self._penalty is not None:
            return self._penalty.coef
        return None if self._config.kl is None else self._config.kl.coef

    def keeps(self, group: ScoredGroup) -> bool:
        if _is_lost(group):
            self._num_lost += 1
            return False
        return self._selection is None or self._selection.keeps(scored_only(group))

    def take_dropped(self) -> dict[str, int]:
        lost, self._num_lost = self._num_lost, 0
        filtered = {} if self._selection is None else self._selection.take_dropped()
        return {**filtered, "masked": lost} if lost else filtered

    def assign(self, groups: Sequence[ScoredGroup], estimates: Estimates) -> list[TrainSample]:
        is_scored = _are_scored(groups)
        if all(is_scored):
            return self._assign(groups, estimates)
        samples = self._assign([scored_only(scored) for scored in groups], estimates_of(estimates, is_scored))
        return with_unscored(samples, groups, is_scored)

    def credit_task(self, groups: Sequence[ScoredGroup]) -> CreditTask | None:
        """Return how ranks assign credit from columns per token that stay with them; None if credit needs none."""
        config, penalty = self._config, self._penalty
        uses_columns = self._needs.has_critic or isinstance(config, PairConfig) or penalty is not None
        if not uses_columns or self._needs.fetches_columns:
            return None
        return CreditTask.of(
            config,
            self._outcomes([scored_only(scored) for scored in groups], Estimates()),
            np.flatnonzero(_are_scored(groups)).tolist(),
            kl=None if penalty is None else penalty.config.estimate,
            kl_coef=0.0 if penalty is None else penalty.coef,
        )

    def measure(self, groups: Sequence[ScoredGroup], estimates: Estimates) -> PreferenceStats | None:
        """Return the statistics of the groups' pairs; None without any."""
        return self._measure(self._outcomes(groups, estimates))

    def _measure(self, outcomes: Outcomes) -> PreferenceStats | None:
        if not isinstance(self._config, PairConfig) or outcomes.implicit is None:
            return None
        return measure_pairs(
            self._config, find_pairs(self._config, outcomes.rewards, outcomes.groups), outcomes.implicit
        )

    def _assign(self, groups: Sequence[ScoredGroup], estimates: Estimates) -> list[TrainSample]:
        config = self._config
        outcomes = self._outcomes(groups, estimates)
        credit = self._credit(outcomes, estimates.sums)
        self.pairs = self._measure(outcomes)
        references = estimates.reference_logprobs if isinstance(config.kl, KlLossConfig) else None
        rollouts = [(scored.group.prompt, rollout) for scored in groups for rollout in scored.group.rollouts]
        samples = [
            TrainSample(
                prompt_ids=prompt.token_ids,
                images=prompt.images,
                rollout=rollout,
                advantages=credit.advantages[index],
                old_logprobs=None if estimates.logprobs is None else estimates.logprobs[index],
                reference_logprobs=None if references is None else references[index],
                values=None if estimates.values is None else estimates.values[index],
                returns=None if credit.returns is None else credit.returns[index],
            )
            for index, (prompt, rollout) in enumerate(rollouts)
        ]
        if config.overlong is not None and config.overlong.is_filtered:
            return [without_cut(sample) for sample in samples]
        return samples

    def _credit(self, outcomes: Outcomes, sums: RolloutSums | None) -> Credit:
        if sums is None or sums.advantages is None:
            return self._estimate(outcomes)
        # The ranks have the advantages; their size stands for them here.
        sizes = zip(sums.advantages.astype(np.float32), outcomes.loss_masks, strict=True)
        return Credit(advantages=tuple(repeated(size, len(mask)) for size, mask in sizes))

    def _outcomes(self, groups: Sequence[ScoredGroup], estimates: Estimates) -> Outcomes:
        config = self._config
        names = config.weights if isinstance(config, GdpoConfig) else ()
        loss_masks = tuple(rollout.loss_mask for scored in groups for rollout in scored.group.rollouts)
        return Outcomes(
            rewards=self._rewards(
                [pair for scored in groups for pair in zip(scored.group.rollouts, scored.scores, strict=True)]
            ),
            groups=np.repeat(np.arange(len(groups)), [len(scored.scores) for scored in groups]),
            loss_masks=loss_masks,
            components={
                name: np.array([component(score, name, scored) for scored in groups for score in scored.scores])
                for name in names
            },
            baselines=self._baselines(groups) if self._needs.has_baseline else None,
            penalties=None if self._penalty is None else self._penalty.of_tokens(estimates, loss_masks),
            penalty_sums=None if self._penalty is None else self._penalty.of_rollouts(estimates.sums),
            implicit=implicit_rewards(config, estimates, loss_masks)
            if isinstance(config, PairConfig) and estimates != Estimates()
            else None,
            values=estimates.values,
            are_right=np.array(
                [is_right(score, right_from=config.right_from) for scored in groups for score in scored.scores]
            )
            if isinstance(config, PrimeConfig)
            else None,
            earlier_rewards=earlier_rewards(groups),
        )

    def _baselines(self, groups: Sequence[ScoredGroup]) -> Float64Array:
        """[B], the reward of the greedy rollout of each rollout's group."""
        return np.repeat(
            self._rewards([_baseline(scored) for scored in groups]), [len(scored.scores) for scored in groups]
        )

    def _rewards(self, scored: Sequence[tuple[Rollout, Score]]) -> Float64Array:
        """[B], the scores with the rewards of turns and tokens and the penalty of overlong responses."""
        rewards = np.array([score.value for _, score in scored], dtype=np.float64)
        if self._config.reward_clip is not None:
            rewards = rewards.clip(*self._config.reward_clip)
        rewards += [sum_of_parts(rollout, score) for rollout, score in scored]
        overlong = self._config.overlong
        if overlong is None or overlong.buffer_tokens is None:
            return rewards
        return rewards + length_penalty(
            np.array([penalised_length(rollout) for rollout, _ in scored]),
            max_tokens=self._max_response_tokens,
            buffer_tokens=overlong.buffer_tokens,
            factor=overlong.factor,
        )


def _baseline(scored: ScoredGroup) -> tuple[Rollout, Score]:
    rollout, score = scored.group.baseline, scored.baseline
    assert rollout is not None, f"prompt {scored.group.prompt.uid} has no greedy rollout"
    assert score is not None, f"the greedy rollout of prompt {scored.group.prompt.uid} has no score"
    return rollout, score


def _is_lost(scored: ScoredGroup) -> bool:
    """Whether the group teaches nothing: no rollout has a score, or its baseline has none."""
    has_no_baseline = scored.baseline is not None and scored.baseline.is_masked
    return has_no_baseline or all(score.is_masked for score in scored.scores)


def _are_scored(groups: Sequence[ScoredGroup]) -> list[bool]:
    """Return for every rollout of a step, in the order of the groups, whether it has a score."""
    return [not score.is_masked for scored in groups for score in scored.scores]


AnyAlgorithm: TypeAlias = Sft | PolicyGradient
