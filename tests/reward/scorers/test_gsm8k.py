from __future__ import annotations

import time

import pytest

from megarl.reward.scorers.gsm8k import compute_score


@pytest.mark.parametrize(
    ("response", "truth", "strict", "flexible"),
    [
        ("so\n#### 42", "42", 1, 1),
        ("#### 42.0", "42", 1, 1),
        ("#### 1,234", "1234", 1, 1),
        ("#### $1,234.50", "1234.5", 1, 1),
        ("#### -7", "-7", 1, 1),
        ("#### \u22127", "-7", 1, 1),
        ("#### 7", "-7", 0, 0),
        ("#### 1\n#### 2", "2", 1, 1),
        ("#### 42 apples", "42", 1, 1),
        ("#### 18/3", "6", 0, 0),
        ("#### apples 42", "42", 0, 1),
        ("It is 42.", "42", 0, 1),
        ("It is 42, or 43", "42", 0, 0),
        ("It costs $1,000,000", "1000000", 0, 1),
        ("5 boxes and .5", "0.5", 0, 1),
        ("from 10-3", "3", 0, 1),
        ("x42", "42", 0, 0),
        ("", "42", 0, 0),
        ("9" * 1_000_000, "42", 0, 0),
        ("#### " + "1," * 500_000, "42", 0, 0),
        ("#### 5", "He has 2+3=<<2+3=5>>5\n#### 5", 1, 1),
    ],
)
def test_the_number_after_the_mark_counts(response: str, truth: str, strict: float, flexible: float) -> None:
    began = time.monotonic()
    assert compute_score("", response, truth)["score"] == strict
    assert compute_score("", response, truth, is_flexible=True)["score"] == flexible
    assert time.monotonic() - began < 5


def test_the_prediction_is_written_in_one_way() -> None:
    assert compute_score("", "#### $1,200.00", "7")["prediction"] == "1200"


def test_a_ground_truth_without_a_number_is_an_error() -> None:
    with pytest.raises(ValueError, match="has no number"):
        compute_score("", "#### 1", "none")
