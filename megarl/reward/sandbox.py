"""Runs a program that the model wrote, in a kernel sandbox with limits. Standard library only; knows no rewards.

Bubblewrap gives the program its own namespaces: no network, no other processes, no files but an interpreter and an
empty /tmp in memory, no environment. Resource limits bound each process; the memory of all of them is added up while
they run, and a filter denies memory that is not counted there (`filter_program`). Where control groups are delegated,
the kernel counts (`ControlGroups`). Killing bubblewrap ends everything inside.

Bubblewrap reports on a descriptor whether it has run the program. A program that it could not run is a SandboxError,
never a failed program.

As root the namespaces are created with root's rights and the program gets an unused user id, since the kernel does not
count root's processes; otherwise they are created in a user namespace.
"""

from __future__ import annotations

import errno
import os
import platform
import selectors
import shutil
import signal
import struct
import subprocess
import sys
import tempfile
import time
from collections.abc import Collection, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from megarl.system.proc import descendants, read_stat, resident_bytes

SandboxKind = Literal["bubblewrap", "none"]

_PROGRAM = "/program.py"
_TMP = "/tmp"  # noqa: S108 - inside the sandbox
_SHM = "/dev/shm"  # noqa: S108 - inside the sandbox
_ENVIRONMENT = {"PATH": "/usr/bin:/bin", "LANG": "C.UTF-8", "OMP_NUM_THREADS": "1"}
_LINKS = ("bin", "sbin", "lib", "lib32", "lib64", "libx32")
_GUARD = 'test "$PPID" = "$0" && exec "$@"'
"""Run the command only if the caller, whose pid is the shell's name, is still the parent: it may have died before the
signal at its death was set."""
_GUARD_IN_GROUP = 'test "$PPID" = "$0" && echo $$ > "$1" && shift && exec "$@"'
_OWN_PROCESSES = 4
"""Processes of the sandbox itself, beside those of the program."""
_PROBE = "print(6 * 7)"
_PROBE_TIMEOUT_S = 20.0
_WATCH_INTERVAL_S = 0.1
_TOO_MUCH_MEMORY = "its processes used too much memory"
_ATTEMPTS = 3
"""Starts of one program: a machine that is short of processes or memory may have them again in a moment."""
_FIRST_PAUSE_S = 0.5
_STOP_TIMEOUT_S = 5.0
_STOP_PAUSE_S = 0.0005
_RUNNING = "RSI"
"""States of a process that computes or may do so at any moment; one that waits for a disk (D) stops after that."""
_CHUNK_BYTES = 65536
_MAX_FILES = 256
_FIRST_UID = 60_000
_NUM_UIDS = 5_000
# The filter of system calls (seccomp). Denied are memory that no limit counts (memfd, System V), namespaces and mounts,
# sockets other than Unix and Internet ones, and interfaces of the kernel that a program of a model has no use for. A
# denied call fails; it does not end the program.
_ARCHITECTURES: Mapping[str, int] = {"x86_64": 0xC000003E, "aarch64": 0xC00000B7}
"""The kernel's numbers of machines."""
# Numbers on x86_64 and on aarch64; calls since Linux 5.1 have the same number everywhere.
_DENIED: Mapping[str, tuple[int, int]] = {
    "memfd_create": (319, 279),
    "memfd_secret": (447, 447),
    "shmget": (29, 194),
    "shmat": (30, 196),
    "shmctl": (31, 195),
    "msgget": (68, 186),
    "semget": (64, 190),
    "unshare": (272, 97),
    "setns": (308, 268),
    "mount": (165, 40),
    "umount2": (166, 39),
    "pivot_root": (155, 41),
    "open_tree": (428, 428),
    "move_mount": (429, 429),
    "fsopen": (430, 430),
    "fsconfig": (431, 431),
    "fsmount": (432, 432),
    "mount_setattr": (442, 442),
    "ptrace": (101, 117),
    "process_vm_readv": (310, 270),
    "process_vm_writev": (311, 271),
    "add_key": (248, 217),
    "request_key": (249, 218),
    "keyctl": (250, 219),
    "bpf": (321, 280),
    "userfaultfd": (323, 282),
    "perf_event_open": (298, 241),
    "io_uring_setup": (425, 425),
}
_CLONE, _SOCKET = (56, 220), (41, 198)
_CLONE3 = 435
_NEW_NAMESPACES = 0x7E020000
"""The flags of clone that make a namespace."""
_FAMILIES = (1, 2, 10)
"""AF_UNIX, AF_INET, AF_INET6."""
_FIRST_X32 = 0x40000000
"""Numbers of x86_64's second set of system calls."""
_LOAD, _EQUAL, _AT_LEAST, _HAS_BITS, _RETURN = 0x20, 0x15, 0x35, 0x45, 0x06
_ALLOW, _FAIL, _KILL = 0x7FFF0000, 0x00050000, 0x80000000
_NUMBER, _MACHINE, _ARGUMENT = 0, 4, 16
"""Offsets of what the kernel shows a filter; of an argument the lower half."""
_CONTROLLERS = ("memory", "pids")
_MARKS = ("trusted.delegate", "user.delegate")
"""Attributes that systemd gives to a folder that it delegates."""
_PREFIX = "megarl-"
_PROC = Path("/proc/self")


