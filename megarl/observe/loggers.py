"""Other people's places for a run's numbers: TensorBoard, Weights & Biases, MLflow. Each is optional, behind `Logger`.

They get what Prometheus gets, under `section/name`, once a step. A thread of its own hands it over: whoever is slow or
gone does not hold up the run.
"""

from __future__ import annotations

import importlib
import logging
import queue
import threading
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Protocol
from uuid import uuid4

from megarl.config.recipe import MlflowConfig, Recipe, TensorboardConfig, WandbConfig
from megarl.errors import MachineError
from megarl.observe.catalogue import Section
from megarl.observe.events import Evaluated, Record, RunFinished, RunStatus, StepFinished
from megarl.observe.meter import Meter

logger = logging.getLogger(__name__)

_OF_STEPS: tuple[Section, ...] = (
    "run", "data", "reward", "rollout", "fleet", "publish", "trainer", "critic", "checkpoint", "machine",
)  # fmt: skip
_OF_EVALUATIONS: tuple[Section, ...] = ("eval",)
_CLOSE_TIMEOUT_S = 60.0
OPEN_TIMEOUT_S = 60.0
_MAX_WAITING = 1000
"""Steps that a logger may be behind; what comes after is not handed over."""


class Logger(Protocol):
    """Somebody who keeps numbers by step. Used from one thread; may be slow, may raise what it likes."""

    @property
    def name(self) -> str: ...

    def log(self, step: int, numbers: Mapping[str, float]) -> None: ...

    def close(self, status: RunStatus) -> None: ...


def open_loggers(recipe: Recipe) -> list[Logger]:
    """Those that the recipe names; one that cannot be opened is an error, before anything else of the run starts."""
    observe, loggers = recipe.observe, list[Logger]()
    if observe.tensorboard is not None:
        loggers.append(TensorboardLogger(observe.tensorboard, recipe))
    if observe.wandb is not None:
        loggers.append(WandbLogger(observe.wandb, recipe))
    if observe.mlflow is not None:
        loggers.append(MlflowLogger(observe.mlflow, recipe))
    return loggers


class LoggerSink:
    """Hands the meter's numbers to loggers, behind the run."""

    def __init__(self, meter: Meter, loggers: Sequence[Logger]) -> None:
        self._meter = meter
        self._loggers = list(loggers)
        self._status = RunStatus.FAILED
        self._waiting: queue.Queue[tuple[int, Mapping[str, float]] | None] = queue.Queue(_MAX_WAITING)
        self._thread = threading.Thread(target=self._work, name="loggers", daemon=True)
        if self._loggers:
            self._thread.start()

    def record(self, record: Record) -> None:
        match record.event:
            case StepFinished(summary=summary):
                self._put(summary.step, _OF_STEPS)
            case Evaluated(step=step):
                self._put(step, _OF_EVALUATIONS)
            case RunFinished(status=status):
                self._status = status

    def close(self) -> None:
        """Waits for what is not handed over yet, but not for ever."""
        if not self._loggers:
            return
        with suppress(queue.Full):
            self._waiting.put(None, timeout=_CLOSE_TIMEOUT_S)
        self._thread.join(_CLOSE_TIMEOUT_S)
        if self._thread.is_alive():
            names = ", ".join(item.name for item in self._loggers)
            logger.warning("%s did not take all numbers within %.0f s", names, _CLOSE_TIMEOUT_S)

    def _put(self, step: int, sections: tuple[Section, ...]) -> None:
        if self._loggers:
            with suppress(queue.Full):
                self._waiting.put_nowait((step, self._meter.values(*sections)))

    def _work(self) -> None:
        while (item := self._waiting.get()) is not None:
            step, numbers = item
            for to in tuple(self._loggers):
                try:
                    to.log(step, numbers)
                except Exception as error:  # noqa: BLE001 - somebody else's code and network; the run goes on without it
                    self._loggers.remove(to)
                    logger.warning("%s takes no more numbers: %s", to.name, _one_line(error))
        for to in self._loggers:
            try:
                to.close(self._status)
            except Exception as error:  # noqa: BLE001 - as above
                logger.warning("%s was not closed: %s", to.name, _one_line(error))


