from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

import numpy as np
import pytest

from megarl.observe.summary import RewardOutlier, RolloutSummary, StepSummary, summarize_step
from megarl.results import UpdateResult
from megarl.types import FinishReason, PolicyVersion, Score, ScoredGroup, TrainSample
from tests.observe.samples import demonstration_group, scored_group, train_samples, update_stats

UPDATE = UpdateResult(version=PolicyVersion(7), stats=replace(update_stats(), teacher_kl=None))


def summary_of(
    groups: Sequence[ScoredGroup],
    *,
    samples: Sequence[TrainSample] | None = None,
    dropped_groups: Mapping[str, int] | None = None,
    update: UpdateResult = UPDATE,
    step: int = 1,
    seconds: float = 2.0,
) -> StepSummary:
    return summarize_step(
        step=step,
        groups=groups,
        samples=train_samples(groups) if samples is None else samples,
        dropped_groups=dropped_groups or {},
        update=update,
        kl_coef=None,
        seconds=seconds,
    )


def rollouts_of(groups: Sequence[ScoredGroup], *, samples: Sequence[TrainSample] | None = None) -> RolloutSummary:
    rollouts = summary_of(groups, samples=samples).rollouts
    assert rollouts is not None
    return rollouts


def test_a_step_is_summarized_over_all_its_rollouts() -> None:
    groups = [
        scored_group([0.0, 1.0], lengths=[2, 4]),
        scored_group([1.0, 1.0], lengths=[6, 8], finish=FinishReason.LENGTH),
    ]
    summary = summary_of(groups, step=7, seconds=4.0)
    assert summary.rollouts is not None
    assert (summary.step, summary.version) == (7, 7)
    assert summary.rollouts.reward_mean == 0.75
    assert summary.rollouts.reward_std == pytest.approx(0.4330127)
    assert summary.rollouts.component_means == {"exact": 0.75}
    assert (summary.rollouts.num_groups, summary.rollouts.num_zero_signal_groups) == (2, 1)
    assert (summary.rollouts.response_tokens_mean, summary.rollouts.response_tokens_max) == (5.0, 8)
    assert summary.rollouts.truncated_ratio == 0.5
    assert (summary.epoch, summary.num_prompts, summary.prompt_tokens_mean) == (0, 2, 4.0)
    # Tokens of prompts count once per rollout.
    assert summary.num_tokens == (4 + 2) + (4 + 4) + (4 + 6) + (4 + 8)
    assert summary.tokens_per_second == 9.0


def test_demonstrations_have_no_reward() -> None:
    groups = [demonstration_group(lengths=[3]), demonstration_group(lengths=[5])]
    summary = summary_of(groups)
    assert summary.rollouts is None
    assert summary.num_tokens == 16


def test_a_group_has_signal_when_some_advantage_is_not_zero() -> None:
    groups = [scored_group([1.0, 1.0], lengths=[2, 2]), scored_group([0.1, 0.1, 0.1], lengths=[2, 2, 2])]
    assert rollouts_of(groups).num_zero_signal_groups == 2
    assert not rollouts_of(groups).has_signal
    # An estimator that compares with something else than the group learns from equal rewards.
    ones = [replace(sample, advantages=np.ones(2, dtype=np.float32)) for sample in train_samples(groups)]
    assert rollouts_of(groups, samples=ones).num_zero_signal_groups == 0


def test_a_teacher_is_a_signal() -> None:
    taught = replace(UPDATE, stats=replace(update_stats(), teacher_kl=0.1))
    summary = summary_of([scored_group([1.0, 1.0], lengths=[2, 2])], update=taught)
    assert summary.rollouts is not None
    assert summary.rollouts.has_signal


def test_advantages_outside_the_loss_are_no_signal() -> None:
    groups = [scored_group([0.0, 1.0], lengths=[2, 2])]
    out = [
        replace(sample, rollout=replace(sample.rollout, loss_mask=np.zeros(2, dtype=np.bool_)))
        for sample in train_samples(groups)
    ]
    assert rollouts_of(groups, samples=out).num_zero_signal_groups == 1


def test_groups_of_one_and_dropped_groups_are_counted() -> None:
    groups = [scored_group([1.0], lengths=[2]), scored_group([0.0, 1.0], lengths=[2, 2])]
    summary = summary_of(groups, dropped_groups={"equal": 3, "below_band": 1})
    assert summary.rollouts is not None
    assert summary.rollouts.num_single_groups == 1
    assert summary.rollouts.dropped_groups == {"equal": 3, "below_band": 1}
    assert summary.rollouts.num_dropped_groups == 4


