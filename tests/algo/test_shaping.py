from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest

from megarl.algo.algorithm import build_algorithm
from megarl.algo.shaping import Selection
from megarl.config.algorithm import (
    AlgorithmConfig,
    FilterConfig,
    GaeConfig,
    GdpoConfig,
    GroupConfig,
    GrpoConfig,
    KlRewardConfig,
    ReinforcePpConfig,
    RemaxConfig,
)
from megarl.errors import DataError
from megarl.stages import Algorithm
from megarl.types import Estimates, FloatArray, Score, ScoredGroup
from tests.algo.groups import scored_group, with_baseline

MASKED = Score(value=0.0, components={}, is_masked=True)


@pytest.mark.parametrize(
    ("config", "rewards", "is_kept"),
    [
        (FilterConfig(), [1, 0, 0], True),
        (FilterConfig(), [1, 1, 1], False),
        (FilterConfig(), [0, 0, 0], False),
        (FilterConfig(), [0.1 + 0.2, 0.3, 0.3], False),
        (FilterConfig(tolerance=0.1), [0.5, 0.55, 0.46], False),
        (FilterConfig(tolerance=0), [0.5, 0.5 + 1e-12], True),
        (FilterConfig(lowest_mean=0.2), [1, 0, 0, 0, 0, 0], False),
        (FilterConfig(lowest_mean=0.25), [1, 0, 0, 0], True),
        (FilterConfig(highest_mean=0.7), [1, 1, 1, 0], False),
        (FilterConfig(lowest_mean=0.2, highest_mean=0.7), [1, 0], True),
    ],
)
def test_a_group_is_kept_when_its_rewards_say_something(
    config: FilterConfig, rewards: list[float], is_kept: bool
) -> None:
    assert Selection(config).keeps(scored_group(0, rewards)) is is_kept


def test_a_group_is_kept_for_rewards_of_tokens_alone() -> None:
    group = scored_group(0, [1, 1])
    assert not Selection(FilterConfig()).keeps(group)
    tokens = (0.5, *(0.0,) * (group.group.rollouts[0].num_tokens - 1))
    scores = (replace(group.scores[0], tokens=tokens), group.scores[1])
    assert Selection(FilterConfig()).keeps(replace(group, scores=scores))


def test_a_component_can_decide_instead_of_the_score() -> None:
    group = scored_group(0, [1, 0], components=[{"right": 1.0}, {"right": 1.0}])
    assert Selection(FilterConfig()).keeps(group)
    assert not Selection(FilterConfig(component="right")).keeps(group)


def test_a_component_the_reward_does_not_give_is_an_error() -> None:
    group = scored_group(3, [1, 0], components=[{"right": 1.0}, {"right": 1.0}])
    with pytest.raises(DataError, match=r"train\.parquet:3 has no component form; it has right"):
        Selection(FilterConfig(component="form")).keeps(group)


def test_too_many_dropped_in_a_row_end_the_run_with_the_reason() -> None:
    selection = Selection(FilterConfig(max_dropped_groups=3))
    hopeless, good = scored_group(7, [0, 0]), scored_group(8, [0, 1])
    dropped_then_kept = [selection.keeps(group) for group in (hopeless, hopeless, good, hopeless, hopeless)]
    assert dropped_then_kept == [False, False, True, False, False]
    with pytest.raises(DataError, match=r"dropped 3 groups in a row; .* train\.parquet:7, because every score is 0\."):
        selection.keeps(hopeless)


def test_dropped_groups_are_counted_by_cause_since_the_last_time() -> None:
    selection = Selection(FilterConfig(lowest_mean=0.2, highest_mean=0.7))
    for rewards in ([0, 0], [1, 1], [1, 1, 1, 0], [1, 0, 0, 0, 0, 0], [1, 0]):
        selection.keeps(scored_group(0, rewards))
    assert selection.take_dropped() == {"above_band": 1, "below_band": 1, "equal": 2}
    assert selection.take_dropped() == {}


def build(config: AlgorithmConfig) -> Algorithm:
    return build_algorithm(config, max_response_tokens=10)


