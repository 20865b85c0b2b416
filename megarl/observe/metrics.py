"""The metrics of a run: current values (`Meter`), and sinks that read them and what Prometheus scrapes from events.

A gauge is exported from its first `set` on: an unknown value is absent, not 0. Counters are exported as 0 from the
start.
"""

from __future__ import annotations

import collections
import logging
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from datetime import datetime
from numbers import Real
from pathlib import Path
from statistics import median

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, disable_created_metrics

from megarl.errors import MachineError
from megarl.observe import catalogue as names
from megarl.observe.catalogue import METRICS, REFUSED_SERIES, RUN_LABEL, Kind, Metric, Section
from megarl.observe.endpoint import TARGETS_FILE, Target, link_targets, write_targets
from megarl.observe.events import (
    CheckpointFailed,
    CheckpointSaved,
    EngineChanged,
    Evaluated,
    Event,
    Published,
    PublishFailed,
    Record,
    Restarted,
    RunStarted,
    StepFinished,
    Straggled,
    Warned,
)
from megarl.observe.progress import Progress, advance
from megarl.observe.summary import Flow
from megarl.results import EvalResult, TrainingWork

logger = logging.getLogger(__name__)

EXPORTER_JOB = "megarl"
ENGINE_JOB = "sglang"

_NUM_BASELINE_STEPS = 8
_COUNTED: Mapping[type[Event], Metric] = {
    Published: names.PUBLISHES,
    PublishFailed: names.PUBLISH_FAILURES,
    CheckpointFailed: names.CHECKPOINT_FAILURES,
    Warned: names.WARNINGS,
}


class Meter:
    """All metrics in one Prometheus registry. Thread-safe."""

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


def _sources() -> Mapping[str, Sequence[tuple[Metric, Sequence[str]]]]:
    """Map the first part of a source to its metrics, each with the rest of the path."""
    by_root: dict[str, list[tuple[Metric, Sequence[str]]]] = {}
    for metric in names.METRICS:
        if metric.source:
            root, *path = metric.source.split(".")
            by_root.setdefault(root, []).append((metric, path))
    return by_root


_SOURCES = _sources()


class RunTotals:
    """Effective time and mismatch baseline of a run. Needs all its records, those of earlier processes included."""

    def __init__(self) -> None:
        self._began: datetime | None = None
        self._seconds: dict[int, float] = {}
        """By step; a step trained again after a crash counts once."""
        self._mismatch: dict[int, float] = {}

    def record(self, record: Record) -> None:
        match record.event:
            case RunStarted(resumed_step=resumed_step):
                self._began = self._began or record.time
                # Steps after the checkpoint are lost.
                self._seconds = {step: s for step, s in self._seconds.items() if step <= resumed_step}
                self._mismatch = {step: m for step, m in self._mismatch.items() if step <= resumed_step}
            case StepFinished(summary=summary):
                self._seconds[summary.step] = summary.seconds
                # Only tokens of the trained version: the others also differ because the policy has changed since.
                mismatch = None if summary.update is None else summary.update.engine_mismatch
                if mismatch is not None and len(self._mismatch) < _NUM_BASELINE_STEPS:
                    self._mismatch[summary.step] = mismatch

    def effective_time_ratio(self, now: datetime) -> float | None:
        """Time of steps that were not lost, over all time since the run first started."""
        if self._began is None or now <= self._began:
            return None
        return min(1.0, sum(self._seconds.values()) / (now - self._began).total_seconds())

    @property
    def mismatch_baseline(self) -> float | None:
        """Median engine mismatch of the first steps; None before they are done."""
        return median(self._mismatch.values()) if len(self._mismatch) == _NUM_BASELINE_STEPS else None


