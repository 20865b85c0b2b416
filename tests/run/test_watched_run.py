"""Quickstarts as Prometheus sees them: every panel of every dashboard has data within half a minute of steps."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil
import pytest

from megarl.observe.endpoint import LINKS_FOLDER, TARGETS_FILE, read_targets
from megarl.observe.event_file import EVENTS_FILE, read_events
from megarl.observe.events import StepFinished
from scripts.dashboards.monitoring import DASHBOARDS
from scripts.dashboards.panels import Needs
from tests.observe.prometheus import prometheus
from tests.repository import ROOT

RECIPES = ROOT / "recipes"
MEGARL = str(Path(sys.executable).with_name("megarl"))
START_TIMEOUT_S = 1200.0
MAX_SECONDS_OF_STEPS = 90.0
"""Half a minute of a machine that has nothing else to do."""

pytestmark = [
    pytest.mark.slow,
    pytest.mark.usefixtures("whole_run"),
    pytest.mark.needs("prometheus"),
    pytest.mark.timeout(900),
]


@contextmanager
def running(folder: Path, name: str) -> Iterator[subprocess.Popen[bytes]]:
    """A quickstart from a random model, with checkpoints and evaluations soon."""
    short = (
        f"model.path={folder}/arithmetic/model",
        f"data.train=[{folder}/arithmetic/train.parquet]",
        f"data.eval=[{folder}/arithmetic/eval.parquet]",
        "run.steps=1000",
        "train.prompts_per_step=16",
        "evaluation.every_steps=2",
        "evaluation.max_prompts=8",
        "checkpoint.save_every_steps=4",
    )
    words = [word for override in short for word in ("--set", override)]
    with (folder / f"{name}.out").open("wb") as output:
        process = subprocess.Popen(
            [MEGARL, "train", str(RECIPES / f"{name}.yaml"), *words], cwd=folder, stdout=output, stderr=output
        )
    try:
        yield process
    finally:
        children = psutil.Process(process.pid).children(recursive=True) if process.poll() is None else []
        process.terminate()
        process.wait(timeout=600)
        assert not psutil.wait_procs(children, timeout=60)[1], "something of the run is left"


def wait_for_a_step(folder: Path, process: subprocess.Popen[bytes], output: Path) -> None:
    deadline = time.monotonic() + START_TIMEOUT_S
    while time.monotonic() < deadline:
        assert process.poll() is None, output.read_text()
        events = folder / EVENTS_FILE
        if events.exists() and any(isinstance(record.event, StepFinished) for record in read_events(events)):
            return
        time.sleep(1)
    raise AssertionError(f"no step within {START_TIMEOUT_S:.0f} s: {output.read_text()}")


@pytest.mark.parametrize(
    ("name", "lacks"),
    [
        ("quickstart", {"components", "critic", "gpu", "reference", "staleness"}),
        ("quickstart_ppo", {"components", "gpu", "reference", "staleness"}),
    ],
)
def test_every_panel_has_data(name: str, lacks: set[Needs], tmp_path: Path) -> None:
    subprocess.run([MEGARL, "data", "make", "arithmetic", "--out", "arithmetic"], cwd=tmp_path, check=True, timeout=600)
    queries = [query for board in DASHBOARDS for query in board.queries if query.needs not in lacks]
    run_folder = tmp_path / "runs" / name
    with (
        running(tmp_path, name) as process,
        prometheus(tmp_path, targets=[tmp_path / "runs" / LINKS_FOLDER / "*.json"]) as server,
    ):
        wait_for_a_step(run_folder, process, tmp_path / f"{name}.out")
        deadline = time.monotonic() + MAX_SECONDS_OF_STEPS
        missing = queries
        while missing and time.monotonic() < deadline:
            time.sleep(2)
            assert process.poll() is None, (tmp_path / f"{name}.out").read_text()
            missing = server.unanswered(missing)
        assert missing == []
        jobs = [target.labels["job"] for target in read_targets(run_folder / TARGETS_FILE)]
        assert sorted(set(jobs)) == ["megarl", "sglang"]
    assert read_targets(run_folder / TARGETS_FILE) == []
