from __future__ import annotations

import re

import pytest

from megarl.observe.catalogue import MAX_SERIES, METRICS, Metric


def test_names_are_unique() -> None:
    names = [metric.name for metric in METRICS]
    assert len(names) == len(set(names))


@pytest.mark.parametrize("metric", METRICS, ids=lambda metric: metric.name)
def test_a_metric_is_well_described(metric: Metric) -> None:
    assert re.fullmatch(r"[a-z][a-z0-9_]*", metric.name)
    assert metric.text
    assert not metric.text.endswith(".")
    assert metric.source.count("*") <= len(metric.labels)
    assert "run" not in metric.labels


def test_a_process_cannot_have_more_series_than_promised() -> None:
    # A histogram has a bucket without an upper bound, a sum and a count.
    counts = [metric.limit * (len(metric.buckets) + 3 if metric.kind == "histogram" else 1) for metric in METRICS]
    assert sum(counts) <= MAX_SERIES
