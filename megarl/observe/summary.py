"""The numbers of one step: rewards and their outliers, lengths, ages, repetition, groups without signal. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from statistics import fmean
from typing import Literal

import numpy as np
import numpy.typing as npt

from megarl.results import CriticStats, DraftStats, PreferenceStats, RankUsage, TrainingWork, UpdateResult, UpdateStats
from megarl.tokens import counted, is_repeated, num_true, repeated_share
from megarl.types import (
    DEMONSTRATION,
    FinishReason,
    PolicyVersion,
    Rollout,
    ScoredGroup,
    TrainSample,
    TurnKind,
)

Phase = Literal["start", "generate", "assign", "update", "publish", "evaluate", "save"]
"""Phase of the loop; one at a time."""


_OUTLIER_DEVIATIONS = 6.0
_OUTLIER_GAP = 4.0
"""An outlier's distance from the median, in the largest distance of the rewards that are none."""
_NORMAL_PER_MEDIAN = 1.4826
"""Standard deviation of a normal distribution over its median distance from the median."""
_MAX_RESPONSES = 64
_RANKS = np.linspace(0, 1, 21)
"""Ranks of the recorded quantiles of lengths."""
_NO_ADVANTAGE = 1e-6
"""Below it an advantage counts as 0: the mean of equal rewards has rounding errors."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RewardOutlier:
    prompt_uid: str
    reward: float


@dataclass(frozen=True, slots=True, kw_only=True)
class EpisodeSummary:
    """The episodes of one step, where the recipe has an environment."""

    endings: Mapping[str, int]
    turns_mean: float
    """Responses of the model per episode."""
    calls_mean: float
    """Turns whose calls were answered, per episode."""
    rows_mean: float
    """Sequences that the trainer makes of an episode: 1 where its history only grew."""
    given_tokens_ratio: float
    """Share of tokens that the policy did not choose."""
    tool_seconds_mean: float
    """Time of all calls of an episode."""
    num_retries: int
    """Episodes that were lost and played again."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RolloutSummary:
    """The rollouts of one step and their rewards."""

    num_groups: int
    num_zero_signal_groups: int
    """Groups in which every advantage is 0: they do not change the policy."""
    num_single_groups: int
    """Groups of one rollout."""
    dropped_groups: Mapping[str, int]
    """Groups dropped since the previous step, by the filter's reason or because their prompt is quarantined."""
    num_masked_rollouts: int
    """Rollouts that could not be scored; rewards and components leave them out."""
    reward_mean: float
    reward_std: float
    reward_min: float
    reward_median: float
    reward_max: float
    num_reward_outliers: int
    """Rewards further from the median than 6 robust deviations."""
    first_outlier: RewardOutlier | None
    tokens_by_version: Mapping[int, int]
    """Trained tokens by the policy that chose them; the update's `mismatch` numbers refer to these versions."""
    component_means: Mapping[str, float]
    """Mean of each component of the score, over the rollouts that have it."""
    response_tokens_mean: float
    response_tokens_max: int
    response_tokens_quantiles: tuple[int, ...] = ()
    """Lengths at equal distances of rank, from the shortest to the longest; empty in events of earlier versions."""
    truncated_ratio: float
    """Share of rollouts that ended at the length limit."""
    empty_ratio: float
    """Share of rollouts of at most one token, the end token included."""
    repetition_ratio: float
    """Share of 4-token windows that occurred before in the same response; mean of the first of up to 64 groups."""
    episodes: EpisodeSummary | None = None

    @property
    def has_signal(self) -> bool:
        return self.num_zero_signal_groups < self.num_groups

    @property
    def zero_signal_ratio(self) -> float:
        return self.num_zero_signal_groups / self.num_groups

    @property
    def oldest_version(self) -> int | None:
        """The oldest policy that chose a trained token; None without such a token."""
        return min(self.tokens_by_version, default=None)

    @property
    def num_dropped_groups(self) -> int:
        return sum(self.dropped_groups.values())


@dataclass(frozen=True, slots=True, kw_only=True)
class Flow:
    """The waiting times of trainer and producers in one step, and the age of its tokens."""

    trainer_wait_s: float
    """Time that the trainer waited for the step's groups."""
    producer_wait_s: float
    """Time since the previous step that a producer waited for admission; mean over all producers."""
    num_ready: int
    """Groups left in the buffer for later steps."""
    num_under_way: int
    """Prompts being generated or scored."""
    age_mean: float
    """Mean age of the step's tokens, in steps."""
    age_max: int


