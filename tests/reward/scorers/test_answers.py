from __future__ import annotations

import time

import pytest

from megarl.reward.scorers import last_answer_line, last_boxed

MEGABYTE = 1_000_000


@pytest.mark.parametrize(
    ("text", "content"),
    [
        (r"so \boxed{42}.", "42"),
        (r"\boxed{1} or rather \boxed{2}", "2"),
        (r"\boxed{\frac{1}{2}}", r"\frac{1}{2}"),
        (r"\boxed{a \boxed{7} b}", r"a \boxed{7} b"),
        (r"\boxed{\{1, 2\}}", r"\{1, 2\}"),
        (r"\boxed {x}", "x"),
        (r"\fbox{9}", "9"),
        (r"\boxed 7 apples", "7"),
        (r"\boxed{3} then \boxed{4", "3"),
        (r"\boxed{4 \boxed{5}", "5"),
        ("} \\boxed{6} {", "6"),
        (r"\boxed{}", ""),
        ("no box", None),
        ("", None),
    ],
)
def test_the_last_closed_box_counts_with_its_braces(text: str, content: str | None) -> None:
    assert last_boxed(text) == content


@pytest.mark.parametrize(
    ("text", "content"),
    [
        ("Answer: 5", "5"),
        ("answer : 5\nmore", "5"),
        ("**Answer:** 12 ", "12"),
        ("**Answer: 12**", "12"),
        ("Answer: 1\nAnswer: 2", "2"),
        ("The final answer: $x$", "$x$"),
        ("Answer:\n5", None),
        ("The answer is 5", None),
        ("", None),
    ],
)
def test_the_last_answer_line_counts_without_emphasis(text: str, content: str | None) -> None:
    assert last_answer_line(text) == content


@pytest.mark.parametrize(
    "garbage",
    [
        "\\boxed{" * (MEGABYTE // 7),
        "\\boxed{" * (MEGABYTE // 8) + "}" * (MEGABYTE // 8),
        "{" * MEGABYTE,
        "x" * MEGABYTE,
    ],
    ids=["opened", "nested", "braces", "letters"],
)
def test_a_megabyte_of_garbage_takes_no_time(garbage: str) -> None:
    began = time.monotonic()
    last_boxed(garbage)
    last_answer_line(garbage)
    assert time.monotonic() - began < 5
