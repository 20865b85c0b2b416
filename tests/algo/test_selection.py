from __future__ import annotations

import pytest

from megarl.algo.selection import Selection
from megarl.config.algorithm import FilterConfig
from megarl.errors import DataError
from tests.algo.groups import scored_group


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
