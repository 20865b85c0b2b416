from __future__ import annotations

from bench.packing import measure_packing


def test_every_goal_of_packing_is_met() -> None:
    figures = measure_packing(num_samples=4096)
    assert [figure.name for figure in figures if figure.is_missed] == []
    attention, work, _, handed_over = figures
    for figure in (attention, work, handed_over):
        assert figure.before is not None
        assert figure.before > figure.value
