from __future__ import annotations

from typing import Literal

import pytest

from megarl.algo.monitor import MismatchMonitor, MonitorState
from megarl.config.algorithm import GrpoConfig, MismatchBaselineConfig, MismatchConfig, SftConfig, TisConfig
from megarl.errors import NumericsError


def monitor(action: Literal["warn", "correct", "stop"]) -> MismatchMonitor:
    return MismatchMonitor(GrpoConfig(kind="grpo", mismatch=MismatchConfig(action=action)))


def test_each_threshold_is_reported_once() -> None:
    watching = monitor("warn")
    said = [watching.observe(mean) for mean in (0.001, 0.006, 0.007, 0.02, 0.03, 0.006)]
    assert [len(warnings) for warnings in said] == [0, 1, 0, 1, 0, 0]
    assert said[1] == ("mean |p_train - p_rollout| is 0.006, above algorithm.mismatch.warn_above 0.005",)
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
        NumericsError, match=r"is 0\.02, above algorithm\.mismatch\.act_above 0\.01; this update was not"
    ):
        monitor("stop").stop_above(0.02)


def test_imitation_has_no_engine_to_disagree_with() -> None:
    watching = MismatchMonitor(SftConfig(kind="sft"))
    watching.stop_above(1.0)
    assert watching.observe(1.0) == ()


def relative(
    action: Literal["warn", "correct", "stop"], *, state: MonitorState | None = None, **keys: float
) -> MismatchMonitor:
    baseline = MismatchBaselineConfig(steps=2, warn_times=3, act_times=10, **keys)
    return MismatchMonitor(GrpoConfig(kind="grpo", mismatch=MismatchConfig(baseline=baseline, action=action)), state)


def test_a_run_can_be_its_own_measure() -> None:
    watching = relative("warn")
    # The first two steps are what the others are compared with, however large they are.
    said = [watching.observe(mean) for mean in (0.01, 0.03, 0.05, 0.07, 0.1, 0.3, 0.5)]
    assert [len(warnings) for warnings in said] == [0, 0, 0, 1, 0, 1, 0]
    assert said[3] == (
        "mean |p_train - p_rollout| is 0.07, above 0.06 "
        "(algorithm.mismatch.baseline.warn_times 3 x the run's baseline 0.02)",
    )
    assert "above 0.2 (algorithm.mismatch.baseline.act_times 10 x the run's baseline 0.02)" in said[5][0]


def test_rounding_errors_are_no_measure() -> None:
    watching = relative("stop")
    for mean in (1e-9, 0.0, 2e-4, 3e-4):
        watching.stop_above(mean)
        assert watching.observe(mean) == ()
    with pytest.raises(NumericsError, match=r"act_times 10 x the run's baseline 0\.0001"):
        watching.stop_above(2e-3)


def test_nothing_stops_a_run_that_has_no_measure_yet() -> None:
    watching = relative("stop")
    watching.stop_above(0.5)
    watching.observe(0.5)
    watching.stop_above(100.0)


@pytest.mark.parametrize("num_before", [1, 2, 3, 4])
def test_a_baseline_survives_a_resume(num_before: int) -> None:
    means = (0.01, 0.03, 0.05, 0.3, 0.3)
    whole = relative("correct")
    expected = [whole.observe(mean) for mean in means]
    first = relative("correct")
    said = [first.observe(mean) for mean in means[:num_before]]
    second = relative("correct", state=first.state)
    said += [second.observe(mean) for mean in means[num_before:]]
    assert said == expected
    assert second.state == whole.state
    assert second.algorithm == whole.algorithm
    assert second.state.has_switched_correction_on