class Metrics:
    """The sink that sets the metrics from the events of a run."""

    def __init__(self, meter: Meter, *, earlier: Iterable[Record] = ()) -> None:
        """`earlier` are the records of the run that this one continues; only totals over the run count them."""
        self._meter = meter
        self._progress = Progress()
        self._totals = RunTotals()
        self._engines: dict[str, str] = {}
        """State by engine."""
        self._serving: set[str] = set()
        for record in earlier:
            self._totals.record(record)

    def record(self, record: Record) -> None:
        self._progress = advance(self._progress, record)
        self._totals.record(record)
        meter, event = self._meter, record.event
        if counter := _COUNTED.get(type(event)):
            meter.add(counter, 1)
        match event:
            case RunStarted(resumed_step=resumed_step):
                meter.set(names.RUN_START, record.time.timestamp())
                meter.set(names.STEP, resumed_step)
                meter.set(names.CHECKPOINT_STEP, resumed_step)
            case StepFinished():
                meter.set(names.LAST_STEP, record.time.timestamp())
                self._record_fields("step", event.summary)
                self._record_time(event)
                self._record_totals(record)
                rollouts = event.summary.rollouts
                meter.add(names.ZERO_SIGNAL_STEPS, int(rollouts is not None and not rollouts.has_signal))
            case Published(result=result):
                self._record_fields("publish", result)
                for engine in self._serving:
                    meter.set(names.ENGINE_VERSION, result.version, engine)
            case EngineChanged():
                self._record_engine(event)
            case Restarted(role=role) | Straggled(role=role):
                meter.add(names.RESTARTS if isinstance(event, Restarted) else names.STRAGGLERS, 1, role)
            case Evaluated(step=step, result=evaluation):
                meter.set(names.EVAL_STEP, step)
                self._record_evaluation(evaluation)
            case CheckpointSaved():
                meter.set(names.CHECKPOINT_TIME, record.time.timestamp())
                self._record_fields("save", event)

    def close(self) -> None:
        """Nothing to close: the endpoint is closed by its owner."""

    def _record_time(self, finished: StepFinished) -> None:
        summary, phase_seconds = finished.summary, finished.phase_seconds
        for phase, seconds in phase_seconds.items():
            self._meter.add(names.PHASE_SECONDS, seconds, phase)
        if "evaluate" in phase_seconds:
            self._meter.set(names.EVAL_SECONDS, phase_seconds["evaluate"])
        if summary.flow is not None and summary.seconds > 0:
            self._record_flow(summary.flow, summary.seconds)
        update_s = phase_seconds.get("update", 0.0)
        if summary.work is not None and update_s > 0:
            self._record_work(summary.work, update_s)

    def _record_flow(self, flow: Flow, seconds: float) -> None:
        self._meter.set(names.TRAINER_WAIT, min(1.0, flow.trainer_wait_s / seconds))
        self._meter.set(names.PRODUCER_WAIT, min(1.0, flow.producer_wait_s / seconds))

    def _record_work(self, work: TrainingWork, seconds: float) -> None:
        self._meter.set(names.TRAIN_FLOPS, work.flops / seconds)
        if work.peak_flops_per_second is not None:
            self._meter.set(names.MFU, work.flops / seconds / work.peak_flops_per_second)

    def _record_totals(self, record: Record) -> None:
        """Set what depends on all steps so far; a value that is not known yet is not exported."""
        totals = {
            names.REMAINING: self._progress.eta_s,
            names.EFFECTIVE_TIME: self._totals.effective_time_ratio(record.time),
            names.MISMATCH_BASELINE: self._totals.mismatch_baseline,
            **self._costs(),
        }
        for metric, value in totals.items():
            if value is not None:
                self._meter.set(metric, value)

    def _costs(self) -> dict[names.Metric, float | None]:
        progress, usage = self._progress, self._progress.usage
        if not usage.num_gpus or progress.summary is None:
            return {}
        step, projected = usage.hours(progress.summary.seconds), progress.projected_gpu_hours
        return {
            names.GPU_HOURS: usage.gpu_hours,
            names.GPU_HOURS_STEP: step,
            names.GPU_HOURS_PROJECTED: projected,
            names.COST: usage.money(usage.gpu_hours),
            names.COST_STEP: usage.money(step),
            names.COST_PROJECTED: None if projected is None else usage.money(projected),
        }

    def _record_engine(self, changed: EngineChanged) -> None:
        meter, engine = self._meter, str(changed.index)
        states_before = set(self._engines.values())
        self._engines[engine] = changed.state
        if changed.is_running:
            meter.set(names.ENGINE_VERSION, changed.version, engine)
        else:
            meter.forget(names.ENGINE_VERSION, engine)
        self._serving = self._serving | {engine} if changed.is_serving else self._serving - {engine}
        counts = collections.Counter(self._engines.values())
        for state in states_before | set(counts):
            meter.set(names.ENGINES, counts[state], state)

    def _record_evaluation(self, result: EvalResult) -> None:
        self._record_fields("evaluation", result)
        for source in result.main.by_source if result.main is not None else ():
            for name, value in result.numbers_of(source).items():
                self._meter.set(names.EVAL_SOURCE, value, name, source)

    def _record_fields(self, root: str, value: object) -> None:
        """Set the gauges and increase the counters whose source begins with `root`."""
        for metric, path in _SOURCES[root]:
            for labels, number in _numbers(value, path):
                if metric.kind == "counter":
                    self._meter.add(metric, number, *labels)
                else:
                    self._meter.set(metric, number, *labels)


def _numbers(value: object, path: Sequence[str]) -> Iterator[tuple[tuple[str, ...], float]]:
    """Yield the numbers at a path, each with the mapping keys on the way to it. A None on the way yields nothing."""
    if value is None:
        return
    if not path:
        assert isinstance(value, Real), f"{value!r} is not a number"
        yield (), float(value)
    elif path[0] == "*":
        assert isinstance(value, Mapping), f"{value!r} is not a mapping"
        for key, item in value.items():
            for keys, number in _numbers(item, path[1:]):
                yield (key, *keys), number
    else:
        yield from _numbers(getattr(value, path[0]), path[1:])


class Targets:
    """The sink that keeps the targets file up to date. Closing it empties the file, so that nothing is scraped."""

    def __init__(self, run_folder: Path, *, run: str, exporter: str | None) -> None:
        self._path = run_folder / TARGETS_FILE
        self._run = run
        self._exporter = exporter
        self._engines: dict[int, str] = {}
        self._is_current = False
        """Whether the file has what it should have: a full disk may have prevented it."""
        self._write()
        link_targets(self._path)

    def record(self, record: Record) -> None:
        match record.event:
            case EngineChanged(index=index, is_running=False):
                self._is_current &= self._engines.pop(index, None) is None
            case EngineChanged(index=index, address=address):
                self._is_current &= self._engines.get(index) == address
                self._engines[index] = address
        if not self._is_current:
            self._write()

    def close(self) -> None:
        self._exporter = None
        self._engines = {}
        try:
            self._write()
        except MachineError as error:
            logger.warning("%s", error)

    def _write(self) -> None:
        targets = [] if self._exporter is None else [self._target(self._exporter, job=EXPORTER_JOB)]
        for index, address in sorted(self._engines.items()):
            targets.append(self._target(address, job=ENGINE_JOB, engine=str(index)))
        write_targets(self._path, targets)
        self._is_current = True

    def _target(self, address: str, **labels: str) -> Target:
        return Target(targets=[address], labels={"run": self._run, **labels})
