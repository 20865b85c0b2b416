"""Whole runs that generate while they train: no token is too old, and no prompt is lost on the way."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest

from megarl.checkpoint.resume import RunState, read_state
from megarl.config.roles import InFlight
from megarl.observe.events import StepFinished
from tests.run.runs import Run, await_event, finished, run, started

pytestmark = pytest.mark.slow

MAX_STALENESS = 2
PROMPTS_PER_STEP = 8
BESIDE = (
    f"train.max_staleness={MAX_STALENESS}",
    "algorithm={kind: grpo, correction: {kind: tis}}",
    "sampling.max_response_tokens=40",
    "pools={train: {gpus_per_node: 1}, rollout: {gpus_per_node: 2}}",
    "roles.actor.tensor=1",
    "evaluation.every_steps=2",
)


def check_ages(done: Run) -> None:
    """Each step makes one version: step s trains from version s - 1."""
    for event in done.steps:
        summary = event.summary
        assert summary.rollouts is not None
        versions = summary.rollouts.tokens_by_version
        assert summary.step - 1 - MAX_STALENESS <= min(versions)
        assert max(versions) <= summary.step - 1
    flows = [event.summary.flow for event in done.steps]
    assert 0 < max(flow.age_max for flow in flows if flow is not None) <= MAX_STALENESS


def state_of(done: Run, step: int) -> RunState:
    return read_state(done.folder / "checkpoints" / f"step_{step:06d}")


@pytest.mark.parametrize(
    ("mode", "workers"),
    [("abort", 0), ("retract", 0), ("in_place", 0), ("abort", 2), ("in_place", 1)],
)
def test_engines_are_updated_while_they_generate(folder: Path, mode: InFlight, workers: int) -> None:
    overrides = ("run.steps=8", f"roles.rollout.in_flight={mode}", f"roles.rollout.workers={workers}")
    done = run(folder, f"{mode}_{workers}", *BESIDE, *overrides)
    assert done.exit_code == 0, done.output
    check_ages(done)
    assert set(done.evaluations) == {0, 2, 4, 6, 8}
    assert (done.evaluations[0].version, done.evaluations[8].version) == (0, 8)
    assert done.evaluations[8].newest_version is None
    ledger = state_of(done, 8).ledger
    assert ledger.num_trained == 8 * PROMPTS_PER_STEP
    assert ledger.num_dropped == 0
    assert ledger.num_carried + len(ledger.pending) <= MAX_STALENESS * PROMPTS_PER_STEP


@pytest.mark.fault("SIGTERM with rollouts in flight (async)", "goes on; no token outside [v - k, v]")
def test_a_run_that_leaves_with_rollouts_in_flight_goes_on_within_the_bound(folder: Path) -> None:
    with started(folder, "leaves", *BESIDE, "run.steps=8") as process:
        await_event(folder / "runs" / "leaves", process, StepFinished, count=3)
        process.send_signal(signal.SIGTERM)
        process.wait(timeout=600)
    left = finished(folder, "leaves", process)
    assert left.exit_code == 75, left.output
    last = max(event.summary.step for event in left.steps)
    before = state_of(left, last)
    assert before.ledger.num_carried + len(before.ledger.pending) > 0

    resumed = run(folder, "leaves", *BESIDE, "run.steps=8")

    assert resumed.exit_code == 0, resumed.output
    check_ages(resumed)
    assert [event.summary.step for event in resumed.steps] == list(range(1, 9))
    ledger = state_of(resumed, 8).ledger
    assert ledger.num_trained == 8 * PROMPTS_PER_STEP
    assert ledger.num_drawn == state_of(resumed, 8).prompt_cursor
