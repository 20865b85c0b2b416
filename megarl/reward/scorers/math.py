"""Mathematics: the last box, else the last `Answer:` line, compared with the ground truth by math-verify.

math-verify parses LaTeX with a grammar. Its other parser, sympy's `parse_expr`, evaluates Python and never gets a
response.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping

from math_verify import LatexExtractionConfig, parse, verify

from megarl.reward.scorers import last_answer_line, last_boxed
from megarl.system.proc import limited_cpu

Result = dict[str, float | str | None]

_MAX_CHARACTERS = 2000
"""A longer answer does not count: parsing it takes seconds."""
_MAX_CPU_S = 5.0
_LATEX = (LatexExtractionConfig(),)
# Minus sign, en dash, no-break space, full-width equals sign.
_TIDY = str.maketrans({"\u2212": "-", "\u2013": "-", "\u00a0": " ", "\uff1d": "="})

# It logs whole responses.
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
    """Whether the two are equal as text or as mathematics."""
    prediction, truth = _tidy(prediction), _tidy(truth)
    if not prediction:
        return False
    if prediction == truth:
        return True
    # CPU time, not time on the clock: on a busy machine a right answer must not become a wrong one.
    try:
        with limited_cpu(_MAX_CPU_S):
            return bool(verify(_parsed(truth), _parsed(prediction), timeout_seconds=None))
    except TimeoutError:
        return False


def _tidy(answer: str) -> str:
    answer = answer.translate(_TIDY).strip().rstrip(".").strip()
    for opening, closing in (("$$", "$$"), ("$", "$"), ("\\(", "\\)"), ("\\[", "\\]")):
        if answer.startswith(opening) and answer.endswith(closing) and len(answer) > len(opening + closing):
            return answer[len(opening) : -len(closing)].strip()
    return answer


def _parsed(answer: str) -> list[object]:
    expressions: list[object] = parse(f"\\boxed{{{answer}}}", extraction_config=_LATEX, parsing_timeout=None)
    return expressions
