"""The events of a run and their log, `<run>/events.jsonl`: one typed, numbered line each, flushed, never rewritten.

The report, the run page and `megarl doctor` are made from this file; its last line shows where a dead run stopped.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from datetime import datetime
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Literal, Protocol

from pydantic import Field, JsonValue, TypeAdapter, ValidationError
from pydantic_core import to_json

from megarl.errors import DataError, MachineError
from megarl.observe.summary import Phase, StepSummary
from megarl.results import EvalResult, PublishResult
from megarl.system.secret import masked
from megarl.types import PolicyVersion

EVENTS_FILE = "events.jsonl"


class RunStatus(StrEnum):
    DONE = "done"
    FAILED = "failed"
    INTERRUPTED = "interrupted"
    PREEMPTED = "preempted"


@dataclass(frozen=True, slots=True, kw_only=True)
class RunStarted:
    kind: Literal["run_started"] = "run_started"
    name: str
    folder: str
    algorithm: str
    steps: int
    megarl_version: str
    metrics_url: str | None
    resumed_step: int
    """The step of the checkpoint that the run resumes from; 0 in a new run."""
    recipe: Mapping[str, JsonValue]
    """With overrides and defaults applied."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PhaseStarted:
    kind: Literal["phase_started"] = "phase_started"
    phase: Phase


@dataclass(frozen=True, slots=True, kw_only=True)
class PhaseEnded:
    kind: Literal["phase_ended"] = "phase_ended"
    phase: Phase
    seconds: float


@dataclass(frozen=True, slots=True, kw_only=True)
class StepFinished:
    kind: Literal["step_finished"] = "step_finished"
    summary: StepSummary
    phase_seconds: Mapping[Phase, float]
    """Time in each phase since the previous step."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Published:
    kind: Literal["published"] = "published"
    result: PublishResult


@dataclass(frozen=True, slots=True, kw_only=True)
class PublishFailed:
    """The engines still serve the previous version."""

    kind: Literal["publish_failed"] = "publish_failed"
    version: PolicyVersion
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineChanged:
    """An engine started, ended or changed its state. A publish alone is no change."""

    kind: Literal["engine_changed"] = "engine_changed"
    index: int
    state: str
    """Name of the fleet's state."""
    is_serving: bool
    """Whether it gets requests; it then serves the last published version."""
    is_running: bool
    """Whether its process exists and serves metrics."""
    version: PolicyVersion
    address: str
    """Host and port, also of its metrics."""
    reason: str = ""


ALL_TRAINERS = "trainers"
"""The role of a restart of all trainer ranks: they restart together."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Restarted:
    """A process that had ended was started again."""

    kind: Literal["restarted"] = "restarted"
    role: str
    index: int
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Evaluated:
    kind: Literal["evaluated"] = "evaluated"
    step: int
    """0 is before the first step."""
    result: EvalResult


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointSaved:
    kind: Literal["checkpoint_saved"] = "checkpoint_saved"
    step: int
    path: str
    num_bytes: int
    blocking_seconds: float
    """Time that training waited: for the previous save, and for copying to host memory."""
    seconds: float
    """Duration of the save, until the folder had its final name."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointFailed:
    """Training continued, unless it was the checkpoint of the last step."""

    kind: Literal["checkpoint_failed"] = "checkpoint_failed"
    step: int
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Warned:
    kind: Literal["warned"] = "warned"
    text: str


@dataclass(frozen=True, slots=True, kw_only=True)
class RunFinished:
    kind: Literal["run_finished"] = "run_finished"
    status: RunStatus
    reason: str = ""
    """The error's message; empty without an error."""


Event = (
    RunStarted
    | PhaseStarted
    | PhaseEnded
    | StepFinished
    | Published
    | PublishFailed
    | EngineChanged
    | Restarted
    | Evaluated
    | CheckpointSaved
    | CheckpointFailed
    | Warned
    | RunFinished
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Record:
    """An event with its number and time."""

    sequence: int
    """From 0, without gaps, over the whole file."""
    time: datetime
    event: Annotated[Event, Field(discriminator="kind")]


class Sink(Protocol):
    """Receives the records, in order, in the loop's thread; must not block for long."""

    def record(self, record: Record) -> None: ...

    def close(self) -> None: ...


class EventLog:
    """The sink that writes the file. An existing file is continued, and so are its sequence numbers."""

    def __init__(self, path: Path) -> None:
        self._path = path
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            self.next_sequence = _prepare(path)
            # Unbuffered: the line is in the file when `record` returns, even if the process is killed next.
            self._file = path.open("ab", buffering=0)
        except OSError as error:
            raise MachineError(f"{path}: cannot be written: {error.strerror}") from error

    def record(self, record: Record) -> None:
        # JSON has no NaN; a string survives the round trip and strict parsers.
        line = masked(to_json(record, inf_nan_mode="strings").decode()).encode() + b"\n"
        try:
            self._file.write(line)
        except OSError as error:
            raise MachineError(f"{self._path}: cannot be written: {error.strerror}") from error

    def close(self) -> None:
        self._file.close()


def read_events(path: Path) -> Iterator[Record]:
    """Yield all records of a file. An unfinished last line, left by a killed writer, is ignored."""
    yield from EventTail(path).read()


class EventTail:
    """Reads a file that may still grow: each `read` returns the records added since the last one."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._offset = 0
        self._num_lines = 0

    def read(self) -> list[Record]:
        try:
            with self._path.open("rb") as file:
                file.seek(self._offset)
                text = file.read()
        except OSError as error:
            raise DataError(f"{self._path}: cannot be read: {error.strerror}") from error
        complete = text[: text.rfind(b"\n") + 1]
        first = self._num_lines + 1
        lines = complete.splitlines()
        records = [_parse(line, where=f"{self._path}: line {n}") for n, line in enumerate(lines, start=first)]
        self._offset += len(complete)
        self._num_lines += len(lines)
        return records


_RECORD: TypeAdapter[Record] = TypeAdapter(Record)


def _parse(line: bytes, *, where: str) -> Record:
    try:
        return _RECORD.validate_json(line)
    except ValidationError as error:
        detail = error.errors()[0]
        key = ".".join(str(part) for part in detail["loc"])
        raise DataError(f"{where} is not an event of this version of megarl: {key}: {detail['msg']}") from None


def _prepare(path: Path) -> int:
    """Return the next sequence number, after cutting off an unfinished last line so that the next one is whole."""
    if not path.exists():
        return 0
    text = path.read_bytes()
    complete = text[: text.rfind(b"\n") + 1]
    if len(complete) < len(text):
        with path.open("r+b") as file:
            file.truncate(len(complete))
    lines = complete.splitlines()
    return _parse(lines[-1], where=f"{path}: the last line").sequence + 1 if lines else 0