class SandboxError(Exception):
    """The sandbox does not work on this machine, or not now; the message has the reason and the remedy."""

    is_machine_fault = True
    """Known to reward workers: a sample that meets it has no score."""


class _NotStartedError(SandboxError):
    pass


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    memory_bytes: int
    """Limit on the address space of each process, and on the resident memory of all together."""
    disk_bytes: int
    max_processes: int
    max_output_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Ran:
    """The end of a program: status, output, and the limit that it exceeded."""

    code: int
    """Its exit status; negative or above 128 for a signal."""
    output: bytes
    """Its standard output, up to the limit."""
    stopped: str | None
    """The reason it was killed; None if it was not."""

    @property
    def is_done(self) -> bool:
        return self.code == 0 and self.stopped is None


class Sandbox:
    """Raises SandboxError on construction if programs cannot run, so that they do not fail as wrong answers later."""

    def __init__(self, kind: SandboxKind, limits: Limits, *, python: str | None = None) -> None:
        self._kind = kind
        self._limits = limits
        self._python = python or str(getattr(sys, "_base_executable", sys.executable))
        if not Path(self._python).is_file():
            raise SandboxError(f"{self._python} is not a file; name an interpreter")
        tools = ("bwrap", "prlimit", "setpriv") if kind == "bubblewrap" else ("prlimit", "setpriv")
        missing = [tool for tool in tools if shutil.which(tool) is None]
        if missing:
            packages = {"bwrap": "bubblewrap"}
            names = " ".join(sorted({packages.get(tool, "util-linux") for tool in missing}))
            raise SandboxError(f"{', '.join(missing)} not found; install the packages {names}")
        self._prefixes = self._prefixes_of_python()
        self._filter = system_call_filter() if kind == "bubblewrap" else b""
        self._groups = ControlGroups.find() if kind == "bubblewrap" else None
        try:
            self._probe()
        except SandboxError:
            if self._groups is None:
                raise
            self._groups = None
            self._probe()

    def run(self, program: str, given: bytes, *, deadline: float) -> Ran:
        """Run until it ends, writes too much, uses too much memory, or `deadline` (monotonic) passes.

        Raise SandboxError if the program could not be started, whatever was tried.
        """
        pause_s = _FIRST_PAUSE_S
        for attempt in range(1, _ATTEMPTS + 1):
            try:
                return self._run(program, given, deadline=deadline, errors=subprocess.DEVNULL)
            except _NotStartedError:
                if attempt == _ATTEMPTS or time.monotonic() + pause_s >= deadline:
                    raise
            time.sleep(pause_s)
            pause_s *= 2
        raise AssertionError("not reached")

    def _probe(self) -> None:
        with tempfile.TemporaryFile() as errors:
            why = "it started no program"
            with suppress(_NotStartedError):
                ran = self._run(_PROBE, b"", deadline=time.monotonic() + _PROBE_TIMEOUT_S, errors=errors.fileno())
                if ran.output.strip() == b"42":
                    return
                why = ran.stopped or f"exit status {ran.code}"
            errors.seek(0)
            complaint = errors.read(2000).decode(errors="replace").strip().partition("\n")[0]
        why = complaint or why
        raise SandboxError(f"{self._kind} cannot run {self._python} here: {why}")

    def _run(self, program: str, given: bytes, *, deadline: float, errors: int) -> Ran:
        with ExitStack() as stack:
            source = stack.enter_context(anonymous_file(program.encode(errors="replace")))
            rules = stack.enter_context(anonymous_file(self._filter))
            status = stack.enter_context(anonymous_file(b""))
            is_boxed = self._kind == "bubblewrap"
            folder = "/" if is_boxed else stack.enter_context(tempfile.TemporaryDirectory())
            try:
                group = self._group()
                given_file = stack.enter_context(anonymous_file(given))
                process = self._start(source, rules, status, group, stdin=given_file, errors=errors, folder=folder)
            except OSError as error:
                raise _NotStartedError(f"{self._kind} cannot be started: {error.strerror}") from error
            assert process.stdout is not None
            try:
                output, stopped = self._watch(process, process.stdout.fileno(), deadline)
            finally:
                with suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)
                if group is not None:
                    group.kill()
                process.stdout.close()
                code = process.wait()
            if group is not None and group.exceeded_memory:
                stopped = _TOO_MUCH_MEMORY
            if is_boxed:
                self._check_started(status, stopped)
        return Ran(code=code, output=output, stopped=stopped)

    def start(self, program: str) -> subprocess.Popen[bytes]:
        """Start a program that is spoken to through its standard input and output.

        The caller watches its time and memory, and kills its process group. A program that sends nothing first has
        not been started.
        """
        with (
            anonymous_file(program.encode()) as source,
            anonymous_file(self._filter) as rules,
            anonymous_file(b"") as status,
        ):
            folder = "/" if self._kind == "bubblewrap" else tempfile.gettempdir()
            pipe, nowhere = subprocess.PIPE, subprocess.DEVNULL
            try:
                return self._start(source, rules, status, self._group(), stdin=pipe, errors=nowhere, folder=folder)
            except OSError as error:
                raise _NotStartedError(f"{self._kind} cannot be started: {error.strerror}") from error

    def _group(self) -> ControlGroup | None:
        if self._groups is None:
            return None
        limits = self._limits
        # The files of /tmp and /dev/shm are in memory.
        return self._groups.make(
            memory_bytes=limits.memory_bytes + 2 * limits.disk_bytes,
            max_processes=limits.max_processes + _OWN_PROCESSES,
        )

    def _start(
        self, source: int, rules: int, status: int, group: ControlGroup | None, *, stdin: int, errors: int, folder: str
    ) -> subprocess.Popen[bytes]:
        return subprocess.Popen(  # noqa: S603 - no shell; the command is ours, the program is inside
            [*ended_with_caller(group), *self._command(source, rules, status)],
            stdin=stdin,
            stdout=subprocess.PIPE,
            stderr=errors,
            pass_fds=(source, rules, status),
            cwd=folder,
            env=_ENVIRONMENT,
            start_new_session=True,
        )

    @staticmethod
    def _check_started(status: int, stopped: str | None) -> None:
        """Raise if bubblewrap ended without having run the command, or made no process until the deadline.

        It reports `child-pid` when there is a process for the command, and `exit-code` only if it ran the command.
        """
        reported = os.pread(status, _CHUNK_BYTES, 0).decode(errors="replace")
        if '"exit-code"' not in reported if stopped is None else '"child-pid"' not in reported:
            raise _NotStartedError("bubblewrap started no program; the machine may be short of processes or memory")

    def _watch(self, process: subprocess.Popen[bytes], descriptor: int, deadline: float) -> tuple[bytes, str | None]:
        """Return its output when it ends, and the reason to kill it if it exceeds a limit."""
        output = bytearray()
        is_open = True
        watched = 0.0
        with selectors.DefaultSelector() as selector:
            selector.register(descriptor, selectors.EVENT_READ)
            while True:
                now = time.monotonic()
                if now >= deadline:
                    return bytes(output), "it was late"
                if now >= watched + _WATCH_INTERVAL_S:
                    watched = now
                    if tree_resident_bytes(process.pid) > self._limits.memory_bytes:
                        return bytes(output), _TOO_MUCH_MEMORY
                if is_open and selector.select(timeout=min(_WATCH_INTERVAL_S, deadline - now)):
                    chunk = os.read(descriptor, _CHUNK_BYTES)
                    output += chunk
                    is_open = bool(chunk)
                    if len(output) > self._limits.max_output_bytes:
                        return bytes(output[: self._limits.max_output_bytes]), "it wrote too much"
                elif not is_open:
                    with suppress(subprocess.TimeoutExpired):
                        process.wait(min(_WATCH_INTERVAL_S, deadline - now))
                        return bytes(output), None

    def _command(self, source: int, rules: int, status: int) -> list[str]:
        limits = self._limits
        limited = [
            "prlimit",
            f"--as={limits.memory_bytes}",
            f"--fsize={limits.disk_bytes}",
            f"--nofile={_MAX_FILES}",
            "--core=0",
        ]
        python = [self._python, "-I", "-B"]
        if self._kind == "none":
            # No limit on processes: the kernel would count all processes of the user.
            return [*limited, *python, f"/proc/self/fd/{source}"]
        limited.append(f"--nproc={limits.max_processes}")
        if os.geteuid() == 0:
            uid = _FIRST_UID + os.getpid() % _NUM_UIDS
            limited += ["setpriv", f"--reuid={uid}", f"--regid={uid}", "--clear-groups", "--inh-caps=-all"]
        return [*self._bubblewrap(source, rules, status), "--", *limited, *python, _PROGRAM]

    def _bubblewrap(self, source: int, rules: int, status: int) -> list[str]:
        is_root = os.geteuid() == 0
        memory = ["--perms", "1777", "--size", str(self._limits.disk_bytes), "--tmpfs"]
        return [
            # By its full path: the program's PATH may not contain it.
            shutil.which("bwrap") or "bwrap",
            *(
                ("--cap-add", "CAP_SETUID", "--cap-add", "CAP_SETGID")
                if is_root
                else ("--unshare-user", "--disable-userns")
            ),
            *("--seccomp", str(rules), "--json-status-fd", str(status)),
            *("--unshare-ipc", "--unshare-pid", "--unshare-net", "--unshare-uts", "--unshare-cgroup-try"),
            *("--die-with-parent", "--new-session", "--clearenv"),
            *(word for name, value in _ENVIRONMENT.items() for word in ("--setenv", name, value)),
            *("--setenv", "HOME", _TMP, "--hostname", "sandbox"),
            *("--ro-bind", "/usr", "/usr"),
            *(word for link in _LINKS for word in _link(link)),
            *(word for prefix in self._prefixes for word in (*_parents(prefix), "--ro-bind", prefix, prefix)),
            *("--proc", "/proc", "--dev", "/dev"),
            *(*memory, _SHM, *memory, _TMP),
            *("--perms", "0444", "--ro-bind-data", str(source), _PROGRAM),
            *("--remount-ro", "/dev", "--remount-ro", "/", "--chdir", _TMP),
        ]

    def _prefixes_of_python(self) -> list[str]:
        """Return the folders of the interpreter and its packages that are not below /usr."""
        code = "import sys; print(sys.prefix, sys.base_prefix, sep='\\n')"
        printed = subprocess.run(  # noqa: S603 - the interpreter that the recipe names
            [self._python, "-I", "-c", code], capture_output=True, text=True, timeout=_PROBE_TIMEOUT_S, check=False
        )
        if printed.returncode != 0:
            raise SandboxError(f"{self._python} is not Python: {printed.stderr.strip().rpartition(chr(10))[2]}")
        return [prefix for prefix in dict.fromkeys(printed.stdout.split("\n")) if prefix and not _is_below_usr(prefix)]


