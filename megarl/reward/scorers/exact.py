"""The whole response is the answer."""

from __future__ import annotations

from collections.abc import Mapping


def compute_score(
    data_source: str, solution_str: str, ground_truth: str, extra_info: Mapping[str, object] | None = None
) -> float:
    return float(solution_str.strip() == ground_truth.strip())
