"""Boxes of bubblewrap: what stays between commands, and what commands cannot exceed or reach."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest

from megarl.config.section import MIB
from megarl.episodes.harbor.boxes import Box, CommandResult
from megarl.episodes.harbor.bubblewrap import BubblewrapBox, remove_abandoned
from megarl.episodes.harbor.root_images import BubblewrapBoxes
from megarl.episodes.harbor.tasks import BoxLimits, read_task
from megarl.system.proc import descendants, read_stat
from tests.episodes.harbor.small_tasks import write_tasks
from tests.waiting import wait_until

pytestmark = pytest.mark.needs("bubblewrap")

DEFAULTS = BoxLimits(memory_bytes=1 << 30, disk_bytes=1 << 30, cpus=1, max_processes=24)
"""The task has limits of its own for memory (512 MiB) and disk (64 MiB)."""


@pytest.fixture
def in_box(tmp_path: Path) -> Callable[[Callable[[Box], Awaitable[list[CommandResult]]]], list[CommandResult]]:
    """Call a function with a box of the task `hello`."""
    tasks = write_tasks(tmp_path / "tasks")

    def call(use: Callable[[Box], Awaitable[list[CommandResult]]]) -> list[CommandResult]:
        async def opened() -> list[CommandResult]:
            boxes = BubblewrapBoxes({"*": Path("host")}, tmp_path / "cache", max_cache_bytes=1 << 30)
            box = await boxes.open(read_task(tasks, "hello", DEFAULTS))
            try:
                return await use(box)
            finally:
                await box.close()
                await boxes.close()

        return asyncio.run(opened())

    return call


def results_of(*commands: str, timeout_s: float = 60) -> Callable[[Box], Awaitable[list[CommandResult]]]:
    async def use(box: Box) -> list[CommandResult]:
        return [await box.run(command, variables={"GIVEN": "a b"}, timeout_s=timeout_s) for command in commands]

    return use


InBox = Callable[[Callable[[Box], Awaitable[list[CommandResult]]]], list[CommandResult]]


def test_background_processes_stay_and_stand_still_between_commands(in_box: InBox) -> None:
    states: list[str] = []

    async def use(box: Box) -> list[CommandResult]:
        first = await box.run("(while :; do :; done) >/dev/null 2>&1 & echo $!", variables={}, timeout_s=60)
        assert isinstance(box, BubblewrapBox)
        assert box._process is not None
        states.extend(read_stat(pid).state for pid in descendants(box._process.pid))
        return [first, await box.run(f"ps -o pid= {first.output}", variables={}, timeout_s=60)]

    first, second = in_box(use)
    assert set(states) == {"T"}
    assert second.output.strip() == first.output.strip()


@pytest.mark.patient
def test_a_command_that_takes_too_long_is_stopped_and_the_box_goes_on(in_box: InBox) -> None:
    async def use(box: Box) -> list[CommandResult]:
        late = await box.run("echo begun; sleep 600", variables={}, timeout_s=2)
        return [late, await box.run("echo $GIVEN; pgrep sleep", variables={"GIVEN": "a b"}, timeout_s=60)]

    late, after = in_box(use)
    assert late == CommandResult(code=None, output="begun\n", stopped="it ran longer than 2 s")
    assert (after.code, after.output) == (1, "a b\n")


def test_memory_of_all_processes_together_is_limited(in_box: InBox) -> None:
    alone = "python3 -c 'bytearray(1 << 30)'"
    together = (
        "python3 -c '\nimport os, time\nfor _ in range(8):\n  if os.fork() == 0:\n"
        "    held = bytearray(100 << 20); held[::4096] = bytes(len(held[::4096])); time.sleep(600)\ntime.sleep(600)'"
    )
    one, many, after = in_box(results_of(alone, together, "echo on"))
    assert "MemoryError" in one.output
    assert many.stopped is not None
    assert many.stopped.startswith("its processes used more than 512 MiB of memory")
    assert after.output == "on\n"


@pytest.mark.patient
def test_processes_and_files_are_limited(in_box: InBox) -> None:
    many, one_file, files = in_box(
        results_of(
            "for each in $(seq 60); do sleep 600 & done; wait",
            "head -c 200M /dev/zero > big; stat -c %s big",
            "for each in 1 2 3; do head -c 40M /dev/zero > file$each; done; rm big; sleep 600",
        )
    )
    assert many.code != 0 or "Resource temporarily unavailable" in many.output
    assert one_file.output.splitlines()[-1] == str(64 * MIB)
    assert files.stopped is not None
    assert files.stopped.startswith("its files take more than 64 MiB")


def test_a_box_that_kills_all_its_processes_begins_anew_with_its_files(in_box: InBox) -> None:
    killed, after = in_box(results_of("echo kept > file; kill -9 -1; sleep 600", "cat file"))
    assert killed.stopped is not None
    assert (after.code, after.output) == (0, "kept\n")


def test_a_box_reaches_nothing_of_the_machine(in_box: InBox, tmp_path: Path) -> None:
    secret = tmp_path / "secret"
    secret.write_text("secret")
    secret.chmod(0o644)
    read, network, namespaces, kernel, links = in_box(
        results_of(
            f"cat {secret} /etc/shadow; ls /home /root",
            "ip -o link 2>/dev/null | grep -v lo:; cat /proc/net/dev | grep -c :",
            "unshare --user true || mount -t tmpfs none /tmp || chroot / mount -t proc none /proc",
            "echo x > /proc/sys/kernel/core_pattern || echo b > /proc/sysrq-trigger",
            # The machine reads what a command has written: a link in its place leads nowhere.
            f"rm -f /.megarl/out/5; ln -s {secret} /.megarl/out/5",
        )
    )
    assert "secret" not in read.output.replace(str(secret), "")
    assert network.output == "1\n"  # loopback alone
    assert namespaces.code != 0
    assert kernel.code != 0
    assert links.output == ""


def test_a_flood_of_output_is_cut_in_the_middle(in_box: InBox) -> None:
    (flood,) = in_box(results_of("echo first; yes | head -c 1M; echo last"))
    assert flood.output.startswith("first\n")
    assert flood.output.endswith("last\n")
    assert "bytes are not shown]" in flood.output
    assert len(flood.output) < 1 << 17


def test_the_folder_of_a_worker_that_was_killed_is_removed_and_its_processes_end(tmp_path: Path) -> None:
    tasks = write_tasks(tmp_path / "tasks")
    program = (
        "import asyncio, sys\nfrom pathlib import Path\n"
        "from megarl.episodes.harbor.root_images import BubblewrapBoxes\n"
        "from megarl.episodes.harbor.tasks import BoxLimits, read_task\n"
        "async def main():\n"
        "    limits = BoxLimits(memory_bytes=1 << 30, disk_bytes=1 << 30, cpus=1, max_processes=24)\n"
        f"    cache = Path({str(tmp_path / 'cache')!r})\n"
        "    boxes = BubblewrapBoxes({'*': Path('host')}, cache, max_cache_bytes=1 << 30)\n"
        f"    box = await boxes.open(read_task(Path({str(tasks)!r}), 'hello', limits))\n"
        "    print(box._process.pid, flush=True)\n"
        "    await asyncio.sleep(600)\n"
        "asyncio.run(main())\n"
    )
    worker = subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True)
    assert worker.stdout is not None
    inside = int(worker.stdout.readline())
    (scratch,) = (tmp_path / "cache" / "scratch").glob("*/")
    remove_abandoned(scratch.parent)
    assert scratch.exists()  # it is in use
    os.kill(worker.pid, signal.SIGKILL)
    worker.wait()
    worker.stdout.close()
    wait_until(lambda: not Path(f"/proc/{inside}/exe").exists(), within_s=300)  # its end follows that of its caller
    remove_abandoned(scratch.parent)
    assert not scratch.exists()
