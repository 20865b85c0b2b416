"""Shapes what a step learns from: leaves out groups without signal, rollouts without a score and responses cut at the
limit; lowers rewards of tokens far from the reference and of responses near the limit.

A step without a filter, a penalty or a rollout that has no score uses none of it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from itertools import compress, pairwise

import numpy as np
import numpy.typing as npt

from megarl.algo.advantage import Float64Array, sum_of_parts
from megarl.algo.token_credit import kl_distances
from megarl.config.algorithm import AdaptiveKlConfig, FilterConfig, KlRewardConfig
from megarl.errors import DataError
from megarl.system.user_code import load_code
from megarl.tokens import RolloutSums, num_true, repeated
from megarl.types import BoolArray, Estimates, FinishReason, FloatArray, Rollout, Score, ScoredGroup, TrainSample

_MAX_KL_ERROR = 0.2
"""The relative distance from the target counts as at most this, so that one step cannot throw the coefficient."""


class Selection:
    """Dynamic sampling: drops groups without signal and ends the run after too many in a row."""

    def __init__(self, config: FilterConfig) -> None:
        self._config = config
        self._num_dropped = 0
        """Since the last group that was kept."""
        self._causes: Counter[str] = Counter()

    def keeps(self, group: ScoredGroup) -> bool:
        pairs = zip(group.group.rollouts, group.scores, strict=True)
        values = [self._value(rollout, score, group) for rollout, score in pairs]
        complaint = self._complaint(values) or self._complaint_of_user(group)
        if complaint is None:
            self._num_dropped = 0
            return True
        cause, reason = complaint
        self._causes[cause] += 1
        self._num_dropped += 1
        if self._num_dropped >= self._config.max_dropped_groups:
            raise DataError(
                f"algorithm.filter dropped {self._num_dropped} groups in a row; the last, prompt "
                f"{group.group.prompt.uid}, because {reason}. The prompts are too easy or too hard for the policy, "
                "or the reward is broken: look at some responses, change data.train, or widen the filter"
            )
        return False

    def take_dropped(self) -> dict[str, int]:
        """Return how many groups were dropped since the last call, by cause."""
        causes, self._causes = self._causes, Counter()
        return dict(sorted(causes.items()))

    def _value(self, rollout: Rollout, score: Score, group: ScoredGroup) -> float:
        name = self._config.component
        return score.value + sum_of_parts(rollout, score) if name is None else component(score, name, group)

    def _complaint(self, values: list[float]) -> tuple[str, str] | None:
        """Return why a group with these values is dropped, as a cause and a clause; None if it is kept."""
        config = self._config
        what = config.component or "score"
        if max(values) - min(values) <= config.tolerance:
            return "equal", f"every {what} is {values[0]:g}"
        mean = sum(values) / len(values)
        if config.lowest_mean is not None and mean < config.lowest_mean:
            return "below_band", f"its mean {what} {mean:g} is below lowest_mean {config.lowest_mean:g}"
        if config.highest_mean is not None and mean > config.highest_mean:
            return "above_band", f"its mean {what} {mean:g} is above highest_mean {config.highest_mean:g}"
        return None

    def _complaint_of_user(self, group: ScoredGroup) -> tuple[str, str] | None:
        code = self._config.code
        if code is None or load_code(code, key="algorithm.filter.code")(group):
            return None
        return "own", f"{code} did not keep it"


def component(score: Score, name: str, group: ScoredGroup) -> float:
    """Return one named part of a score; its absence is an error, never a zero."""
    if name not in score.components:
        names = ", ".join(sorted(score.components)) or "none"
        raise DataError(
            f"the reward of prompt {group.group.prompt.uid} has no component {name}; it has {names}: "
            "return it from the reward function or change the recipe"
        )
    return score.components[name]


def scored_only(scored: ScoredGroup) -> ScoredGroup:
    """Return the group without the rollouts that have no score."""
    is_scored = [not score.is_masked for score in scored.scores]
    return replace(
        scored,
        group=replace(scored.group, rollouts=tuple(compress(scored.group.rollouts, is_scored))),
        scores=tuple(compress(scored.scores, is_scored)),
    )


def estimates_of(estimates: Estimates, is_scored: Sequence[bool]) -> Estimates:
    """Return the estimates of the rollouts that have a score."""

    def select(arrays: tuple[FloatArray, ...] | None) -> tuple[FloatArray, ...] | None:
        return None if arrays is None else tuple(compress(arrays, is_scored))

    return Estimates(
        logprobs=select(estimates.logprobs),
        reference_logprobs=select(estimates.reference_logprobs),
        values=select(estimates.values),
        sums=estimates.sums,
    )


def with_unscored(
    samples: Sequence[TrainSample], groups: Sequence[ScoredGroup], is_scored: Sequence[bool]
) -> list[TrainSample]:
    """Return the samples with one without loss tokens inserted for each rollout that has no score."""
    rollouts = [(scored.group.prompt, rollout) for scored in groups for rollout in scored.group.rollouts]
    remaining = iter(samples)
    like = samples[0]
    result: list[TrainSample] = []
    for (prompt, rollout), has_score in zip(rollouts, is_scored, strict=True):
        if has_score:
            result.append(next(remaining))
            continue
        nothing = repeated(np.float32(0), rollout.num_tokens)
        # Without loss tokens no value is read, but every sample of a batch needs the same columns.
        result.append(
            TrainSample(
                prompt_ids=prompt.token_ids,
                images=prompt.images,
                rollout=replace(rollout, loss_mask=repeated(np.False_, rollout.num_tokens)),
                advantages=nothing,
                old_logprobs=None if like.old_logprobs is None else nothing,
                reference_logprobs=None if like.reference_logprobs is None else nothing,
                values=None if like.values is None else nothing,
                returns=None if like.returns is None else nothing,
            )
        )
    return result


def without_cut(sample: TrainSample) -> TrainSample:
    """Return the sample, without loss tokens if its response was cut at the limit: its reward means little."""
    rollout = sample.rollout
    if rollout.finish_reason is not FinishReason.LENGTH:
        return sample
    return replace(
        sample,
        rollout=replace(rollout, loss_mask=repeated(np.False_, rollout.num_tokens)),
        advantages=repeated(np.float32(0), rollout.num_tokens),
    )


class KlPenalty:
    """The KL to the reference, times a coefficient that may adapt to a target."""

    def __init__(self, config: KlRewardConfig, coef: float | None) -> None:
        """`coef` is the adaptive coefficient to resume from."""
        self.config = config
        self.coef = config.coef if coef is None else coef

    def of_tokens(self, estimates: Estimates, loss_masks: tuple[BoolArray, ...]) -> tuple[FloatArray, ...] | None:
        """Return the penalty of each token, B of [T_i]; adapt the coefficient for the next step."""
        if estimates.logprobs is None:
            return None
        assert estimates.reference_logprobs is not None, "a penalty without a reference"
        distances = kl_distances(self.config.estimate, estimates.logprobs, estimates.reference_logprobs)
        penalties = tuple((self.coef * distance).astype(np.float32) for distance in distances)
        chosen = [distance[mask] for distance, mask in zip(distances, loss_masks, strict=True)]
        self._adapt([distance.mean(dtype=np.float64) for distance in chosen if len(distance)], len(chosen))
        return penalties

    def of_rollouts(self, sums: RolloutSums | None) -> Float64Array | None:
        """Return the penalty of each rollout, [B], from the sums of the ranks; adapt the coefficient."""
        if sums is None or sums.kl is None:
            return None
        penalties = self.coef * sums.kl
        chosen = sums.counts > 0
        self._adapt((sums.kl[chosen] / sums.counts[chosen]).tolist(), len(sums.kl))
        return penalties

    def _adapt(self, means: Sequence[float], num_sequences: int) -> None:
        """Adapt the coefficient to the mean of the sequences' means: one long rollout does not steer it."""
        if self.config.adaptive is not None:
            mean = float(np.mean(means or [0.0]))
            self.coef = adapted_kl_coef(self.coef, self.config.adaptive, kl=mean, num_sequences=num_sequences)


def adapted_kl_coef(coef: float, config: AdaptiveKlConfig, *, kl: float, num_sequences: int) -> float:
    """Return the next step's coefficient from this step's mean KL."""
    error = min(max(kl / config.target - 1, -_MAX_KL_ERROR), _MAX_KL_ERROR)
    return coef * (1 + error * num_sequences / config.horizon)


def length_penalty(
    lengths: npt.NDArray[np.int64], *, max_tokens: int, buffer_tokens: int, factor: float
) -> Float64Array:
    """[B], 0 up to `buffer_tokens` before the limit, then linear down to -factor at the limit."""
    excess = lengths - (max_tokens - buffer_tokens)
    penalty: Float64Array = np.clip(-excess / buffer_tokens, -1.0, 0.0) * factor
    return penalty


def penalised_length(rollout: Rollout) -> int:
    """Return the length of a response: of an episode the tokens that the policy chose in one row, where it chose most.

    The limit is one of rows.
    """
    if not rollout.episode.turns:
        return rollout.num_tokens
    bounds = (0, *rollout.episode.rows, rollout.num_tokens)
    return max(num_true(rollout.loss_mask[start:end]) for start, end in pairwise(bounds))
