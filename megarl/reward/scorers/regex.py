"""The answer is the last match of a pattern, or the response as a whole has its form."""

from __future__ import annotations

import re
from collections.abc import Mapping

Result = dict[str, float | str | None]


def compute_score(
    data_source: str,
    solution_str: str,
    ground_truth: str,
    extra_info: Mapping[str, object] | None = None,
    *,
    pattern: str,
    ignores_case: bool = False,
    is_format: bool = False,
) -> Result:
    if is_format:
        flags = re.IGNORECASE if ignores_case else 0
        return {"score": float(re.fullmatch(pattern, solution_str, flags) is not None), "prediction": None}
    prediction = find(pattern, solution_str)
    if prediction is None:
        return {"score": 0.0, "prediction": None}
    truth = ground_truth.strip()
    is_right = prediction.casefold() == truth.casefold() if ignores_case else prediction == truth
    return {"score": float(is_right), "prediction": prediction}


def find(pattern: str, text: str) -> str | None:
    """Return the group `answer` of the last match, else its first group, else the match; None if that is unset."""
    compiled = re.compile(pattern)
    last = None
    for last in compiled.finditer(text):  # noqa: B007 - only the last match counts
        pass
    if last is None:
        return None
    group: str | int = "answer" if "answer" in compiled.groupindex else min(compiled.groups, 1)
    answer: str | None = last.group(group)
    return None if answer is None else answer.strip()
