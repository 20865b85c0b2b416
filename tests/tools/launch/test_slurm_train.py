"""A real run as a real job: two Slurm nodes, Ray on both, the quickstart; asked to leave, queued again, resumed."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from megarl.observe.event_file import EVENTS_FILE, read_events
from megarl.observe.events import Event, RunFinished, RunStarted, RunStatus, StepFinished
from tests.repository import ROOT
from tests.tools.launch.containers import write_programs
from tests.tools.launch.slurm_cluster import SlurmCluster, slurm_cluster

QUICKSTART = ROOT / "recipes" / "quickstart.yaml"
MEGARL = Path(sys.executable).with_name("megarl")
NUM_STEPS = 8

pytestmark = [pytest.mark.slow, pytest.mark.needs("slurm")]


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SlurmCluster]:
    with slurm_cluster(tmp_path_factory.mktemp("slurm") / "cluster") as cluster:
        yield cluster


def megarl(folder: Path, *words: str) -> str:
    done = subprocess.run([str(MEGARL), *words], cwd=folder, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def events(run: Path) -> list[Event]:
    path = run / EVENTS_FILE
    return [record.event for record in read_events(path)] if path.exists() else []


def log(folder: Path) -> str:
    files = [*folder.glob("*.log"), *folder.glob("runs/slurm/*/*/*.log")]
    return "\n".join(f"== {path}\n{path.read_text()[-3000:]}" for path in files)


@pytest.mark.needs("root")
@pytest.mark.parametrize("image", [None, "team/megarl:1", "megarl.sif"], ids=["venv", "pyxis", "apptainer"])
def test_a_job_over_two_nodes_is_stopped_and_goes_on_to_its_end(
    cluster: SlurmCluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, image: str | None
) -> None:
    """With an image every step has a /tmp of its own, and Ray's sockets are in /tmp."""
    entered, programs = tmp_path / "entered", tmp_path / "programs"
    write_programs(programs, entered)
    monkeypatch.setenv("PATH", f"{programs}:{MEGARL.parent}:{os.environ['PATH']}")
    container = [] if image is None else ["--container", image, "--mount", str(cluster.folder)]
    # The image's programs are those of this environment, which may be in /tmp itself.
    container += [] if image is None else ["--mount", str(ROOT), "--mount", sys.prefix]
    megarl(tmp_path, "data", "make", "arithmetic", "--out", "data/arithmetic")
    settings = {
        "model.path": "data/arithmetic/model",
        "run.steps": str(NUM_STEPS),
        "evaluation.max_prompts": "8",
        "evaluation.every_steps": "null",
        "train.prompts_per_step": "16",
    }
    overrides = [word for key, value in settings.items() for word in ("--set", f"{key}={value}")]
    # Two places per node: the two trainer ranks fill one node, the engine is on the other.
    megarl(tmp_path, "launch", "slurm", str(QUICKSTART), "--nodes", "2", *overrides, *container, "--out", "job.sh")
    job = cluster.submit(tmp_path / "job.sh")
    run = tmp_path / "runs" / "quickstart"

    deadline = time.monotonic() + 300
    while not any(isinstance(event, StepFinished) and event.summary.step >= 2 for event in events(run)):
        state = cluster.field(job, "JobState")
        assert state in ("PENDING", "RUNNING"), f"{state}\n{log(tmp_path)}"
        assert time.monotonic() < deadline, log(tmp_path)
        time.sleep(0.2)
    # What `--signal=B:USR1@...` sends before the time limit, and to whom.
    cluster.ask("scancel", "--signal=USR1", "--batch", job)
    cluster.wait_for(job, lambda: cluster.field(job, "Restarts") == "1", timeout_s=180)
    assert cluster.wait(job, "COMPLETED", "FAILED", timeout_s=300) == "COMPLETED", log(tmp_path)

    told = events(run)
    starts = [event for event in told if isinstance(event, RunStarted)]
    ends = [event.status for event in told if isinstance(event, RunFinished)]
    steps = [event.summary.step for event in told if isinstance(event, StepFinished)]
    assert ends == [RunStatus.PREEMPTED, RunStatus.DONE]
    # No step was lost and none was done twice.
    assert steps == list(range(1, NUM_STEPS + 1))
    assert [start.resumed_step for start in starts] == [0, starts[1].resumed_step]
    assert 2 <= starts[1].resumed_step < NUM_STEPS

    assert entered.exists() is (image is not None)
    folder = tmp_path / "runs" / "slurm" / job
    assert "megarl ended with 75" in (tmp_path / f"megarl-quickstart-{job}.log").read_text()
    assert not (folder / "token").exists()
    for attempt in (0, 1):
        names = {path.name for path in (folder / f"attempt_{attempt}").iterdir()}
        assert {"ray_n0.log", "ray_n1.log", "ready.log", "train.log"} <= names
        assert (folder / f"attempt_{attempt}" / "ready.log").read_text().startswith("2 nodes: ")
