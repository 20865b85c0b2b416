"""Control groups: where they are delegated, and what the kernel does with a program that exceeds one."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from megarl.reward import groups
from megarl.reward.groups import Groups

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
    monkeypatch.setattr(groups, "_PROC", proc)
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    return folder


def test_groups_are_made_beside_that_of_the_process(tree: Path) -> None:
    found = Groups.find()
    assert found is not None
    assert found.folder == tree
    assert (tree / "cgroup.subtree_control").read_text() in ("+memory", "+pids")
    group = found.make(memory_bytes=1 << 20, max_processes=7)
    assert group.folder.parent == tree
    assert (group.folder / "memory.max").read_text() == str(1 << 20)
    assert (group.folder / "pids.max").read_text() == "7"


def test_groups_without_these_limits_are_not_used(tree: Path) -> None:
    (tree / "cgroup.controllers").write_text("cpu pids\n")
    assert Groups.find() is None


def test_root_takes_only_what_is_marked_as_delegated(tree: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 0)
    assert Groups.find() is None
    monkeypatch.setattr(os, "getxattr", lambda folder, name: b"1" if folder == tree else b"")
    assert Groups.find() is not None


@pytest.mark.parametrize("text", ["4:memory:/job/worker\n", "0::/\n"], ids=["first version", "root of the tree"])
def test_without_a_group_of_its_own_there_are_none(tree: Path, text: str) -> None:
    (tree.parents[2] / "proc" / "cgroup").write_text(text)
    assert Groups.find() is None


def test_a_program_that_the_kernel_ended_for_its_memory_is_known(tmp_path: Path) -> None:
    group = groups.Group(folder=tmp_path)
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
