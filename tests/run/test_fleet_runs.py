"""Whole runs that lose engines: they end as if nothing had been, or say what happened."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from megarl.checkpoint.manifest import verify
from megarl.cluster.local_ray import LocalRay, local_ray, private_ray
from megarl.env import RAY_ADDRESS
from megarl.observe.events import EngineChanged, Event, PhaseStarted, Restarted, StepFinished
from tests.run.runs import Driver, Run, await_events, descendants, finished, run, started, survivors, write_recipe

pytestmark = pytest.mark.slow

TWO_ENGINES = (
    "roles.actor={pool: train, tensor: 1}",
    "pools.train.gpus_per_node=1",
    "pools.rollout.gpus_per_node=2",
    "run.steps=6",
    "sampling.max_response_tokens=64",
    "train.prompts_per_step=16",
    "train.tokens_per_micro_batch=512",
    "checkpoint.save_every_steps=1",
    "evaluation.max_prompts=4",
)


@pytest.fixture(scope="module")
def undisturbed(folder: Path) -> Run:
    done = run(folder, "undisturbed", *TWO_ENGINES)
    assert done.exit_code == 0, done.output
    return done


@pytest.mark.fault("both engines of a run lost, one in a publish", "the run ends with the same bits")
def test_a_run_that_loses_one_engine_in_a_publish_and_the_other_while_generating_ends_bit_equal(
    folder: Path, undisturbed: Run
) -> None:
    # The second engine dies as it receives version 2; the first in the middle of step 4, when there may be no other.
    lost_in_publish = {
        "point": "bucket_received",
        "of": "publish",
        "step": 2,
        "rank": 1,
        "kind": "kill",
        "once": str(folder / "killed_in_publish"),
    }
    with started(folder, "disturbed", *TWO_ENGINES, faults=[lost_in_publish]) as process:
        _await_phase(folder / "runs" / "disturbed", process, "generate", after_step=3)
        time.sleep(0.3)
        os.killpg(os.getpgid(_engine_of(process, index=0)), signal.SIGKILL)
        processes = descendants(process.pid)
        process.wait(timeout=1200)
    done = finished(folder, "disturbed", process)
    assert done.exit_code == 0, done.output
    assert (folder / "killed_in_publish").exists()
    assert survivors(processes, timeout_s=60) == []
    assert done.weights == undisturbed.weights
    assert [event.summary.update for event in done.steps] == [event.summary.update for event in undisturbed.steps]
    assert done.evaluations == undisturbed.evaluations
    dead = {event.index for event in done.events if isinstance(event, EngineChanged) and event.state == "dead"}
    assert dead == {0, 1}
    assert any(isinstance(event, Restarted) for event in done.events)
    assert "engine 1 is dead: " in done.output
    assert "Traceback" not in done.output


@pytest.mark.fault(
    "kill -9 of an engine that sleeps in a shared pool", "comes back when engines may generate; the same bits"
)
@pytest.mark.parametrize("release", ["kv_cache", "everything"])
def test_in_a_shared_pool_an_engine_killed_while_it_sleeps_comes_back_when_it_may_generate(
    release: str, folder: Path
) -> None:
    roles = f"roles={{actor: {{pool: all}}, rollout: {{pool: all, release: {release}}}}}"
    overrides = (*TWO_ENGINES[3:], "pools={all: {gpus_per_node: 2}}", roles)
    name = f"shared_{release}"
    reference = run(folder, f"{name}_undisturbed", *overrides)
    assert reference.exit_code == 0, reference.output
    with started(folder, name, *overrides) as process:
        _await_phase(folder / "runs" / name, process, "update", after_step=2)
        os.killpg(os.getpgid(_engine_of(process, index=0)), signal.SIGKILL)
        process.wait(timeout=1200)
    done = finished(folder, name, process)
    assert done.exit_code == 0, done.output
    assert done.weights == reference.weights
    events = done.events
    restart = next(number for number, event in enumerate(events) if isinstance(event, Restarted))
    phases = [event.phase for event in events[:restart] if isinstance(event, PhaseStarted)]
    assert phases[-1] == "generate"


def test_a_run_with_an_engine_of_two_nodes_is_the_run_with_an_engine_of_one(folder: Path) -> None:
    sizes = ("roles.rollout.tensor=2", "roles.rollout.canary_every=1")
    reference = run(folder, "one_node", "pools.rollout.gpus_per_node=2", *sizes)
    assert reference.exit_code == 0, reference.output
    overrides = ("pools.rollout={nodes: 2, gpus_per_node: 1}", *sizes)
    words = ["train", str(write_recipe(folder, "two_nodes")), *(word for item in overrides for word in ("--set", item))]
    with private_ray():
        nodes = LocalRay(device="cpu", log_folder=folder, has_several_nodes=True)
        with local_ray(nodes, num_slots=3):
            nodes.start_node(num_slots=1)
            nodes.wait_started()
            done = subprocess.run(
                [sys.executable, "-c", "from megarl.cli.main import main; main()", *words],
                env={**os.environ, RAY_ADDRESS.name: nodes.address},
                cwd=folder,
                capture_output=True,
                text=True,
                timeout=1200,
                check=False,
            )
    assert done.returncode == 0, done.stdout + done.stderr
    finished_there = Run(folder=folder / "runs" / "two_nodes", exit_code=0, output=done.stdout)
    assert finished_there.weights == reference.weights
    logs = sorted(path.name for path in (finished_there.folder / "engines").iterdir())
    assert logs == ["engine_0.log", "engine_0_node_1.log"]


@pytest.mark.fault("all engines gone, restarts spent", "exit code 76, one sentence, a checkpoint that verifies")
def test_a_run_whose_engines_cannot_be_had_any_more_ends_with_76_and_a_checkpoint_that_verifies(folder: Path) -> None:
    overrides = (*TWO_ENGINES, "run.steps=500", "roles.rollout.max_restarts=0")
    with started(folder, "exhausted", *overrides) as process:
        _await_phase(folder / "runs" / "exhausted", process, "generate", after_step=2)
        processes = descendants(process.pid)
        for index in (0, 1):
            os.killpg(os.getpgid(_engine_of(process, index=index)), signal.SIGKILL)
        process.wait(timeout=300)
    done = finished(folder, "exhausted", process)
    assert done.exit_code == 76, done.output
    assert survivors(processes, timeout_s=60) == []
    assert "no engine is left: engine 0 (127.0.0.1:" in done.output
    assert "Traceback" not in done.output
    assert verify((done.folder / "checkpoints" / "latest").resolve()).step >= 1


def _engine_of(process: Driver, *, index: int) -> int:
    """The server of an engine; its command line names a file of its own."""
    for item in descendants(process.pid):
        words = item.cmdline()
        if "megarl.engine.cpu" in words and any(f"engine_{index}." in word for word in words):
            return int(item.pid)
    raise AssertionError(f"no engine {index}")


def _await_phase(run_folder: Path, process: Driver, phase: str, *, after_step: int) -> None:
    """Wait until the step after `after_step` is in a phase."""

    def happened(events: list[Event]) -> bool:
        ends = [number for number, event in enumerate(events) if isinstance(event, StepFinished)]
        if len(ends) < after_step:
            return False
        later = events[ends[after_step - 1] :]
        return any(isinstance(event, PhaseStarted) and event.phase == phase for event in later)

    await_events(run_folder, process, happened)
