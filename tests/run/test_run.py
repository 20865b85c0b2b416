"""Whole runs on real Megatron, real SGLang and Ray: layouts agree, seeds decide, signals leave nothing behind."""

from __future__ import annotations

import os
import signal
from contextlib import suppress
from pathlib import Path

import numpy as np
import psutil
import pytest

from megarl.data.evaluation_files import generations_file, read_generations
from megarl.observe.events import Restarted, RunStarted, StepFinished
from tests.engine.template import EngineTemplate
from tests.faults.leftovers import Footprint, nothing_left
from tests.run.runs import Run, await_event, finished, run, started

TP1 = ("roles.actor={pool: train, tensor: 1}", "pools.train.gpus_per_node=1")
PP2_ENGINE_TP2 = (
    "roles.actor={pool: train, pipeline: 2}",
    "roles.rollout={pool: rollout, tensor: 2}",
    "pools.rollout.gpus_per_node=2",
)
SHARED_DP2_ENGINE_TP2 = (
    "pools={all: {gpus_per_node: 2}}",
    "roles={actor: {pool: all, offload: optimizer}, rollout: {pool: all, tensor: 2, release: everything}}",
)
TP2_PP2 = ("roles.actor={pool: train, tensor: 2, pipeline: 2}", "pools.train.gpus_per_node=4")


@pytest.fixture(scope="module")
def reference(folder: Path, engine_template: EngineTemplate) -> Run:
    """Actor TP2 in one pool, one engine in another."""
    done = run(folder, "reference", engines=engine_template)
    assert done.exit_code == 0, done.output
    return done


def test_a_run_ends_with_its_numbers_its_picture_and_a_model(reference: Run) -> None:
    assert [event.summary.step for event in reference.steps] == [1, 2]
    assert list(reference.evaluations) == [0, 2]
    assert (reference.folder / "curves.png").stat().st_size > 10_000
    assert (reference.model / "config.json").exists()
    assert "run done" in reference.output


def test_engine_and_trainer_agree_about_every_token(reference: Run) -> None:
    updates = [event.summary.update for event in reference.steps]
    assert all(update is not None and update.mismatch_max < 1e-4 for update in updates)


def test_an_evaluation_answers_in_both_ways_and_keeps_what_was_said(reference: Run) -> None:
    before, after = reference.evaluations.values()
    assert list(after.numbers) == ["accuracy", "score", "mean@4", "pass@1", "pass@4", "majority@4"]
    assert after.numbers["pass@1"] == pytest.approx(after.numbers["mean@4"])
    assert before != after
    for step, result in reference.evaluations.items():
        kept = list(read_generations(generations_file(reference.folder, step)))
        sampled = [item for item in kept if not item.is_greedy]
        assert (len(kept), len(sampled)) == (4 + 16, 16)
        assert len({item.response for item in sampled}) > 1
        assert result.numbers["mean@4"] == np.mean([item.is_right for item in sampled])
        assert all(item.is_right == (item.prediction == "0") for item in kept)
        assert all(item.prompt.count("+") == 1 for item in kept)


@pytest.mark.slow
def test_a_seed_decides_every_bit_whatever_evaluates_generates_or_dies(
    folder: Path, reference: Run, engine_template: EngineTemplate
) -> None:
    """Two engines, two workers and one evaluation less; the first worker that has an answer in step 2 is killed."""
    fault = {"point": "generating", "kind": "kill", "step": 1, "once": str(folder / "killed")}
    overrides = ("roles.rollout.workers=2", "pools.rollout.gpus_per_node=2", "evaluation.runs_before_training=false")
    other = run(folder, "workers", *overrides, faults=[fault], engines=engine_template)
    assert other.exit_code == 0, other.output
    assert (folder / "killed").exists()
    assert "rollout_worker" in {event.role for event in other.events if isinstance(event, Restarted)}
    assert other.weights == reference.weights
    assert [event.summary.update for event in other.steps] == [event.summary.update for event in reference.steps]
    assert [event.summary.rollouts for event in other.steps] == [event.summary.rollouts for event in reference.steps]
    assert other.evaluations == {2: reference.evaluations[2]}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "overrides"), [("pp2_engine_tp2", PP2_ENGINE_TP2), ("tp1", TP1), ("tp2_pp2", TP2_PP2)]
)
def test_the_first_step_does_not_depend_on_the_layout(
    folder: Path, reference: Run, name: str, overrides: tuple[str, ...]
) -> None:
    other = run(folder, name, *overrides)
    assert other.exit_code == 0, other.output
    _check_first_step(other, reference)


