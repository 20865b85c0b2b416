"""The answer is a letter, read from the response in the ways that people and models write it.

In this order: the last box (`\\boxed{B}`, `\\boxed{\\text{(B)}}`), the last "answer ... B" phrase, a response that is
only a letter, the last letter in parentheses. A bare letter in a sentence does not count: "A" is a word.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

from megarl.reward.scorers import last_boxed

Result = dict[str, float | str | None]

_WRAPPING = re.compile(r"\\(?:text|textbf|mathrm|mathbf)\s*\{([^{}]*)\}")


def compute_score(
    data_source: str,
    solution_str: str,
    ground_truth: str,
    extra_info: Mapping[str, object] | None = None,
    *,
    letters: str = "ABCD",
) -> Result:
    truth = _bare(ground_truth)
    if len(truth) != 1 or truth not in letters:
        raise ValueError(f"the ground truth {ground_truth[:40]!r} is not one of the letters {letters}")
    prediction = choice(solution_str, letters)
    return {"score": float(prediction == truth), "prediction": prediction}


def choice(text: str, letters: str) -> str | None:
    boxed = last_boxed(text)
    if boxed is not None:
        letter = re.match(rf"\(?([{letters}])(?![A-Za-z])", _bare(boxed))
        return letter[1] if letter else None
    patterns = (
        # "the answer is (B)", "Answer: **B**", "final answer - B."; no letter follows it.
        rf"(?i:answer|choice|option)(?i:\s+is|\s+would\s+be)?\s*[:=\-]?[\s*_$(\[]*([{letters}])(?![A-Za-z'\u2019])",
        rf"\A[\s*_$(\[]*([{letters}])[\s*_$)\].:]*\Z",
        rf"\(([{letters}])\)",
    )
    for pattern in patterns:
        matches = re.findall(pattern, text)
        if matches:
            return str(matches[-1])
    return None


def _bare(text: str) -> str:
    return _WRAPPING.sub(r"\1", text).strip().strip("().*$ ")
