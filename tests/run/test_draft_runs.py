"""Whole runs with a draft that learns the policy's responses."""

from __future__ import annotations

import os
import re
import signal
from pathlib import Path

import pytest

from megarl.checkpoint.resume import read_state
from megarl.observe.events import Restarted, StepFinished
from megarl.tools.quickstart.arithmetic import make_arithmetic
from megarl.tools.quickstart.tiny_model import TinyShape, write_tiny_model
from tests.run.runs import Run, await_event, finished, run, started
from tests.run.test_frozen_runs import server_of

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("whole_run")]

RECIPE = (
    "pools={train: {gpus_per_node: 1}, rollout: {gpus_per_node: 1}, spare: {gpus_per_node: 1}}",
    "roles.actor={pool: train}",
    "roles.drafter={pool: spare, every_steps: 2, epochs: 100, optimizer: {learning_rate: 1e-3}}",
    "train.optimizer={learning_rate: 1e-6}",
    "sampling={rollouts_per_prompt: 4, max_response_tokens: 24}",
    "checkpoint.save_every_steps=2",
    "evaluation=null",
    "data.eval=[]",
)


def kept(steps: list[StepFinished]) -> list[float]:
    """Return the tokens of each pass over drafts."""
    found = [step.summary.tokens_per_pass for step in steps]
    assert None not in found
    return [each for each in found if each is not None]


def sent(done: Run) -> list[int]:
    """Return the versions of the draft that engines got, in their order."""
    return [int(each) for each in re.findall(r"sent drafts version=(\d+)", (done.folder / "megarl.log").read_text())]


def test_a_draft_learns_goes_on_after_a_resume_and_is_that_of_engines_that_start_again(tmp_path: Path) -> None:
    predictable = TinyShape(weight_std=2.0)
    make_arithmetic(tmp_path / "arithmetic", num_train=8, num_sft=16, num_eval=16, shape=predictable)
    write_tiny_model(tmp_path / "small", TinyShape(num_layers=1), seed=5)
    draft = f"roles.rollout.draft={{kind: model, path: {tmp_path / 'small'}, num_tokens: 1}}"
    first = run(tmp_path, "learning", *RECIPE, draft, "run.steps=2")
    assert first.exit_code == 0, first.output
    assert "which learns every 2 steps" in first.output
    state = read_state(first.folder / "checkpoints" / "step_000002")
    assert state.drafter is not None
    assert (state.drafter.num_steps, state.drafter.num_updates) == (1, 100)
    assert sent(first) == [100]
    assert any(name.startswith("drafter/") for name in first.tensors(2))

    with started(tmp_path, "learning", *RECIPE, draft, "run.steps=8") as driver:
        await_event(first.folder, driver, StepFinished, count=3)
        os.kill(server_of(tmp_path / "arithmetic" / "model", driver.pid).pid, signal.SIGKILL)
        driver.wait(timeout=1200)
    done = finished(tmp_path, "learning", driver)
    assert done.exit_code == 0, done.output
    assert [event.role for event in done.events if isinstance(event, Restarted)] == ["rollout"]
    # Sent to the engine of the second start and to the one after it was killed; the last step ends the run.
    versions = sent(done)
    assert versions[:2] == [100, 100]
    assert sorted(versions) == versions
    assert versions[-1] == 400
    losses = [step.summary.draft.loss for step in done.steps if step.summary.draft is not None]
    assert len(losses) == 4
    assert losses[-1] < losses[0]
    assert kept(done.steps)[-1] > kept(done.steps)[0] + 0.1


def test_a_run_that_loses_its_drafter_goes_on_from_the_draft_of_its_checkpoint(tmp_path: Path) -> None:
    make_arithmetic(tmp_path / "arithmetic", num_train=8, num_sft=16, num_eval=16)
    write_tiny_model(tmp_path / "small", TinyShape(num_layers=1), seed=5)
    fault = {"point": "updated", "of": "drafter", "rank": 0, "step": 3, "kind": "kill", "once": str(tmp_path / "once")}
    done = run(
        tmp_path,
        "lost",
        *RECIPE,
        f"roles.rollout.draft={{kind: model, path: {tmp_path / 'small'}, num_tokens: 1}}",
        "roles.drafter={pool: spare, optimizer: {learning_rate: 1e-3}}",
        "checkpoint.save_every_steps=1",
        "train.max_restarts=1",
        "run.steps=4",
        faults=[fault],
    )
    assert done.exit_code == 0, done.output
    assert [event.role for event in done.events if isinstance(event, Restarted)] == ["trainers"]
    assert sent(done)[-2:] == [3, 4]
    state = read_state(done.folder / "checkpoints" / "step_000004")
    assert state.drafter is not None
    assert (state.drafter.num_steps, state.drafter.num_updates) == (4, 4)
