from __future__ import annotations

import pytest

from bench.algo import KINDS, StepMeasurement, measure_steps
from megarl.errors import MachineError


@pytest.mark.slow
def test_a_small_step_is_measured_in_processes_of_its_own() -> None:
    found = measure_steps(num_rollouts=64, num_tokens=100, repeats=1)
    assert [item.kind for item in found] == list(KINDS)
    for item in found:
        assert (item.num_rollouts, item.num_tokens) == (64, 100)
        assert 0 < item.seconds < 10
        assert item.peak_megabytes > item.input_megabytes
    grpo, gae = found
    # 13 bytes a token (ids, log-probabilities, versions, mask), 4 of values, and a prompt per group of 16.
    assert 0.083 < grpo.input_megabytes < 0.1
    assert gae.input_megabytes - grpo.input_megabytes == pytest.approx(64 * 100 * 4 / 1e6, abs=1e-3)


@pytest.mark.patient
def test_what_fails_is_said() -> None:
    with pytest.raises(MachineError, match=r"^bench algo: grpo failed: .*; choose fewer --rollouts or --tokens"):
        measure_steps(num_rollouts=16, num_tokens=-1, repeats=1)


@pytest.mark.parametrize(
    ("seconds", "peak_megabytes", "ratio"), [(1.0, 20.0, 2 / 3), (3.0, 20.0, 1.5), (1.0, 60.0, 2.0)]
)
def test_the_worst_of_time_and_memory_decides(seconds: float, peak_megabytes: float, ratio: float) -> None:
    found = StepMeasurement(
        kind="gae",
        num_rollouts=32,
        num_tokens=64,
        assign_seconds=seconds / 2,
        pack_seconds=seconds / 2,
        cpu_seconds=0.5,
        input_megabytes=10.0,
        peak_megabytes=peak_megabytes,
    )
    assert found.worst_ratio == pytest.approx(ratio)
