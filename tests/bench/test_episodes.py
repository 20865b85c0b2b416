from __future__ import annotations

import pytest

from bench.episodes import measure_episodes


@pytest.mark.slow
def test_turns_are_played_and_their_processes_counted() -> None:
    driver, environments, together = measure_episodes(num_episodes=16, num_turns=3)
    assert driver.value > 0
    assert environments.value >= 0  # the clock of processes has hundredths of a second
    assert together.value == pytest.approx(driver.value + environments.value)
    assert together.goal == 2.0