@dataclass(frozen=True, slots=True, kw_only=True)
class StepSummary:
    step: int
    """Counts from 1."""
    version: PolicyVersion
    update: UpdateStats | None
    """None if no update of the actor was applied."""
    critic: CriticStats | None
    draft: DraftStats | None = None
    """None if the model that drafts has not learned, and in events of earlier versions."""
    preference: PreferenceStats | None = None
    """None if the algorithm compares no pairs, and in events of earlier versions."""
    num_skipped_updates: int
    kl_coef: float | None
    """Weight of the KL to the reference from now on; None without that term."""
    rollouts: RolloutSummary | None
    """None if the step trained on demonstrations, which are neither generated nor scored."""
    epoch: int
    """Epoch of the newest prompt, from 0."""
    num_prompts: int
    prompt_tokens_mean: float
    num_tokens: int
    """Prompt and response tokens of the step's groups."""
    work: TrainingWork | None
    usage: Mapping[str, RankUsage] = field(compare=False)
    """By role."""
    flow: Flow | None
    """None without a buffer between generator and trainer."""
    seconds: float
    """Time from asking for the step's groups to the end of the publish, without evaluations between steps."""
    tokens_per_second: float
    cached_prompt_ratio: float | None = field(default=None, compare=False)
    """Share of the tokens that requests brought which engines had in their caches, since the step before; None without
    a request, and in events of earlier versions."""
    tokens_per_pass: float | None = field(default=None, compare=False)
    """Tokens of a response for each pass of the policy over drafted ones, since the step before; None without drafts,
    and in events of earlier versions."""

    @property
    def computed_ratio(self) -> float | None:
        """Share of the tokens of all trained rows that are computed; None where none are counted."""
        work = self.work
        return None if work is None or not work.num_tokens else 1 - work.num_shared_tokens / work.num_tokens


def summarize_step(
    *,
    step: int,
    groups: Sequence[ScoredGroup],
    samples: Sequence[TrainSample],
    dropped_groups: Mapping[str, int],
    update: UpdateResult,
    kl_coef: float | None,
    seconds: float,
    flow: Flow | None = None,
) -> StepSummary:
    """`samples` are those of `groups`, in their order; `dropped_groups` counts groups that the filter dropped."""
    num_tokens = sum(
        len(scored.group.prompt.token_ids) + rollout.num_tokens
        for scored in groups
        for rollout in scored.group.rollouts
    )
    rollouts = None if _are_demonstrations(groups) else _summarize_rollouts(groups, samples, dropped_groups)
    if rollouts is not None and update.stats is not None and update.stats.teacher_kl is not None:
        rollouts = replace(rollouts, num_zero_signal_groups=0)  # a teacher has something to say about every group
    return StepSummary(
        step=step,
        version=update.version,
        update=update.stats,
        critic=update.critic,
        draft=update.draft,
        preference=update.preference,
        num_skipped_updates=update.num_skipped_updates,
        kl_coef=kl_coef,
        rollouts=rollouts,
        epoch=max(scored.group.prompt.epoch for scored in groups),
        num_prompts=len(groups),
        prompt_tokens_mean=fmean(len(scored.group.prompt.token_ids) for scored in groups),
        num_tokens=num_tokens,
        work=update.work,
        usage=update.usage,
        flow=flow,
        seconds=seconds,
        tokens_per_second=num_tokens / seconds if seconds > 0 else 0.0,
    )


def _are_demonstrations(groups: Sequence[ScoredGroup]) -> bool:
    return all(_is_demonstration(rollout) for scored in groups for rollout in scored.group.rollouts)


def _is_demonstration(rollout: Rollout) -> bool:
    return [version for version, _ in counted(rollout.versions)] == [DEMONSTRATION]


def _summarize_rollouts(
    groups: Sequence[ScoredGroup], samples: Sequence[TrainSample], dropped_groups: Mapping[str, int]
) -> RolloutSummary:
    # A demonstration beside the rollouts of a group is none of them.
    played = [
        (rollout, score)
        for scored in groups
        for rollout, score in zip(scored.group.rollouts, scored.scores, strict=True)
        if not _is_demonstration(rollout)
    ]
    rollouts, all_scores = [rollout for rollout, _ in played], [score for _, score in played]
    scores = [score for score in all_scores if not score.is_masked]
    rewards = np.array([score.value for score in scores], dtype=np.float64)
    outliers = _outliers(rewards)
    lengths = np.array([rollout.num_tokens for rollout in rollouts])
    components: dict[str, list[float]] = {}
    for score in scores:
        for name, value in score.components.items():
            components.setdefault(name, []).append(value)
    return RolloutSummary(
        num_groups=len(groups),
        num_zero_signal_groups=_num_without_signal(groups, samples),
        num_single_groups=sum(len(scored.scores) == 1 for scored in groups),
        dropped_groups=dropped_groups,
        num_masked_rollouts=len(all_scores) - len(scores),
        reward_mean=float(rewards.mean()),
        reward_std=float(rewards.std()),
        reward_min=float(rewards.min()),
        reward_median=float(np.median(rewards)),
        reward_max=float(rewards.max()),
        num_reward_outliers=len(outliers),
        first_outlier=_first_outlier(groups, rewards, outliers),
        tokens_by_version=_tokens_by_version(rollouts),
        component_means={name: float(np.mean(values)) for name, values in sorted(components.items())},
        response_tokens_mean=float(lengths.mean()),
        response_tokens_max=int(lengths.max()),
        response_tokens_quantiles=tuple(np.quantile(lengths, _RANKS).astype(int).tolist()),
        truncated_ratio=float(np.mean([rollout.finish_reason is FinishReason.LENGTH for rollout in rollouts])),
        empty_ratio=float(np.mean(lengths <= 1)),
        repetition_ratio=_repetition(groups),
        episodes=_summarize_episodes(rollouts),
    )


