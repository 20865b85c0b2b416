"""Whole runs that are stopped and go on: the end is the same, to the last bit, as if nothing had happened."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from pathlib import Path

import pytest

from megarl.data.arithmetic import make_arithmetic
from megarl.observe.events import EVENTS_FILE, CheckpointSaved, Event, RunStarted, StepFinished, read_events
from tests.runtime.runs import Run, descendants, finished, run, started, survivors

STEPS = ("run.steps=4", "checkpoint.save_every_steps=2", "train.optimizer={learning_rate: 1e-3, decay: cosine}")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("runs")
    make_arithmetic(path / "arithmetic", num_train=12, num_sft=16, num_eval=16)
    return path


@pytest.fixture(scope="module")
def at_once(folder: Path) -> Run:
    """All four steps; 12 prompts and 8 a step, so that an epoch ends in the middle of a step."""
    done = run(folder, "at_once", *STEPS)
    assert done.exit_code == 0, done.output
    return done


def test_a_run_that_was_killed_goes_on_and_ends_with_the_same_bits(folder: Path, at_once: Run) -> None:
    with started(folder, "killed", *STEPS) as process:
        _await_event(folder / "runs" / "killed", process, CheckpointSaved)
        processes = descendants(process.pid)
        process.kill()
        process.wait(timeout=10)
    assert survivors(processes, timeout_s=60) == []

    resumed = run(folder, "killed", *STEPS)

    assert resumed.exit_code == 0, resumed.output
    assert "going on after step 2" in resumed.output
    assert [event.resumed_step for event in resumed.events if isinstance(event, RunStarted)] == [0, 2]
    assert _tensors(resumed) == _tensors(at_once)
    last = [event.summary.update for event in at_once.steps[2:]]
    assert [event.summary.update for event in resumed.steps[-2:]] == last
    assert not (folder / "runs" / "killed.1").exists()


@pytest.mark.slow
def test_a_run_that_is_asked_to_leave_saves_its_step_and_goes_on_from_there(folder: Path, at_once: Run) -> None:
    with started(folder, "preempted", *STEPS) as process:
        _await_event(folder / "runs" / "preempted", process, StepFinished)
        processes = descendants(process.pid)
        os.killpg(process.pid, signal.SIGTERM)
        process.wait(timeout=60)
    assert survivors(processes, timeout_s=10) == []
    left = finished(folder, "preempted", process)
    assert left.exit_code == 75, left.output
    assert "Traceback" not in left.output
    steps_before = len(left.steps)
    saved = [event for event in left.events if isinstance(event, CheckpointSaved)]
    assert saved[-1].path.endswith(f"step_{steps_before:06d}")

    resumed = run(folder, "preempted", *STEPS)

    assert resumed.exit_code == 0, resumed.output
    assert [event.summary.step for event in resumed.steps] == [1, 2, 3, 4]
    assert _tensors(resumed) == _tensors(at_once)


def _tensors(done: Run) -> dict[str, bytes]:
    checkpoint = done.folder / "checkpoints" / "step_000004"
    return {str(path.relative_to(checkpoint)): path.read_bytes() for path in sorted(checkpoint.rglob("*.safetensors"))}


def _await_event(run_folder: Path, process: subprocess.Popen[bytes], kind: type[Event], timeout_s: float = 300) -> None:
    deadline = time.monotonic() + timeout_s
    path = run_folder / EVENTS_FILE
    while time.monotonic() < deadline:
        assert process.poll() is None, "the run ended before it could be stopped"
        if path.exists() and any(isinstance(record.event, kind) for record in read_events(path)):
            return
        time.sleep(0.1)
    raise AssertionError(f"no {kind.__name__} within the deadline")
