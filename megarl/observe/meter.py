"""The current values of the metrics, in one Prometheus registry. Knows the catalogue, not what sets a value.

A gauge is exported from its first `set` on: an unknown value is absent, not 0. Counters are exported as 0 from the
start.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, disable_created_metrics

from megarl.observe.catalogue import METRICS, REFUSED_SERIES, RUN_LABEL, Kind, Metric, Section

logger = logging.getLogger(__name__)


class Meter:
    """Thread-safe."""

    def __init__(self, run: str) -> None:
        # The creation times of counters and histograms would be half as many series again.
        disable_created_metrics()  # type: ignore[no-untyped-call]
        self.registry = CollectorRegistry()
        self._run = run
        self._gauges = {
            metric: Gauge(metric.full_name, metric.text, (RUN_LABEL, *metric.labels), registry=self.registry)
            for metric in _of_kind("gauge")
        }
        self._counters = {
            metric: Counter(metric.full_name, metric.text, (RUN_LABEL, *metric.labels), registry=self.registry)
            for metric in _of_kind("counter")
        }
        self._histograms = {
            metric: Histogram(
                metric.full_name, metric.text, (RUN_LABEL,), registry=self.registry, buckets=metric.buckets
            ).labels(run)
            for metric in _of_kind("histogram")
        }
        self._full: set[Metric] = set()
        self._known: dict[Metric, set[tuple[str, ...]]] = {metric: set() for metric in METRICS}
        for metric in self._counters:
            for labels in [(value,) for value in metric.known] if metric.labels else [()]:
                self.add(metric, 0, *labels)

    def set(self, metric: Metric, value: float, *labels: str) -> None:
        if self._admits(metric, labels):
            self._gauges[metric].labels(self._run, *labels).set(value)

    def add(self, metric: Metric, amount: float, *labels: str) -> None:
        if self._admits(metric, labels):
            self._counters[metric].labels(self._run, *labels).inc(amount)

    def observe(self, metric: Metric, value: float) -> None:
        self._histograms[metric].observe(value)

    def watch(self, metric: Metric, read: Callable[[], float], *labels: str) -> None:
        """Export a gauge that `read` returns at each scrape, in the endpoint's thread: quickly, and without raising."""
        if self._admits(metric, labels):
            self._gauges[metric].labels(self._run, *labels).set_function(read)

    def forget(self, metric: Metric, *labels: str) -> None:
        """Stop exporting a gauge for these labels, such as those of an engine that has ended."""
        if labels in self._known[metric]:
            self._known[metric].remove(labels)
            self._gauges[metric].remove(self._run, *labels)

    def values(self, *sections: Section) -> dict[str, float]:
        """Return the gauges and counters of the sections, or of all, as `section/name` or `section/name/label/...`."""
        return dict(self._values(sections))

    def _values(self, sections: tuple[Section, ...]) -> Iterator[tuple[str, float]]:
        for metric in (*self._gauges, *self._counters):
            if sections and metric.section not in sections:
                continue
            family = self._gauges[metric] if metric.kind == "gauge" else self._counters[metric]
            for sample in next(iter(family.collect())).samples:
                if sample.name == metric.full_name:
                    labels = [sample.labels[label] for label in metric.labels]
                    yield "/".join((metric.section, metric.name, *labels)), sample.value

    def _admits(self, metric: Metric, labels: tuple[str, ...]) -> bool:
        """Whether the metric may be exported with these labels: known ones, or new ones within its limit."""
        known = self._known[metric]
        if labels in known:
            return True
        if len(known) >= metric.limit:
            self.add(REFUSED_SERIES, 1)
            if metric not in self._full:
                self._full.add(metric)
                logger.warning("metric %s: label values beyond %d are not exported", metric.name, metric.limit)
            return False
        known.add(labels)
        return True


def _of_kind(kind: Kind) -> Iterator[Metric]:
    return (metric for metric in METRICS if metric.kind == kind)
