"""Control groups of the kernel, version 2: limits on the memory and the number of all processes of a program together.

A group counts exactly and at every moment what a look at the processes sees now and then: pages they share once, and
files in memory as well. Groups can be made where a part of the tree is delegated to this process, as systemd does with
`Delegate=` and `DelegateSubgroup=`; elsewhere there are none, and resource limits and a system-call filter have to do.
"""

from __future__ import annotations

import os
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

_CONTROLLERS = ("memory", "pids")
_MARKS = ("trusted.delegate", "user.delegate")
"""Attributes that systemd gives to a folder that it delegates."""
_PREFIX = "megarl-"
_PROC = Path("/proc/self")


@dataclass(frozen=True, slots=True, kw_only=True)
class Group:
    """The processes of one program."""

    folder: Path

    @property
    def entrance(self) -> Path:
        """A process that writes its id into this file belongs to the group, and so does what it starts."""
        return self.folder / "cgroup.procs"

    @property
    def exceeded_memory(self) -> bool:
        """Whether the kernel ended a process of it for its memory."""
        with suppress(OSError):
            counts = dict(line.split() for line in (self.folder / "memory.events").read_text().splitlines())
            return int(counts.get("oom_kill", 0)) > 0
        return False

    def kill(self) -> None:
        with suppress(OSError):  # it is empty, or the kernel is older than 5.14: the caller kills its process group
            (self.folder / "cgroup.kill").write_text("1")


@dataclass(slots=True, kw_only=True)
class Groups:
    """Makes groups in a folder that is delegated to this process."""

    folder: Path
    _number: int = 0
    _made: list[Path] = field(default_factory=list)

    @classmethod
    def find(cls) -> Groups | None:
        """Return None where nothing is delegated, or not these limits."""
        own = _own_folder(_PROC)
        # A group with limits for others has no processes of its own: this process is one below, with groups beside it.
        if own is None or not _is_delegated(own.parent):
            return None
        try:
            for controller in _CONTROLLERS:
                (own.parent / "cgroup.subtree_control").write_text(f"+{controller}")
        except OSError:
            return None
        groups = cls(folder=own.parent)
        groups._remove_those_of_the_dead()
        return groups

    def make(self, *, memory_bytes: int, max_processes: int) -> Group:
        """Raises OSError."""
        self._remove_empty()
        self._number += 1
        folder = self.folder / f"{_PREFIX}{os.getpid()}-{self._number}"
        folder.mkdir()
        self._made.append(folder)
        (folder / "memory.max").write_text(str(memory_bytes))
        (folder / "pids.max").write_text(str(max_processes))
        (folder / "memory.oom.group").write_text("1")
        swap = folder / "memory.swap.max"
        if swap.exists():  # not on a kernel without swap
            swap.write_text("0")
        return Group(folder=folder)

    def _remove_empty(self) -> None:
        """A group is gone when its last process is reaped, which may be a moment after the program's end."""
        for folder in list(self._made):
            with suppress(OSError):
                folder.rmdir()
            if not folder.exists():
                self._made.remove(folder)

    def _remove_those_of_the_dead(self) -> None:
        for folder in self.folder.glob(f"{_PREFIX}*-*"):
            pid = folder.name.removeprefix(_PREFIX).partition("-")[0]
            if not Path("/proc", pid).exists():
                with suppress(OSError):
                    folder.rmdir()


def _own_folder(proc: Path) -> Path | None:
    """Return the folder of this process's group in the tree of version 2."""
    try:
        groups = (proc / "cgroup").read_text().splitlines()
        mounts = [line.split() for line in (proc / "mountinfo").read_text().splitlines()]
    except OSError:
        return None
    below = next((line.removeprefix("0::/") for line in groups if line.startswith("0::/")), None)
    # Behind the options of a mount there is a hyphen, and then the kind of file system.
    points = [words[4] for words in mounts if words[words.index("-") + 1] == "cgroup2"]
    return Path(points[0], below) if points and below else None


def _is_delegated(folder: Path) -> bool:
    """Whether groups may be made here: root could write anywhere, but only what is marked is not another's."""
    try:
        if not set(_CONTROLLERS) <= set((folder / "cgroup.controllers").read_text().split()):
            return False
    except OSError:
        return False
    if not all(os.access(folder / name, os.W_OK) for name in (".", "cgroup.procs", "cgroup.subtree_control")):
        return False
    return os.geteuid() != 0 or any(_attribute(folder, mark) == b"1" for mark in _MARKS)


def _attribute(folder: Path, name: str) -> bytes:
    try:
        return os.getxattr(folder, name)
    except OSError:
        return b""
