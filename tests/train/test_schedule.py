from __future__ import annotations

import math

import pytest

from megarl.config.roles import OptimizerConfig
from megarl.train.schedule import learning_rate


def rates(total_steps: int, **options: object) -> list[float]:
    config = OptimizerConfig.model_validate({"learning_rate": 1.0, **options})
    return [learning_rate(step, config, total_steps) for step in range(total_steps)]


def test_a_constant_rate_stays() -> None:
    assert rates(3) == [1.0, 1.0, 1.0]


def test_the_warm_up_is_linear_and_ends_at_the_peak() -> None:
    assert rates(6, warmup_steps=4) == [0.25, 0.5, 0.75, 1.0, 1.0, 1.0]


def test_linear_decay_heads_for_the_floor_after_the_last_step() -> None:
    assert rates(5, decay="linear", min_learning_rate=0.5, warmup_steps=1) == pytest.approx(
        [1.0, 1.0, 0.875, 0.75, 0.625]
    )


def test_cosine_decay_is_half_way_in_the_middle() -> None:
    found = rates(8, decay="cosine", min_learning_rate=0.2)
    assert found[0] == 1.0
    assert found[4] == pytest.approx(0.6)
    assert found[2] == pytest.approx(0.2 + 0.8 * 0.5 * (1 + math.cos(math.pi / 4)))
    assert found == sorted(found, reverse=True)


@pytest.mark.parametrize("decay", ["linear", "cosine"])
def test_steps_beyond_the_end_keep_the_floor(decay: str) -> None:
    config = OptimizerConfig.model_validate({"learning_rate": 1.0, "decay": decay, "min_learning_rate": 0.1})
    assert learning_rate(50, config, 10) == pytest.approx(0.1)


def test_a_warm_up_longer_than_the_run_never_decays() -> None:
    assert rates(3, warmup_steps=10, decay="linear") == pytest.approx([0.1, 0.2, 0.3])
