"""The seam between an episode and the box that its commands run in: one per episode, with files that stay."""

from __future__ import annotations

import shlex
import socket
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from megarl.episodes.harbor.tasks import BoxLimits, HarborTask

MAX_OUTPUT_BYTES = 1 << 16
"""Limit on the output of a command that is kept: the first and the last half of this."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CommandResult:
    code: int | None
    """The exit status; None for a command that was stopped."""
    output: str
    stopped: str | None = None
    """The limit that it exceeded."""


class BoxBrokenError(Exception):
    """A box that cannot be used any more for what was done inside; the message says what fails."""


class Box(Protocol):
    async def run(self, command: str, *, variables: Mapping[str, str], timeout_s: float) -> CommandResult:
        """Run a command in the working folder with bash.

        Raise EnvironmentLostError when the machine is at fault, BoxBrokenError when the box can run none any more.
        """
        ...

    async def put(self, folder: Path, target: str) -> None:
        """Copy a folder of this machine into the box, in place of what is there; a BoxBrokenError if that fails."""
        ...

    async def listener(self) -> socket.socket | None:
        """Return a socket of this process that listens at a loopback port of the box; None where it has a network.

        Raise EnvironmentLostError when none can be had.
        """
        ...

    async def close(self) -> None:
        """End all processes and remove all files of the box. May be called twice."""
        ...


class Boxes(Protocol):
    """Makes the boxes of a rollout worker, from images that are built once."""

    async def check(self, limits: BoxLimits) -> None:
        """Raise a ConfigError with the reason where this machine can have no boxes."""
        ...

    async def open(self, task: HarborTask) -> Box:
        """Raise EnvironmentLostError when the machine has none, DataError when the task cannot be built."""
        ...

    async def close(self) -> None: ...


def script_of(command: str, variables: Mapping[str, str]) -> str:
    """Return a script for bash that sets variables and runs a command."""
    lines = [f"export {name}={shlex.quote(value)}" for name, value in variables.items()]
    return "\n".join([*lines, command, ""])


def shown_output(head: bytes, tail: bytes, num_bytes: int) -> str:
    """Return an output of so many bytes of which the beginning and the end are known."""
    missing = num_bytes - len(head) - len(tail)
    mark = f"\n[{missing} bytes are not shown]\n".encode() if missing > 0 else b""
    return (head + mark + tail).decode(errors="replace").replace("\x00", "")
