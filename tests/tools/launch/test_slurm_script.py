"""The job script on a real Slurm of two nodes; Ray and megarl are stand-ins that say what a test wants to hear."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from megarl.config.load import read_recipe
from megarl.tools.launch.slurm import SlurmJob, render
from tests.repository import ROOT
from tests.tools.launch.slurm_cluster import SlurmCluster, slurm_cluster

QUICKSTART = ROOT / "recipes" / "quickstart.yaml"

pytestmark = [pytest.mark.slow, pytest.mark.needs("slurm")]

RAY = """\
#!/usr/bin/env bash
echo "$SLURMD_NODENAME $*" >>FOLDER/ray
port=$(grep -oE -- '--port=[0-9]+' <<<"$*" | cut -d= -f2)
[[ $* == *--head* ]] && exec python3 -m http.server --bind 127.0.0.1 "$port"
exec sleep 1000
"""
READY = """\
#!/usr/bin/env bash
[[ "$*" == "-m megarl"* ]] || exec PYTHON "$@"
until (($(wc -l <FOLDER/ray) >= 2 * (${SLURM_RESTART_COUNT:-0} + 1))); do sleep 0.1; done
"""


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SlurmCluster]:
    with slurm_cluster(tmp_path_factory.mktemp("slurm") / "cluster") as cluster:
        yield cluster


def job(folder: Path, megarl: str, *, max_failures: int = 1) -> Path:
    """A script whose `megarl train` is the given piece of bash."""
    programs = {
        "ray": RAY.replace("FOLDER", str(folder)),
        "python3": READY.replace("PYTHON", "/usr/bin/python3").replace("FOLDER", str(folder)),
        "megarl": f"#!/usr/bin/env bash\ncd {folder}\necho attempt >>attempts\n{megarl}\n",
    }
    (folder / "bin").mkdir()
    for name, text in programs.items():
        (folder / "bin" / name).write_text(text)
        (folder / "bin" / name).chmod(0o755)
    script = folder / "job.sh"
    wanted = SlurmJob(
        recipe_path=QUICKSTART, folder=folder, nodes=2, gpus_per_node=2, venv=folder, max_failures=max_failures
    )
    script.write_text(render(wanted, read_recipe(QUICKSTART, []).recipe))
    return script


def attempts(folder: Path) -> int:
    path = folder / "attempts"
    return len(path.read_text().splitlines()) if path.exists() else 0


def log(folder: Path) -> str:
    return "".join(path.read_text() for path in sorted(folder.glob("megarl-*.log")))


def test_the_warning_before_the_time_limit_saves_and_the_job_goes_on(cluster: SlurmCluster, tmp_path: Path) -> None:
    megarl = """
    trap 'echo asked >>signals; exit 75' USR1
    (($(wc -l <attempts) > 1)) && exit 0
    for ((i = 0; i < 600; i++)); do sleep 0.5; done
    """
    number = cluster.submit(job(tmp_path, megarl), "--time=2", "--signal=B:USR1@60")
    assert cluster.wait(number, "COMPLETED", "FAILED", "TIMEOUT", timeout_s=300) == "COMPLETED", log(tmp_path)
    assert (tmp_path / "signals").read_text() == "asked\n"
    assert attempts(tmp_path) == 2
    assert cluster.field(number, "Restarts") == "1"
    assert "megarl ended with 75" in log(tmp_path)
    assert "queued again" in log(tmp_path)
    # Ray was started on both nodes, at the addresses Slurm knows them by, with the cores of the allocation.
    started = (tmp_path / "ray").read_text().splitlines()
    cores = f"--num-cpus={os.cpu_count()}"
    assert sum(line.startswith("n0 ") and "--node-ip-address=127.0.0.1" in line for line in started) == 2
    assert sum(line.startswith("n1 ") and "--node-ip-address=127.0.0.2" in line for line in started) == 2
    assert all(cores in line for line in started)
    # Each attempt has its logs, and the token is gone.
    folders = sorted(path.name for path in (tmp_path / "runs" / "slurm" / number).iterdir())
    assert folders == ["attempt_0", "attempt_1"]


def test_a_job_that_another_one_displaces_is_not_a_failure(cluster: SlurmCluster, tmp_path: Path) -> None:
    # All steps get SIGTERM, Ray's as well: megarl ends with what it has lost, not with 75.
    megarl = """
    trap 'echo lost >>signals; exit 1' TERM
    (($(wc -l <attempts) > 1)) && exit 0
    for ((i = 0; i < 600; i++)); do sleep 0.5; done
    """
    number = cluster.submit(job(tmp_path, megarl, max_failures=0))
    cluster.wait_for(number, lambda: attempts(tmp_path) == 1, timeout_s=120)
    urgent = tmp_path / "urgent.sh"
    urgent.write_text("#!/bin/sh\ntrue\n")
    other = cluster.submit(urgent, "--partition=urgent", "--nodes=2", "--exclusive", f"--output={tmp_path}/urgent.log")
    assert cluster.wait(other, "COMPLETED", "FAILED", timeout_s=180) == "COMPLETED"
    assert cluster.wait(number, "COMPLETED", "FAILED", timeout_s=300) == "COMPLETED", log(tmp_path)
    assert (tmp_path / "signals").read_text() == "lost\n"
    assert attempts(tmp_path) == 2
    assert "preempted, with exit code 1: not counted as a failure" in log(tmp_path)
    assert not (tmp_path / "runs" / "slurm" / number / "failures").exists()
    # Its Ray ended with the step, which is no fault of the node.
    assert not (tmp_path / "runs" / "slurm" / number / "bad_nodes").exists()


def test_a_mistake_of_the_recipe_is_not_tried_again(cluster: SlurmCluster, tmp_path: Path) -> None:
    number = cluster.submit(job(tmp_path, "exit 2"))
    assert cluster.wait(number, "COMPLETED", "FAILED", timeout_s=60) == "FAILED"
    assert cluster.field(number, "ExitCode") == "2:0"
    assert attempts(tmp_path) == 1


def test_a_failure_is_tried_again_but_not_for_ever(cluster: SlurmCluster, tmp_path: Path) -> None:
    number = cluster.submit(job(tmp_path, "exit 76"))
    cluster.wait_for(number, lambda: "giving up" in log(tmp_path), timeout_s=180)
    assert cluster.wait(number, "FAILED", timeout_s=60) == "FAILED"
    assert cluster.field(number, "ExitCode") == "76:0"
    assert attempts(tmp_path) == 2
    assert "failure 1 of at most 1, with exit code 76" in log(tmp_path)
    assert "failure 2, with exit code 76: giving up" in log(tmp_path)


def test_a_ray_that_does_not_start_is_not_waited_for(cluster: SlurmCluster, tmp_path: Path) -> None:
    script = job(tmp_path, "exit 0")
    ray = tmp_path / "bin" / "ray"
    ray.write_text(ray.read_text().replace("exec sleep 1000", "exit 1"))
    # The second node never joins; otherwise the job could start in the moment before its Ray ends.
    ready = tmp_path / "bin" / "python3"
    ready.write_text(ready.read_text().replace(">= 2 *", ">= 3 *"))
    number = cluster.submit(script)
    cluster.wait_for(number, lambda: "giving up" in log(tmp_path), timeout_s=180)
    assert cluster.wait(number, "FAILED", timeout_s=60) == "FAILED"
    assert attempts(tmp_path) == 0
    assert "Ray ended on a node: read " in log(tmp_path)
    assert "not excluded: there are " in log(tmp_path), "the job needs both nodes of this Slurm"


def test_a_job_whose_node_is_lost_is_queued_again(tmp_path: Path, tmp_path_factory: pytest.TempPathFactory) -> None:
    megarl = "(($(wc -l <attempts) > 1)) && exit 0\nexec sleep 1000"
    with slurm_cluster(tmp_path_factory.mktemp("failing") / "cluster") as cluster:
        number = cluster.submit(job(tmp_path, megarl))
        cluster.wait_for(number, lambda: attempts(tmp_path) == 1, timeout_s=60)
        lost = cluster.daemons["n1"]
        lost.send_signal(signal.SIGSTOP)
        cluster.wait_for(number, lambda: cluster.field(number, "Restarts") == "1", timeout_s=240)
        lost.send_signal(signal.SIGCONT)
        assert cluster.wait(number, "COMPLETED", "FAILED", timeout_s=180) == "COMPLETED", log(tmp_path)
        assert attempts(tmp_path) == 2
        assert psutil.pid_exists(lost.pid)


def test_a_node_where_ray_ends_is_excluded_from_the_next_attempt(
    tmp_path: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    script = job(tmp_path, "(($(wc -l <attempts) > 1)) && exit 0\nsleep 8\nexit 76")
    ray = tmp_path / "bin" / "ray"
    ray.write_text(
        ray.read_text().replace("exec sleep 1000", "[[ $SLURMD_NODENAME == n1 ]] || sleep 1000\nsleep 4; exit 1")
    )
    with slurm_cluster(tmp_path_factory.mktemp("spare") / "cluster", has_spare=True) as cluster:
        number = cluster.submit(script)
        assert cluster.wait(number, "COMPLETED", "FAILED", timeout_s=240) == "COMPLETED", log(tmp_path)
        assert cluster.field(number, "ExcNodeList") == "n1"
        assert "queued again, without n1" in log(tmp_path)
    assert {line.split()[0] for line in (tmp_path / "ray").read_text().splitlines()[2:]} == {"n0", "n2"}
