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
from megarl.observe.events import Noted, Restarted, StepFinished
from megarl.serving.frozen import model_version
from megarl.tools.quickstart.arithmetic import make_arithmetic
from megarl.tools.quickstart.tiny_model import ASSISTANT, END, USER, TinyShape, write_tiny_model
from tests.run.runs import await_event, descendants, finished, started
from tests.tiny_models import as_classifier, classifier_scores, next_logprobs


def server_of(model: Path, pid: int) -> psutil.Process:
    for process in descendants(pid):
        words = process.cmdline()
        if str(model) in words and "megarl.engine.cpu" in words and "megarl.system.guard" not in words:
            return process
    raise AssertionError(f"no engine serves {model}")


COMPOSED = (
    "reward={kind: composed, parts: {model: {reward: {kind: reward_model}, std: 2.0}, judge: {reward: {"
    "kind: engine_judge, template: '{prompt}{response}?', answers: {right: 1, wrong: 0}, is_expected: true}}}}"
)


@pytest.mark.slow
@pytest.mark.usefixtures("whole_run")
@pytest.mark.fault(
    "kill -9 of the engines of a reward model and of a judge, with requests under way",
    "both start again; every score is that of transformers",
)
def test_frozen_models_that_are_killed_in_a_step_give_no_wrong_score(tmp_path: Path) -> None:
    make_arithmetic(tmp_path / "arithmetic", num_train=64, num_sft=16, num_eval=16)
    classifier = as_classifier(tmp_path / "arithmetic" / "model", tmp_path / "classifier", "qwen2")
    judge = tmp_path / "judge"
    write_tiny_model(judge, TinyShape(), seed=5)
    overrides = (
        "run.steps=3",
        "pools.scores={gpus_per_node: 1}",
        "pools.judges={gpus_per_node: 1}",
        f"roles.reward_model.tiny={{pool: scores, model: {classifier}}}",
        f"roles.judge.tiny={{pool: judges, model: {judge}}}",
        COMPOSED,
        "roles.rollout.workers=1",
        "evaluation=null",
        "data.eval=[]",
        "observe.rollouts.groups_per_step=8",
    )
    with started(tmp_path, "scored", *overrides) as driver:
        await_event(tmp_path / "runs" / "scored", driver, StepFinished)
        servers = [server_of(model, driver.pid).pid for model in (classifier, judge)]
        for server in servers:
            os.kill(server, signal.SIGSTOP)
        time.sleep(3)  # the requests of the next step arrive
        for server in servers:
            os.kill(server, signal.SIGKILL)
        driver.wait(timeout=1200)
    done = finished(tmp_path, "scored", driver)
    assert done.exit_code == 0, done.output
    assert len(done.steps) == 3
    restarts = {event.role for event in done.events if isinstance(event, Restarted)}
    assert restarts == {"reward_model.tiny", "judge.tiny"}, restarts
    noted = " ".join(event.text for event in done.events if isinstance(event, Noted))
    assert f"roles.judge.tiny is {judge}, version {model_version(judge)}" in noted
    check_scores(done.folder, classifier, judge)


@pytest.mark.slow
@pytest.mark.usefixtures("whole_run")
@pytest.mark.parametrize("pools", ["rollout", "all", "train"])
def test_frozen_models_score_in_turns_on_the_devices_of_others(pools: str, tmp_path: Path) -> None:
    """The pool of the engines, one pool for everything, or the pool of the trainers; the scores are the same."""
    make_arithmetic(tmp_path / "arithmetic", num_train=64, num_sft=16, num_eval=16)
    classifier = as_classifier(tmp_path / "arithmetic" / "model", tmp_path / "classifier", "qwen2")
    judge = tmp_path / "judge"
    write_tiny_model(judge, TinyShape(), seed=5)
    pool = "train" if pools == "all" else pools
    overrides = [
        "run.steps=3",
        f"roles.reward_model.tiny={{pool: {pool}, model: {classifier}}}",
        f"roles.judge.tiny={{pool: {pool}, model: {judge}}}",
        COMPOSED,
        "observe.rollouts.groups_per_step=8",
        f"roles.rollout.workers={int(pools == 'rollout')}",
        "pools.train.gpus_per_node=1",
        "roles.actor.tensor=1",
    ]
    if pools == "all":
        overrides += ["pools={train: {gpus_per_node: 1}}", "roles.rollout.pool=train"]
    with started(tmp_path, "scored", *overrides) as driver:
        driver.wait(timeout=1200)
    done = finished(tmp_path, "scored", driver)
    assert done.exit_code == 0, done.output
    assert not [event for event in done.events if isinstance(event, Restarted)]
    assert sorted(done.evaluations) == [0, 3]
    check_scores(tmp_path / "runs" / "scored", classifier, judge)


def check_scores(folder: Path, classifier: Path, judge: Path) -> None:
    """Compare all stored scores with those of transformers."""
    tokenizer = load_tokenizer(classifier, vocab=read_model_shape(classifier).vocab)
    rows = [row for path in sorted((folder / "rollouts").rglob("*.parquet")) for row in pq.read_table(path).to_pylist()]
    assert len(rows) == 3 * 8 * 4, len(rows)
    # The stored prompt is rendered up to where the assistant begins.
    texts = [row["prompt"] + row["text"] + END for row in rows]
    expected = classifier_scores(classifier, [ids.tolist() for ids in tokenizer.encode(texts)]) / 2
    assert np.ptp(expected) > 1e-3, "a test of equal scores shows nothing"
    judged = np.array([judged_right(judge, row["prompt"], row["text"]) for row in rows])
    assert np.ptp(judged) > 1e-3, "a test of equal scores shows nothing"
    assert np.abs(np.array([row["score"] for row in rows]) - expected - judged).max() < 1e-5


def judged_right(judge: Path, prompt: str, text: str) -> float:
    tokenizer = load_tokenizer(judge, vocab=read_model_shape(judge).vocab)
    plain = prompt.removeprefix(USER).removesuffix(ASSISTANT)
    question = f"{USER}{plain}{text}?\n\nReply with one of: right, wrong.{ASSISTANT}"
    asked, right, wrong = (ids.tolist() for ids in tokenizer.encode([question, "right", "wrong"]))
    shares = next_logprobs(judge, asked)[[right[0], wrong[0]]].exp()
    return float(shares[0] / shares.sum())
