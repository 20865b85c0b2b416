"""Boxes of bubblewrap: an unpacked root file system, and what an episode changes of it in a layer of its own.

The root is an overlay: the image below, shared by all boxes and never written; a scratch folder above, removed with the
box. Inside, a shell runs one command after the other and stays between them, and so do processes in the background,
which stand still meanwhile. Root inside is an ordinary user outside: as root on the machine the box belongs to an
unused user id, otherwise to the caller. There is no network.
"""

from __future__ import annotations

import asyncio
import fcntl
import itertools
import math
import os
import shlex
import shutil
import signal
import socket
import stat
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from uuid import uuid4

from megarl.config.section import MIB
from megarl.episodes.harbor.boxes import MAX_OUTPUT_BYTES, BoxBrokenError, CommandResult, script_of, shown_output
from megarl.episodes.harbor.inner_socket import listen_inside
from megarl.episodes.harbor.tasks import BoxLimits
from megarl.errors import EnvironmentLostError
from megarl.reward.sandbox import (
    ControlGroup,
    ControlGroups,
    SandboxError,
    anonymous_file,
    ended_with_caller,
    resume_tree,
    stop_tree,
    system_call_filter,
)
from megarl.system.foreign import one_line
from megarl.system.proc import descendants, read_stat, resident_bytes

BOX_UID = 65_432
"""The user of boxes where megarl runs as root, and of the files in the cache; not one of `reward.sandbox`."""
_CONTROL = "/.megarl"
_PROGRAMS = {
    "bwrap": "bubblewrap",
    "mount": "mount",
    "prlimit": "util-linux",
    "setpriv": "util-linux",
    "taskset": "util-linux",
    "unshare": "util-linux",
}
"""Debian packages of the programs that make a box."""
_CAPABILITIES = (
    "CHOWN",
    "DAC_OVERRIDE",
    "FOWNER",
    "FSETID",
    "KILL",
    "NET_BIND_SERVICE",
    "SETGID",
    "SETUID",
    "SYS_CHROOT",
)
"""Within the user namespace of the box."""
_ALLOWED_CALLS = ("ptrace", "process_vm_readv", "process_vm_writev")
"""Debuggers are work of an agent; a box sees no process but its own."""
_COUNTED_CALLS = ("memfd_create", "shmget", "shmat", "shmctl", "semget", "msgget")
"""Memory that only a control group counts."""
_VARIABLES = {
    "PATH": "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin",
    "HOME": "/root",
    "LANG": "C.UTF-8",
    "TERM": "dumb",
}
_MAX_FILES = 4096
_SHM_BYTES = 64 * MIB
_START_TIMEOUT_S = 60.0
_STOP_TIMEOUT_S = 10.0
_WATCH_INTERVAL_S = 0.2
_DISK_INTERVAL_S = 1.0
_DISK_SHARE = 0.05
"""Share of the time that may be spent on measuring the disk that a box uses."""
_OWN_PROCESSES = 4
_LEAST_FREE_BYTES = 256 * MIB
_HALF = MAX_OUTPUT_BYTES // 2

# Everything is mounted outside, where the folders can be reached; bubblewrap takes the mounts over with their root.
_MOUNT = """set -e
mount -t overlay overlay -o "$1" /mnt
mount --bind "$2/control" /mnt/.megarl
mount -o remount,bind,ro /mnt/.megarl
mount --bind "$2/out" /mnt/.megarl/out
if [ "$3" = host ]; then mount --rbind /usr /mnt/usr; mount -o remount,bind,ro /mnt/usr; fi
shift 3
exec "$@"
"""
# The number of processes is limited inside: outside, the kernel would count those of all boxes. Shells name it
# differently.
_SHELL = """exec 3>&1 >/dev/null 2>&1
(ulimit -p "$2") && ulimit -p "$2" || ulimit -u "$2" || exit
shell=/bin/bash
test -x $shell || shell=/bin/sh
echo ready >&3
while IFS= read -r number; do
  (cd "$1" && exec $shell /.megarl/$number) </dev/null >/.megarl/out/$number 2>&1 3>&-
  echo "$number $?" >&3
done
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class RootImage:
    """A root file system that is not written, of folders in the cache."""

    lowers: tuple[str, ...]
    """Relative to the cache; the first hides what is below it."""
    is_host: bool
    """/usr is the machine's."""
    workdir: str
    variables: Mapping[str, str]