class TensorboardLogger:
    """Event files that TensorBoard reads."""

    name = "observe.tensorboard"

    def __init__(self, config: TensorboardConfig, recipe: Recipe) -> None:
        folder = config.folder or recipe.run_folder / "tensorboard"
        try:
            self._writer = importlib.import_module("tensorboardX").SummaryWriter(logdir=str(folder))
        except OSError as error:
            raise MachineError(f"{self.name}.folder: {folder} cannot be written: {error.strerror}") from error

    def log(self, step: int, numbers: Mapping[str, float]) -> None:
        for name, value in numbers.items():
            self._writer.add_scalar(name, value, global_step=step)
        self._writer.flush()

    def close(self, status: RunStatus) -> None:
        self._writer.close()


class WandbLogger:
    """A run of Weights & Biases; one that is continued goes on there too."""

    name = "observe.wandb"

    def __init__(self, config: WandbConfig, recipe: Recipe) -> None:
        wandb = importlib.import_module("wandb")
        # The proxy is W&B's alone: in the environment it would be that of every library in this process.
        settings = wandb.Settings(
            silent=True,
            console="off",
            init_timeout=OPEN_TIMEOUT_S,
            save_code=False,
            disable_git=True,
            x_disable_stats=True,
            http_proxy=config.proxy,
            https_proxy=config.proxy,
        )
        try:
            self._run = wandb.init(
                project=config.project,
                entity=config.entity,
                name=recipe.run.name,
                id=_kept_id(recipe.run_folder / "wandb_run_id", uuid4().hex),
                resume="allow",
                dir=str(recipe.run_folder),
                mode=config.mode,
                tags=list(config.tags) or None,
                config=recipe.model_dump(mode="json"),
                settings=settings,
            )
        except wandb.Error as error:
            raise MachineError(
                f"{self.name}: {_one_line(error)}; `mode: offline` needs no network, `wandb sync` sends it later"
            ) from error

    def log(self, step: int, numbers: Mapping[str, float]) -> None:
        self._run.log(dict(numbers), step=step)

    def close(self, status: RunStatus) -> None:
        self._run.finish(exit_code=0 if status is RunStatus.DONE else 1)


class MlflowLogger:
    """A run of MLflow; one that is continued goes on there too."""

    name = "observe.mlflow"

    def __init__(self, config: MlflowConfig, recipe: Recipe) -> None:
        mlflow = importlib.import_module("mlflow")
        self._entities = importlib.import_module("mlflow.entities")
        try:
            self._client = mlflow.MlflowClient(tracking_uri=config.tracking_uri)
            experiment = self._client.get_experiment_by_name(config.experiment)
            found = (
                self._client.create_experiment(config.experiment) if experiment is None else experiment.experiment_id
            )
            kept = recipe.run_folder / "mlflow_run_id"
            if not kept.exists():
                run = self._client.create_run(found, run_name=recipe.run.name)
                self._client.set_tag(run.info.run_id, "algorithm", recipe.algorithm.kind)
                _kept_id(kept, run.info.run_id)
            self._run_id = kept.read_text()
        except mlflow.MlflowException as error:
            raise MachineError(f"{self.name}.tracking_uri {config.tracking_uri}: {_one_line(error)}") from error

    def log(self, step: int, numbers: Mapping[str, float]) -> None:
        now_ms = int(time.time() * 1000)
        # MLflow's names have no @.
        metrics = [
            self._entities.Metric(name.replace("@", "_at_"), value, now_ms, step) for name, value in numbers.items()
        ]
        self._client.log_batch(self._run_id, metrics=metrics)

    def close(self, status: RunStatus) -> None:
        self._client.set_terminated(self._run_id, "FINISHED" if status is RunStatus.DONE else "FAILED")


def _kept_id(path: Path, fresh: str) -> str:
    """What an earlier process of the same run wrote there, else `fresh`."""
    if not path.exists():
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(fresh)
    return path.read_text()


def _one_line(error: Exception) -> str:
    return (str(error) or type(error).__name__).splitlines()[0]
