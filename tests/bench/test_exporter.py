from __future__ import annotations

import pytest

from bench.exporter import QUICKSTART, measure_exporter
from megarl.observe.catalogue import MAX_SERIES, METRICS


@pytest.mark.patient
def test_every_series_there_can_be_is_scraped() -> None:
    *overheads, series, scrape = measure_exporter([QUICKSTART], repeats=1)
    assert [figure.goal for figure in overheads] == [0.5]
    assert all(figure.value > 0 for figure in (*overheads, scrape))
    assert sum(metric.limit for metric in METRICS) < series.value <= MAX_SERIES