def _summarize_episodes(rollouts: Sequence[Rollout]) -> EpisodeSummary | None:
    episodes = [rollout.episode for rollout in rollouts if rollout.episode.ending is not None]
    if not episodes:
        return None
    sampled = [sum(turn.kind is TurnKind.SAMPLED for turn in episode.turns) for episode in episodes]
    num_tokens = sum(rollout.num_tokens for rollout in rollouts)
    return EpisodeSummary(
        endings=dict(sorted(Counter(str(episode.ending) for episode in episodes).items())),
        turns_mean=fmean(sampled),
        calls_mean=fmean(episode.num_calls for episode in episodes),
        rows_mean=fmean(episode.num_rows for episode in episodes),
        given_tokens_ratio=1 - sum(num_true(rollout.loss_mask) for rollout in rollouts) / max(num_tokens, 1),
        tool_seconds_mean=fmean(
            sum(turn.seconds for turn in episode.turns if turn.kind is not TurnKind.SAMPLED) for episode in episodes
        ),
        num_retries=sum(episode.num_retries for episode in episodes),
    )


def _repetition(groups: Sequence[ScoredGroup]) -> float:
    """Mean over evenly spaced groups: all tokens of a large step would take seconds, and they may be on other nodes."""
    return fmean(_repetition_of(scored.group.rollouts[0]) for scored in groups[:: -(-len(groups) // _MAX_RESPONSES)])


def _repetition_of(rollout: Rollout) -> float:
    known = rollout.content.repetition
    return repeated_share(rollout.token_ids) if known is None else known


def _num_without_signal(groups: Sequence[ScoredGroup], samples: Sequence[TrainSample]) -> int:
    """Count groups without signal by their advantages: rewards do not show it for every estimator."""
    remaining = iter(samples)
    of_groups = ([next(remaining) for _ in scored.scores] for scored in groups)
    return sum(not any(map(_has_signal, of_group)) for of_group in of_groups)


def _has_signal(sample: TrainSample) -> bool:
    advantages, mask = sample.advantages, sample.rollout.loss_mask
    if is_repeated(advantages) and is_repeated(mask):
        return bool(mask[0]) and abs(float(advantages[0])) > _NO_ADVANTAGE
    return bool((np.abs(advantages[mask]) > _NO_ADVANTAGE).any())


def _outliers(rewards: npt.NDArray[np.float64]) -> list[int]:
    """Return the indices of the rewards that are far from the rest.

    The deviation is the median distance among rewards that differ from the median. If most rewards are equal, the few
    others are compared with each other, so that a rare success is not an outlier. Nor is the best of rewards that
    mostly pay for a part: what is far has to be apart from all the others too.
    """
    distances = np.abs(rewards - np.median(rewards))
    apart = distances[distances > 0]
    if not len(apart):
        return []
    limit = _OUTLIER_DEVIATIONS * _NORMAL_PER_MEDIAN * float(np.median(apart))
    apart_from_all = _OUTLIER_GAP * float(distances[distances <= limit].max())
    return [int(index) for index in np.flatnonzero(distances > max(limit, apart_from_all))]


def _first_outlier(
    groups: Sequence[ScoredGroup], rewards: npt.NDArray[np.float64], outliers: Sequence[int]
) -> RewardOutlier | None:
    if not outliers:
        return None
    uids = [
        scored.group.prompt.uid
        for scored in groups
        for rollout, score in zip(scored.group.rollouts, scored.scores, strict=True)
        if not score.is_masked and not _is_demonstration(rollout)
    ]
    return RewardOutlier(prompt_uid=uids[outliers[0]], reward=float(rewards[outliers[0]]))


def _tokens_by_version(rollouts: Sequence[Rollout]) -> dict[int, int]:
    counts: Counter[int] = Counter()
    for rollout in rollouts:
        mask = rollout.loss_mask
        is_whole = is_repeated(mask) and bool(mask[0])
        for version, number in counted(rollout.versions if is_whole else rollout.versions[mask]):
            counts[version] += number
    return dict(sorted(counts.items()))
