"""Programs in the sandbox, and the limits of control groups."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from megarl.reward import sandbox
from megarl.reward.sandbox import ControlGroups, Limits, Sandbox, filter_program

pytestmark = pytest.mark.needs("bubblewrap")

LIMITS = Limits(memory_bytes=256 << 20, disk_bytes=16 << 20, max_processes=16, max_output_bytes=10_000)

# Each takes memory that belongs to no process, 16 MiB at a time, and prints how much it got.
_MEMFD = """
import os
taken = 0
try:
    for _ in range(32):
        file = os.memfd_create("hidden")
        taken += os.write(file, bytes(16 << 20))
except OSError: pass
print(taken >> 20)
"""
_SYSTEM_V = """
import ctypes
libc = ctypes.CDLL(None, use_errno=True)
libc.shmat.restype = ctypes.c_void_p
taken = 0
for _ in range(32):
    segment = libc.shmget(0, 16 << 20, 0o1600)
    if segment < 0: break
    address = libc.shmat(segment, None, 0)
    ctypes.memset(address, 1, 16 << 20)
    libc.shmdt(ctypes.c_void_p(address))
    taken += 16
print(taken)
"""
_MOUNTS = """
import ctypes, os
libc = ctypes.CDLL(None, use_errno=True)
taken = 0
if libc.unshare(0x10000000 | 0x20000) == 0:
    for number in range(32):
        os.mkdir(f"/tmp/{number}")
        if libc.mount(b"tmpfs", f"/tmp/{number}".encode(), b"tmpfs", 0, None): break
        with open(f"/tmp/{number}/file", "wb") as file: file.write(bytes(16 << 20))
        taken += 16
print(taken)
"""


@pytest.mark.fault(
    "memory that belongs to no process (memfd, System V, mounts)", "the program in the sandbox gets none"
)
@pytest.mark.parametrize("program", [_MEMFD, _SYSTEM_V, _MOUNTS], ids=["memfd", "system_v", "mounts"])
def test_memory_that_no_limit_counts_cannot_be_had(program: str) -> None:
    ran = Sandbox("bubblewrap", LIMITS).run(program, b"", deadline=time.monotonic() + 60)
    assert ran.is_done
    assert ran.output == b"0\n"


@pytest.mark.parametrize(
    ("code", "said"),
    [
        ("libc.unshare(0x10000000)", "-1 1"),
        ("libc.clone3(0, 0)", "-1 0"),
        ("libc.syscall(56, 0x10000000 | 17, 0, 0, 0, 0)", "-1 1"),
        ("libc.socket(40, 1, 0)", "-1 97"),
        ("libc.socket(16, 3, 0)", "-1 97"),
    ],
    ids=["user namespace", "clone3 is no symbol", "clone with a namespace", "vsock", "netlink"],
)
@pytest.mark.skipif(filter_program("x86_64") != filter_program(), reason="the numbers are those of x86_64")
def test_namespaces_and_other_sockets_are_denied(code: str, said: str) -> None:
    program = (
        "import ctypes\nlibc = ctypes.CDLL(None, use_errno=True)\n"
        f"try: got = {code}\nexcept AttributeError: got = -1\nprint(got, ctypes.get_errno())"
    )
    ran = Sandbox("bubblewrap", LIMITS).run(program, b"", deadline=time.monotonic() + 60)
    assert ran.output.decode().strip() == said


def test_threads_processes_and_ordinary_sockets_work() -> None:
    program = """
import concurrent.futures, multiprocessing, socket, subprocess, threading
thread = threading.Thread(target=print, args=("thread",)); thread.start(); thread.join()
print(subprocess.run(["echo", "process"], capture_output=True, text=True).stdout.strip())
left, right = socket.socketpair(); left.send(b"pair"); print(right.recv(4).decode())
server = socket.create_server(("127.0.0.1", 0)); print("server")
with multiprocessing.get_context("fork").Pool(2) as pool: print(pool.map(abs, [-1]))
"""
    ran = Sandbox("bubblewrap", LIMITS).run(program, b"", deadline=time.monotonic() + 60)
    assert ran.output.decode().split() == ["thread", "process", "pair", "server", "[1]"]


_SHORT_OF_NAMESPACES = """
import ctypes, sys, time
from pathlib import Path
from megarl.reward.sandbox import Limits, Sandbox, SandboxError
ctypes.CDLL(None).unshare(0x10000000)
print("ready", flush=True)
sys.stdin.readline()
box = Sandbox("bubblewrap", Limits(memory_bytes=1 << 28, disk_bytes=1 << 24, max_processes=16, max_output_bytes=99))
print(box.run("print(6 * 7)", b"", deadline=time.monotonic() + 60).output, flush=True)
Path("/proc/sys/user/max_net_namespaces").write_text("0")
try:
    print(box.run("print(6 * 7)", b"", deadline=time.monotonic() + 60))
except SandboxError as error:
    print(error)
