"""Faults for tests: they stop a run, or one part of it, at a named point. Inert without MEGARL_FAULTS.

MEGARL_FAULTS='[{"point": "file_written", "rank": 1, "step": 4, "kind": "kill"}]'. `step`, `rank`, `engine` and `of`
select one passage of the point; those left out match any. `once` is the path of a file: the fault happens only if the
file does not exist, and creates it, so that a restarted part of the run passes unharmed.

Kinds: `kill` ends the process with SIGKILL, `stop` freezes it with SIGSTOP, `wait` sleeps for `seconds`, the name of an
errno (ENOSPC, EFBIG, EROFS, EIO) raises that OSError, and at the points marked so in `fault_points` `nan` or `corrupt`
let the caller spoil a value.
"""

from __future__ import annotations

import errno
import json
import os
import re
import signal
import threading
import time
from functools import cache
from pathlib import Path

from megarl.env import FAULTS
from megarl.system.fault_points import Fault, Point, Spoil


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
