"""DAPO's verifier: the last `Answer:` line of the response's end, compared as normalised text; 1 or -1.

The public set-up asks for a last line `Answer: $Answer` and reads only the last 300 characters. The component `acc` is
1 or 0, for a filter on the share of right answers.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

from megarl.reward.scorers import last_answer_line, last_boxed

Result = dict[str, float | str | None]

_MINUS = "\u2212"
_NUM_LAST_CHARACTERS = 300
_REMOVED = re.compile(r"\\left|\\right|\\!|\\,|\\;|\\ |\\%|%|\^\\circ|\^\{\\circ\}|\\\$|\$|\\quad|~|\s")
_TEXT = re.compile(r"\\(?:text|textbf|mathrm|mathbf|mbox|overline)\s*\{([^{}]*)\}")
_FRACTION = re.compile(r"\\[dt]frac")
_SHORT_FRACTION = re.compile(r"\\frac(\d)(\d)")
_THOUSANDS = re.compile(r"(?<=\d),(?=\d{3}(?:\D|$))")


def compute_score(
    data_source: str, solution_str: str, ground_truth: str, extra_info: Mapping[str, object] | None = None
) -> Result:
    truth = normalized(ground_truth)
    if not truth:
        raise ValueError("the ground truth is empty")
    answer = last_answer_line(solution_str[-_NUM_LAST_CHARACTERS:])
    prediction = None if answer is None else normalized(answer)
    is_right = prediction == truth
    return {"score": 1.0 if is_right else -1.0, "acc": float(is_right), "prediction": prediction}


def normalized(answer: str) -> str:
    """Remove what changes only the look of an answer: `$\\dfrac{1}{2}$.` and `\\frac12` become equal."""
    answer = answer.replace(_MINUS, "-").strip()
    boxed = last_boxed(answer)
    answer = answer if boxed is None else boxed
    # "x = 5" answers 5.
    answer = answer.rpartition("=")[2]
    answer = _TEXT.sub(r"\1", answer)
    answer = _FRACTION.sub(r"\\frac", answer)
    answer = _SHORT_FRACTION.sub(r"\\frac{\1}{\2}", answer)
    answer = _REMOVED.sub("", answer)
    answer = _THOUSANDS.sub("", answer)
    return answer.rstrip(".").strip("()") if re.fullmatch(r"\(?-?\d[\d.]*\)?\.?", answer) else answer.rstrip(".")
