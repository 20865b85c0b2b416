from __future__ import annotations

from megarl.config.hub import PUBLIC_MODELS
from megarl.config.roles import RolloutRoleConfig
from megarl.engine.process import deadlines_of

QWEN_32B = PUBLIC_MODELS["qwen2.5-32b"]
QWEN_72B = PUBLIC_MODELS["qwen2.5-72b"]


def test_a_long_response_of_a_large_model_has_several_times_the_time_it_needs() -> None:
    rollout = RolloutRoleConfig(pool="all", tensor=4)
    deadlines = deadlines_of(rollout, QWEN_32B, device="cuda", max_response_tokens=20_480)
    # The planner's ideal is 483 s: 23.6 ms a token.
    assert 4 * 483 < deadlines.request_s < 8 * 483
    short = deadlines_of(rollout, QWEN_32B, device="cuda", max_response_tokens=512)
    assert 600 < short.request_s < 700


def test_a_larger_model_may_take_longer_to_start() -> None:
    rollout = RolloutRoleConfig(pool="all", tensor=8)
    small, large = (
        deadlines_of(rollout, shape, device="cuda", max_response_tokens=1024) for shape in (QWEN_32B, QWEN_72B)
    )
    assert 600 < small.start_s < large.start_s < 800


def test_the_recipe_decides_where_it_has_a_deadline() -> None:
    rollout = RolloutRoleConfig(pool="all", start_timeout_s=7, request_timeout_s=9)
    deadlines = deadlines_of(rollout, QWEN_32B, device="cuda", max_response_tokens=20_480)
    assert (deadlines.start_s, deadlines.request_s) == (7, 9)
