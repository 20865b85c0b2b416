"""The tool `python`: code of the model in a kernel sandbox, with variables that live as long as the episode.

Runs in an environment's worker process, as a user's class does.
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
from megarl.reward.sandbox import Limits, Sandbox, SandboxKind, tree_resident_bytes

_LENGTH = struct.Struct("!I")
_WATCH_INTERVAL_S = 0.1
_START_TIMEOUT_S = 60.0
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

variables, number = {{"__name__": "__main__"}}, 0
replies.write(struct.pack("!I", 2) + b"{{}}")
replies.flush()
while header := requests.read(4):
    code = requests.read(struct.unpack("!I", header)[0]).decode()
    number += 1
    sys.stdout = sys.stderr = output = Printed()
    is_done = run(code, number)
    sys.stdout, sys.stderr = sys.__stdout__, sys.__stderr__
    reply = json.dumps({{"text": "".join(output.parts), "size": output.size, "is_done": is_done}}).encode()
    replies.write(struct.pack("!I", len(reply)) + reply)
    replies.flush()
"""


class _StoppedError(Exception):
    """The interpreter is gone; the message says why."""


@cache
def _sandbox(kind: SandboxKind, limits: Limits, python: str | None) -> Sandbox:
    return Sandbox(kind, limits, python=python)


class Python:
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

    def python(self, code: str) -> str:
        """Run Python code and return what it prints, and the value of its last line. Variables are kept."""
        try:
            if self._process is None:
                self._process = self._sandbox.start(_PROGRAM)
                self._reply(time.monotonic() + _START_TIMEOUT_S)
            payload = code.encode(errors="replace")
            self._write(_LENGTH.pack(len(payload)) + payload)
            reply = self._reply(time.monotonic() + self._deadline_s)
        except _StoppedError as error:
            self.close()
            return f"error: the interpreter was stopped: {error}; variables are lost, the next call begins afresh"
        text, size = str(reply.get("text", "")), reply.get("size", 0)
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

    def _write(self, payload: bytes) -> None:
        assert self._process is not None
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(payload)
            self._process.stdin.flush()
        except OSError:
            raise _StoppedError("it has ended") from None

    def _reply(self, deadline: float) -> dict[str, object]:
        (size,) = _LENGTH.unpack(self._read(_LENGTH.size, deadline))
        if size > 8 * _MAX_OUTPUT_CHARACTERS:
            raise _StoppedError("it wrote to its reply")
        try:
            reply = json.loads(self._read(size, deadline))
        except ValueError:
            reply = None
        if not isinstance(reply, dict):
            raise _StoppedError("it wrote to its reply")
        return reply

    def _read(self, num_bytes: int, deadline: float) -> bytes:
        """Read from the interpreter while its time and memory are watched."""
        assert self._process is not None
        assert self._process.stdout is not None
        descriptor, found = self._process.stdout.fileno(), b""
        watched = 0.0
        with selectors.DefaultSelector() as selector:
            selector.register(descriptor, selectors.EVENT_READ)
            while len(found) < num_bytes:
                now = time.monotonic()
                if now >= deadline:
                    raise _StoppedError(f"it ran longer than {self._deadline_s:g} s")
                if now >= watched + _WATCH_INTERVAL_S:
                    watched = now
                    if tree_resident_bytes(self._process.pid) > self._limits.memory_bytes:
                        raise _StoppedError("it used too much memory")
                if selector.select(timeout=min(_WATCH_INTERVAL_S, deadline - now)):
                    chunk = os.read(descriptor, num_bytes - len(found))
                    if not chunk:
                        raise _StoppedError("it ended")
                    found += chunk
        return found
