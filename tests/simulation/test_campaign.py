"""Histories in several processes: what is counted and written, also where a campaign is cut off."""

from __future__ import annotations

import io
from unittest import mock

import pytest

from tests.simulation import campaign
from tests.simulation.__main__ import Campaign
from tests.simulation.histories import worlds
from tests.simulation.tools import run_bench


def _even_only(seed: int) -> tuple[tuple[str, ...], str]:
    return ((f"odd: {seed}",) if seed % 2 else ()), f"history {seed}"


@pytest.mark.patient
def test_a_campaign_counts_histories_by_world_and_names_each_failing_seed() -> None:
    written = io.StringIO()
    with worlds():
        run_bench(0)  # leaves a thread behind, which forked processes do not have
    with mock.patch.dict(campaign.WORLDS, {"odd": _even_only}, clear=False):
        found = Campaign(first=100, files=[written])
        found.run(("tools", "odd"), seconds=0.3, num_jobs=2)
    lines = written.getvalue().splitlines()
    assert found.counts["tools"] > 0
    assert {failure.seed % 2 for failure in found.failures} == {1}
    assert "FAILED --world odd --seed 101: odd: 101" in lines
    total = f"{found.counts.total()} histories (odd {found.counts['odd']}, tools {found.counts['tools']}) from seed 100"
    assert any(total in line for line in lines)
    assert lines[-2].startswith(f"{len(found.failures)} times: odd: odd: N")


def test_the_worlds_of_a_campaign_get_the_same_time() -> None:
    spent = {"slow": 3.0, "quick": 1.0}
    assert next(campaign._fairly(spent)) == "quick"
