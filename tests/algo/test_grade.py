from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megarl.algo.grade import answer_of, grade, majority_is_right, pass_at_k
from megarl.types import ScoredGroup
from tests.algo.groups import scored_group


@st.composite
def counts(draw: st.DrawFn, *, max_rollouts: int) -> tuple[int, int, int]:
    num_rollouts = draw(st.integers(1, max_rollouts))
    return num_rollouts, draw(st.integers(0, num_rollouts)), draw(st.integers(1, num_rollouts))


@given(counts(max_rollouts=2000))
@settings(max_examples=200)
def test_pass_at_k_is_exact_for_many_rollouts(numbers: tuple[int, int, int]) -> None:
    num_rollouts, num_right, k = numbers
    # Python's integers do not overflow; one division rounds once.
    exact = 1 - math.comb(num_rollouts - num_right, k) / math.comb(num_rollouts, k)
    assert pass_at_k(*numbers) == pytest.approx(exact, abs=1e-12)


@pytest.mark.parametrize(
    ("numbers", "expected"),
    [
        ((10, 3, 1), 0.3),
        ((10, 3, 5), 1 - 21 / 252),
        ((8, 0, 8), 0.0),
        ((8, 1, 8), 1.0),
        ((4, 2, 2), 1 - 1 / 6),
        ((100_000, 1, 1000), 0.01),
    ],
)
def test_golden_numbers_of_pass_at_k(numbers: tuple[int, int, int], expected: float) -> None:
    assert pass_at_k(*numbers) == pytest.approx(expected, abs=1e-12)


@pytest.mark.parametrize(
    ("answers", "verdicts", "expected"),
    [
        ("abb", [True, False, False], False),
        ("abb", [False, True, True], True),
        ("ab", [True, False], True),
        ("ba", [False, True], False),
        ("abab", [False, True, False, True], False),
        ("aab", [True, False, True], True),
    ],
)
def test_of_a_tie_the_answer_that_came_first_counts(answers: str, verdicts: list[bool], expected: bool) -> None:
    assert majority_is_right(list(answers), verdicts) is expected


def with_texts(group: ScoredGroup, texts: Sequence[str], *, predictions: Sequence[str | None]) -> ScoredGroup:
    rollouts = tuple(
        replace(rollout, content=replace(rollout.content.load(), text=text))
        for rollout, text in zip(group.group.rollouts, texts, strict=True)
    )
    scores = tuple(
        replace(score, prediction=prediction) for score, prediction in zip(group.scores, predictions, strict=True)
    )
    return replace(group, group=replace(group.group, rollouts=rollouts), scores=scores)


def test_an_answer_is_the_prediction_or_else_the_stripped_text() -> None:
    group = with_texts(scored_group(0, [1, 0]), ["so it is 7", " 8 \n"], predictions=["7", None])
    found = [answer_of(rollout, score) for rollout, score in zip(group.group.rollouts, group.scores, strict=True)]
    assert found == ["7", "8"]


def test_long_texts_are_compared_by_what_stands_for_them() -> None:
    long, other = "a long answer " * 20, "a long answer " * 20 + "but another"
    group = with_texts(scored_group(0, [0, 1, 1]), [long, other, f" {other}"], predictions=[None] * 3)
    found = [answer_of(rollout, score) for rollout, score in zip(group.group.rollouts, group.scores, strict=True)]
    assert found[1] == found[2] != found[0]
    assert max(map(len, found)) < len(long)
    assert grade([group], right_from=1.0).overall.majority == 1.0


def test_the_majority_goes_by_predictions() -> None:
    group = with_texts(scored_group(0, [1, 1, 0]), ["7", "seven: 7", "8"], predictions=["7", "7", "8"])
    apart = with_texts(scored_group(0, [0, 1, 1]), ["8", "seven: 7", "7"], predictions=[None, None, None])
    grades = grade([group, apart], right_from=1.0)
    assert grades.overall.majority == 0.5


def of_source(group: ScoredGroup, source: str) -> ScoredGroup:
    prompt = replace(group.group.prompt, data_source=source)
    return replace(group, group=replace(group.group, prompt=prompt))


def test_groups_are_graded_together_and_by_source() -> None:
    groups = [
        of_source(scored_group(0, [1.0, 0.5, 0.0, 0.0]), "sums"),
        of_source(scored_group(1, [1.0, 1.0, 1.0, 0.0]), "sums"),
        of_source(scored_group(2, [0.0, 0.0, 0.0, 0.0]), "code"),
    ]
    grades = grade(groups, right_from=1.0, pass_at=[2, 1])
    assert grades.overall.num_prompts == 3
    assert grades.overall.rollouts_per_prompt == 4
    assert grades.overall.score_mean == pytest.approx(4.5 / 12)
    assert grades.overall.accuracy == pytest.approx(4 / 12)
    assert grades.overall.pass_at == {1: pytest.approx(4 / 12), 2: pytest.approx((0.5 + 1 + 0) / 3)}
    assert list(grades.by_source) == ["code", "sums"]
    assert grades.by_source["code"].accuracy == 0
    assert grades.by_source["sums"].pass_at[2] == pytest.approx(0.75)


@pytest.mark.parametrize(("right_from", "accuracy"), [(1.0, 0.5), (0.5, 0.75), (-1.0, 1.0)])
def test_the_recipe_says_from_which_score_on_an_answer_is_right(right_from: float, accuracy: float) -> None:
    # 0.7 + 0.2 + 0.1 is a little less than 1.
    group = scored_group(0, [1.0, 0.7 + 0.2 + 0.1, 0.5, -1.0])
    assert grade([group], right_from=right_from).overall.accuracy == accuracy


def test_one_rollout_per_prompt_makes_all_numbers_the_same() -> None:
    grades = grade([scored_group(0, [1.0]), scored_group(1, [0.0])], right_from=1.0, pass_at=[1])
    assert grades.overall.accuracy == grades.overall.majority == grades.overall.pass_at[1] == 0.5
