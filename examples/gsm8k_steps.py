"""How far the calculations of an answer are those of the solution: a reward between 0 and 1 for answers to GSM8K.

Calculations are written <<48/2=24>>, as in the solutions of the data set. One counts where it is right and its result
is that of a calculation of the solution; further ones and missing ones lower the score (F1). A small model rarely
answers right, but is more or less on the way, so nearly every group of answers has something to learn from.
"""

from __future__ import annotations

from collections import Counter
from fractions import Fraction

from gsm8k_calculator import CALCULATION, value_of

_ROUNDED = Fraction(1, 100)
"""Solutions round to cents."""


def compute_score(data_source, solution_str, ground_truth, extra_info=None):
    wanted = Counter(_results(ground_truth))
    written = list(_results(solution_str))
    if not wanted or not written:
        return 0.0
    right = Counter(result for result in written if result is not None)
    return 2 * (right & wanted).total() / (len(written) + wanted.total())


def _results(text):
    """Yield the result of each calculation; None for one that is wrong."""
    for expression, written in CALCULATION.findall(text):
        try:
            result = Fraction(written.replace(",", "").strip())
            yield result if abs(value_of(expression) - result) <= _ROUNDED else None
        except (ValueError, SyntaxError, ZeroDivisionError):
            yield None
