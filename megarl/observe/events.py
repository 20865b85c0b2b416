"""The events of a run, its progress by them, and their log, `<run>/events.jsonl`: one line each, never rewritten.

The report, the run page and `megarl doctor` are made from this file; its last line shows where a dead run stopped.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace
from datetime import datetime
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Literal, Protocol

from pydantic import Field, JsonValue, TypeAdapter, ValidationError
from pydantic_core import to_json

from megarl.errors import DataError, writing
from megarl.observe.cost import Usage
from megarl.observe.summary import Phase, StepSummary
from megarl.results import EvalResult, PublishResult
from megarl.system.secret import masked
from megarl.types import PolicyVersion

EVENTS_FILE = "events.jsonl"
MAX_WAITING_BYTES = 64 << 20
"""Events that wait for a disk; beyond it the oldest are dropped."""

logger = logging.getLogger(__name__)


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
    tools_digest: str | None = None
    """Digest of the tools that prompts name; None without any."""


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
class Straggled:
    """A rank or an engine was slow beside the others of its role, for several windows in a row."""

    kind: Literal["straggled"] = "straggled"
    role: str
    index: int
    ratio: float
    """Its time over the median's."""
    text: str


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
class Noted:
    """Progress outside the steps, for people."""

    kind: Literal["noted"] = "noted"
    text: str


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
    | Straggled
    | Evaluated
    | CheckpointSaved
    | CheckpointFailed
    | Noted
    | Warned
    | RunFinished
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Record:
    """An event with its number and time."""

    sequence: int
    """From 0, without gaps, over the whole file, unless lines were lost or damaged."""
    time: datetime
    event: Annotated[Event, Field(discriminator="kind")]


@dataclass(frozen=True, slots=True, kw_only=True)
class Progress:
    """How far a run is, folded from its records."""

    steps: int = 0
    step: int = 0
    """The last finished step."""
    first_step: int = 0
    """The last step finished before this process; 0 in a new run."""
    phase: Phase | None = None
    phase_began: datetime | None = None
    steps_began: datetime | None = None
    """Start of the first step; the time before it does not count in the pace."""
    summary: StepSummary | None = None
    evaluation: EvalResult | None = None
    eta_s: float | None = None
    """Seconds until the last step ends, at the mean pace so far, evaluations between steps included."""
    usage: Usage = field(default_factory=Usage)
    """GPU time of all starts so far."""

    @property
    def projected_gpu_hours(self) -> float | None:
        """GPU hours at the end of the run, at the pace so far."""
        return None if self.eta_s is None else self.usage.gpu_hours + self.usage.hours(self.eta_s)


def advance(progress: Progress, record: Record) -> Progress:
    usage = progress.usage.counted(record.time, is_over=isinstance(record.event, RunFinished))
    if isinstance(record.event, RunStarted):
        # The time since a driver that was killed is not counted.
        usage = progress.usage.started(record.event.recipe, record.time)
    return replace(_advance(progress, record), usage=usage)


def _advance(progress: Progress, record: Record) -> Progress:
    match record.event:
        case RunStarted(steps=steps, resumed_step=resumed_step):
            return Progress(steps=steps, step=resumed_step, first_step=resumed_step)
        case PhaseStarted(phase=phase):
            began = progress.steps_began or (record.time if phase == "generate" else None)
            return replace(progress, phase=phase, phase_began=record.time, steps_began=began)
        case StepFinished(summary=summary):
            # Behind a damaged checkpoint a process goes on from an earlier step than it began with.
            progress = replace(progress, first_step=min(progress.first_step, summary.step - 1))
            eta_s = _eta_s(progress, record.time, step=summary.step)
            return replace(progress, step=summary.step, summary=summary, eta_s=eta_s)
        case Evaluated(result=result):
            return replace(progress, evaluation=result)
        case _:
            return progress


def _eta_s(progress: Progress, now: datetime, *, step: int) -> float | None:
    if progress.steps_began is None:
        return None
    return (now - progress.steps_began).total_seconds() / (step - progress.first_step) * (progress.steps - step)


class Sink(Protocol):
    """Receives the records, in order, in the loop's thread; must not block for long.

    `record` raises OSError, ValueError or MachineError where it cannot write; the observer then reports it and goes on,
    and the sink tries again with the next record.
    """

    def record(self, record: Record) -> None: ...

    def close(self) -> None: ...


