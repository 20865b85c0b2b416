"""Loggers: TensorBoard and W&B offline as they are released; MLflow against its client's interface."""

from __future__ import annotations

import logging
import socket
import struct
import sys
import threading
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest

from megarl.config.recipe import ObserveConfig
from megarl.errors import MachineError
from megarl.observe import loggers
from megarl.observe.events import Event, RunFinished, RunStatus
from megarl.observe.loggers import Logger, LoggerSink, MlflowLogger, TensorboardLogger, WandbLogger, open_loggers
from megarl.observe.metrics import Meter, Metrics
from tests.observe.samples import evaluated, records, run_started, step_finished
from tests.waiting import wait_until


class Remembering:
    name = "remembering"

    def __init__(self, *, fails_at: int | None = None) -> None:
        self.logged: list[tuple[int, Mapping[str, float]]] = []
        self.status: RunStatus | None = None
        self._fails_at = fails_at

    def log(self, step: int, numbers: Mapping[str, float]) -> None:
        if step == self._fails_at:
            raise ConnectionError("no route to host")
        self.logged.append((step, numbers))

    def close(self, status: RunStatus) -> None:
        self.status = status


def tell(sink: LoggerSink, meter: Meter) -> None:
    metrics = Metrics(meter)
    told: list[Event] = [
        run_started(),
        step_finished(1),
        evaluated(1, 0.875),
        step_finished(2),
        RunFinished(status=RunStatus.DONE),
    ]
    for record in records(told):
        metrics.record(record)
        sink.record(record)
    sink.close()


def opened(folder: Path, config: Mapping[str, object]) -> list[Logger]:
    return open_loggers(ObserveConfig.model_validate(config), replace(run_started(), folder=str(folder)))


def test_a_logger_gets_what_prometheus_gets_by_step() -> None:
    meter, logger = Meter("sample"), Remembering()
    tell(LoggerSink(meter, [logger]), meter)
    assert [step for step, _ in logger.logged] == [1, 1, 2]
    assert logger.logged[0][1]["reward/reward_mean"] == 0.5
    assert logger.logged[0][1]["run/phase_seconds/generate"] == 1.5
    assert logger.logged[1][1]["eval/eval/accuracy"] == 0.875
    assert not [name for name in logger.logged[2][1] if name.startswith("eval/")]
    assert logger.status is RunStatus.DONE


def test_a_logger_that_fails_is_left_alone_and_the_others_go_on(caplog: pytest.LogCaptureFixture) -> None:
    meter, failing, other = Meter("sample"), Remembering(fails_at=2), Remembering()
    with caplog.at_level(logging.WARNING, logger="megarl"):
        tell(LoggerSink(meter, [failing, other]), meter)
    assert [step for step, _ in failing.logged] == [1, 1]
    assert failing.status is None
    assert [step for step, _ in other.logged] == [1, 1, 2]
    assert "remembering failed and gets no more numbers: no route to host" in caplog.text


def test_a_slow_logger_does_not_hold_up_the_run() -> None:
    recorded = threading.Event()

    class Slow(Remembering):
        def log(self, step: int, numbers: Mapping[str, float]) -> None:
            assert recorded.wait(60), "the run waits for the logger"
            super().log(step, numbers)

    meter, slow = Meter("sample"), Slow()
    sink = LoggerSink(meter, [slow])
    for record in records([step_finished(step) for step in range(1, 5)]):
        sink.record(record)
    recorded.set()
    sink.close()
    assert len(slow.logged) == 4


def test_tensorboard_reads_what_is_written(tmp_path: Path) -> None:
    (logger,) = opened(tmp_path, {"tensorboard": {}})
    assert isinstance(logger, TensorboardLogger)
    logger.log(3, {"reward/reward_mean": 0.5, "eval/eval/pass@4": 0.25})
    logger.close(RunStatus.DONE)
    (file,) = (tmp_path / "tensorboard").iterdir()
    assert list(scalars(file)) == [(3, "reward/reward_mean", 0.5), (3, "eval/eval/pass_4", 0.25)]


