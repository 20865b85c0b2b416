"""A small soak: the same tool as `make soak`, with an accident."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.faults.soak import soak


@pytest.mark.parametrize(
    ("kinds", "num_steps", "num_faults"),
    [
        (("trainer rank killed",), 8, 1),
        pytest.param((), 24, 3, marks=pytest.mark.slow),
    ],
    ids=["short", "long"],
)
def test_a_run_outlives_accidents(kinds: tuple[str, ...], num_steps: int, num_faults: int, tmp_path: Path) -> None:
    told: list[str] = []
    found = soak(tmp_path, num_steps=num_steps, every=4, seed=4, num_engines=1, kinds=kinds, tell=told.append)
    assert found is not None
    assert sum(found.faults.values()) >= num_faults
    assert told[0].startswith("seed 4: ")
