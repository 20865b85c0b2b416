"""TensorBoard, Weights & Biases and MLflow, each optional, behind `Logger`.

They get the numbers that Prometheus gets, as `section/name`, once per step. A thread of its own calls them, so that a
slow or unreachable service does not delay the run.
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

from megarl.config.recipe import MlflowConfig, ObserveConfig, TensorboardConfig, WandbConfig
from megarl.errors import MachineError, first_line
from megarl.observe.catalogue import Section
from megarl.observe.events import Evaluated, Record, RunFinished, RunStarted, RunStatus, StepFinished
from megarl.observe.metrics import Meter

logger = logging.getLogger(__name__)

_STEP_SECTIONS: tuple[Section, ...] = (
    "run", "data", "reward", "rollout", "fleet", "publish", "trainer", "critic", "preference", "checkpoint", "machine",
)  # fmt: skip
_EVALUATION_SECTIONS: tuple[Section, ...] = ("eval",)
_CLOSE_TIMEOUT_S = 60.0
OPEN_TIMEOUT_S = 60.0
_MAX_WAITING = 1000
"""Steps that the loggers may lag behind; further ones are dropped."""


class Logger(Protocol):
    """Stores numbers by step. Used from one thread; may be slow and may raise anything."""

    @property
    def name(self) -> str: ...

    def log(self, step: int, numbers: Mapping[str, float]) -> None: ...

    def close(self, status: RunStatus) -> None: ...


def open_loggers(config: ObserveConfig, run: RunStarted) -> list[Logger]:
    """Open the loggers of the recipe; a MachineError if one cannot be opened."""
    loggers: list[Logger] = []
    if config.tensorboard is not None:
        loggers.append(TensorboardLogger(config.tensorboard, run))
    if config.wandb is not None:
        loggers.append(WandbLogger(config.wandb, run))
    if config.mlflow is not None:
        loggers.append(MlflowLogger(config.mlflow, run))
    return loggers


class LoggerSink:
    """The sink that passes the meter's numbers to the loggers, in a thread of its own."""

    def __init__(self, meter: Meter, loggers: Sequence[Logger]) -> None:
        self._meter = meter
        self._loggers = list(loggers)
        self._status = RunStatus.FAILED
        self._waiting: queue.Queue[tuple[int, Mapping[str, float]] | None] = queue.Queue(_MAX_WAITING)
        self._thread = threading.Thread(target=self._work, name="loggers", daemon=True)
        self._thread.start()

    def record(self, record: Record) -> None:
        match record.event:
            case StepFinished(summary=summary):
                self._put(summary.step, _STEP_SECTIONS)
            case Evaluated(step=step):
                self._put(step, _EVALUATION_SECTIONS)
            case RunFinished(status=status):
                self._status = status

    def close(self) -> None:
        """Wait until the loggers have all numbers, for a limited time."""
        with suppress(queue.Full):
            self._waiting.put(None, timeout=_CLOSE_TIMEOUT_S)
        self._thread.join(_CLOSE_TIMEOUT_S)
        if self._thread.is_alive():
            names = ", ".join(item.name for item in self._loggers)
            logger.warning("%s did not store all numbers within %.0f s", names, _CLOSE_TIMEOUT_S)

    def _put(self, step: int, sections: tuple[Section, ...]) -> None:
        with suppress(queue.Full):
            self._waiting.put_nowait((step, self._meter.values(*sections)))

    def _work(self) -> None:
        while (item := self._waiting.get()) is not None:
            step, numbers = item
            for each in tuple(self._loggers):
                try:
                    each.log(step, numbers)
                except Exception as error:  # noqa: BLE001 - third-party code and a network: the run goes on without it
                    self._loggers.remove(each)
                    logger.warning("%s failed and gets no more numbers: %s", each.name, first_line(error))
        for each in self._loggers:
            try:
                each.close(self._status)
            except Exception as error:  # noqa: BLE001 - as above
                logger.warning("%s could not be closed: %s", each.name, first_line(error))


class TensorboardLogger:
    """Writes event files for TensorBoard."""

    name = "observe.tensorboard"

    def __init__(self, config: TensorboardConfig, run: RunStarted) -> None:
        folder = config.folder or Path(run.folder) / "tensorboard"
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
    """A run in Weights & Biases; a resumed run continues it."""

    name = "observe.wandb"

    def __init__(self, config: WandbConfig, run: RunStarted) -> None:
        wandb = importlib.import_module("wandb")
        # The proxy is a setting of W&B: an environment variable would apply to every library in this process.
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
                name=run.name,
                id=_saved_id(Path(run.folder) / "wandb_run_id", uuid4().hex),
                resume="allow",
                dir=run.folder,
                mode=config.mode,
                tags=list(config.tags) or None,
                config=dict(run.recipe),
                settings=settings,
            )
        except wandb.Error as error:
            raise MachineError(
                f"{self.name}: {first_line(error)}; `mode: offline` needs no network, `wandb sync` sends it later"
            ) from error

    def log(self, step: int, numbers: Mapping[str, float]) -> None:
        self._run.log(dict(numbers), step=step)

    def close(self, status: RunStatus) -> None:
        self._run.finish(exit_code=0 if status is RunStatus.DONE else 1)


class MlflowLogger:
    """A run in MLflow; a resumed run continues it."""

    name = "observe.mlflow"

    def __init__(self, config: MlflowConfig, run: RunStarted) -> None:
        mlflow = importlib.import_module("mlflow")
        self._entities = importlib.import_module("mlflow.entities")
        try:
            self._client = mlflow.MlflowClient(tracking_uri=config.tracking_uri)
            experiment = self._client.get_experiment_by_name(config.experiment)
            experiment_id = (
                self._client.create_experiment(config.experiment) if experiment is None else experiment.experiment_id
            )
            id_file = Path(run.folder) / "mlflow_run_id"
            if not id_file.exists():
                run_id = self._client.create_run(experiment_id, run_name=run.name).info.run_id
                self._client.set_tag(run_id, "algorithm", run.algorithm)
                _saved_id(id_file, run_id)
            self._run_id = id_file.read_text()
        except mlflow.MlflowException as error:
            raise MachineError(f"{self.name}.tracking_uri {config.tracking_uri}: {first_line(error)}") from error

    def log(self, step: int, numbers: Mapping[str, float]) -> None:
        now_ms = int(time.time() * 1000)
        # MLflow does not allow @ in names.
        metrics = [
            self._entities.Metric(name.replace("@", "_at_"), value, now_ms, step) for name, value in numbers.items()
        ]
        self._client.log_batch(self._run_id, metrics=metrics)

    def close(self, status: RunStatus) -> None:
        self._client.set_terminated(self._run_id, "FINISHED" if status is RunStatus.DONE else "FAILED")


def _saved_id(path: Path, fresh: str) -> str:
    """Return the id that an earlier process of the run saved; without one, save `fresh`."""
    if not path.exists():
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(fresh)
    return path.read_text()
