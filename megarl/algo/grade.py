"""Grades the answers to held-out prompts: mean@n, pass@k, majority@n. Knows scores and text, no engine."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from hashlib import blake2b

import numpy as np

from megarl.results import Grade, Grades
from megarl.types import Rollout, Score, ScoredGroup

_TOLERANCE = 1e-6
"""A sum of weighted components may miss its exact value by a rounding error."""
_MAX_ANSWER_CHARS = 64


def grade(groups: Sequence[ScoredGroup], *, right_from: float, pass_at: Sequence[int] = ()) -> Grades:
    """Grade all prompts together and by data source; every group has the same number of rollouts."""
    sources = sorted({scored.group.prompt.data_source for scored in groups})
    return Grades(
        overall=_grade(groups, right_from, pass_at),
        by_source={
            source: _grade(
                [scored for scored in groups if scored.group.prompt.data_source == source], right_from, pass_at
            )
            for source in sources
        },
    )


def _grade(groups: Sequence[ScoredGroup], right_from: float, pass_at: Sequence[int]) -> Grade:
    sizes = {len(scored.scores) for scored in groups}
    assert len(sizes) == 1, f"groups of {sorted(sizes)} rollouts cannot be graded together"
    (num_rollouts,) = sizes
    are_right = [[is_right(score, right_from=right_from) for score in scored.scores] for scored in groups]
    return Grade(
        num_prompts=len(groups),
        rollouts_per_prompt=num_rollouts,
        score_mean=float(np.mean([score.value for scored in groups for score in scored.scores])),
        accuracy=float(np.mean(are_right)),
        majority=float(
            np.mean([majority_is_right(_answers(scored), of) for scored, of in zip(groups, are_right, strict=True)])
        ),
        pass_at={
            k: float(np.mean([pass_at_k(num_rollouts, sum(of), k) for of in are_right])) for k in sorted(set(pass_at))
        },
    )


def is_right(score: Score, *, right_from: float) -> bool:
    return score.value >= right_from - _TOLERANCE


def pass_at_k(num_rollouts: int, num_right: int, k: int) -> float:
    """Probability that at least one of k rollouts drawn without replacement is right: 1 - C(n - c, k) / C(n, k).

    Computed as a product of factors between 0 and 1: binomial coefficients would overflow.
    """
    assert 1 <= k <= num_rollouts, f"pass@{k} of {num_rollouts} rollouts"
    assert 0 <= num_right <= num_rollouts, f"{num_right} of {num_rollouts} are right"
    num_wrong = num_rollouts - num_right
    if num_wrong < k:
        return 1.0
    return float(1.0 - np.prod(1.0 - k / np.arange(num_wrong + 1, num_rollouts + 1, dtype=np.float64)))


def majority_is_right(answers: Sequence[str], are_right: Sequence[bool]) -> bool:
    """Whether the most frequent answer is right, by its first rollout; the first of equally frequent answers counts."""
    # most_common keeps the order of first occurrence among equals.
    ((chosen, _),) = Counter(answers).most_common(1)
    return are_right[answers.index(chosen)]


def _answers(scored: ScoredGroup) -> list[str]:
    if len(scored.scores) == 1:
        return [""]  # nothing to compare: the text is not loaded
    return [answer_of(rollout, score) for rollout, score in zip(scored.group.rollouts, scored.scores, strict=True)]


def answer_of(rollout: Rollout, score: Score) -> str:
    """Return the text by which answers are compared: the scorer's prediction, else the whole response."""
    if score.prediction is not None:
        return score.prediction
    made = rollout.content.answer
    return answer_in(rollout.text) if made is None else made


def answer_in(text: str) -> str:
    """Return the stripped text or, where it is long, a digest to compare: it may be made where the text is."""
    answer = text.strip()
    return answer if len(answer) <= _MAX_ANSWER_CHARS else blake2b(answer.encode(errors="replace")).hexdigest()
