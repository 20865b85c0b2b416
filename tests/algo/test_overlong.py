from __future__ import annotations

import numpy as np
import pytest

from megarl.algo.overlong import length_penalty, without_cut
from megarl.types import TrainSample
from tests.algo.groups import scored_group


def test_the_penalty_has_the_golden_values() -> None:
    lengths = np.array([100, 16384, 18432, 20480])
    penalty = length_penalty(lengths, max_tokens=20480, buffer_tokens=4096, factor=1.0)
    assert penalty.tolist() == pytest.approx([0, 0, -0.5, -1])


def test_the_factor_scales_the_penalty() -> None:
    assert length_penalty(np.array([8]), max_tokens=10, buffer_tokens=4, factor=3.0).tolist() == [-1.5]


def test_a_response_cut_at_the_limit_leaves_the_loss_and_nothing_else_changes() -> None:
    finished, cut = scored_group(0, [1, 0], cut=[1]).group.rollouts
    whole, empty = (
        without_cut(
            TrainSample(
                prompt_ids=np.arange(2, dtype=np.int32),
                rollout=rollout,
                advantages=rollout.loss_mask.astype(np.float32),
            )
        )
        for rollout in (finished, cut)
    )
    assert whole.rollout is finished
    assert not empty.rollout.loss_mask.any()
    assert not empty.advantages.any()
    np.testing.assert_array_equal(empty.rollout.token_ids, cut.token_ids)
