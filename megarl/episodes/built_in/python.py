"""The tool `python`: code of the model in a kernel sandbox, with variables that live as long as the episode.

Runs in an environment's worker process, as a user's class does. A frame of either pipe is its length, its number and
its content; a reply repeats the number of its request. Between calls all processes of the code are stopped: they use
no time, and the memory that was counted at the end of a call does not grow.
"""

from __future__ import annotations

import json
import os
import selectors
import signal
import struct
import subprocess
import time
from contextlib import suppress
from functools import cache

from megarl.config.section import GIB, MIB
from megarl.episodes.protocol import PreparedTool
from megarl.reward.sandbox import (
    Limits,
    Sandbox,
    SandboxError,
    SandboxKind,
    resume_tree,
    stop_tree,
    tree_resident_bytes,
)
from megarl.system.foreign import whole_text

_HEADER = struct.Struct("!IQ")
_CHUNK_BYTES = 1 << 16
_WATCH_INTERVAL_S = 0.1
START_TIMEOUT_S = 60.0
"""Time for a start, which is no part of the call that waits for it."""
_START_ATTEMPTS = 2
_TOO_MUCH_MEMORY = "it used too much memory"
_MAX_OUTPUT_CHARACTERS = 1 << 18

# Runs inside the sandbox. The code's own output goes to a buffer; the pipes are kept from it under other numbers.
_PROGRAM = f"""
import ast, io, json, linecache, os, struct, sys, traceback

requests, replies = os.fdopen(os.dup(0), "rb"), os.fdopen(os.dup(1), "wb")
nowhere = os.open(os.devnull, os.O_RDWR)
os.dup2(nowhere, 0)
os.dup2(nowhere, 1)
sys.stdin = open(os.devnull)

class Printed(io.TextIOBase):
    def __init__(self):
        self.parts, self.size = [], 0
    def writable(self):
        return True
    def write(self, text):
        if self.size < {_MAX_OUTPUT_CHARACTERS}:
            self.parts.append(text[: {_MAX_OUTPUT_CHARACTERS} - self.size])
        self.size += len(text)
        return len(text)

def run(code, number):
    name = f"<call {{number}}>"
    linecache.cache[name] = (len(code), None, code.splitlines(True), name)
    try:
        tree = ast.parse(code, name)
        last = tree.body.pop() if tree.body and isinstance(tree.body[-1], ast.Expr) else None
        exec(compile(tree, name, "exec"), variables)
        if last is not None:
            value = eval(compile(ast.Expression(last.value), name, "eval"), variables)
            if value is not None:
                print(repr(value))
        return True
    except SystemExit as error:
        print(f"SystemExit: {{error}}")
    except BaseException as error:
        found = traceback.TracebackException.from_exception(error)
        found.stack = traceback.StackSummary.from_list([each for each in found.stack if each.filename[:1] == "<"])
        print("".join(found.format()), end="")
    return False

variables = {{"__name__": "__main__"}}
replies.write(struct.pack("{_HEADER.format}", 2, 0) + b"{{}}")
replies.flush()
while header := requests.read({_HEADER.size}):
    size, number = struct.unpack("{_HEADER.format}", header)
    code = requests.read(size).decode()
    sys.stdout = sys.stderr = output = Printed()
    is_done = run(code, number)
    sys.stdout, sys.stderr = sys.__stdout__, sys.__stderr__
    reply = json.dumps({{"text": "".join(output.parts), "size": output.size, "is_done": is_done}}).encode()
    replies.write(struct.pack("{_HEADER.format}", len(reply), number) + reply)
    replies.flush()
"""


class _StoppedError(Exception):
    """The interpreter is gone; the message says why."""


@cache
def _sandbox(kind: SandboxKind, limits: Limits, python: str | None) -> Sandbox:
    return Sandbox(kind, limits, python=python)