@pytest.mark.slow
def test_a_reference_with_ranks_of_its_own_is_read_by_the_ranks_that_learn(folder: Path) -> None:
    """One rank answers for both data-parallel ranks of the actor; the driver does not see the numbers."""
    done = run(
        folder,
        "own_reference",
        "pools={train: {gpus_per_node: 2}, rollout: {gpus_per_node: 1}, reference: {gpus_per_node: 1}}",
        "roles={actor: {pool: train}, rollout: {pool: rollout}, reference: {pool: reference}}",
        "algorithm={kind: grpo, kl: {kind: loss, coef: 0.1}}",
    )
    assert done.exit_code == 0, done.output
    first, second = (step.summary.update for step in done.steps)
    assert first is not None
    assert second is not None
    # The policy is the reference until its first update.
    assert first.reference_kl == 0
    assert second.reference_kl is not None
    assert second.reference_kl > 1e-3


@pytest.fixture(scope="module")
def left_by_ctrl_c(folder: Path, engine_template: EngineTemplate) -> Run:
    """A run in a shared pool, as in a terminal, until Ctrl-C after its first step; nothing outlives it."""
    with (
        nothing_left() as footprint,
        # With a lease, as by default: the driver is a process below that of the command.
        started(
            folder,
            "left",
            "run.steps=500",
            "cluster.lease_s=90",
            *SHARED_DP2_ENGINE_TP2,
            footprint=footprint,
            engines=engine_template,
        ) as process,
    ):
        await_event(folder / "runs" / "left", process, StepFinished)
        assert _listening(footprint) <= {"127.0.0.1", "::ffff:127.0.0.1", "::1"}
        os.killpg(process.pid, signal.SIGINT)
        process.wait(timeout=300)
    return finished(folder, "left", process)


def test_the_first_step_does_not_depend_on_whether_a_pool_is_shared(reference: Run, left_by_ctrl_c: Run) -> None:
    _check_first_step(left_by_ctrl_c, reference)


def test_ctrl_c_leaves_a_checkpoint_and_nothing_else(left_by_ctrl_c: Run) -> None:
    assert left_by_ctrl_c.exit_code == 130, left_by_ctrl_c.output
    assert "Traceback" not in left_by_ctrl_c.output
    # Every signal saves the last trained step and says where the run stands.
    saved = left_by_ctrl_c.steps[-1].summary.step
    assert f" after step {saved}: saved; " in left_by_ctrl_c.output
    assert (left_by_ctrl_c.folder / "checkpoints" / f"step_{saved:06d}" / "manifest.json").exists()


@pytest.mark.slow
def test_the_next_run_goes_on_and_leaves_nothing_behind_when_it_is_killed(
    folder: Path, left_by_ctrl_c: Run, engine_template: EngineTemplate
) -> None:
    saved = left_by_ctrl_c.steps[-1].summary.step
    overrides = ("run.steps=500", *SHARED_DP2_ENGINE_TP2)
    with (
        nothing_left() as footprint,
        started(folder, "left", *overrides, footprint=footprint, engines=engine_template) as process,
    ):
        await_event(folder / "runs" / "left", process, StepFinished, count=saved + 1)
        process.kill()
        process.wait(timeout=60)
    done = finished(folder, "left", process)
    assert [event.resumed_step for event in done.events if isinstance(event, RunStarted)] == [0, saved]
    steps = [event.summary.step for event in done.steps]
    assert steps == list(range(1, len(steps) + 1))


def _listening(footprint: Footprint) -> set[str]:
    """Return the addresses that a run listens on."""
    addresses = set()
    for process in footprint.processes():
        with suppress(psutil.Error):
            connections = process.net_connections(kind="tcp")
            addresses |= {item.laddr.ip for item in connections if item.status == psutil.CONN_LISTEN}
    return addresses


def _check_first_step(other: Run, reference: Run) -> None:
    expected, found = reference.steps[0].summary, other.steps[0].summary
    assert found.rollouts == expected.rollouts
    for number in ("loss", "grad_norm", "entropy", "mismatch_mean", "mismatch_max"):
        difference = abs(getattr(found.update, number) - getattr(expected.update, number))
        assert difference < 1e-5, f"{number} differs by {difference}"
