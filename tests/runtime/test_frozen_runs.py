"""Whole runs that are scored by a frozen model on an engine of its own."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

import numpy as np
import psutil
import pyarrow.parquet as pq
import pytest

from megarl.config.model import read_model_shape
from megarl.data.tokenizer import load_tokenizer
from megarl.observe.events import EVENTS_FILE, Restarted, StepFinished, read_events
from megarl.tools.quickstart.arithmetic import make_arithmetic
from megarl.tools.quickstart.tiny_model import END
from tests.runtime.runs import descendants, finished, started
from tests.tiny_models import as_classifier, classifier_scores


def wait_for_step(folder: Path, timeout_s: float) -> None:
    deadline = time.monotonic() + timeout_s
    while time.monotonic() < deadline:
        if (folder / EVENTS_FILE).exists() and any(
            isinstance(record.event, StepFinished) for record in read_events(folder / EVENTS_FILE)
        ):
            return
        time.sleep(0.2)
    raise AssertionError(f"no step within {timeout_s:.0f} s")


def server_of(model: Path, pid: int) -> psutil.Process:
    for process in descendants(pid):
        if str(model) in process.cmdline() and "megarl.rollout.cpu" in process.cmdline():
            return process
    raise AssertionError(f"no engine serves {model}")


@pytest.mark.slow
def test_a_reward_model_that_is_killed_in_a_step_gives_no_wrong_score(tmp_path: Path) -> None:
    make_arithmetic(tmp_path / "arithmetic", num_train=64, num_sft=16, num_eval=16)
    classifier = as_classifier(tmp_path / "arithmetic" / "model", tmp_path / "classifier", "qwen2")
    overrides = (
        "run.steps=3",
        "pools.scores={gpus_per_node: 1}",
        f"roles.reward_model.tiny={{pool: scores, model: {classifier}}}",
        "reward={kind: reward_model, std: 2.0, clip: [-10, 10]}",
        "roles.rollout.workers=1",
        "evaluation=null",
        "data.eval=[]",
        "observe.rollouts.groups_per_step=8",
    )
    with started(tmp_path, "scored", *overrides) as driver:
        folder = tmp_path / "runs" / "scored"
        wait_for_step(folder, timeout_s=900)
        os.kill(server_of(classifier, driver.pid).pid, signal.SIGKILL)
        driver.wait(timeout=1200)
    done = finished(tmp_path, "scored", driver)
    assert done.exit_code == 0, done.output
    assert len(done.steps) == 3
    restarts = [event for event in done.events if isinstance(event, Restarted)]
    assert [restart.role for restart in restarts] == ["reward_model.tiny"], restarts
    check_scores(folder, classifier)


def check_scores(folder: Path, classifier: Path) -> None:
    """Compare all stored scores with those of transformers."""
    tokenizer = load_tokenizer(classifier, vocab=read_model_shape(classifier).vocab)
    rows = [row for path in sorted((folder / "rollouts").rglob("*.parquet")) for row in pq.read_table(path).to_pylist()]
    assert len(rows) == 3 * 8 * 4, len(rows)
    # The stored prompt is rendered up to where the assistant begins.
    texts = [row["prompt"] + row["text"] + END for row in rows]
    expected = classifier_scores(classifier, [ids.tolist() for ids in tokenizer.encode(texts)]) / 2
    assert np.ptp(expected) > 1e-3, "a test of equal scores shows nothing"
    assert np.abs(np.array([row["score"] for row in rows]) - expected).max() < 1e-5