class Python(PreparedTool):
    """A sandboxed interpreter, started at the first call."""

    def __init__(
        self,
        *,
        sandbox: SandboxKind,
        memory_gib: float,
        disk_mib: int,
        max_processes: int,
        python: str | None,
        deadline_s: float,
    ) -> None:
        self._limits = Limits(
            memory_bytes=int(memory_gib * GIB),
            disk_bytes=disk_mib * MIB,
            max_processes=max_processes,
            max_output_bytes=_MAX_OUTPUT_CHARACTERS,
        )
        self._sandbox = _sandbox(sandbox, self._limits, python)
        self._deadline_s = deadline_s
        self._process: subprocess.Popen[bytes] | None = None
        self._number = 0

    def prepare(self) -> None:
        """Start the interpreter if there is none; a SandboxError if it does not come up: no code has run in it yet."""
        deadline, attempt = time.monotonic() + START_TIMEOUT_S, 1
        while self._process is None:
            self._process = self._sandbox.start(_PROGRAM)
            try:
                self._exchange(b"", 0, deadline)
            except _StoppedError as error:
                self.close()
                is_late = time.monotonic() >= deadline
                if attempt == _START_ATTEMPTS or is_late:
                    why = f"it was not ready within {START_TIMEOUT_S:g} s" if is_late else str(error)
                    raise SandboxError(f"no interpreter can be started: {why}") from None
                attempt += 1
            except BaseException:
                self.close()
                raise

    def python(self, code: str) -> str:
        """Run Python code and return what it prints, and the value of its last line. Variables are kept."""
        self.prepare()
        try:
            reply = self._call(code)
        except _StoppedError as error:
            self.close()
            return f"error: the interpreter was stopped: {error}; variables are lost, the next call begins afresh"
        except BaseException:
            # The call's deadline, above all. A reply that comes later must not meet the next call.
            self.close()
            raise
        text, size = whole_text(str(reply.get("text", ""))), reply.get("size", 0)
        if isinstance(size, int) and size > len(text):
            text += f"\n[{size - len(text)} characters more]"
        return text

    def close(self) -> None:
        """End the interpreter and all that it has started."""
        process, self._process = self._process, None
        if process is None:
            return
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        for pipe in (process.stdin, process.stdout):
            if pipe is not None:
                with suppress(OSError):
                    pipe.close()
        process.wait()

    def _call(self, code: str) -> dict[str, object]:
        assert self._process is not None
        pid, self._number = self._process.pid, self._number + 1
        resume_tree(pid)
        reply = self._exchange(code.encode(errors="replace"), self._number, time.monotonic() + self._deadline_s)
        if not stop_tree(pid):
            raise _StoppedError("it starts processes without end")
        if tree_resident_bytes(pid) > self._limits.memory_bytes:
            raise _StoppedError(_TOO_MUCH_MEMORY)
        return reply

    def _exchange(self, payload: bytes, number: int, deadline: float) -> dict[str, object]:
        """Send a request, number 0 being none, and return its reply."""
        frame = _HEADER.pack(len(payload), number) + payload if number else b""
        size, replied = _HEADER.unpack(self._read(_HEADER.size, deadline, unsent=frame))
        if size > 8 * _MAX_OUTPUT_CHARACTERS or replied != number:
            raise _StoppedError("it wrote to its reply")
        try:
            reply = json.loads(self._read(size, deadline))
        except (ValueError, RecursionError):
            reply = None
        if not isinstance(reply, dict):
            raise _StoppedError("it wrote to its reply")
        return reply

    def _read(self, num_bytes: int, deadline: float, *, unsent: bytes = b"") -> bytes:
        """Read from the interpreter, and write to it what is unsent, while its time and memory are watched."""
        assert self._process is not None
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        given, descriptor, found = self._process.stdin.fileno(), self._process.stdout.fileno(), b""
        os.set_blocking(given, False)
        watched = 0.0
        with selectors.DefaultSelector() as selector:
            selector.register(descriptor, selectors.EVENT_READ)
            if unsent:
                selector.register(given, selectors.EVENT_WRITE)
            while len(found) < num_bytes:
                now = time.monotonic()
                if now >= deadline:
                    raise _StoppedError(f"it ran longer than {self._deadline_s:g} s")
                if now >= watched + _WATCH_INTERVAL_S:
                    watched = now
                    if tree_resident_bytes(self._process.pid) > self._limits.memory_bytes:
                        raise _StoppedError(_TOO_MUCH_MEMORY)
                for key, _ in selector.select(timeout=min(_WATCH_INTERVAL_S, deadline - now)):
                    if key.fd == descriptor:
                        found += _received(descriptor, num_bytes - len(found))
                    else:
                        unsent = unsent[_sent(given, unsent[:_CHUNK_BYTES]) :]
                        if not unsent:
                            selector.unregister(given)
        return found


def _received(descriptor: int, num_bytes: int) -> bytes:
    chunk = os.read(descriptor, num_bytes)
    if not chunk:
        raise _StoppedError("it ended")
    return chunk


def _sent(descriptor: int, chunk: bytes) -> int:
    try:
        return os.write(descriptor, chunk)
    except BlockingIOError:
        return 0
    except OSError:
        raise _StoppedError("it has ended") from None
