from __future__ import annotations

import pytest

from megarl.observe.summary import summarize_step
from megarl.types import FinishReason, PolicyVersion, UpdateResult
from tests.observe.samples import demonstration_group, scored_group, update_stats

UPDATE = UpdateResult(version=PolicyVersion(7), stats=update_stats())


def test_a_step_is_summarized_over_all_its_rollouts() -> None:
    groups = [
        scored_group([0.0, 1.0], lengths=[2, 4]),
        scored_group([1.0, 1.0], lengths=[6, 8], finish=FinishReason.LENGTH),
    ]
    summary = summarize_step(step=7, groups=groups, update=UPDATE, kl_coef=None, seconds=4.0)
    assert summary.rollouts is not None
    assert (summary.step, summary.version) == (7, 7)
    assert summary.rollouts.reward_mean == 0.75
    assert summary.rollouts.reward_std == pytest.approx(0.4330127)
    assert summary.rollouts.component_means == {"exact": 0.75}
    assert (summary.rollouts.num_groups, summary.rollouts.num_zero_signal_groups) == (2, 1)
    assert (summary.rollouts.response_tokens_mean, summary.rollouts.response_tokens_max) == (5.0, 8)
    assert summary.rollouts.truncated_ratio == 0.5


def test_tokens_of_prompts_count_once_per_rollout() -> None:
    summary = summarize_step(
        step=1, groups=[scored_group([0.0, 1.0], lengths=[2, 4])], update=UPDATE, kl_coef=None, seconds=2.0
    )
    assert summary.num_tokens == (4 + 2) + (4 + 4)
    assert summary.tokens_per_second == 7.0


def test_demonstrations_have_no_reward() -> None:
    groups = [demonstration_group(lengths=[3]), demonstration_group(lengths=[5])]
    summary = summarize_step(step=1, groups=groups, update=UPDATE, kl_coef=None, seconds=2.0)
    assert summary.rollouts is None
    assert summary.num_tokens == 16
