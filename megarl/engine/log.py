"""The log of an engine: what its processes print, without secrets, and the message that explains their end."""

from __future__ import annotations

import re
import threading
import time
from collections import deque
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path
from typing import IO

from megarl.system.secret import masked
from megarl.system.start_log import piece_line

_JOIN_S = 5.0
_NUM_TAIL_LINES = 400
_EXCEPTION = re.compile(r"^[\w.]*(Error|Exception|Interrupt|Exit)\b.*: \S")
_NOISE = re.compile(r"Received sigquit|kill_process_tree|(Prefill|Decode) batch|^\s*$")
_START = {
    "imports of the server": re.compile(r"server_args="),
    "imports of the scheduler": re.compile(r"Init torch distributed begin"),
    "weights and cache": re.compile(r"Capture .*begin|max_total_num_tokens="),
    "graphs": re.compile(r"Capture .* end\b"),
    "server": re.compile(r"fired up and ready"),
}
"""The pieces of a start, each with the line of SGLang that ends it; one without its line is part of the next."""
_LAST_PIECE = "server"
_NUM_LAST_LINES = 60
"""The server survived an exception before these."""


class EngineLog:
    """A file that outlives restarts of the engine."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._tail: deque[str] = deque(maxlen=_NUM_TAIL_LINES)
        self._writer: threading.Thread | None = None
        self._began = 0.0
        self._ends: dict[str, float] = {}
        """When each piece of the start ended, in seconds since the epoch."""

    def follow(self, output: IO[bytes]) -> None:
        """Append the output, in a thread, until the last writing process is gone."""
        self._began, self._ends = time.time(), {}
        self._writer = threading.Thread(target=self._write, args=(output,), daemon=True)
        self._writer.start()

    def _write(self, output: IO[bytes]) -> None:
        """Lines that a full disk does not take are lost: unread, they would block the server."""
        with output, self.path.open("ab", buffering=0) as log:
            for raw in output:
                # SGLang prints all its options, including its keys, when it starts.
                line = masked(raw.decode("utf-8", errors="replace"))
                with suppress(OSError):
                    log.write(line.encode())
                self._tail.append(line.rstrip())
                self._note(line)

    def _note(self, line: str) -> None:
        if _LAST_PIECE in self._ends:
            return
        for what, end in _START.items():
            if what not in self._ends and end.search(line):
                self._ends[what] = time.time()

    def note_start(self) -> None:
        """Append what took how long since the process was started."""
        ends, began = [*self._ends.items(), ("first tokens", time.time())], self._began
        with suppress(OSError), self.path.open("a", encoding="utf-8") as log:
            for what, ended in ends:
                log.write(piece_line(what, began=began, ended=ended))
                began = ended

    def finish(self) -> None:
        """Wait for the last lines."""
        if self._writer is not None:
            self._writer.join(timeout=_JOIN_S)

    def has(self, pattern: re.Pattern[str]) -> bool:
        """Whether one of the last lines matches."""
        return pattern.search("\n".join(self._tail)) is not None

    @property
    def hint(self) -> str:
        return f"last message: {last_message(self._tail)!r}; log: {self.path}"


def last_message(lines: Iterable[str]) -> str:
    """Return the line of a log that gives the reason: the last exception, else the last meaningful line."""
    meaningful = [line.strip() for line in lines if not _NOISE.search(line)]
    exceptions = [line for line in meaningful[-_NUM_LAST_LINES:] if _EXCEPTION.match(line)]
    chosen = exceptions or meaningful
    return chosen[-1][:500] if chosen else "(nothing)"
