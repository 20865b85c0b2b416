"""A private Ray that outlives its driver: here any command under a guard stands for it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from types import SimpleNamespace

import pytest

from megarl.system import lease as lease_module
from megarl.system.guard import start_guarded
from megarl.system.lease import LeasedGuard, PrivateLease, digest_program, find_leased, record_path
from megarl.system.proc import read_stat
from megarl.system.run_lock import run_lock
from tests.engine.test_process import group_members, wait_until_gone

PROGRAM = "import time; print('ready', flush=True); time.sleep(600)"


@pytest.fixture
def run_folder(tmp_path: Path) -> Path:
    return tmp_path / "runs" / "one"


@pytest.fixture
def lease(run_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> PrivateLease:
    folder = tmp_path / "ray"
    folder.mkdir(mode=0o700)
    monkeypatch.setattr(lease_module, "RAY_FOLDER", str(folder))
    return PrivateLease(run_folder, folder=folder, program="digest", seconds=600)


@pytest.fixture
def guard(lease: PrivateLease) -> Iterator[subprocess.Popen[bytes]]:
    command = [sys.executable, "-c", PROGRAM]
    guard = start_guarded(command, environment=os.environ, output=subprocess.PIPE, lease=lease.of_guard)
    assert guard.stdin is not None
    assert guard.stdout is not None
    with guard:
        guard.stdout.readline()
        lease.started("127.0.0.1:1", guard.pid)
        yield guard
        lease.of_guard.file.unlink(missing_ok=True)


def test_the_next_driver_finds_what_a_killed_one_left_and_can_end_it(
    run_folder: Path, lease: PrivateLease, guard: subprocess.Popen[bytes]
) -> None:
    with run_lock(run_folder):
        assert find_leased(run_folder) is None
        lease.placed({"train": [[0, 1]]})
        lease.take()
        kept = find_leased(run_folder)
        assert kept is not None
        assert (kept.program, kept.gpus, kept.address) == ("digest", {"train": [[0, 1]]}, "127.0.0.1:1")
        assert guard.stdin is not None
        guard.stdin.close()  # as by the death of the driver
        time.sleep(1.0)
        assert len(group_members(guard.pid)) == 2
        assert kept.guard is not None
        kept.guard.end(grace_s=10)
        assert not wait_until_gone(guard.pid, 60)
        assert not lease.of_guard.folder.exists()
        assert find_leased(run_folder) is None


@pytest.mark.fault("a lease record that somebody planted", "nobody is killed and nothing is removed")
@pytest.mark.parametrize("plant", ["another process", "another folder", "not private", "shared file", "another user's"])
def test_a_record_that_another_wrote_or_that_names_what_is_no_guard_harms_nobody(
    run_folder: Path,
    lease: PrivateLease,
    guard: subprocess.Popen[bytes],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    plant: str,
) -> None:
    mine = tmp_path / "mine"
    mine.mkdir(mode=0o700)
    path = record_path(run_folder)
    with (
        run_lock(run_folder),
        subprocess.Popen(["sleep", "600"], start_new_session=True) as bystander,
        closing(SimpleNamespace(close=bystander.kill)),
    ):
        lease.take()
        assert find_leased(run_folder) is not None
        record = json.loads(path.read_text())
        changes: dict[str, object] = {}
        match plant:
            case "another process":
                changes = {"pid": bystander.pid, "started": read_stat(bystander.pid).started}
            case "another folder":
                changes = {"folder": str(mine)}
            case "not private":
                lease.of_guard.folder.chmod(0o755)
            case "shared file":
                path.chmod(0o660)
            case _:
                monkeypatch.setattr("megarl.system.lease.os.geteuid", lambda: os.getuid() + 1)
        path.write_text(json.dumps(record | {"guard": record["guard"] | changes}))
        assert find_leased(run_folder) is None
        if changes:
            LeasedGuard(**(record["guard"] | changes)).end(grace_s=0.1)
        assert (bystander.poll(), guard.poll(), mine.exists()) == (None, None, True)


def test_looking_for_a_lease_removes_nothing(run_folder: Path, lease: PrivateLease) -> None:
    """A command looks without the lock when its driver was killed: another driver may hold the run by then."""
    with run_lock(run_folder):
        lease.started("127.0.0.1:1", os.getpid())
        lease.take()
        assert find_leased(run_folder) is None, "this process is no guard"
        assert record_path(run_folder).stat().st_mode & 0o777 == 0o600
        assert lease.give_back()


@pytest.mark.patient
def test_a_lease_is_renewed_until_it_is_given_back(run_folder: Path, tmp_path: Path) -> None:
    lease = PrivateLease(run_folder, folder=tmp_path, program="digest", seconds=1)
    with run_lock(run_folder):
        lease.started("127.0.0.1:1", os.getpid())
        lease.take()
        seen = set()
        for _ in range(40):
            time.sleep(0.05)
            if lease.of_guard.file.exists():
                seen.add(lease.of_guard.file.stat().st_mtime_ns)
        assert len(seen) > 2
        assert lease.give_back()
        assert not record_path(run_folder).exists()


def test_a_driver_that_lost_the_run_leaves_everything_to_its_successor(run_folder: Path, tmp_path: Path) -> None:
    lease = PrivateLease(run_folder, folder=tmp_path, program="digest", seconds=600)
    with run_lock(run_folder, beat_s=600) as holder:
        lease.started("127.0.0.1:1", os.getpid())
        lease.take()
        path = record_path(run_folder).with_name(f"{run_folder.name}.json")
        after = json.loads(path.read_bytes()) | {"token": holder.token + 1}
        path.write_text(json.dumps(after))
        assert not lease.give_back()
        assert record_path(run_folder).exists()


@pytest.mark.parametrize("change", [{"boot_id": "another"}, {"started": 1}])
def test_a_ray_of_another_boot_or_with_a_pid_that_was_given_again_is_gone(
    run_folder: Path, lease: PrivateLease, guard: subprocess.Popen[bytes], change: dict[str, object]
) -> None:
    with run_lock(run_folder):
        lease.take()
        path = record_path(run_folder)
        record = json.loads(path.read_text())
        path.write_text(json.dumps(record | {"guard": record["guard"] | change}))
        assert find_leased(run_folder) is None
        assert guard.poll() is None


def test_a_process_keeps_its_code_and_its_environment(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "module.py").write_text("x = 1")
    monkeypatch.setattr(lease_module, "_CODE", tmp_path)
    digests = [digest_program("recipe"), digest_program("other recipe")]
    monkeypatch.setenv("SGLANG_ANYTHING", "1")
    digests.append(digest_program("recipe"))
    (tmp_path / "module.py").write_text("x = 12")
    digests.append(digest_program("recipe"))
    assert len(set(digests)) == 4
    monkeypatch.setenv("SHLVL", "7")
    assert digest_program("recipe") == digests[-1]


@pytest.mark.parametrize("text", ["", "{", "[]", '{"address": "1"}', '{"guard": 1}', '{"guard": {"pid": 1}}'])
def test_a_damaged_record_is_none(run_folder: Path, text: str) -> None:
    path = record_path(run_folder)
    path.parent.mkdir(parents=True)
    path.write_text(text)
    assert find_leased(run_folder) is None


def test_without_a_duration_nothing_is_kept(run_folder: Path, tmp_path: Path) -> None:
    lease = PrivateLease(run_folder, folder=tmp_path, program="digest", seconds=0)
    lease.started("127.0.0.1:1", os.getpid())
    lease.take()
    assert not lease.of_guard.file.exists()
    assert not record_path(run_folder).exists()
