"""Grade-school word problems: the answer is the number after `####`, as in the data set's own solutions."""

from __future__ import annotations

import re
from collections.abc import Mapping
from decimal import Decimal

Result = dict[str, float | str | None]

_SIGN = r"[-\u2212+]?\$?"
_NUMBER = rf"{_SIGN}\s?(?:\d{{1,3}}(?:,\d{{3}})+(?!\d)|\d+)(?:\.\d+)?|{_SIGN}\.\d+"
_MARKED = re.compile(rf"####\s*({_NUMBER})")
_ANYWHERE = re.compile(rf"(?<![\w.])(?:{_NUMBER})")


def compute_score(
    data_source: str,
    solution_str: str,
    ground_truth: str,
    extra_info: Mapping[str, object] | None = None,
    *,
    is_flexible: bool = False,
) -> Result:
    truth = _truth(ground_truth)
    prediction = final_number(solution_str, is_flexible=is_flexible)
    return {
        "score": float(prediction == truth),
        "prediction": None if prediction is None else f"{prediction:f}",
    }


def final_number(text: str, *, is_flexible: bool) -> Decimal | None:
    marked = _MARKED.findall(text)
    if marked:
        return _decimal(marked[-1])
    if is_flexible and (numbers := _ANYWHERE.findall(text)):
        return _decimal(numbers[-1])
    return None


def _truth(text: str) -> Decimal:
    """Read the ground truth: a bare number, or the data set's whole solution with its `####`."""
    number = final_number(text if "####" in text else f"#### {text.strip()}", is_flexible=False)
    if number is None:
        raise ValueError(f"the ground truth {text[-40:]!r} has no number")
    return number


def _decimal(written: str) -> Decimal | None:
    """Return the exact value; None for more than 100 characters, which would be slow to compare."""
    digits = written.translate(str.maketrans("\u2212", "-", ",$ \u00a0\t\n"))
    return Decimal(digits).normalize() if len(digits) <= 100 else None
