"""What happened in a run, one line each, in `<run>/events.jsonl`: typed, numbered, flushed, never rewritten.

The file is the memory of a run: the report is made from it, and its last line says where a dead run stood.
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
    """The step of the checkpoint it goes on from; 0 is a new run."""
    recipe: Mapping[str, JsonValue]
    """As it was after overrides and defaults."""


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
    """Time in each phase since the step before."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Published:
    kind: Literal["published"] = "published"
    result: PublishResult


@dataclass(frozen=True, slots=True, kw_only=True)
class PublishFailed:
    """The engines keep the version before."""

    kind: Literal["publish_failed"] = "publish_failed"
    version: PolicyVersion
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineChanged:
    """An engine came, left, or does something else than before. A publish that reaches it is no such change."""

    kind: Literal["engine_changed"] = "engine_changed"
    index: int
    state: str
    """In the fleet's words."""
    is_serving: bool
    """Whether it gets requests: then it has the version published last."""
    is_running: bool
    """Whether there is a process that can be asked for its metrics."""
    version: PolicyVersion
    address: str
    """Host and port; its own metrics are there."""
    reason: str = ""


ALL_TRAINERS = "trainers"
"""As a role: the ranks of all models, which start again together."""


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
    """Training stood still: for the save before, and for copying to host memory."""
    seconds: float
    """Of the whole save, until it was complete and named."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointFailed:
    """Training went on all the same, unless it was the last step's."""

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
    """The error's sentence, where there was one."""


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
    """An event with its place in the run."""

    sequence: int
    """Counts from 0 over the whole file, without gaps."""
    time: datetime
    event: Annotated[Event, Field(discriminator="kind")]


class Sink(Protocol):
    """Where records go. Called from the loop's thread, in order; must not block for long."""

    def record(self, record: Record) -> None: ...

    def close(self) -> None: ...


class EventLog:
    """The sink that is a file. An existing file is continued: its numbers go on."""

    def __init__(self, path: Path) -> None:
        self._path = path
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            self.next_sequence = _prepare(path)
            # Unbuffered: a line is in the file when `record` returns, whatever kills the process next.
            self._file = path.open("ab", buffering=0)
        except OSError as error:
            raise MachineError(f"{path}: cannot be written: {error.strerror}") from error

    def record(self, record: Record) -> None:
        # JSON has no NaN; as a string it survives the round trip and every strict parser.
        line = masked(to_json(record, inf_nan_mode="strings").decode()).encode() + b"\n"
        try:
            self._file.write(line)
        except OSError as error:
            raise MachineError(f"{self._path}: cannot be written: {error.strerror}") from error

    def close(self) -> None:
        self._file.close()


def read_events(path: Path) -> Iterator[Record]:
    """All records of a file, in order. A last line that was not finished (the writer died) is left out."""
    yield from EventTail(path).read()


class EventTail:
    """The records of a file that somebody may still be writing: each call gives those that have come since."""

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
    """The next sequence number; a line the last writer did not finish is cut off, so that ours starts on its own."""
    if not path.exists():
        return 0
    text = path.read_bytes()
    complete = text[: text.rfind(b"\n") + 1]
    if len(complete) < len(text):
        with path.open("r+b") as file:
            file.truncate(len(complete))
    lines = complete.splitlines()
    return _parse(lines[-1], where=f"{path}: the last line").sequence + 1 if lines else 0
