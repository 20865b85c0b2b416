"""Selects the groups to train on and assigns credit to their tokens. Knows scores and tokens, not losses or engines."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch

from megarl.algo.advantage import Credit, Outcomes, estimate
from megarl.algo.comparison import find_pairs, implicit_rewards, measure_pairs
from megarl.algo.loss import kl
from megarl.algo.remote_credit import CreditTask
from megarl.algo.selection import (
    Selection,
    are_scored,
    component,
    estimates_of,
    has_parts,
    is_lost,
    parts_of,
    scored_only,
    with_unscored,
    without_cut,
)
from megarl.config.algorithm import (
    AdaptiveKlConfig,
    AlgorithmConfig,
    EstimatorConfig,
    GaeConfig,
    GdpoConfig,
    KlLossConfig,
    KlRewardConfig,
    PairConfig,
    PrimeConfig,
    RemaxConfig,
    SftConfig,
)
from megarl.errors import RewardError
from megarl.results import PreferenceStats
from megarl.tokens import RolloutSums, num_true, repeated
from megarl.types import BoolArray, Estimates, FloatArray, Rollout, Score, ScoredGroup, TrainSample

_MAX_KL_ERROR = 0.2


def build_algorithm(
    config: AlgorithmConfig, *, max_response_tokens: int, kl_coef: float | None = None
) -> Sft | PolicyGradient:
    """`kl_coef` is the adaptive coefficient to resume from."""
    match config:
        case SftConfig():
            return Sft()
        case _:
            return PolicyGradient(config, max_response_tokens=max_response_tokens, kl_coef=kl_coef)


class Sft:
    """Imitation: every token of a demonstration has advantage 1."""

    def keeps(self, group: ScoredGroup) -> bool:
        return True

    def take_dropped(self) -> dict[str, int]:
        return {}

    kl_coef: float | None = None
    pairs: PreferenceStats | None = None

    def credit_task(self, groups: Sequence[ScoredGroup]) -> None:
        return None

    def measure(self, groups: Sequence[ScoredGroup], estimates: Estimates) -> None:
        return None

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
    """Learns from rewards: compares rollouts with others of their prompt or step, or with a critic's estimates."""

    def __init__(self, config: EstimatorConfig, *, max_response_tokens: int, kl_coef: float | None = None) -> None:
        self._config = config
        self._max_response_tokens = max_response_tokens
        self._selection = None if config.filter is None else Selection(config.filter)
        self._num_lost = 0
        self.pairs: PreferenceStats | None = None
        """The pairs of the last step; None without any."""
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
        is_scored = are_scored(groups)
        if all(is_scored):
            return self._assign(groups, estimates)
        samples = self._assign([scored_only(scored) for scored in groups], estimates_of(estimates, is_scored))
        return with_unscored(samples, groups, is_scored)

    def credit_task(self, groups: Sequence[ScoredGroup]) -> CreditTask | None:
        """Return what the ranks have to do with numbers of tokens that they hold; None if nothing."""
        config, penalty = self._config, self._penalty
        is_credited = isinstance(config, GaeConfig | PairConfig | PrimeConfig) or penalty is not None
        if not is_credited or config.estimator is not None:
            return None
        scored, ids = [scored_only(each) for each in groups], np.flatnonzero(are_scored(groups)).tolist()
        return CreditTask.of(
            config,
            self._outcomes(scored, Estimates()),
            ids,
            kl=None if penalty is None else penalty.estimate,
            kl_coef=self.kl_coef or 0.0,
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
        credit, self.pairs = self._credit(outcomes, estimates.sums), self._measure(outcomes)
        references = estimates.reference_logprobs if isinstance(config.kl, KlLossConfig) else None
        rollouts = [(scored.group.prompt, rollout) for scored in groups for rollout in scored.group.rollouts]
        samples = [
            TrainSample(
                prompt_ids=prompt.token_ids,
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
            return estimate(self._config, outcomes)
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
            baselines=self._baselines(groups) if isinstance(config, RemaxConfig) else None,
            penalties=self._penalties(estimates, loss_masks),
            penalty_sums=self._penalty_sums(estimates.sums),
            implicit=implicit_rewards(config, estimates, loss_masks)
            if isinstance(config, PairConfig) and estimates != Estimates()
            else None,
            values=estimates.values,
            earlier_rewards=_earlier_rewards(groups),
        )

    @property
    def _penalty(self) -> KlRewardConfig | None:
        config = self._config
        return config.kl if isinstance(config.kl, KlRewardConfig) and not isinstance(config, PairConfig) else None

    def _penalties(self, estimates: Estimates, loss_masks: tuple[BoolArray, ...]) -> tuple[FloatArray, ...] | None:
        """Return the KL penalty of each token, B of [T_i]; adapt the coefficient for the next step."""
        config = self._penalty
        if config is None or estimates.logprobs is None:
            return None
        assert estimates.reference_logprobs is not None, "a penalty without a reference"
        assert self.kl_coef is not None, "a penalty without a coefficient"
        pairs = zip(estimates.logprobs, estimates.reference_logprobs, strict=True)
        distances = [
            kl(config.estimate, torch.from_numpy(policy), torch.from_numpy(reference)).numpy()
            for policy, reference in pairs
        ]
        penalties = tuple((self.kl_coef * distance).astype(np.float32) for distance in distances)
        chosen = [distance[mask] for distance, mask in zip(distances, loss_masks, strict=True)]
        self._adapt([distance.mean(dtype=np.float64) for distance in chosen if len(distance)], len(chosen))
        return penalties

    def _penalty_sums(self, sums: RolloutSums | None) -> npt.NDArray[np.float64] | None:
        """Return the KL penalty of each rollout, [B], as the ranks summed it; adapt the coefficient."""
        if sums is None or sums.kl is None:
            return None
        assert self.kl_coef is not None, "a penalty without a coefficient"
        penalties = self.kl_coef * sums.kl
        chosen = sums.counts > 0
        self._adapt((sums.kl[chosen] / sums.counts[chosen]).tolist(), len(sums.kl))
        return penalties

    def _adapt(self, means: Sequence[float], num_sequences: int) -> None:
        """Adapt the coefficient to the mean of the sequences' means: one long rollout does not steer it."""
        adaptive = None if self._penalty is None else self._penalty.adaptive
        if adaptive is not None and self.kl_coef is not None:
            mean = float(np.mean(means or [0.0]))
            self.kl_coef = adapted_kl_coef(self.kl_coef, adaptive, kl=mean, num_sequences=num_sequences)

    def _baselines(self, groups: Sequence[ScoredGroup]) -> npt.NDArray[np.float64]:
        """[B], the reward of the greedy rollout of each rollout's group."""
        return np.repeat(
            self._rewards([_baseline(scored) for scored in groups]), [len(scored.scores) for scored in groups]
        )

    def _rewards(self, scored: Sequence[tuple[Rollout, Score]]) -> npt.NDArray[np.float64]:
        """[B], the scores with the rewards of turns and tokens and the penalty of overlong responses."""
        rewards = np.array([score.value for _, score in scored], dtype=np.float64)
        if self._config.reward_clip is not None:
            rewards = rewards.clip(*self._config.reward_clip)
        rewards += [parts_of(rollout, score) for rollout, score in scored]
        overlong = self._config.overlong
        if overlong is None or overlong.buffer_tokens is None:
            return rewards
        return rewards + length_penalty(
            np.array([_num_counted(rollout) for rollout, _ in scored]),
            max_tokens=self._max_response_tokens,
            buffer_tokens=overlong.buffer_tokens,
            factor=overlong.factor,
        )


def _num_counted(rollout: Rollout) -> int:
    """Return the length of a response; of an episode without what its environment wrote."""
    return num_true(rollout.loss_mask) if rollout.episode.turns else rollout.num_tokens


def _earlier_rewards(groups: Sequence[ScoredGroup]) -> tuple[dict[int, float], ...] | None:
    """Return the rewards of turns, by the last token of each, and of tokens; None where no rollout has any."""
    rewards = tuple(
        _rewards_by_token(rollout, score, scored.group.prompt.uid) if has_parts(rollout, score) else {}
        for scored in groups
        for rollout, score in zip(scored.group.rollouts, scored.scores, strict=True)
    )
    return rewards if any(rewards) else None


def _rewards_by_token(rollout: Rollout, score: Score, uid: str) -> dict[int, float]:
    by_token = {turn.end - 1: turn.reward for turn in rollout.episode.turns if turn.reward}
    if score.tokens is None:
        return by_token
    chosen, rewards = np.flatnonzero(rollout.loss_mask), np.array(score.tokens)
    if len(rewards) == rollout.num_tokens and not rewards[~rollout.loss_mask].any():
        rewards = rewards[chosen]  # of all tokens of an episode
    if len(rewards) != len(chosen):
        raise RewardError(
            f"prompt {uid}: the score has {len(rewards)} rewards in `tokens`, and the policy chose {len(chosen)} "
            "tokens: return one for each"
        )
    for place in np.flatnonzero(rewards).tolist():
        token = int(chosen[place])
        by_token[token] = by_token.get(token, 0.0) + float(rewards[place])
    return by_token


def _baseline(scored: ScoredGroup) -> tuple[Rollout, Score]:
    rollout, score = scored.group.baseline, scored.baseline
    assert rollout is not None, f"prompt {scored.group.prompt.uid} has no greedy rollout"
    assert score is not None, f"the greedy rollout of prompt {scored.group.prompt.uid} has no score"
    return rollout, score


def length_penalty(
    lengths: npt.NDArray[np.int64], *, max_tokens: int, buffer_tokens: int, factor: float
) -> npt.NDArray[np.float64]:
    """[B], 0 up to `buffer_tokens` before the limit, then linear down to -factor at the limit."""
    excess = lengths - (max_tokens - buffer_tokens)
    penalty: npt.NDArray[np.float64] = np.minimum(0.0, -excess / buffer_tokens * factor)
    return penalty


def adapted_kl_coef(coef: float, config: AdaptiveKlConfig, *, kl: float, num_sequences: int) -> float:
    """Return the next step's coefficient from this step's mean KL."""
    error = min(max(kl / config.target - 1, -_MAX_KL_ERROR), _MAX_KL_ERROR)
    return coef * (1 + error * num_sequences / config.horizon)
