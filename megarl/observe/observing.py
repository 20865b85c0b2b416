"""Opens what one run is observed with: its folder, event log, metrics endpoint, loggers and log file."""

from __future__ import annotations

import logging
import math
import platform
import shutil
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import psutil

from megarl import __version__
from megarl.config.recipe import Recipe
from megarl.env import FAULTS
from megarl.observe import catalogue as names
from megarl.observe.endpoint import MetricsEndpoint
from megarl.observe.event_file import EVENTS_FILE, EventTail
from megarl.observe.event_log import EventLog
from megarl.observe.events import Evaluated, PhaseEnded, PhaseStarted, Record, RunStarted, Sink, StepFinished
from megarl.observe.loggers import LoggerSink, open_loggers
from megarl.observe.metrics import Meter, Metrics, Targets
from megarl.observe.observer import Observer
from megarl.observe.summary import Phase
from megarl.system.environment import append_environment
from megarl.system.faults import reach
from megarl.system.network import LOOPBACK, address_in
from megarl.system.process_log import log_format

LOG_FILE = "megarl.log"
_RESULT_FOLDERS = ("checkpoints", "rollouts", "evaluations")
_DRIVER = "driver"
_HOUR_S = 3600.0


@contextmanager
def observing(
    recipe: Recipe,
    *,
    display: Sink,
    resumed_step: int = 0,
    is_continued: bool = False,
    tools_digest: str | None = None,
) -> Iterator[Observer]:
    """Yield the observer of one run, with its port open and its folder created.

    An earlier run of the same name is moved to `<name>.N`, unless this one continues it or it took no step. On exit
    the end of the run is recorded, unless `run_finished` was called, and everything is closed.
    """
    folder = recipe.run_folder
    with ExitStack() as stack:
        meter = Meter(recipe.run.name)
        endpoint = None
        if recipe.observe.metrics_port is not None:
            host = LOOPBACK if recipe.network.bind is None else address_in(recipe.network.bind)
            endpoint = MetricsEndpoint(meter.registry, port=recipe.observe.metrics_port, host=host)
            stack.callback(endpoint.close)
        retired = None if is_continued else _retire_earlier_run(folder, recipe.images_folder)
        started = RunStarted(
            name=recipe.run.name,
            folder=str(folder),
            algorithm=recipe.algorithm.kind,
            steps=recipe.run.total_steps,
            megarl_version=__version__,
            metrics_url=endpoint.url if endpoint else None,
            resumed_step=resumed_step,
            recipe=recipe.model_dump(mode="json"),
            tools_digest=tools_digest,
        )
        events = folder / EVENTS_FILE
        earlier = EventTail(events)
        metrics = Metrics(meter, earlier=earlier.read() if events.exists() else ())
        log = EventLog(events)
        stack.callback(log.close)
        set_constants(meter, recipe)
        append_environment(folder)
        stack.enter_context(logging_to(folder / LOG_FILE))
        stack.callback(_close, display)
        targets = Targets(folder, run=recipe.run.name, exporter=endpoint.address if endpoint else None)
        stack.callback(targets.close)
        sinks: list[Sink] = [log, metrics, targets, display]
        if loggers := open_loggers(recipe.observe, started):
            logging_sink = LoggerSink(meter, loggers)
            stack.callback(logging_sink.close)
            sinks.append(logging_sink)
        if FAULTS.read():
            sinks.append(StepFaults())
        with Observer(sinks, meter=meter, first_sequence=log.next_sequence) as observer:
            observer.emit(started)
            if retired is not None:
                observer.warned(f"an earlier run of this name was moved to {retired}")
            if earlier.damage:
                observer.warned(earlier.damage)
            yield observer


def _close(display: Sink) -> None:
    with suppress(OSError):  # the terminal is gone, or its file's disk is full
        display.close()


def _retire_earlier_run(folder: Path, images: Path) -> Path | None:
    """Rename the folder of an earlier run to the first free `<name>.N`; return that path, None without such a run.

    The folder of a start that failed has nothing to keep apart: its log is continued. Images of the new run are in the
    folder already, among those of the earlier one: both have them all.
    """
    if not folder.exists() or not _has_results(folder, images):
        return None
    number = 1
    while (retired := folder.with_name(f"{folder.name}.{number}")).exists():
        number += 1
    folder.rename(retired)
    if (earlier := retired / images.name).exists():
        shutil.copytree(earlier, images, copy_function=_link)
    return retired