def scalars(file: Path) -> Iterator[tuple[int, str, float]]:
    """Records of TensorBoard's format: length, checksum, event, checksum."""
    from tensorboardX.proto.event_pb2 import Event

    data, offset = file.read_bytes(), 0
    while offset < len(data):
        (size,) = struct.unpack_from("<Q", data, offset)
        event = Event.FromString(data[offset + 12 : offset + 12 + size])
        offset += 12 + size + 4
        for value in event.summary.value:
            yield event.step, value.tag, value.simple_value


@pytest.mark.patient
def test_wandb_writes_offline_and_a_continued_run_keeps_its_name(tmp_path: Path) -> None:
    config = {"wandb": {"project": "sums", "mode": "offline", "tags": ["small"]}}
    for step in (1, 2):
        (logger,) = opened(tmp_path, config)
        assert isinstance(logger, WandbLogger)
        logger.log(step, {"reward/reward_mean": 0.5})
        logger.close(RunStatus.DONE)
    files = [path for path in tmp_path.rglob("*.wandb") if not path.parent.is_symlink()]
    run_id = (tmp_path / "wandb_run_id").read_text()
    assert {path.name for path in files} == {f"run-{run_id}.wandb"}
    # Its service goes on writing after `finish`.
    wait_until(lambda: all(b"reward/reward_mean" in path.read_bytes() for path in files), told=lambda: files)


@pytest.mark.patient
def test_the_proxy_is_that_of_wandb_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody is behind it: what arrives there is what would have left, and the error is one line."""
    monkeypatch.setenv("WANDB_API_KEY", "a" * 40)
    monkeypatch.setattr(loggers, "OPEN_TIMEOUT_S", 3.0)
    asked: list[bytes] = []
    with socket.create_server(("127.0.0.1", 0)) as server:
        threading.Thread(target=_hang_up, args=(server, asked), daemon=True).start()
        proxy = f"http://127.0.0.1:{server.getsockname()[1]}"
        with pytest.raises(MachineError, match=r"^observe.wandb: [^\n]+; `mode: offline` needs no network"):
            opened(tmp_path, {"wandb": {"project": "sums", "proxy": proxy}})
    assert asked
    assert all(line.startswith(b"CONNECT ") for line in asked)


def _hang_up(server: socket.socket, asked: list[bytes]) -> None:
    while True:
        try:
            connection, _ = server.accept()
        except OSError:
            return
        with connection:
            asked.append(connection.recv(100))


class FakeMlflow:
    """The part of MLflow's client that is used."""

    def __init__(self, tracking_uri: str) -> None:
        self.calls: list[tuple[object, ...]] = []
        CLIENTS.append(self)

    def get_experiment_by_name(self, name: str) -> None:
        return None

    def create_experiment(self, name: str) -> str:
        return f"experiment {name}"

    def create_run(self, experiment_id: str, run_name: str) -> SimpleNamespace:
        return SimpleNamespace(info=SimpleNamespace(run_id=f"{experiment_id}, run {run_name}"))

    def set_tag(self, run_id: str, key: str, value: str) -> None:
        self.calls.append(("tag", key, value))

    def log_batch(self, run_id: str, metrics: list[tuple[str, float, int, int]]) -> None:
        self.calls.append(("log", run_id, [(name, value, step) for name, value, _, step in metrics]))

    def set_terminated(self, run_id: str, status: str) -> None:
        self.calls.append(("end", run_id, status))


CLIENTS: list[FakeMlflow] = []


def test_mlflow_is_told_by_step_and_how_it_ended(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    mlflow, entities = ModuleType("mlflow"), ModuleType("mlflow.entities")
    vars(mlflow).update(MlflowClient=FakeMlflow, MlflowException=ValueError)
    vars(entities).update(Metric=lambda *values: values)
    monkeypatch.setitem(sys.modules, "mlflow", mlflow)
    monkeypatch.setitem(sys.modules, "mlflow.entities", entities)
    (logger,) = opened(tmp_path, {"mlflow": {"tracking_uri": "http://127.0.0.1:5000"}})
    assert isinstance(logger, MlflowLogger)
    logger.log(3, {"eval/eval/pass@4": 0.25})
    logger.close(RunStatus.INTERRUPTED)
    run_id = "experiment megarl, run sample"
    assert CLIENTS[-1].calls == [
        ("tag", "algorithm", "grpo"),
        ("log", run_id, [("eval/eval/pass_at_4", 0.25, 3)]),
        ("end", run_id, "FAILED"),
    ]
