"""Whole runs whose disk is slower than every deadline: what is saved, what is said."""

from __future__ import annotations

import shutil
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from megarl.observe.events import CheckpointSaved
from megarl.tools.quickstart.arithmetic import make_arithmetic
from tests.run.runs import Run, await_event, finished, run, started
from tests.slow_disk import slow_disk

OPERATION_S = 30
SAVE_S = 2.5 * OPERATION_S
LIMITS = (
    f"train.operation_timeout_s={OPERATION_S}",
    "run.steps=2",
    "checkpoint={save_every_steps: 1, grace_s: 10}",
    "evaluation=null",
    "data.eval=[]",
)

pytestmark = [pytest.mark.slow, pytest.mark.needs("fuse")]


@pytest.fixture(scope="module")
def undisturbed(whole_run: None, tmp_path_factory: pytest.TempPathFactory) -> Run:
    folder = tmp_path_factory.mktemp("fast_disk")
    make_arithmetic(folder / "arithmetic", num_train=12, num_sft=16, num_eval=16)
    done = run(folder, "run", *LIMITS)
    assert done.exit_code == 0, done.output
    return done


@pytest.fixture
def folder(undisturbed: Run, tmp_path: Path) -> Iterator[Path]:
    """The same model and data, and a disk that takes `SAVE_S` to write what a rank saves."""
    shutil.copytree(undisturbed.folder.parent.parent / "arithmetic", tmp_path / "arithmetic")
    largest = max(map(len, undisturbed.tensors(2).values()))
    with slow_disk(tmp_path / "runs", bytes_per_second=largest / SAVE_S):
        yield tmp_path


@pytest.mark.fault("a disk so slow that a save takes longer than `operation_timeout_s`", "told; saved; no restart")
def test_a_save_that_takes_longer_than_a_call_may_goes_on_with_a_warning(folder: Path, undisturbed: Run) -> None:
    done = run(folder, "run", *LIMITS)
    assert done.exit_code == 0, done.output
    saves = [event for event in done.events if isinstance(event, CheckpointSaved)]
    assert [save.step for save in saves] == [1, 2]
    assert saves[-1].seconds > OPERATION_S
    assert "the save goes on: the disk is slow" in done.output
    assert "did not finish within" not in done.output
    assert done.tensors(2) == undisturbed.tensors(2)


@pytest.mark.fault(
    "a signal, and a disk so slow that a save outlasts `grace_s`", "exit code 75; the save before; same bits"
)
def test_a_save_that_outlasts_the_grace_is_left_and_the_run_goes_on_from_the_one_before(
    folder: Path, undisturbed: Run
) -> None:
    with started(folder, "run", *LIMITS) as driver:
        await_event(folder / "runs" / "run", driver, CheckpointSaved)
        driver.send_signal(signal.SIGTERM)
        driver.wait(timeout=1200)
    left = finished(folder, "run", driver)
    assert left.exit_code == 75, left.output
    assert [event.step for event in left.events if isinstance(event, CheckpointSaved)] == [1]
    resumed = run(folder, "run", *LIMITS)
    assert resumed.exit_code == 0, resumed.output
    assert resumed.tensors(2) == undisturbed.tensors(2)
