from __future__ import annotations

import pytest

from megarl.planner.deployment import StepWorkload


@pytest.mark.parametrize(("mean", "longest"), [(500, 1000), (900, 1000), (100, 4096)])
def test_assumed_lengths_have_the_mean_and_the_maximum(mean: int, longest: int) -> None:
    workload = StepWorkload(mean_prompt_tokens=10, mean_response_tokens=mean, max_response_tokens=longest)
    lengths = workload.lengths(1000)
    assert len(lengths) == 1000
    assert max(lengths) == longest
    assert sum(lengths) / 1000 == pytest.approx(mean, rel=0.02)


def test_recorded_lengths_are_replayed_between_their_quantiles() -> None:
    workload = StepWorkload(
        mean_prompt_tokens=10, mean_response_tokens=40, max_response_tokens=200, quantiles=(10, 20, 30, 200)
    )
    lengths = sorted(workload.lengths(300))
    assert lengths[-1] == 200
    assert lengths[100] == pytest.approx(20, abs=1)
    assert lengths[200] == pytest.approx(30, abs=1)


def test_long_and_short_responses_are_mixed_in_the_order_of_requests() -> None:
    workload = StepWorkload(mean_prompt_tokens=10, mean_response_tokens=500, max_response_tokens=1000)
    lengths = workload.lengths(400)
    for first in range(0, 400, 100):
        assert sum(lengths[first : first + 100]) / 100 == pytest.approx(500, rel=0.1)
    assert workload.lengths(1) == [1000]
