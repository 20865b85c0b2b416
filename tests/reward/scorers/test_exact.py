from __future__ import annotations

import pytest

from megarl.reward.scorers.exact import compute_score


@pytest.mark.parametrize(
    ("response", "score"), [("42", 1), (" 42\n", 1), ("42.", 0), ("4 2", 0), ("", 0), ("42" * 500_000, 0)]
)
def test_all_but_the_white_space_around_counts(response: str, score: float) -> None:
    assert compute_score("", response, "42 ") == score
