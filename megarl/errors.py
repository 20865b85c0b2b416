"""Every error megarl raises on purpose, and the exit code each one ends a run with.

    MegarlError
    ├── ConfigError          2   the recipe is wrong; holds every problem
    ├── DataError            3   a data set or a reward function is wrong
    │   └── RewardError      3   the reward cannot be loaded or reached, or has changed
    │       ├── ScoreError       one rollout has no score: the reward failed, was late or returned nonsense
    │       └── ScoreLostError   one episode has no score: its environment failed or was gone when asked for it
    ├── CheckpointError      4   nothing that verifies can be loaded, or a folder is broken
    │   ├── DamagedError         a file does not have the bytes that were written; an earlier checkpoint may be whole
    │   └── FinishedError        the run took all its steps before; nothing is left to do
    ├── MachineError         5   ports, devices, packages, processes of this machine
    │   └── EnvironmentLostError     the environment of one episode is gone or does not answer
    │       └── NeighbourError       its process ended because of another episode, which shared it
    ├── PreemptedError      75   the run was asked to stop; requeue it
    │   └── StoppedError   130   Ctrl-C: saved as for a preemption
    ├── FleetError          76   no engine that can generate is left
    │   ├── EngineError          one engine failed; the fleet may have others
    │   │   └── EngineLostError  it died during a request, which can be sent again
    │   ├── QuarantineError      the requests of one prompt failed or lost engines; the run goes on without its group
    │   └── WeightSyncError      a publish was not committed
    ├── NumericsError       77   loss, gradient or log-probability is not finite
    └── WorkerError         70   a rank failed; names role, rank and operation
        └── NodeMemoryError  5   Ray ended a rank because its node ran short of memory

Errors cross process borders, so each is picklable from its message alone.
"""

from __future__ import annotations

import errno
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass


class MegarlError(Exception):
    """A failure whose message says what to do."""

    exit_code = 70


@dataclass(frozen=True, slots=True, kw_only=True)
class Problem:
    """One thing wrong with a recipe: where, what, and the way out."""

    key: str
    message: str

    def __str__(self) -> str:
        return f"{self.key}: {self.message}" if self.key else self.message


class ConfigError(MegarlError):
    """The recipe cannot be run; holds all its problems."""

    exit_code = 2

    def __init__(self, source: str, problems: tuple[Problem, ...]) -> None:
        super().__init__(source, problems)
        self.source = source
        self.problems = problems

    def __str__(self) -> str:
        lines = [f"{self.source}: {len(self.problems)} problem(s)"]
        lines += [f"  {problem}" for problem in self.problems]
        return "\n".join(lines)


class DataError(MegarlError):
    exit_code = 3


class RewardError(DataError):
    pass


class ScoreError(RewardError):
    pass


class ScoreLostError(RewardError):
    pass


class CheckpointError(MegarlError):
    exit_code = 4


class DamagedError(CheckpointError):
    pass


class FinishedError(CheckpointError):
    pass


class MachineError(MegarlError):
    exit_code = 5


class EnvironmentLostError(MachineError):
    pass


class NeighbourError(EnvironmentLostError):
    pass


class PreemptedError(MegarlError):
    exit_code = 75


class StoppedError(PreemptedError):
    exit_code = 130


class FleetError(MegarlError):
    exit_code = 76


class EngineError(FleetError):
    pass


class EngineLostError(EngineError):
    pass


class QuarantineError(FleetError):
    pass


class WeightSyncError(FleetError):
    pass


class NumericsError(MegarlError):
    exit_code = 77


class WorkerError(MegarlError):
    pass


class NodeMemoryError(WorkerError):
    exit_code = MachineError.exit_code


def first_line(error: BaseException) -> str:
    """Return the first line of an error's message, or its class's name if it has no message."""
    return (str(error).strip().splitlines() or [type(error).__name__])[0]


def first_few(sentences: Sequence[str], max_named: int = 5) -> str:
    """Join the first sentences of a message, and count the rest."""
    more = [f"and {len(sentences) - max_named} more"] if len(sentences) > max_named else []
    return "; ".join([*sentences[:max_named], *more])


_DISK_FAULTS = {
    errno.EIO,
    errno.ENOSPC,
    errno.EDQUOT,
    errno.EROFS,
    errno.ESTALE,
    errno.ENODEV,
    errno.ENOTCONN,
    errno.ETIMEDOUT,
    errno.EHOSTDOWN,
}


@contextmanager
def naming_disk_faults(folder: object) -> Iterator[None]:
    """Raise a MachineError where the body meets a disk that fails; other errors of the system stay as they are."""
    try:
        yield
    except OSError as error:
        if error.errno not in _DISK_FAULTS:
            raise
        what = error.filename or folder
        raise MachineError(
            f"{what}: {error.strerror}: its disk fails; the same command goes on when it works"
        ) from error


@contextmanager
def writing(what: object) -> Iterator[None]:
    """Raise a MachineError that names what the body cannot write."""
    try:
        yield
    except OSError as error:
        raise MachineError(f"{what}: cannot be written: {error.strerror}") from error
