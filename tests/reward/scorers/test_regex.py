from __future__ import annotations

import pytest

from megarl.reward.scorers.regex import compute_score

TAGGED = r"<answer>(.*?)</answer>"


@pytest.mark.parametrize(
    ("pattern", "response", "score"),
    [
        (TAGGED, "<answer> 42 </answer>", 1),
        (TAGGED, "<answer>1</answer> no: <answer>42</answer>", 1),
        (TAGGED, "<answer>42</answer> no: <answer>1</answer>", 0),
        (TAGGED, "42", 0),
        (TAGGED, "", 0),
        (TAGGED, "x" * 1_000_000, 0),
        (r"(\w+) is (?P<answer>\d+)", "x is 42", 1),
        (r"\d+", "between 7 and 42", 1),
        (r"a|(b)", "a", 0),
    ],
)
def test_the_last_match_counts(pattern: str, response: str, score: float) -> None:
    assert compute_score("", response, "42", pattern=pattern)["score"] == score


def test_case_counts_unless_it_is_ignored() -> None:
    assert compute_score("", "Paris", "paris", pattern=r"\w+")["score"] == 0
    assert compute_score("", "Paris", "paris", pattern=r"\w+", ignores_case=True) == {"score": 1, "prediction": "Paris"}
