"""Accidents on purpose: how tests stop a run, or one write of it, at a named point. Inert without MEGARL_FAULTS.

MEGARL_FAULTS='[{"point": "file_written", "rank": 1, "step": 4, "kind": "kill"}]'; without `rank` and `step` every rank
and every step is meant. Kinds: `kill` ends the process as kill -9 does, `wait` sleeps for `seconds`, and the name of an
errno (ENOSPC, EFBIG, EROFS, EIO) fails the way the operating system would.

The points of a save, in the order they are passed:
    begun              driver  step_N.tmp is there, empty
    snapshot_taken     rank    the rank has its part in host memory; training may go on
    ranks_met          rank    the ranks are connected for this save
    tensors_received   rank    whole tensors are in host memory, no file is begun
    file_written       rank    a safetensors file has all its bytes, not yet synced
    file_synced        rank    it is on disk
    index_written      rank    rank 0 has written the index
    companions_copied  rank    rank 0 has copied configuration and tokenizer
    ranks_done         driver  every tensor is on disk, no state yet
    state_written      driver
    manifest_written   driver  the last file is there, folders are not synced
    folders_synced     driver  complete, under its temporary name
    later_set_aside    driver  what was of this step or later has another name
    renamed            driver  complete and named; `latest` is the one before
    latest_linked      driver  `latest` is this one; the number beside it is not
    latest_numbered    driver
    doomed             driver  an old checkpoint has a temporary name and is about to be removed
    pruned             driver  it is gone
"""

from __future__ import annotations

import errno
import json
import os
import signal
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from megarl.env import FAULTS

Point = Literal[
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


@dataclass(frozen=True, slots=True, kw_only=True)
class Fault:
    point: Point
    kind: str
    rank: int | None = None
    step: int | None = None
    seconds: float = 0.0

    def happens(self, point: Point, path: Path, rank: int | None) -> bool:
        is_step = self.step is None or any(part.startswith(f"step_{self.step:06d}") for part in path.parts)
        return point == self.point and is_step and self.rank in (None, rank)


def reach(point: Point, path: Path, *, rank: int | None = None) -> None:
    """Say that this process is at a point of the save of `path`, whose name has the step."""
    text = FAULTS.read()
    if not text:
        return
    for fault in (Fault(**fields) for fields in json.loads(text)):
        if fault.happens(point, path, rank):
            _happen(fault)


def _happen(fault: Fault) -> None:
    match fault.kind:
        case "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        case "wait":
            time.sleep(fault.seconds)
        case name:
            number = getattr(errno, name)
            raise OSError(number, os.strerror(number))