def test_rollouts_that_nobody_could_score_are_counted_and_in_no_mean() -> None:
    masked = Score(value=0.0, components={}, is_masked=True)
    group = scored_group([1.0, 7.0, 0.5], lengths=[2, 2, 2])
    group = replace(group, scores=(group.scores[0], masked, group.scores[2]))
    rollouts = rollouts_of([group])
    assert rollouts.num_masked_rollouts == 1
    assert (rollouts.reward_mean, rollouts.reward_min) == (0.75, 0.5)


def test_a_reward_far_from_the_rest_is_counted_and_the_first_is_named() -> None:
    groups = [
        scored_group([0.0, 1.0, 0.0, 1.0], lengths=[2] * 4, number=0),
        scored_group([0.0, -1000.0, 0.0, 1.0], lengths=[2] * 4, number=1),
        scored_group([0.0, 0.0, 500.0, 1.0], lengths=[2] * 4, number=2),
    ]
    rollouts = rollouts_of(groups)
    assert rollouts.num_reward_outliers == 2
    assert rollouts.first_outlier == RewardOutlier(prompt_uid="train.parquet:1", reward=-1000.0)
    assert (rollouts.reward_min, rollouts.reward_median, rollouts.reward_max) == (-1000.0, 0.0, 500.0)


@pytest.mark.parametrize(
    "rewards",
    [
        [0.0] * 99 + [1.0],
        [1.0] * 99 + [0.0],
        [0.0] * 60 + [1.0] * 40,
        [0.5] * 100,
        [0.0] * 70 + [0.1, 0.15, 0.15, 0.2] * 6 + [0.5, 0.5, 1.2, 1.5],  # half a point at most for a part, one for all
        list(np.random.default_rng(0).normal(size=1000)),
        list(np.random.default_rng(0).uniform(-3, 3, size=1000)),
    ],
)
def test_rare_successes_and_ordinary_spreads_are_no_outliers(rewards: list[float]) -> None:
    assert rollouts_of([scored_group(rewards, lengths=[1] * len(rewards))]).num_reward_outliers == 0


def test_trained_tokens_are_counted_by_the_version_that_chose_them() -> None:
    groups = [scored_group([0.0, 1.0], lengths=[2, 3], version=3), scored_group([0.0], lengths=[4], version=2)]
    assert rollouts_of(groups).tokens_by_version == {2: 4, 3: 5}


def with_tokens(tokens: Sequence[Sequence[int]]) -> ScoredGroup:
    group = scored_group([0.0, 1.0], lengths=[len(row) for row in tokens])
    rollouts = tuple(
        replace(rollout, content=replace(rollout.content.load(), token_ids=np.array(row, dtype=np.int32)))
        for rollout, row in zip(group.group.rollouts, tokens, strict=True)
    )
    return replace(group, group=replace(group.group, rollouts=rollouts))


def test_repetition_is_the_share_of_windows_seen_before_in_the_same_response() -> None:
    fresh, looping = list(range(12)), [1, 2, 3] * 4
    assert rollouts_of([with_tokens([fresh, fresh])]).repetition_ratio == 0
    # Of nine windows of four tokens three are different.
    assert rollouts_of([with_tokens([looping, looping])]).repetition_ratio == pytest.approx(6 / 9)
    # The first response of each group stands for it.
    mixed = [with_tokens([fresh, looping]), with_tokens([looping, fresh])]
    assert rollouts_of(mixed).repetition_ratio == pytest.approx(3 / 9)


def test_a_response_shorter_than_a_window_does_not_repeat_and_one_of_one_token_is_empty() -> None:
    rollouts = rollouts_of([with_tokens([[5], [5, 5, 5]])])
    assert rollouts.repetition_ratio == 0
    assert rollouts.empty_ratio == 0.5


def test_repetition_that_was_computed_beside_the_tokens_is_not_computed_again() -> None:
    group = with_tokens([list(range(12)), [5]])
    first = group.group.rollouts[0]
    known = replace(first, content=replace(first.content.load(), repetition=0.25))
    rollouts = (known, *group.group.rollouts[1:])
    assert rollouts_of([replace(group, group=replace(group.group, rollouts=rollouts))]).repetition_ratio == 0.25


def test_repetition_looks_at_a_bounded_number_of_responses(monkeypatch: pytest.MonkeyPatch) -> None:
    looked_at = 0

    def share(token_ids: object) -> float:
        nonlocal looked_at
        looked_at += 1
        return 0.0

    monkeypatch.setattr("megarl.observe.summary.repeated_share", share)
    rollouts_of([scored_group([0.0, 1.0], lengths=[1, 1], number=number) for number in range(400)])
    assert 32 <= looked_at <= 64
