from __future__ import annotations

import pytest

from megarl.algo.kl_control import adapted
from megarl.config.algorithm import AdaptiveKlConfig

CONFIG = AdaptiveKlConfig(target=0.1, horizon=10_000)


def test_the_coefficient_has_the_golden_number() -> None:
    assert adapted(0.001, CONFIG, kl=0.3, num_sequences=1024) == pytest.approx(0.00102048, abs=1e-10)


@pytest.mark.parametrize(("kl", "direction"), [(0.0, -1), (0.05, -1), (0.1, 0), (0.11, 1), (5.0, 1)])
def test_it_follows_the_distance_by_a_fifth_at_most(kl: float, direction: int) -> None:
    change = adapted(1.0, CONFIG, kl=kl, num_sequences=10_000) - 1
    assert change * direction >= 0
    assert (change == 0) == (direction == 0)
    assert abs(change) <= 0.2 + 1e-12
