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


def test_a_format_is_that_of_the_whole_response_whatever_the_truth() -> None:
    for response, score in [("<a>x</a>", 1), ("<A>x</a>", 0), ("so <a>x</a>", 0), ("<a>x</a>\n", 0), ("", 0)]:
        found = compute_score("", response, "42", pattern="<a>.*</a>", is_format=True)
        assert found == {"score": score, "prediction": None}
    assert compute_score("", "<A>x</a>", "", pattern="<a>.*</a>", is_format=True, ignores_case=True)["score"] == 1


def test_case_counts_unless_it_is_ignored() -> None:
    assert compute_score("", "Paris", "paris", pattern=r"\w+")["score"] == 0
    assert compute_score("", "Paris", "paris", pattern=r"\w+", ignores_case=True) == {"score": 1, "prediction": "Paris"}
