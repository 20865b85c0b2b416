"""Runs one command and ends its whole process group when whoever asked for it is gone, however that happened.

`python -m megarl.rollout.guard COMMAND...` with a pipe as its standard input, whose other end the parent keeps: the
kernel closes that end with the parent, even one that was killed. Linux's own parent-death signal would reach only the
direct child, and SGLang's workers would stay behind.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading

_SIGNAL_EXIT = 128


def main(command: list[str]) -> int:
    """The command's exit code; 128 + n where signal n ended it, as a shell has it."""
    child = subprocess.Popen(command, stdin=subprocess.DEVNULL)  # noqa: S603 - the command is our own
    signal.signal(signal.SIGTERM, lambda _number, _frame: child.terminate())
    threading.Thread(target=_end_with_parent, daemon=True).start()
    code = child.wait()
    return code if code >= 0 else _SIGNAL_EXIT - code


def _end_with_parent() -> None:
    # Not sys.stdin: a thread that waits there holds a lock which the interpreter needs to exit.
    os.read(sys.stdin.fileno(), 1)
    os.killpg(os.getpgrp(), signal.SIGKILL)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
