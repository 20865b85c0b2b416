"""Faults for tests: they stop a run, or one part of it, at a named point. Inert without MEGARL_FAULTS.

MEGARL_FAULTS='[{"point": "file_written", "rank": 1, "step": 4, "kind": "kill"}]'. `step`, `rank`, `engine` and `of`
select one passage of the point; those left out match any. `once` is the path of a file: the fault happens only if the
file does not exist, and creates it, so that a restarted part of the run passes unharmed.

Kinds: `kill` ends the process with SIGKILL, `stop` freezes it with SIGSTOP, `wait` sleeps for `seconds`, the name of an
errno (ENOSPC, EFBIG, EROFS, EIO) raises that OSError, and at the points marked so below `nan` or `corrupt` let the
caller spoil a value.

A step in the trainer; `of` is actor or critic:
    forward            rank    a mini-batch has arrived, no micro-batch is begun
    backward           rank    the loss of a micro-batch is known, its gradients are not; on last stages; nan: the loss
    gradients          rank    gradients of a mini-batch are summed over all ranks; nan: this rank's
    optimizer          rank    gradients are known to be finite, no weight is changed
    updated            rank    every weight of this rank is changed
A forward pass that is not part of an update; `of` is actor, critic or reference:
    asked              rank    before the pass

A transfer of weights; `step` is the version, `of` the name of the group, such as publish, or save 2:
    bucket_packed      rank    the sender has packed it, not yet sent; corrupt: its bytes
    bucket_sent        rank    it is being transferred
    bucket_received    engine  the receiver has it, not yet read; corrupt: its bytes
    received           engine  everything has arrived and is digested, nothing is served; corrupt: a digest

A step in the driver:
    step_begun         driver
    step_taken         driver  its groups are complete
    step_trained       driver  not yet published
    step_published     driver
    generating         driver  one request is about to be sent to `engine`
    scoring            worker  a reward worker is about to call the user's function; nan: its score

The points of a save, in the order they are passed:
    begun              driver  step_N.tmp exists and is empty
    snapshot_taken     rank    the rank has its part in host memory; training may go on
    ranks_met          rank    the ranks are connected for this save
    tensors_received   rank    whole tensors are in host memory, no file is begun
    file_written       rank    a safetensors file has all its bytes, not yet synced
    file_synced        rank    the file is on disk
    index_written      rank    rank 0 has written the index
    companions_copied  rank    rank 0 has copied configuration and tokenizer
    ranks_done         driver  every tensor is on disk, no state yet
    state_written      driver
    manifest_written   driver  the last file is written, folders are not synced
    folders_synced     driver  the checkpoint is complete, under its temporary name
    later_set_aside    driver  older checkpoints of this step or later have another name
    renamed            driver  the checkpoint has its name; `latest` is still the one before
    latest_linked      driver  `latest` is this one; its number is still the one before
    latest_numbered    driver
    doomed             driver  an old checkpoint has a temporary name and is about to be removed
    pruned             driver  the old checkpoint is removed
"""

from __future__ import annotations

import errno
import json
import os
import re
import signal
import threading
import time
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Literal, TypeAlias, get_args

from megarl.env import FAULTS

StepPoint = Literal["forward", "backward", "gradients", "optimizer", "updated", "asked"]
PublishPoint = Literal["bucket_packed", "bucket_sent", "bucket_received", "received"]
DriverPoint = Literal["step_begun", "step_taken", "step_trained", "step_published", "generating", "scoring"]
SavePoint = Literal[
    "begun",
    "snapshot_taken",
    "ranks_met",
    "tensors_received",
    "file_written",
    "file_synced",
    "index_written",
    "companions_copied",
    "ranks_done",
    "state_written",
    "manifest_written",
    "folders_synced",
    "later_set_aside",
    "renamed",
    "latest_linked",
    "latest_numbered",
    "doomed",
    "pruned",
]
Point: TypeAlias = StepPoint | PublishPoint | DriverPoint | SavePoint
POINTS: tuple[str, ...] = tuple(name for group in get_args(Point) for name in get_args(group))

Spoil = Literal["nan", "corrupt"]
"""The damage that the caller does to the value at the point."""
SPOILABLE: dict[str, Spoil] = {
    "backward": "nan",
    "gradients": "nan",
    "scoring": "nan",
    "bucket_packed": "corrupt",
    "bucket_received": "corrupt",
    "received": "corrupt",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Fault:
    point: Point
    kind: str
    step: int | None = None
    rank: int | None = None
    engine: int | None = None
    of: str | None = None
    seconds: float = 0.0
    once: str | None = None

    def __post_init__(self) -> None:
        assert self.point in POINTS, f"{FAULTS.name}: no point {self.point}"
        is_plain = self.kind in ("kill", "stop", "wait") or hasattr(errno, self.kind)
        assert is_plain or SPOILABLE.get(self.point) == self.kind, f"{FAULTS.name}: no {self.kind} at {self.point}"


def reach(
    point: Point,
    *,
    step: int | None = None,
    rank: int | None = None,
    engine: int | None = None,
    of: str | None = None,
) -> Spoil | None:
    """Run the faults planned for this point; return what the caller does to its value, nearly always nothing."""
    for fault in planned_faults():
        meant = ((fault.step, step), (fault.rank, rank), (fault.engine, engine), (fault.of, of))
        if fault.point == point and all(planned in (None, reached) for planned, reached in meant) and _is_first(fault):
            return _happen(fault)
    return None


def step_in(path: Path) -> int | None:
    """Return the step of a checkpoint's path, also of its names while it is written or removed."""
    numbers = (re.match(r"step_(\d{6,})", part) for part in path.parts)
    return next((int(number[1]) for number in numbers if number is not None), None)


@cache
def planned_faults() -> tuple[Fault, ...]:
    """Return the faults of this process, which are read once."""
    return tuple(Fault(**fields) for fields in json.loads(FAULTS.read() or "[]"))


def _is_first(fault: Fault) -> bool:
    if fault.once is None:
        return True
    try:
        Path(fault.once).touch(exist_ok=False)
    except FileExistsError:
        return False
    return True


def _happen(fault: Fault) -> Spoil | None:
    match fault.kind:
        case "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        case "stop":
            # To this thread: a signal to the process goes to the main thread, and this one goes on until it is handled.
            signal.pthread_kill(threading.get_ident(), signal.SIGSTOP)
        case "wait":
            time.sleep(fault.seconds)
        case "nan" | "corrupt":
            return fault.kind
        case name:
            number = getattr(errno, name)
            raise OSError(number, os.strerror(number))
    return None