class BubblewrapBox:
    """One box; `start` comes first."""

    _cores = itertools.count()

    def __init__(self, cache: Path, image: RootImage, limits: BoxLimits, groups: ControlGroups | None) -> None:
        self.scratch = cache / "scratch" / uuid4().hex
        self.workdir = image.workdir
        self._cache = cache
        self._image = image
        self._limits = limits
        self._groups = groups
        self._group: ControlGroup | None = None
        self._process: asyncio.subprocess.Process | None = None
        self._shell_pid = 0
        self._number = 0
        self._has_started = False
        self._lock: int | None = None
        self._disk_watched = self._disk_interval_s = 0.0

    @property
    def upper(self) -> Path:
        """The files that the box has changed."""
        return self.scratch / "upper"

    async def start(self) -> None:
        """Make the folders; an EnvironmentLostError if no process can be started in the box."""
        try:
            self._lock = await asyncio.to_thread(self._make_folders)
        except OSError as error:
            raise EnvironmentLostError(f"the box has no folder: {error}") from None
        await self._ensure_shell()

    async def run(self, command: str, *, variables: Mapping[str, str], timeout_s: float) -> CommandResult:
        return await self.run_in(self.workdir, command, variables=variables, timeout_s=timeout_s)

    async def run_in(
        self, folder: str, command: str, *, variables: Mapping[str, str], timeout_s: float
    ) -> CommandResult:
        """Run a command in a folder of the box."""
        self._number += 1
        inside = f"cd {shlex.quote(folder)} || exit\n" if folder != self.workdir else ""
        script = script_of(inside + command, {**self._image.variables, **variables})
        try:
            (self.scratch / "control" / str(self._number)).write_text(script, encoding="utf-8", errors="replace")
        except OSError as error:
            raise EnvironmentLostError(f"the box has no disk: {error}") from None
        process = await self._ensure_shell()
        assert process.stdin is not None
        assert process.stdout is not None
        stopped: str | None = None
        code: int | None = None
        try:
            process.stdin.write(f"{self._number}\n".encode())
            await process.stdin.drain()
            reading = asyncio.create_task(process.stdout.readline())
            try:
                stopped = await self._watch(reading, timeout_s)
                if stopped is not None:
                    self._kill_command()
                line = await asyncio.wait_for(reading, _STOP_TIMEOUT_S)
            finally:
                reading.cancel()
            code = self._code(line)
        except (OSError, TimeoutError):
            code = None
        if code is None or not await asyncio.to_thread(self._stand_still):
            await self.end_processes()
            ended = "all processes of the box were ended"
            stopped = ended if stopped is None else f"{stopped}; {ended}"
        self._check_machine()
        return CommandResult(code=None if stopped else code, output=self._output(), stopped=stopped)

    async def put(self, folder: Path, target: str) -> None:
        self._number += 1
        name = f"put-{self._number}"
        try:
            await asyncio.to_thread(self._copy_in, folder, name)
        except OSError as error:
            raise EnvironmentLostError(f"{folder} cannot be copied into the box: {error}") from None
        place = shlex.quote(target)
        command = f"rm -rf {place} && mkdir -p $(dirname {place}) && cp -r {_CONTROL}/{name} {place}"
        result = await self.run_in("/", command, variables={}, timeout_s=_START_TIMEOUT_S)
        if result.code != 0:
            why = result.stopped or one_line(result.output)
            raise BoxBrokenError(f"{target} cannot be written in the box: {why}")

    async def listener(self) -> socket.socket:
        await self._ensure_shell()
        try:
            return await asyncio.to_thread(listen_inside, self._shell_pid)
        except OSError as error:
            raise EnvironmentLostError(f"the box cannot reach the model: {one_line(error)}") from None

    async def close(self) -> None:
        await self.end_processes()
        lock, self._lock = self._lock, None
        if lock is not None:
            await asyncio.to_thread(remove_folder, self.scratch)
            os.close(lock)

    def _make_folders(self) -> int:
        lock = locked(self.scratch.parent / f"{self.scratch.name}.lock", fcntl.LOCK_EX)
        assert lock is not None
        for name in ("upper/.megarl", "work", "control/out", "out"):
            (self.scratch / name).mkdir(parents=True)
        # The mount is root of the box: others may enter it, though not the scratch folder itself.
        self.upper.chmod(0o755)
        give_to_boxes(self.upper, self.upper / ".megarl", self.scratch / "out")
        (self.scratch / "control" / "shell").write_text(_SHELL)
        return lock

    def _copy_in(self, folder: Path, name: str) -> None:
        shutil.copytree(folder, self.scratch / "control" / name, symlinks=True)
        for path in (self.scratch / "control" / name).rglob("*"):
            if not path.is_symlink():
                path.chmod(path.stat().st_mode | 0o444 | (0o111 if path.is_dir() else 0))

    async def _ensure_shell(self) -> asyncio.subprocess.Process:
        """Return the shell of the box, started anew where it is gone.

        A box that cannot be started is the machine's fault, one that cannot be started again that of its contents.
        """
        if self._process is not None and self._process.returncode is None:
            resume_tree(self._process.pid)
            return self._process
        self._check_machine()
        limits = self._limits
        if self._groups is not None:
            with suppress(OSError):
                self._group = self._groups.make(
                    memory_bytes=limits.memory_bytes + _SHM_BYTES, max_processes=limits.max_processes + _OWN_PROCESSES
                )
        errors = self.scratch / "errors"
        calls = _ALLOWED_CALLS if self._group is None else (*_ALLOWED_CALLS, *_COUNTED_CALLS)
        with anonymous_file(system_call_filter(calls)) as rules, errors.open("wb") as error_file:
            try:
                process = await asyncio.create_subprocess_exec(
                    *self._command(rules),
                    stdin=asyncio.subprocess.PIPE,
                    stdout=asyncio.subprocess.PIPE,
                    stderr=error_file,
                    pass_fds=(rules,),
                    cwd=self._cache,
                    env={"PATH": os.defpath + ":/usr/sbin:/sbin"},
                    start_new_session=True,
                )
            except OSError as error:
                raise EnvironmentLostError(f"a box cannot be started: {error.strerror}") from None
        self._process = process
        assert process.stdout is not None
        try:
            async with asyncio.timeout(_START_TIMEOUT_S):
                is_ready = await process.stdout.readline() == b"ready\n"
        except TimeoutError:
            is_ready = False
        if not is_ready:
            await self.end_processes()
            why = one_line(errors.read_text(errors="replace").strip()) or f"nothing came within {_START_TIMEOUT_S:g} s"
            if self._has_started:
                raise BoxBrokenError(f"no command can be run in it any more: {why}")
            raise EnvironmentLostError(f"a box cannot be started: {why}")
        self._has_started = True
        self._shell_pid = _leaf(process.pid)
        return process

    def _command(self, rules: int) -> list[str]:
        limits, cache = self._limits, self._cache
        is_root = os.geteuid() == 0
        scratch = self.scratch.relative_to(cache)
        options = f"lowerdir={':'.join(self._image.lowers)},upperdir={scratch}/upper,workdir={scratch}/work"
        allowed = sorted(os.sched_getaffinity(0))
        first, num_cores = next(self._cores), min(math.ceil(limits.cpus), len(allowed))
        cores = {allowed[(first * num_cores + place) % len(allowed)] for place in range(num_cores)}
        return [
            *ended_with_caller(self._group),
            *("unshare", "--mount", *(() if is_root else ("--user", "--map-root-user"))),
            *("sh", "-c", _MOUNT, "mount", options if is_root else f"userxattr,{options}", str(scratch)),
            "host" if self._image.is_host else "image",
            *("taskset", "-c", ",".join(map(str, sorted(cores)))),
            *("prlimit", f"--data={limits.memory_bytes}", f"--fsize={limits.disk_bytes}", f"--nofile={_MAX_FILES}"),
            "--core=0",
            *((f"setpriv --reuid={BOX_UID} --regid={BOX_UID} --clear-groups".split()) if is_root else ()),
            *("bwrap", "--unshare-user", "--uid", "0", "--gid", "0", "--disable-userns", "--seccomp", str(rules)),
            *("--unshare-ipc", "--unshare-pid", "--unshare-net", "--unshare-uts", "--unshare-cgroup-try"),
            *("--die-with-parent", "--new-session", "--hostname", "box", "--clearenv"),
            *(word for name, value in _VARIABLES.items() for word in ("--setenv", name, value)),
            *(word for name in _CAPABILITIES for word in ("--cap-add", f"CAP_{name}")),
            *("--bind", "/mnt", "/", "--proc", "/proc", "--dev", "/dev"),
            *("--perms", "1777", "--size", str(_SHM_BYTES), "--tmpfs", "/dev/shm", "--chdir", "/", "--"),  # noqa: S108
            *("/bin/sh", f"{_CONTROL}/shell", self.workdir, str(limits.max_processes + _OWN_PROCESSES)),
        ]

    async def _watch(self, reading: asyncio.Task[bytes], timeout_s: float) -> str | None:
        """Wait until the command ends; return the limit that it exceeds."""
        deadline = time.monotonic() + timeout_s
        while True:
            left = deadline - time.monotonic()
            done, _ = await asyncio.wait({reading}, timeout=max(min(_WATCH_INTERVAL_S, left), 0.0))
            # In a thread: a box may have many files, and a rollout worker many boxes.
            if done:
                return await asyncio.to_thread(self._excess)
            if left <= 0:
                return f"it ran longer than {timeout_s:g} s"
            if (excess := await asyncio.to_thread(self._excess)) is not None:
                return excess

    def _excess(self) -> str | None:
        assert self._process is not None
        limits, family = self._limits, descendants(self._process.pid)
        if sum(map(resident_bytes, family)) > limits.memory_bytes:
            return f"its processes used more than {limits.memory_bytes / MIB:g} MiB of memory"
        if len(family) > limits.max_processes + _OWN_PROCESSES:
            return f"there were more than {limits.max_processes} processes"
        began = time.monotonic()
        if began < self._disk_watched + self._disk_interval_s:
            return None
        used = used_bytes(self.upper) + used_bytes(self.scratch / "out")
        self._disk_watched = time.monotonic()
        self._disk_interval_s = max(_DISK_INTERVAL_S, (self._disk_watched - began) / _DISK_SHARE)
        return f"its files take more than {limits.disk_bytes / MIB:g} MiB" if used > limits.disk_bytes else None

    def _kill_command(self) -> None:
        for pid in descendants(self._shell_pid) - {self._shell_pid}:
            with suppress(OSError):
                os.kill(pid, signal.SIGKILL)

    def _code(self, line: bytes) -> int | None:
        """Return the exit status; None if the shell is gone or something else wrote in its place."""
        number, _, code = line.decode(errors="replace").strip().partition(" ")
        return int(code) if number == str(self._number) and code.isdigit() else None

    def _stand_still(self) -> bool:
        """Stop what runs in the background: the limits hold while nobody watches."""
        assert self._process is not None
        return stop_tree(self._process.pid) and self._excess() is None

    async def end_processes(self) -> None:
        """End what runs in the box; its files stay."""
        process, self._process = self._process, None
        if process is None:
            return
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        if self._group is not None:
            self._group.kill()
        if process.stdin is not None:
            process.stdin.close()
        await process.wait()

    def _output(self) -> str:
        """Return what the command has written. The box may have put anything in the place of the file."""
        try:
            flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK
            descriptor = os.open(self.scratch / "out" / str(self._number), flags)
        except OSError:
            return ""
        with os.fdopen(descriptor, "rb") as file:
            status = os.fstat(descriptor)
            if not stat.S_ISREG(status.st_mode):
                return ""
            head = file.read(_HALF)
            num_bytes = max(status.st_size, len(head))
            file.seek(max(len(head), num_bytes - _HALF))
            return shown_output(head, file.read(_HALF), num_bytes)

    def _check_machine(self) -> None:
        """Raise where this machine, and not the box, has no room: a command that fails for it is not the model's."""
        free = shutil.disk_usage(self._cache).free
        if free < _LEAST_FREE_BYTES:
            raise EnvironmentLostError(f"{self._cache} has {free / MIB:.0f} MiB left; boxes need more, free some")


