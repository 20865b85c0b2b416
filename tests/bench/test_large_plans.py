from __future__ import annotations

import pytest

from bench.large_plans import PUBLISHES, rehearse
from bench.planning import PUBLISH_GOALS, start_in_fresh_process

_SLOWER = 5
"""A busy machine may be slower by this factor; the benchmark holds the goal itself."""


@pytest.mark.patient
@pytest.mark.parametrize("name", PUBLISHES)
def test_a_large_publish_is_planned_near_its_goal(name: str) -> None:
    sample = start_in_fresh_process(["rehearse", name])
    assert sample.cpu_seconds < _SLOWER * PUBLISH_GOALS[name].seconds
    assert sample.megabytes < PUBLISH_GOALS[name].megabytes


def test_every_process_finds_the_same_plan() -> None:
    name = next(iter(PUBLISHES))
    assert rehearse(name) == rehearse(name)
