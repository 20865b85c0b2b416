"""A small soak: the same tool as `make soak`, with accidents."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.faults.soak import soak


@pytest.mark.slow
@pytest.mark.usefixtures("whole_run")
def test_a_run_outlives_accidents(tmp_path: Path) -> None:
    told: list[str] = []
    found = soak(tmp_path, num_steps=24, every=4, seed=4, num_engines=1, kinds=(), tell=told.append)
    assert found is not None
    assert sum(found.faults.values()) >= 3
    assert told[0].startswith("seed 4: ")