def check_programs() -> None:
    """Raise SandboxError with the packages to install where a program is missing."""
    missing = [name for name in _PROGRAMS if shutil.which(name) is None]
    if missing:
        packages = " ".join(sorted({_PROGRAMS[name] for name in missing}))
        raise SandboxError(f"{', '.join(missing)} not found; install the packages {packages}")


def locked(path: Path, kind: int) -> int | None:
    """Return a descriptor that holds the lock of a file; None where LOCK_NB is asked and another holds it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(descriptor, kind)
    except OSError:
        os.close(descriptor)
        return None
    return descriptor


@contextmanager
def held(path: Path, kind: int) -> Iterator[bool]:
    """Hold a lock; yield whether it was had."""
    descriptor = locked(path, kind)
    try:
        yield descriptor is not None
    finally:
        if descriptor is not None:
            os.close(descriptor)


def give_to_boxes(*paths: Path) -> None:
    """Let the user of boxes own these paths, where megarl runs as root."""
    if os.geteuid() == 0:
        for path in paths:
            os.chown(path, BOX_UID, BOX_UID, follow_symlinks=False)


def remove_folder(folder: Path) -> None:
    """Remove a folder that a box has written, whatever rights it has set."""
    for parent, names, _ in os.walk(folder):
        for name in names:
            path = Path(parent, name)
            with suppress(OSError):
                if not path.is_symlink():
                    path.chmod(0o700)
    shutil.rmtree(folder, ignore_errors=True)
    folder.with_name(f"{folder.name}.lock").unlink(missing_ok=True)


def remove_abandoned(scratch: Path) -> None:
    """Remove the folders of boxes whose process has died."""
    for folder in scratch.glob("*/"):
        with held(folder.with_name(f"{folder.name}.lock"), fcntl.LOCK_EX | fcntl.LOCK_NB) as is_mine:
            if is_mine:
                remove_folder(folder)


def used_bytes(folder: Path) -> int:
    """Return the disk space of the files below a folder; links are not followed."""
    total, left = 0, [str(folder)]
    while left:
        try:
            with os.scandir(left.pop()) as entries:
                for entry in entries:
                    with suppress(OSError):
                        total += entry.stat(follow_symlinks=False).st_blocks * 512
                        if entry.is_dir(follow_symlinks=False):
                            left.append(entry.path)
        except OSError:
            continue  # removed meanwhile
    return total


def _leaf(root: int) -> int:
    """Return the last of a chain of processes: bubblewrap outside, bubblewrap inside, and the shell."""
    family = descendants(root)
    parents = set[int]()
    for pid in family:
        with suppress(OSError):
            parents.add(read_stat(pid).parent)
    return next(iter(family - parents), root)
