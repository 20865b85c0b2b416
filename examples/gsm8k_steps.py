"""How far the calculations of an answer are those of the solution: a reward between 0 and 1 for answers to GSM8K.

Calculations are written <<48/2=24>>, as in the solutions of the data set. One counts where it is right and its result
is that of a calculation of the solution; further ones and missing ones lower the score (F1). A small model rarely
answers right, but is more or less on the way, so nearly every group of answers has something to learn from.
"""

from __future__ import annotations

from gsm8k_calculator import agreement, results


def compute_score(data_source, solution_str, ground_truth, extra_info=None):
    return agreement(list(results(solution_str)), ground_truth)
