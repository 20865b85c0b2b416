"""A program as the agent of one episode, inside of a worker process: started, watched, ended with all that it started.

Whether the model or the machine is to blame for a program that fails cannot be known: its episode is lost, and no score
is made up.
"""

from __future__ import annotations

import json
import os
import resource
import signal
import subprocess
import sys
import threading
from collections.abc import Mapping
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import IO, TypedDict, cast
from uuid import uuid4

from megarl.config.section import MIB
from megarl.env import USER_PROGRAM, current_environment
from megarl.system.foreign import one_line, read_json
from megarl.system.proc import descendants, kill_marked, resident_bytes
from megarl.types import JsonValue

_WATCH_INTERVAL_S = 1.0
_READ_BYTES = 1 << 16
_TAIL_BYTES = 2000
"""The end of a program's output that a message may show."""
_OUTPUT_GRACE_S = 5.0
_MAX_RESULT_BYTES = MIB


class ProgramTask(TypedDict):
    command: list[str]
    is_given_row: bool
    """It reads the whole row instead of the prompt's text."""
    result: str | None
    """The file that it writes its score to."""
    memory_bytes: int
    max_processes: int
    cpu_s: int | None


class ProgramError(Exception):
    """A program that did not play the episode to its end; the message is a predicate."""


def run_program(
    task: ProgramTask,
    folder: Path,
    row: Mapping[str, JsonValue],
    variables: Mapping[str, str],
    *,
    is_over: threading.Event | None = None,
) -> JsonValue:
    """Run the program in a folder; return the score that it wrote, None where it writes none.

    A ProgramError if it fails, or if `is_over` says that nobody waits for it any more.
    """
    mark = uuid4().hex
    given = json.dumps(row) if task["is_given_row"] else str(row["prompt"])
    try:
        process = subprocess.Popen(  # noqa: S603 - the user's own program, no shell
            task["command"],
            cwd=folder,
            env={**current_environment(), **variables, USER_PROGRAM.name: mark},
            # A pipe: what was read from it cannot be read again by what the program starts for the model.
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    except OSError as error:
        raise ProgramError(f"cannot be started: {task['command'][0]}: {error.strerror}") from None
    assert process.stdin is not None
    assert process.stdout is not None
    tail = bytearray()
    writing = threading.Thread(target=partial(_give, process.stdin, given), daemon=True)
    reading = threading.Thread(target=partial(_pass_on, process.stdout, tail), daemon=True)
    writing.start()
    reading.start()
    try:
        if task["cpu_s"] is not None:
            with suppress(ProcessLookupError):
                resource.prlimit(process.pid, resource.RLIMIT_CPU, (task["cpu_s"], resource.RLIM_INFINITY))
        excess = _watch(process, task, is_over)
    finally:
        with suppress(OSError):
            os.killpg(process.pid, signal.SIGKILL)
        kill_marked(USER_PROGRAM.name, mark)  # what has left the program's session
        process.wait()
        reading.join(_OUTPUT_GRACE_S)
    if excess is not None:
        raise ProgramError(excess)
    if process.returncode != 0:
        said = one_line(tail.decode(errors="replace").strip().rpartition("\n")[2])
        raise ProgramError(f"{_described(process.returncode)}{': ' if said else ''}{said}")
    return None if task["result"] is None else _read_result(folder / task["result"])


def _give(stdin: IO[bytes], given: str) -> None:
    with suppress(OSError), stdin:  # a program need not read it
        stdin.write(given.encode(errors="replace"))


def _pass_on(stdout: IO[bytes], tail: bytearray) -> None:
    """Write the output to this worker's, which has a bounded log, and keep its end."""
    with stdout:
        while chunk := os.read(stdout.fileno(), _READ_BYTES):
            with suppress(OSError):
                os.write(sys.stdout.fileno(), chunk)
            tail += chunk
            del tail[:-_TAIL_BYTES]


def _watch(process: subprocess.Popen[bytes], task: ProgramTask, is_over: threading.Event | None) -> str | None:
    """Wait until the program ends; return the limit that it exceeds."""
    while True:
        if is_over is not None and is_over.is_set():
            return "was ended: nobody waits for it"
        with suppress(subprocess.TimeoutExpired):
            process.wait(_WATCH_INTERVAL_S)
            return None
        family = descendants(process.pid)
        if len(family) > task["max_processes"]:
            return f"had more than {task['max_processes']} processes (environment.max_processes)"
        if sum(map(resident_bytes, family)) > task["memory_bytes"]:
            return f"used more than {task['memory_bytes'] / MIB:g} MiB of memory (environment.memory_gib)"


def _described(code: int) -> str:
    if code == -signal.SIGXCPU:
        return "used more CPU time than environment.cpu_s"
    return f"was ended by {signal.Signals(-code).name}" if code < 0 else f"exited with status {code}"


def _read_result(path: Path) -> JsonValue:
    if not path.is_file():
        raise ProgramError(f"wrote no file {path.name} (environment.result)")
    with path.open("rb") as file:
        content = file.read(_MAX_RESULT_BYTES)
    try:
        return cast("JsonValue", read_json(content))
    except ValueError:
        raise ProgramError(f"wrote {path.name}, which is neither a number nor JSON (environment.result)") from None
