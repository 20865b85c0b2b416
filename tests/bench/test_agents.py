from __future__ import annotations

import pytest

from bench.agents import DIALECTS, measure_agents


@pytest.mark.slow
def test_requests_streams_and_idle_episodes_are_measured() -> None:
    figures = {figure.name: figure for figure in measure_agents(num_requests=16, num_idle=64)}
    for path in DIALECTS:
        part = figures[f"{path}: the endpoint's part of a request"]
        assert part.goal == 1.0
        turn = figures["a turn without the endpoint"].value
        assert part.value == pytest.approx(figures[f"{path}: a request"].value - turn)
        assert figures[f"{path}: the endpoint's part of a token"].goal == 0.25
        assert figures[f"{path}, streamed: a request"].value > 0
        assert figures[f"{path}: a request in echoes"].value > 1
        assert figures[f"{path}: first streamed token after the engine's"].value > 0
    assert figures["process of one episode"].value > 1
    for name in ("episode of an async class that waits for its tool", "async agent of `chat` that waits"):
        assert 0 < figures[f"{name}: memory of 64 idle"].value < 1
    assert {figure.unit for figure in figures.values()} == {
        "ms CPU",
        "us CPU",
        "ms",
        "GB",
        "KB",
        "% of a core",
        "MB",
        "x",
    }
