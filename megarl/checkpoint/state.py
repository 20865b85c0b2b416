"""The state of a run after a step, `state.json`: everything but weights and optimizer moments."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from pydantic import TypeAdapter, ValidationError

from megarl.algo.monitor import MonitorState
from megarl.checkpoint.manifest import sync
from megarl.errors import CheckpointError, first_line
from megarl.system.faults import reach, step_in

STATE_FILE = "state.json"


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainerState:
    """State of the actor or the critic; the same on every rank."""

    num_steps: int
    """Steps taken: the position in the learning-rate schedule."""
    num_updates: int
    """Step count of the optimizer, and for the actor the version of the weights."""
    num_skipped_in_a_row: int = 0
    """Updates with non-finite numbers since the last applied update."""
    monitor: MonitorState | None = None
    """Set for the actor only."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Ledger:
    """Counts of the prompts drawn from the stream: trained on, dropped, carried or pending."""

    num_trained: int = 0
    num_dropped: int = 0
    """Groups that the algorithm filtered out."""
    pending: tuple[int, ...] = ()
    """Stream positions of prompts without a group; a resumed run begins with them."""
    num_carried: int = 0
    """Groups that are scored and not yet trained on; they are part of the checkpoint."""

    @property
    def num_drawn(self) -> int:
        return self.num_trained + self.num_dropped + len(self.pending) + self.num_carried


@dataclass(frozen=True, slots=True, kw_only=True)
class Best:
    """The best evaluation so far."""

    metric: str
    value: float
    step: int


@dataclass(frozen=True, slots=True, kw_only=True)
class RunState:
    trainer: TrainerState
    """State of the actor."""
    prompt_cursor: int
    """Number of prompts drawn from the stream; with the seed it determines epoch and order."""
    ledger: Ledger
    best: Best | None = None
    """None without `checkpoint.keep_best`."""
    critic: TrainerState | None = None
    kl_coef: float | None = None
    """KL coefficient of the next step."""
    versions: tuple[int, ...] = ()
    """Versions published before the trainer's own, as far back as carried groups may reach; the latest comes last."""
    seed: int
    data_digest: str
    """Digest of all prompts, in the order of the files."""
    tools_digest: str | None = None
    """Digest of the tools that prompts name; None without any."""


_STATE: TypeAdapter[RunState] = TypeAdapter(RunState)


def write_state(folder: Path, state: RunState) -> None:
    path = folder / STATE_FILE
    path.write_bytes(_STATE.dump_json(state, indent=1) + b"\n")
    sync(path)
    reach("state_written", step=step_in(folder))


def read_state(folder: Path) -> RunState:
    path = folder / STATE_FILE
    try:
        return _STATE.validate_json(path.read_bytes(), strict=True)
    except (OSError, ValidationError) as error:
        raise CheckpointError(f"{path}: cannot be read: {first_line(error)}") from error
