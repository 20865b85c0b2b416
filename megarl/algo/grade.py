"""How well held-out prompts were answered: mean@n, pass@k, majority@n. Knows scores and text, no engine."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import numpy as np

from megarl.results import Grade, Grades
from megarl.types import Rollout, Score, ScoredGroup

_TOLERANCE = 1e-6
"""A sum of weighted components may miss the score it stands for by a rounding error."""


def grade(groups: Sequence[ScoredGroup], *, right_from: float, pass_at: Sequence[int] = ()) -> Grades:
    """All prompts together and by data source; every group has equally many rollouts."""
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
    verdicts = [[is_right(score, right_from=right_from) for score in scored.scores] for scored in groups]
    return Grade(
        num_prompts=len(groups),
        rollouts_per_prompt=num_rollouts,
        score_mean=float(np.mean([score.value for scored in groups for score in scored.scores])),
        accuracy=float(np.mean(verdicts)),
        majority=float(
            np.mean([majority_is_right(_answers(scored), of) for scored, of in zip(groups, verdicts, strict=True)])
        ),
        pass_at={
            k: float(np.mean([pass_at_k(num_rollouts, sum(of), k) for of in verdicts])) for k in sorted(set(pass_at))
        },
    )


def is_right(score: Score, *, right_from: float) -> bool:
    return score.value >= right_from - _TOLERANCE


def pass_at_k(num_rollouts: int, num_right: int, k: int) -> float:
    """How likely at least one of k rollouts drawn without replacement is right: 1 - C(n - c, k) / C(n, k).

    As a product of factors between 0 and 1: no binomial coefficient is ever formed, whatever n is.
    """
    assert 1 <= k <= num_rollouts, f"pass@{k} of {num_rollouts} rollouts"
    assert 0 <= num_right <= num_rollouts, f"{num_right} of {num_rollouts} are right"
    num_wrong = num_rollouts - num_right
    if num_wrong < k:
        return 1.0
    return float(1.0 - np.prod(1.0 - k / np.arange(num_wrong + 1, num_rollouts + 1, dtype=np.float64)))


def majority_is_right(answers: Sequence[str], verdicts: Sequence[bool]) -> bool:
    """Whether the most frequent answer is right, judged by its first rollout; of a tie, the one that came first."""
    # most_common keeps the order of first occurrence among equals.
    ((chosen, _),) = Counter(answers).most_common(1)
    return verdicts[answers.index(chosen)]


def _answers(scored: ScoredGroup) -> list[str]:
    return [answer_of(rollout, score) for rollout, score in zip(scored.group.rollouts, scored.scores, strict=True)]


def answer_of(rollout: Rollout, score: Score) -> str:
    """What counts as the same answer: the scorer's prediction, else the whole response, stripped."""
    return rollout.text.strip() if score.prediction is None else score.prediction
