"""Mathematics: the last box, else the last `Answer:` line, compared with the ground truth by math-verify.

math-verify reads LaTeX with a grammar. Its other way to read text, through sympy's `parse_expr`, evaluates Python: it
is never given a response.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping

from math_verify import LatexExtractionConfig, parse, verify

from megarl.reward.scorers.boxes import last_answer_line, last_boxed

Result = dict[str, float | str | None]

_MAX_CHARACTERS = 2000
"""A longer answer is none: the grammar takes seconds for it."""
_TIMEOUT_S = 5
_READS = (LatexExtractionConfig(),)
# Minus sign, en dash, no-break space, full-width equals sign.
_TIDY = str.maketrans({"\u2212": "-", "\u2013": "-", "\u00a0": " ", "\uff1d": "="})

# It logs whole responses; a score of 0 says as much.
logging.getLogger("math_verify").setLevel(logging.CRITICAL)


def compute_score(
    data_source: str, solution_str: str, ground_truth: str, extra_info: Mapping[str, object] | None = None
) -> Result:
    truth = answer_of(ground_truth) or ground_truth.strip()
    if not truth:
        raise ValueError("the ground truth is empty")
    prediction = answer_of(solution_str)
    if prediction is None or len(prediction) > _MAX_CHARACTERS:
        return {"score": 0.0, "prediction": None}
    return {"score": float(is_equal(prediction, truth)), "prediction": prediction}


def answer_of(text: str) -> str | None:
    boxed = last_boxed(text)
    return boxed if boxed is not None else last_answer_line(text)


def is_equal(prediction: str, truth: str) -> bool:
    """As text, or as mathematics."""
    prediction, truth = _tidy(prediction), _tidy(truth)
    if not prediction:
        return False
    if prediction == truth:
        return True
    return bool(verify(_parsed(truth), _parsed(prediction), timeout_seconds=_TIMEOUT_S))


def _tidy(answer: str) -> str:
    answer = answer.translate(_TIDY).strip().rstrip(".").strip()
    for opening, closing in (("$$", "$$"), ("$", "$"), ("\\(", "\\)"), ("\\[", "\\]")):
        if answer.startswith(opening) and answer.endswith(closing) and len(answer) > len(opening + closing):
            return answer[len(opening) : -len(closing)].strip()
    return answer


def _parsed(answer: str) -> list[object]:
    found: list[object] = parse(f"\\boxed{{{answer}}}", extraction_config=_READS, parsing_timeout=_TIMEOUT_S)
    return found
