"""The events of a run, which the report, the run page and `megarl doctor` are made from, and their sinks."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime
from enum import StrEnum
from typing import Annotated, Literal, Protocol

from pydantic import Field, JsonValue

from megarl.observe.summary import Phase, StepSummary
from megarl.results import EvalResult, PublishResult
from megarl.types import PolicyVersion


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


class Sink(Protocol):
    """Receives the records, in order, in the loop's thread; must not block for long.

    `record` raises OSError, ValueError or MachineError where it cannot write; the observer then reports it and goes on,
    and the sink tries again with the next record.
    """

    def record(self, record: Record) -> None: ...

    def close(self) -> None: ...