def _link(source: str, target: str) -> None:
    try:
        Path(target).hardlink_to(source)
    except OSError:  # a file system without hard links
        shutil.copy2(source, target)


def _has_results(folder: Path, images: Path) -> bool:
    """Whether a run took a step or was evaluated; a folder of other files is not a failed start either."""
    events = folder / EVENTS_FILE
    if not events.exists() and [path.name for path in folder.iterdir()] == [images.name]:
        return False
    if not events.exists() or any((folder / name).exists() for name in _RESULT_FOLDERS):
        return True
    return any(isinstance(record.event, StepFinished | Evaluated) for record in EventTail(events).read())


def set_constants(meter: Meter, recipe: Recipe) -> None:
    """Set the metrics that do not depend on steps: versions, numbers of the recipe, memory and disk of the driver."""
    packages = (_version(name) for name in ("torch", "megatron-core", "sglang", "ray"))
    meter.set(names.BUILD_INFO, 1, __version__, platform.python_version(), *packages)
    meter.set(names.RUN_INFO, 1, recipe.algorithm.kind, str(recipe.model.path), recipe.run.device)
    meter.set(names.RUN_STEPS, recipe.run.total_steps)
    meter.set(names.RUN_GPUS, sum(pool.gpus for pool in recipe.pools.values()))
    meter.set(names.STALENESS_LIMIT, recipe.train.max_staleness)
    if isinstance(recipe.checkpoint.save_every_steps, int):
        meter.set(names.CHECKPOINT_INTERVAL, recipe.checkpoint.save_every_steps)
    elif recipe.checkpoint.save_every_steps == "hourly":
        meter.set(names.CHECKPOINT_PERIOD, _HOUR_S)
    folder = recipe.run_folder.absolute()
    meter.watch(names.CHECKPOINT_FREE, lambda: _free_bytes(folder))
    process = psutil.Process()
    meter.watch(names.RESIDENT, lambda: process.memory_info().rss, _DRIVER)
    meter.watch(names.HOST_AVAILABLE, lambda: psutil.virtual_memory().available, _DRIVER)
    meter.watch(names.HOST_TOTAL, lambda: psutil.virtual_memory().total, _DRIVER)


def _free_bytes(folder: Path) -> float:
    """NaN if the folder is gone: an error here would fail the whole scrape."""
    try:
        return shutil.disk_usage(folder).free
    except OSError:
        return math.nan


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return "none"


class _LogFile(logging.FileHandler):
    """Says once that it cannot write; the lines of that time are lost, and the run goes on."""

    _has_failed = False

    def handleError(self, record: logging.LogRecord) -> None:  # noqa: N802 - the name in logging
        if not self._has_failed:
            self._has_failed = True
            with suppress(OSError):
                sys.stderr.write(f"megarl: {self.baseFilename} cannot be written: {sys.exception()}\n")

    def close(self) -> None:
        with suppress(OSError):
            super().close()


@contextmanager
def logging_to(path: Path) -> Iterator[None]:
    """Append everything that megarl logs at INFO and above to `path`, with UTC times."""
    handler = _LogFile(path, encoding="utf-8")
    handler.setFormatter(log_format())
    logger = logging.getLogger("megarl")
    level_before = logger.level
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    try:
        yield
    finally:
        logger.setLevel(level_before)
        logger.removeHandler(handler)
        handler.close()


class StepFaults:
    """The sink that reaches the driver's fault points of a step, so that the loop does not mention them."""

    def __init__(self) -> None:
        self._step = 0
        """The step under way; 0 before the first one begins."""
        self._num_finished = 0

    def record(self, record: Record) -> None:
        match record.event:
            case RunStarted(resumed_step=step):
                self._num_finished = step
            case StepFinished(summary=summary):
                self._num_finished = summary.step
            case PhaseStarted(phase="generate"):
                self._step = self._num_finished + 1
                reach("step_begun", step=self._step)
            case PhaseEnded(phase=phase) if self._step > self._num_finished:
                self._reach_end(phase)

    def close(self) -> None: ...

    def _reach_end(self, phase: Phase) -> None:
        match phase:
            case "generate":
                reach("step_taken", step=self._step)
            case "update":
                reach("step_trained", step=self._step)
            case "publish":
                reach("step_published", step=self._step)
