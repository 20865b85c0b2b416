"""The sink that sets the metrics: it reads the numbers out of a run's events and writes them to the meter."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from numbers import Real

from megarl.observe import catalogue as names
from megarl.observe.catalogue import Metric
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
from megarl.observe.history import Progress, RunTotals, advance
from megarl.observe.meter import Meter
from megarl.observe.summary import Flow
from megarl.results import EvalResult, TrainingWork

_COUNTED: Mapping[type[Event], Metric] = {
    Published: names.PUBLISHES,
    PublishFailed: names.PUBLISH_FAILURES,
    CheckpointFailed: names.CHECKPOINT_FAILURES,
    Warned: names.WARNINGS,
}


def _sources() -> Mapping[str, Sequence[tuple[Metric, Sequence[str]]]]:
    """Map the first part of a source to its metrics, each with the rest of the path."""
    by_root: dict[str, list[tuple[Metric, Sequence[str]]]] = {}
    for metric in names.METRICS:
        if metric.source:
            root, *path = metric.source.split(".")
            by_root.setdefault(root, []).append((metric, path))
    return by_root


_SOURCES = _sources()


class Metrics:
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
        }
        for metric, value in totals.items():
            if value is not None:
                self._meter.set(metric, value)

    def _record_engine(self, changed: EngineChanged) -> None:
        meter, engine = self._meter, str(changed.index)
        states_before = set(self._engines.values())
        self._engines[engine] = changed.state
        if changed.is_running:
            meter.set(names.ENGINE_VERSION, changed.version, engine)
        else:
            meter.forget(names.ENGINE_VERSION, engine)
        self._serving = self._serving | {engine} if changed.is_serving else self._serving - {engine}
        counts = Counter(self._engines.values())
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