class EventLog:
    """The sink that writes the file. An existing file is continued, and so are its sequence numbers.

    Lines that cannot be written wait, up to a limit, and are written before the next one. No line is written in part.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._waiting: deque[bytes] = deque()
        self._num_waiting_bytes = 0
        self._num_lost = 0
        with writing(path):
            path.parent.mkdir(parents=True, exist_ok=True)
            self.next_sequence, self._end = _prepare(path)
            # Unbuffered: the line is in the file when `record` returns, even if the process is killed next.
            self._file = path.open("ab", buffering=0)

    def record(self, record: Record) -> None:
        # JSON has no NaN; a string survives the round trip and strict parsers.
        line = masked(to_json(record, inf_nan_mode="strings").decode()).encode() + b"\n"
        self._waiting.append(line)
        self._num_waiting_bytes += len(line)
        while self._num_waiting_bytes > MAX_WAITING_BYTES:
            self._num_waiting_bytes -= len(self._waiting.popleft())
            self._num_lost += 1
        self._write_waiting()

    def _write_waiting(self) -> None:
        while self._waiting:
            self._write(self._waiting[0])
            self._num_waiting_bytes -= len(self._waiting.popleft())
        if self._num_lost:
            logger.warning("%s: %d events are lost: it could not be written for too long", self._path, self._num_lost)
            self._num_lost = 0

    def _write(self, line: bytes) -> None:
        """Write a whole line or nothing: what a full disk took of it is cut off again."""
        left = memoryview(line)
        try:
            while left:
                left = left[self._file.write(left) :]
        except OSError:
            if len(left) < len(line):
                self._file.truncate(self._end)
            raise
        self._end += len(line)

    def close(self) -> None:
        try:
            self._write_waiting()
        except OSError as error:
            logger.warning("%s: %d events are lost: %s", self._path, len(self._waiting), error.strerror)
        with suppress(OSError):
            self._file.close()


def read_events(path: Path) -> Iterator[Record]:
    """Yield all records of a file, without its damaged lines and without an unfinished last one."""
    tail = EventTail(path)
    yield from tail.read()
    if tail.damage:
        logger.warning("%s", tail.damage)


class EventTail:
    """Reads a file that may still grow: each `read` returns the records added since the last one.

    A line that is not an event, as a power failure or another version of megarl leaves it, is skipped and counted.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._offset = 0
        self._num_lines = 0
        self._num_damaged = 0
        self._first_damage = ""

    @property
    def damage(self) -> str:
        """The number of skipped lines and the reason; empty if all are events."""
        if not self._num_damaged:
            return ""
        return f"{self._path}: {self._num_damaged} damaged lines are left out; the first is {self._first_damage}"

    def read(self) -> list[Record]:
        try:
            with self._path.open("rb") as file:
                file.seek(self._offset)
                text = file.read()
        except OSError as error:
            raise DataError(f"{self._path}: cannot be read: {error.strerror}") from error
        complete = text[: text.rfind(b"\n") + 1]
        records = []
        for line in complete.split(b"\n")[:-1]:
            self._num_lines += 1
            try:
                records.append(_RECORD.validate_json(line))
            except ValidationError as error:
                self._num_damaged += 1
                self._first_damage = self._first_damage or f"line {self._num_lines}: {_reason(error)}"
        self._offset += len(complete)
        return records


_RECORD: TypeAdapter[Record] = TypeAdapter(Record)


def _reason(error: ValidationError) -> str:
    detail = error.errors()[0]
    key = ".".join(str(part) for part in detail["loc"])
    return f"{key}: {detail['msg']}" if key else detail["msg"]


def _prepare(path: Path) -> tuple[int, int]:
    """Return the next sequence number and the size of the file, without an unfinished last line, which is cut off."""
    if not path.exists():
        return 0, 0
    text = path.read_bytes()
    complete = text[: text.rfind(b"\n") + 1]
    if len(complete) < len(text):
        with path.open("r+b") as file:
            file.truncate(len(complete))
    # Backwards: the last lines may be damaged.
    for line in reversed(complete.split(b"\n")):
        with suppress(ValidationError):
            return _RECORD.validate_json(line).sequence + 1, len(complete)
    return 0, len(complete)