def ended_with_caller(group: ControlGroup | None) -> list[str]:
    """Return a prefix that ends the command with its caller, for which bubblewrap asks only after a while, and
    takes it into the group."""
    words = [_GUARD, str(os.getpid())] if group is None else [_GUARD_IN_GROUP, str(os.getpid()), str(group.entrance)]
    return ["setpriv", "--pdeathsig", "KILL", "sh", "-c", *words]


def system_call_filter(allowed: Collection[str] = ()) -> bytes:
    """Return the filter for this machine; a SandboxError if its system calls are not known."""
    try:
        return filter_program(allowed=allowed)
    except KeyError as error:
        raise SandboxError(f"the system calls of {error} are not known; use a machine with x86_64 or aarch64") from None


def _is_below_usr(path: str) -> bool:
    return Path(path).is_relative_to("/usr")


def _link(name: str) -> tuple[str, ...]:
    """Return bubblewrap's options for /bin and the like, which are links into /usr or folders."""
    path = Path("/", name)
    if path.is_symlink():
        return ("--symlink", str(path.readlink()), str(path))
    return ("--ro-bind", str(path), str(path)) if path.is_dir() else ()


def _parents(path: str) -> Iterator[str]:
    """Yield bubblewrap's options for the folders above a path: those that it makes by itself are closed to users."""
    for folder in reversed(Path(path).parents[:-1]):
        yield from ("--perms", "0755", "--dir", str(folder))


