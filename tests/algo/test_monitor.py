from __future__ import annotations

from typing import Literal

import pytest

from megarl.algo.monitor import MismatchMonitor
from megarl.config.algorithm import GrpoConfig, MismatchConfig, SftConfig, TisConfig
from megarl.errors import NumericsError


def monitor(action: Literal["warn", "correct", "stop"]) -> MismatchMonitor:
    return MismatchMonitor(GrpoConfig(kind="grpo", mismatch=MismatchConfig(action=action)))


def test_each_threshold_is_reported_once() -> None:
    watching = monitor("warn")
    said = [watching.observe(mean) for mean in (0.001, 0.006, 0.007, 0.02, 0.03, 0.006)]
    assert [len(warnings) for warnings in said] == [0, 1, 0, 1, 0, 0]
    assert said[1] == ("mean |p_train - p_rollout| is 0.0060, above algorithm.mismatch.warn_above 0.005",)
    assert said[3][0].endswith("above algorithm.mismatch.act_above 0.01; consider algorithm.correction")
    assert watching.algorithm == GrpoConfig(kind="grpo")


def test_correct_switches_tis_on_for_the_rest_of_the_run() -> None:
    watching = monitor("correct")
    watching.observe(0.009)
    assert isinstance(watching.algorithm, GrpoConfig)
    assert watching.algorithm.correction is None
    (warning,) = watching.observe(0.011)
    assert warning.endswith("correcting with tis from the next step on")
    watching.observe(0.001)
    assert watching.algorithm.correction == TisConfig(kind="tis")


def test_a_monitor_goes_on_where_another_stood() -> None:
    first = monitor("correct")
    first.observe(0.02)
    second = MismatchMonitor(GrpoConfig(kind="grpo", mismatch=MismatchConfig(action="correct")), first.state)
    assert second.algorithm == first.algorithm
    assert second.observe(0.02) == ()


def test_only_stop_stops_and_only_above_its_threshold() -> None:
    for action in ("warn", "correct"):
        monitor(action).stop_above(0.5)
    monitor("stop").stop_above(0.01)
    with pytest.raises(
        NumericsError, match=r"is 0\.0200, above algorithm\.mismatch\.act_above 0\.01; this update was not"
    ):
        monitor("stop").stop_above(0.02)


def test_imitation_has_no_engine_to_disagree_with() -> None:
    watching = MismatchMonitor(SftConfig(kind="sft"))
    watching.stop_above(1.0)
    assert watching.observe(1.0) == ()
