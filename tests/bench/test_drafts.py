"""The comparison of drafted tokens with the policy's probabilities finds a small bias, and none where there is none."""

from __future__ import annotations

import numpy as np
import pytest

from bench.drafts import standard_errors


@pytest.mark.parametrize(("bias", "is_found"), [(0.0, False), (0.01, True), (-0.01, True)])
def test_tokens_that_are_drawn_too_often_or_too_rarely_are_found(bias: float, is_found: bool) -> None:
    """The probability of each token depends on the one before, as in a response."""
    generator = np.random.default_rng(0)
    is_kind, probabilities = np.zeros((1, 102_400)), np.zeros((1, 102_400))
    for place, drawn in enumerate(generator.random(102_400)):
        probabilities[0, place] = 0.85 if place and is_kind[0, place - 1] else 0.7
        is_kind[0, place] = drawn < probabilities[0, place] + bias
    assert bool(abs(standard_errors(is_kind, probabilities)[0]) > 3.5) is is_found
