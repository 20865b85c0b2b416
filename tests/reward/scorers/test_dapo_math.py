from __future__ import annotations

import pytest

from megarl.reward.scorers.dapo_math import compute_score


@pytest.mark.parametrize(
    ("response", "truth", "is_right"),
    [
        ("so\nAnswer: 42", "42", True),
        ("Answer: $42$.", "42", True),
        (r"Answer: \boxed{42}", "42", True),
        ("Answer: 1,234", "1234", True),
        ("Answer: \u22127", "-7", True),
        ("Answer: x = 5", "5", True),
        (r"Answer: $\dfrac{1}{2}$", r"\frac12", True),
        (r"Answer: 90^\circ", "90", True),
        (r"Answer: 12 \text{ }", "12", True),
        ("Answer: (3)", "3", True),
        ("Answer: 1\nAnswer: 2", "2", True),
        ("Answer: 1\nAnswer: 2", "1", False),
        (r"\boxed{42}", "42", False),
        ("Answer: 0.5", r"\frac12", False),
        ("Answer: 42" + " " * 300, "42", False),
        ("", "42", False),
        ("Answer: " * 125_000, "42", False),
    ],
)
def test_right_is_one_and_wrong_is_minus_one(response: str, truth: str, is_right: bool) -> None:
    result = compute_score("", response, truth)
    assert (result["score"], result["acc"]) == ((1, 1) if is_right else (-1, 0))


def test_an_empty_ground_truth_is_an_error() -> None:
    with pytest.raises(ValueError, match="ground truth is empty"):
        compute_score("", "Answer: 1", "")