@contextmanager
def anonymous_file(content: bytes) -> Iterator[int]:
    """Yield a descriptor of an anonymous file with this content, at its beginning."""
    with os.fdopen(os.memfd_create("program"), "wb") as file:
        file.write(content)
        file.flush()
        os.lseek(file.fileno(), 0, os.SEEK_SET)
        yield file.fileno()


def tree_resident_bytes(root: int) -> int:
    """Return the resident memory of the process and its descendants."""
    return sum(resident_bytes(pid) for pid in descendants(root))


def stop_tree(root: int) -> bool:
    """Stop a process and all below it (SIGSTOP); return whether all of them stand still."""
    deadline = time.monotonic() + _STOP_TIMEOUT_S
    while time.monotonic() < deadline:
        running = [pid for pid in descendants(root) if _is_running(pid)]
        if not running:
            return True
        for pid in running:
            with suppress(OSError):  # it ended meanwhile
                os.kill(pid, signal.SIGSTOP)
        time.sleep(_STOP_PAUSE_S)
    return False


def resume_tree(root: int) -> None:
    for pid in descendants(root):
        with suppress(OSError):
            os.kill(pid, signal.SIGCONT)


def _is_running(pid: int) -> bool:
    with suppress(OSError):
        return read_stat(pid).state in _RUNNING
    return False