def masked(group: ScoredGroup, *places: int) -> ScoredGroup:
    return replace(
        group, scores=tuple(MASKED if place in places else score for place, score in enumerate(group.scores))
    )


def without(group: ScoredGroup, *places: int) -> ScoredGroup:
    kept = [place for place in range(len(group.scores)) if place not in places]
    return replace(
        group,
        group=replace(group.group, rollouts=tuple(group.group.rollouts[place] for place in kept)),
        scores=tuple(group.scores[place] for place in kept),
    )


def groups() -> list[ScoredGroup]:
    parts = [{"right": value} for value in (1.0, 0.0, 0.0, 1.0)]
    first = with_baseline(scored_group(0, [1, 0, 0, 1], components=parts), score=0.5, length=3)
    second = with_baseline(scored_group(1, [0.5, 0, 2, 0], components=parts), score=0.0, length=2)
    return [first, second]


def numbers(of: Sequence[ScoredGroup]) -> tuple[FloatArray, ...]:
    """Return numbers that differ between rollouts and do not depend on their position in the group."""
    return tuple(
        np.linspace(-1, 0, len(rollout.token_ids), dtype=np.float32) - scored.group.prompt.position
        for scored in of
        for rollout in scored.group.rollouts
    )


def estimates(of: Sequence[ScoredGroup]) -> Estimates:
    found = numbers(of)
    return Estimates(logprobs=found, reference_logprobs=tuple(array * 1.5 for array in found), values=found)


@pytest.mark.parametrize(
    "config",
    [
        GrpoConfig(kind="grpo", kl=KlRewardConfig(kind="reward", coef=0.1)),
        GroupConfig(kind="rloo"),
        GroupConfig(kind="opo"),
        GroupConfig(kind="gpg"),
        GroupConfig(kind="grpo_passk"),
        GroupConfig(kind="reinforce_pp_baseline"),
        ReinforcePpConfig(kind="reinforce_pp"),
        RemaxConfig(kind="remax"),
        GdpoConfig(kind="gdpo", weights={"right": 1.0}),
        GaeConfig(kind="gae"),
    ],
    ids=lambda config: config.kind,
)
def test_a_masked_rollout_is_as_if_it_had_never_been_but_for_its_place(config: AlgorithmConfig) -> None:
    first, second = groups()
    given = [masked(first, 1), masked(second, 0, 3)]
    expected_of = [without(first, 1), without(second, 0, 3)]
    samples = build(config).assign(given, estimates(given))
    expected = build(config).assign(expected_of, estimates(expected_of))
    assert len(samples) == 8
    kept = [samples[place] for place in (0, 2, 3, 5, 6)]
    for sample, other in zip(kept, expected, strict=True):
        assert np.array_equal(sample.advantages, other.advantages)
        assert np.array_equal(sample.rollout.loss_mask, other.rollout.loss_mask)
        assert (sample.returns is None) == (other.returns is None)
        if sample.returns is not None and other.returns is not None:
            assert np.array_equal(sample.returns, other.returns)
    for place in (1, 4, 7):
        assert not samples[place].rollout.loss_mask.any()
        assert not samples[place].advantages.any()
        assert len(samples[place].advantages) == len(samples[place].rollout.token_ids)
        assert (samples[place].returns is None) == (samples[0].returns is None)


def test_a_group_without_a_score_is_dropped_and_counted() -> None:
    algorithm = build(GrpoConfig(kind="grpo"))
    first, _ = groups()
    assert algorithm.keeps(masked(first, 0, 1, 2))
    assert not algorithm.keeps(masked(first, 0, 1, 2, 3))
    assert not algorithm.keeps(replace(first, baseline=MASKED))
    assert algorithm.take_dropped() == {"masked": 2}
    assert algorithm.take_dropped() == {}


def test_a_filter_looks_at_scored_rollouts_only() -> None:
    algorithm = build(GrpoConfig(kind="grpo", filter=FilterConfig(component="right")))
    first, _ = groups()
    assert algorithm.keeps(masked(first, 1))
    assert not algorithm.keeps(masked(first, 1, 2))
    assert algorithm.take_dropped() == {"equal": 1}
