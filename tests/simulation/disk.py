"""Disks below `/sim`: real files of a folder in memory, behind calls that fail, wait, and forget what is not synced.

Every function of `os` and `io` that the package reaches files with is wrapped. A process sees one disk at `/sim`: one
that all hosts share, or that of its own host.
"""

from __future__ import annotations

import builtins
import errno
import fcntl
import io
import os
import shutil
import stat
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any
from unittest import mock

from tests.simulation.world import Process, World, calling_process, current_thread

ROOT = "/sim"
_BELOW = f"{ROOT}/"
SHARED = "shared"
"""The name of the disk that all hosts mount."""
_LATENCY_S = 0.001
_FREE_BYTES = 1 << 40


class Disk:
    """One file system with its accidents."""

    def __init__(self, world: World, folder: Path, name: str) -> None:
        self.world = world
        self.name = name
        self.folder = folder / name
        self.root = str(self.folder)
        self.folder.mkdir()
        self.latency_s = _LATENCY_S
        self.fails_until = 0.0
        """Every call raises EIO."""
        self.is_full = False
        self.hangs_until = 0.0
        """Every call waits, as on a mount whose server is gone."""
        self.flock = "shared"
        """Between which processes flock works: `shared`, those of one `host`, or `none`."""
        self.locks: dict[int, dict[int, tuple[Process, int]]] = {}
        """By inode: descriptor -> holder and kind."""
        self.num_losses = 0
        """Power failures so far."""
        self.synced_files: dict[int, bytes] = {}
        self.synced_folders: dict[int, dict[str, tuple[int, str]]] = {}
        self.sync_folder(self.folder.stat().st_ino, str(self.folder))

    def reach(self, *, allocates: bool = False, pauses: bool = True) -> None:
        """Begin a call: it may take time, and it may fail."""
        if pauses:
            self.world.pause(self.latency_s * self.world.random.random())
        while self.world.now < self.hangs_until:
            self.world.pause(self.hangs_until - self.world.now)
        if self.world.now < self.fails_until:
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        if allocates and self.is_full:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    def sync_folder(self, inode: int, path: str) -> None:
        with _real["scandir"](path) as entries:
            self.synced_folders[inode] = {entry.name: _kind(entry) for entry in entries}

    def lose_power(self) -> None:
        """Forget what is not synced: each name and each content either survives or is as it was."""
        self.num_losses += 1
        lost = self.folder.with_name(f"{self.name}.lost")
        self.folder.rename(lost)
        contents = {entry.stat(follow_symlinks=False).st_ino: entry for entry in _walk(lost)}
        files = [entry for entry in contents.values() if entry.is_file(follow_symlinks=False)]
        now = {entry.inode(): Path(entry.path).read_bytes() for entry in files}
        folders: dict[int, dict[str, tuple[int, str]]] = {}
        for path in [str(lost), *(entry.path for entry in contents.values() if entry.is_dir(follow_symlinks=False))]:
            with _real["scandir"](path) as entries:
                folders[Path(path).stat().st_ino] = {entry.name: _kind(entry) for entry in entries}
        self.folder.mkdir()
        root = lost.stat().st_ino
        synced, self.synced_files, self.synced_folders = (self.synced_files, self.synced_folders), {}, {}
        self._restore(root, self.folder, folders, now, *synced)
        shutil.rmtree(lost)
        self.locks.clear()

    def _restore(
        self,
        inode: int,
        target: Path,
        folders: dict[int, dict[str, tuple[int, str]]],
        contents: dict[int, bytes],
        synced_files: dict[int, bytes],
        synced_folders: dict[int, dict[str, tuple[int, str]]],
    ) -> None:
        current, before = folders.get(inode, {}), synced_folders.get(inode, {})
        for name in sorted(current.keys() | before.keys()):
            entry = current.get(name) if self.world.random.random() < 0.5 else before.get(name)
            if current.get(name) == before.get(name):
                entry = current[name]
            if entry is None:
                continue
            number, link = entry
            path = target / name
            if link == "/":
                path.mkdir()
                self._restore(number, path, folders, contents, synced_files, synced_folders)
            elif link:
                path.symlink_to(link)
            else:
                path.write_bytes(self._content(contents.get(number, b""), synced_files.get(number)))
                self.synced_files[path.stat().st_ino] = path.read_bytes()
        self.sync_folder(target.stat().st_ino, str(target))

    def _content(self, current: bytes, synced: bytes | None) -> bytes:
        if synced is None:
            return current[: self.world.random.choice((0, len(current) // 2, len(current)))]
        return synced if self.world.random.random() < 0.5 else current


def _kind(entry: os.DirEntry[str]) -> tuple[int, str]:
    """Return the inode of an entry, and `/` for a folder, the target of a link, or nothing for a file."""
    if entry.is_symlink():
        return entry.inode(), _real["readlink"](entry.path)
    return entry.inode(), "/" if entry.is_dir(follow_symlinks=False) else ""


def _walk(folder: Path) -> Iterator[os.DirEntry[str]]:
    with _real["scandir"](folder) as entries:
        for entry in entries:
            yield entry
            if entry.is_dir(follow_symlinks=False):
                yield from _walk(Path(entry.path))


_NAMES = (
    *("open", "stat", "lstat", "mkdir", "rmdir", "unlink", "rename", "replace", "symlink", "readlink", "listdir"),
    *("scandir", "utime", "chmod", "fsync", "pwrite", "close", "statvfs", "access"),
)
_real: dict[str, Any] = {name: getattr(os, name) for name in _NAMES} | {"open_file": io.open, "flock": fcntl.flock}


def _located(path: Any) -> str | None:
    """Return the real path of one below `/sim`; None for any other."""
    if isinstance(path, int):
        return None
    text = path if isinstance(path, str) else os.fspath(path)
    if isinstance(text, str) and (text.startswith(_BELOW) or text == ROOT):
        disk: Disk = calling_process().values["disk"]
        return disk.root + text[len(ROOT) :]
    return None


def disk_of_caller() -> Disk:
    found: Disk = calling_process().values["disk"]
    return found


class _Sorted:
    """The entries of a folder, in an order that is the same in every history."""

    def __init__(self, path: Any) -> None:
        with _real["scandir"](path) as entries:
            self._entries = iter(sorted(entries, key=lambda entry: entry.name))

    def __enter__(self) -> _Sorted:
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def __iter__(self) -> Iterator[os.DirEntry[str]]:
        return self._entries

    def __next__(self) -> os.DirEntry[str]:
        return next(self._entries)

    def close(self) -> None:
        pass


def _reader(name: str) -> Callable[..., Any]:
    """Wrap a call that changes nothing; it takes no time."""
    real = _real[name]

    def call(path: Any, *arguments: Any, **named: Any) -> Any:
        if current_thread() is None:
            return real(path, *arguments, **named)
        found = _located(path)
        if found is None:
            return real(path, *arguments, **named)
        disk_of_caller().reach(pauses=False)
        return real(found, *arguments, **named)

    return call


def _writer(name: str, *, allocates: bool = False) -> Callable[..., Any]:
    """Wrap a call that changes names."""
    real = _real[name]

    def call(path: Any, *arguments: Any, **named: Any) -> Any:
        if current_thread() is None:
            return real(path, *arguments, **named)
        found = _located(path)
        if found is None and (named.get("dir_fd") is None or "disk" not in calling_process().values):
            return real(path, *arguments, **named)
        disk_of_caller().reach(allocates=allocates)
        return real(path if found is None else found, *arguments, **named)

    return call


def _mover(name: str) -> Callable[..., None]:
    real = _real[name]

    def call(source: Any, target: Any, **named: Any) -> None:
        if current_thread() is not None:
            found, there = _located(source), _located(target)
            if there is not None:
                disk_of_caller().reach(allocates=False)
            source, target = found or source, there or target
        real(source, target, **named)

    return call


def _symlink(source: Any, target: Any, *arguments: Any, **named: Any) -> None:
    if current_thread() is not None and (there := _located(target)) is not None:
        disk_of_caller().reach(allocates=True)
        target = there
    _real["symlink"](source, target, *arguments, **named)


def _open(path: Any, flags: int, mode: int = 0o777, *, dir_fd: int | None = None) -> int:
    if current_thread() is None:
        return int(_real["open"](path, flags, mode, dir_fd=dir_fd))
    found = _located(path)
    if found is None:
        return int(_real["open"](path, flags, mode, dir_fd=dir_fd))
    makes = bool(flags & os.O_CREAT) and not os.path.lexists(found)
    disk_of_caller().reach(allocates=makes)
    file = int(_real["open"](found, flags, mode))
    calling_process().values.setdefault("files", set()).add(file)
    return file


def _close(file: int) -> None:
    thread = current_thread()
    if thread is not None:
        thread.process.values.get("files", set()).discard(file)
        disk: Disk | None = thread.process.values.get("disk")
        for holders in disk.locks.values() if disk is not None else ():
            holders.pop(file, None)
    _real["close"](file)


def _open_file(path: Any, mode: str = "r", *arguments: Any, **named: Any) -> Any:
    if current_thread() is None or (found := _located(path)) is None:
        return _real["open_file"](path, mode, *arguments, **named)
    writes = mode[0] in "wxa"
    disk = disk_of_caller()
    disk.reach(allocates=writes)
    return _real["open_file"](found, mode, *arguments, **named)


def _fsync(file: int) -> None:
    if current_thread() is None:
        _real["fsync"](file)
        return
    disk, path = disk_of_caller(), f"/proc/self/fd/{file}"
    disk.reach(allocates=True)
    status = os.fstat(file)
    if stat.S_ISDIR(status.st_mode):
        disk.sync_folder(status.st_ino, path)
    else:
        with _real["open_file"](path, "rb") as content:
            disk.synced_files[status.st_ino] = content.read()


def _pwrite(file: int, content: Any, offset: int) -> int:
    if current_thread() is not None:
        size = os.fstat(file).st_size
        disk_of_caller().reach(allocates=offset + len(content) > size)
    return int(_real["pwrite"](file, content, offset))


def _statvfs(path: Any) -> Any:
    if current_thread() is None or (found := _located(path)) is None:
        return _real["statvfs"](path)
    disk = disk_of_caller()
    disk.reach(pauses=False)
    real = _real["statvfs"](found)
    free = 0 if disk.is_full else _FREE_BYTES // real.f_frsize
    values = list(real[:10])
    values[3] = values[4] = free
    return os.statvfs_result(values)


def _flock(file: int, operation: int) -> None:
    if current_thread() is None:
        _real["flock"](file, operation)
        return
    process, disk = calling_process(), disk_of_caller()
    disk.reach()
    if disk.flock == "none":
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))
    holders = disk.locks.setdefault(os.fstat(file).st_ino, {})
    if operation & fcntl.LOCK_UN:
        holders.pop(file, None)
        return
    kind = operation & (fcntl.LOCK_EX | fcntl.LOCK_SH)
    for other, (holder, held) in list(holders.items()):
        if not holder.is_alive:
            del holders[other]
        elif (
            other != file and (disk.flock == "shared" or holder.host == process.host) and fcntl.LOCK_EX in (kind, held)
        ):
            raise BlockingIOError(errno.EWOULDBLOCK, "held")
    holders[file] = process, kind


@contextmanager
def simulated_files() -> Iterator[None]:
    """Let threads of a world see its disks below `/sim`."""
    functions: list[tuple[Any, str, Any]] = [
        (os, name, _reader(name)) for name in ("stat", "lstat", "readlink", "access")
    ]
    functions += [(os, name, _writer(name)) for name in ("rmdir", "unlink", "utime", "chmod")]
    functions += [(os, "mkdir", _writer("mkdir", allocates=True)), (os, "remove", _writer("unlink"))]
    functions += [(os, name, _mover(name)) for name in ("rename", "replace")]
    functions += [(os, "symlink", _symlink), (os, "open", _open), (os, "close", _close), (os, "fsync", _fsync)]
    functions += [(os, "pwrite", _pwrite), (os, "statvfs", _statvfs), (fcntl, "flock", _flock)]
    functions += [(os, "scandir", _scandir), (os, "listdir", _listdir)]
    functions += [(io, "open", _open_file), (builtins, "open", _open_file)]
    with ExitStack() as stack:
        for module, name, function in functions:
            stack.enter_context(mock.patch.object(module, name, function))
        yield


def _scandir(path: Any = ".") -> Any:
    if current_thread() is None:
        return _real["scandir"](path)
    found = _located(path)
    if found is not None:
        disk_of_caller().reach(pauses=False)
    return _Sorted(path if found is None else found)


def _listdir(path: Any = ".") -> list[str]:
    if current_thread() is None:
        return list(_real["listdir"](path))
    found = _located(path)
    if found is not None:
        disk_of_caller().reach(pauses=False)
    return sorted(_real["listdir"](path if found is None else found))


def close_left(process: Process) -> None:
    """Close the files of a process that has ended."""
    for file in process.values.pop("files", set()):
        with suppress(OSError):
            _real["close"](file)