def filter_program(machine: str | None = None, *, allowed: Collection[str] = ()) -> bytes:
    """Return the filter for a machine, this one by default; raise KeyError for one whose numbers are not known.

    `allowed` are system calls that are not denied.
    """
    name = machine or platform.machine()
    column = list(_ARCHITECTURES).index(name) if name in _ARCHITECTURES else -1
    architecture = _ARCHITECTURES[name]
    return b"".join(struct.pack("=HBBI", *step) for step in _steps(architecture, column, allowed))


def _steps(architecture: int, column: int, allowed: Collection[str]) -> Iterator[tuple[int, int, int, int]]:
    """Yield instructions: operation, how many to skip if true, how many if false, operand."""
    yield _LOAD, 0, 0, _MACHINE
    yield _EQUAL, 1, 0, architecture
    yield _RETURN, 0, 0, _KILL
    yield _LOAD, 0, 0, _NUMBER
    yield _AT_LEAST, 0, 1, _FIRST_X32
    yield _RETURN, 0, 0, _FAIL | errno.EPERM
    for numbers in (numbers for name, numbers in _DENIED.items() if name not in allowed):
        yield _EQUAL, 0, 1, numbers[column]
        yield _RETURN, 0, 0, _FAIL | errno.EPERM
    # Its flags are behind a pointer, which a filter cannot follow; the C library then uses clone.
    yield _EQUAL, 0, 1, _CLONE3
    yield _RETURN, 0, 0, _FAIL | errno.ENOSYS
    yield _EQUAL, 0, 4, _CLONE[column]
    yield _LOAD, 0, 0, _ARGUMENT
    yield _HAS_BITS, 0, 1, _NEW_NAMESPACES
    yield _RETURN, 0, 0, _FAIL | errno.EPERM
    yield _RETURN, 0, 0, _ALLOW
    yield _EQUAL, 0, len(_FAMILIES) + 2, _SOCKET[column]
    yield _LOAD, 0, 0, _ARGUMENT
    for place, family in enumerate(_FAMILIES):
        yield _EQUAL, len(_FAMILIES) - place, 0, family
    yield _RETURN, 0, 0, _FAIL | errno.EAFNOSUPPORT
    yield _RETURN, 0, 0, _ALLOW


@dataclass(frozen=True, slots=True, kw_only=True)
class ControlGroup:
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
class ControlGroups:
    """Makes control groups of the kernel, version 2, in a folder that is delegated to this process.

    A group limits the memory and the number of all processes of a program together. It counts exactly and at every
    moment what a look at the processes sees now and then: pages they share once, and files in memory as well. Groups
    can be made where a part of the tree is delegated, as systemd does with `Delegate=` and `DelegateSubgroup=`;
    elsewhere there are none, and resource limits and the filter of system calls have to do.
    """

    folder: Path
    _number: int = 0
    _made: list[Path] = field(default_factory=list)

    @classmethod
    def find(cls) -> ControlGroups | None:
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

    def make(self, *, memory_bytes: int, max_processes: int) -> ControlGroup:
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
        return ControlGroup(folder=folder)

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