"""


@pytest.mark.patient
@pytest.mark.needs("root")
@pytest.mark.fault("a machine that gives the sandbox no namespace", "an error of the sandbox, never a score")
def test_a_program_that_could_not_be_started_is_not_a_program_that_failed() -> None:
    """The limit is one of the kernel's, set in a user namespace of the test's own."""
    process = subprocess.Popen(
        [sys.executable, "-c", _SHORT_OF_NAMESPACES], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert process.stdin is not None
    assert process.stdout is not None
    assert process.stdout.readline() == "ready\n"
    for kind in ("uid", "gid"):
        Path(f"/proc/{process.pid}/{kind}_map").write_text("0 0 4294967295")
    output, _ = process.communicate("go\n", timeout=120)
    assert output.splitlines() == [
        r"b'42\n'",
        "bubblewrap started no program; the machine may be short of processes or memory",
    ]


def test_a_program_that_was_not_started_is_tried_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    box = Sandbox("bubblewrap", LIMITS)
    found = subprocess.run(["which", "bwrap"], capture_output=True, text=True, check=True).stdout.strip()
    once = tmp_path / "bwrap"
    once.write_text(f'#!/bin/sh\ntest -e {tmp_path}/second && exec {found} "$@"\ntouch {tmp_path}/second\nexit 1\n')
    once.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    assert box.run("print(6 * 7)", b"", deadline=time.monotonic() + 60).output == b"42\n"
    assert (tmp_path / "second").exists()


def test_the_interpreter_has_its_own_library_wherever_it_lies() -> None:
    """Root may have an interpreter below a folder that nobody else may enter."""
    program = "import encodings, sys; print(encodings.__file__); print(sys.base_prefix)"
    ran = Sandbox("bubblewrap", LIMITS).run(program, b"", deadline=time.monotonic() + 60)
    library, prefix = ran.output.decode().split()
    assert prefix == sys.base_prefix
    assert Path(library).is_relative_to(prefix)


MOUNTED = "35 25 0:30 / {point} rw,nosuid shared:9 - cgroup2 cgroup2 rw\n36 25 0:31 / /tmp rw - tmpfs tmpfs rw\n"
TREE = Path("/sys/fs/cgroup")


@pytest.fixture
def tree(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The files of a delegated group and of this process's own one below it."""
    folder = tmp_path / "tree" / "user" / "job"
    (folder / "worker").mkdir(parents=True)
    (folder / "cgroup.controllers").write_text("cpu memory pids\n")
    for name in ("cgroup.subtree_control", "cgroup.procs"):
        (folder / name).touch()
    proc = tmp_path / "proc"
    proc.mkdir()
    (proc / "cgroup").write_text("4:memory:/old\n0::/user/job/worker\n")
    (proc / "mountinfo").write_text(MOUNTED.format(point=tmp_path / "tree"))
    monkeypatch.setattr(sandbox, "_PROC", proc)
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    return folder


def test_groups_are_made_beside_that_of_the_process(tree: Path) -> None:
    found = ControlGroups.find()
    assert found is not None
    assert found.folder == tree
    assert (tree / "cgroup.subtree_control").read_text() in ("+memory", "+pids")
    group = found.make(memory_bytes=1 << 20, max_processes=7)
    assert group.folder.parent == tree
    assert (group.folder / "memory.max").read_text() == str(1 << 20)
    assert (group.folder / "pids.max").read_text() == "7"


def test_groups_without_these_limits_are_not_used(tree: Path) -> None:
    (tree / "cgroup.controllers").write_text("cpu pids\n")
    assert ControlGroups.find() is None


def test_root_takes_only_what_is_marked_as_delegated(tree: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 0)
    assert ControlGroups.find() is None
    monkeypatch.setattr(os, "getxattr", lambda folder, name: b"1" if folder == tree else b"")
    assert ControlGroups.find() is not None


@pytest.mark.parametrize("text", ["4:memory:/job/worker\n", "0::/\n"], ids=["first version", "root of the tree"])
def test_without_a_group_of_its_own_there_are_none(tree: Path, text: str) -> None:
    (tree.parents[2] / "proc" / "cgroup").write_text(text)
    assert ControlGroups.find() is None


def test_a_program_that_the_kernel_ended_for_its_memory_is_known(tmp_path: Path) -> None:
    group = sandbox.ControlGroup(folder=tmp_path)
    assert not group.exceeded_memory
    (tmp_path / "memory.events").write_text("low 0\nmax 12\noom 1\noom_kill 0\n")
    assert not group.exceeded_memory
    (tmp_path / "memory.events").write_text("low 0\nmax 12\noom 1\noom_kill 3\n")
    assert group.exceeded_memory


@pytest.fixture
def delegated() -> Iterator[Path]:
    """A group of this machine, delegated as systemd would."""
    controllers = TREE / "cgroup.controllers"
    if os.geteuid() != 0 or not controllers.exists() or not {"memory", "pids"} <= set(controllers.read_text().split()):
        pytest.skip("needs root and control groups of version 2 with memory and pids")
    folder = TREE / f"megarl-test-{os.getpid()}"
    (TREE / "cgroup.subtree_control").write_text("+memory +pids")
    folder.mkdir()
    os.setxattr(folder, "user.delegate", b"1")
    yield folder
    for path in (folder / "worker", folder):
        path.rmdir()


@pytest.mark.needs("bubblewrap")
def test_the_kernel_counts_all_processes_of_a_program(delegated: Path) -> None:
    words = [sys.executable, "-m", "tests.reward.in_a_group", str(delegated)]
    told = json.loads(subprocess.run(words, capture_output=True, text=True, check=True, timeout=900).stdout)
    assert told["found"] == str(delegated)
    assert told["plain"] == {"code": 0, "output": "42\n", "stopped": None}
    assert told["together"]["stopped"] == "its processes used too much memory"
    assert told["outliving"]["output"] == "begun\n"
    assert len(told["left"]) == 1, "only the group of the last program"
