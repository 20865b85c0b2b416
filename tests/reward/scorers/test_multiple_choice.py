from __future__ import annotations

import time

import pytest

from megarl.reward.scorers.multiple_choice import compute_score


@pytest.mark.parametrize(
    ("response", "letter"),
    [
        ("B", "B"),
        (" (B). ", "B"),
        ("**B**", "B"),
        ("The answer is (C).", "C"),
        ("The answer is B because A is wrong.", "B"),
        ("Answer: **D**", "D"),
        ("Final answer - $A$", "A"),
        ("So the correct option is A, no wait, the answer is D", "D"),
        ("(A) is too small and (C) fits", "C"),
        (r"The answer is A. \boxed{C}", "C"),
        (r"\boxed{\text{(B)}}", "B"),
        (r"\boxed{B. 42}", "B"),
        (r"\boxed{42}", None),
        ("A cat sat on a mat.", None),
        ("The answer is Banana", None),
        ("The answer is E", None),
        ("b", None),
        ("", None),
        ("A" * 1_000_000, None),
    ],
)
def test_the_letter_the_response_settles_on_counts(response: str, letter: str | None) -> None:
    began = time.monotonic()
    for truth in "ABCD":
        assert compute_score("", response, truth) == {"score": float(truth == letter), "prediction": letter}
    assert time.monotonic() - began < 10


def test_more_letters_and_a_decorated_ground_truth() -> None:
    assert compute_score("", "answer: J", " (J) ", letters="ABCDEFGHIJ")["score"] == 1


@pytest.mark.parametrize("truth", ["E", "", "AB", "2"])
def test_a_ground_truth_that_is_no_choice_is_an_error(truth: str) -> None:
    with pytest.raises(ValueError, match="not one of the letters ABCD"):
        compute_score("", "A", truth)
