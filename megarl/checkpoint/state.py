"""Where a run stood after a step: `state.json`. Everything of a run that is neither a weight nor a moment."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from pydantic import TypeAdapter, ValidationError

from megarl.algo.monitor import MonitorState
from megarl.checkpoint.manifest import sync
from megarl.errors import CheckpointError
from megarl.system.faults import reach, step_in

STATE_FILE = "state.json"


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainerState:
    """Of the actor or the critic; the same on every rank."""

    num_steps: int
    """Taken; the learning rate's place in its schedule."""
    num_updates: int
    """Of the optimizer: its step count, and for the actor the version of the weights."""
    num_skipped_in_a_row: int = 0
    """Updates whose numbers were not finite, since the last that was applied."""
    monitor: MonitorState | None = None
    """The actor's."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Ledger:
    """What became of every prompt drawn from the stream: it was trained on, dropped, or is still to be answered."""

    num_trained: int = 0
    num_dropped: int = 0
    """Not kept by the algorithm."""
    pending: tuple[int, ...] = ()
    """Positions in the stream of those that have no group yet; a run that goes on begins with them."""
    num_carried: int = 0
    """Groups that are scored and not yet trained on; the checkpoint has them."""

    @property
    def num_drawn(self) -> int:
        return self.num_trained + self.num_dropped + len(self.pending) + self.num_carried


@dataclass(frozen=True, slots=True, kw_only=True)
class Best:
    """The evaluation that no later one has beaten."""

    metric: str
    value: float
    step: int


@dataclass(frozen=True, slots=True, kw_only=True)
class RunState:
    trainer: TrainerState
    """The actor's."""
    prompt_cursor: int
    """Prompts drawn from the stream; epoch and order follow from it and the seed."""
    ledger: Ledger
    best: Best | None = None
    """None where no checkpoint is kept for its metric."""
    critic: TrainerState | None = None
    kl_coef: float | None = None
    """What the next step's distance from the reference will cost."""
    versions: tuple[int, ...] = ()
    """Published before the trainer's own, as far back as carried groups may reach; the latest comes last."""
    seed: int
    data_digest: str
    """Of all prompts, in the order of the files."""


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
        raise CheckpointError(f"{path}: cannot be read: {str(error).splitlines()[0]}") from error
