from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from megarl.system import proc
from megarl.system.proc import (
    ZOMBIE,
    all_processes,
    descendants,
    own_address_space_bytes,
    read_stat,
    resident_bytes,
)

SLEEP = [sys.executable, "-c", "import time; time.sleep(60)"]


def test_this_process_is_described_as_the_system_knows_it() -> None:
    stat = read_stat(os.getpid())
    assert (stat.pid, stat.parent, stat.group, stat.session) == (
        os.getpid(),
        os.getppid(),
        os.getpgid(0),
        os.getsid(0),
    )
    assert stat.state == "R"
    assert stat.started > 0
    # The CPU time of a process that runs is another one a moment later.
    assert (stat.pid, stat.started) in [(process.pid, process.started) for process in all_processes()]


def test_a_name_with_spaces_and_parentheses_is_read_whole(tmp_path: Path) -> None:
    program = tmp_path / "a (b) c)"
    program.symlink_to(Path("/bin/sleep").resolve())
    with subprocess.Popen([program, "60"]) as process:
        try:
            while read_stat(process.pid).name != "a (b) c)":
                time.sleep(0.01)
            assert read_stat(process.pid).parent == os.getpid()
        finally:
            process.kill()


def test_a_process_that_ended_is_a_zombie_until_it_is_waited_for_and_then_gone() -> None:
    process = subprocess.Popen([sys.executable, "-c", ""])
    while read_stat(process.pid).state != ZOMBIE:
        time.sleep(0.01)
    assert resident_bytes(process.pid) == 0
    process.wait()
    with pytest.raises((FileNotFoundError, ProcessLookupError)):
        read_stat(process.pid)
    assert resident_bytes(process.pid) == 0


@pytest.mark.parametrize("is_listed", [True, False])
def test_descendants_are_the_process_its_children_and_theirs(is_listed: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """By the kernel's lists of children, and without."""
    assert proc._LISTS_CHILDREN
    monkeypatch.setattr(proc, "_LISTS_CHILDREN", is_listed)
    if is_listed:
        monkeypatch.setattr(proc, "all_processes", lambda: pytest.fail("all processes were looked at"))
    script = f"import subprocess, sys; child = subprocess.Popen({SLEEP!r}); print(child.pid, flush=True); child.wait()"
    with subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, start_new_session=True) as process:
        try:
            assert process.stdout is not None
            grandchild = int(process.stdout.readline())
            assert descendants(process.pid) == {process.pid, grandchild}
            assert {process.pid, grandchild} < descendants(os.getpid())
        finally:
            os.killpg(process.pid, 9)


def test_memory_is_in_bytes() -> None:
    before, size = resident_bytes(os.getpid()), 64 << 20
    block = bytearray(os.urandom(1)) * size
    assert resident_bytes(os.getpid()) - before > size * 0.9
    assert own_address_space_bytes() > resident_bytes(os.getpid()) > len(block)
