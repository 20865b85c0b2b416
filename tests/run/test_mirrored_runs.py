"""Whole runs that lose their disk: the next one takes the checkpoint from the store and ends with the same bits."""

from __future__ import annotations

import shutil
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from megarl.checkpoint.manifest import read_manifest, verify
from megarl.observe.events import Event, Noted, RunStarted, StepFinished
from tests.checkpoint.object_store import GS, ObjectStore, object_store, slow_network
from tests.run.runs import Driver, Run, await_events, descendants, finished, run, started, survivors

STEPS = ("run.steps=4", "checkpoint.save_every_steps=1", "evaluation=null", "data.eval=[]")
FETCH_S = 20.0
"""How long the last fetch takes at least: a line about its progress comes every 10 s."""


@pytest.fixture(scope="module", params=["s3", GS])
def store(request: pytest.FixtureRequest) -> Iterator[ObjectStore]:
    with object_store(protocol=request.param) as serving:
        yield serving


@pytest.fixture(scope="module")
def at_once(folder: Path) -> Run:
    done = run(folder, "at_once", *STEPS)
    assert done.exit_code == 0, done.output
    return done


@pytest.mark.fault("checkpoints lost after kill -9, with a mirror", "fetched from the store; the same bits")
@pytest.mark.slow
def test_a_run_that_lost_its_checkpoints_takes_them_from_the_store(
    folder: Path, store: ObjectStore, at_once: Run
) -> None:
    name, overrides = f"checkpoints_lost_{store.protocol}", _mirrored(store)
    run_folder = folder / "runs" / name
    # Its last step does not end, so that the copies can.
    faults = [{"point": "optimizer", "of": "actor", "step": 4, "kind": "wait", "seconds": 1200}]
    with started(folder, name, *overrides, faults=faults, environment=store.environment) as first:
        _await_event(run_folder, first, Noted, "copied step 3 to ")
        processes = descendants(first.pid)
        first.kill()
        first.wait(timeout=60)
    assert survivors(processes, timeout_s=60) == []
    shutil.rmtree(run_folder / "checkpoints")

    resumed = run(folder, name, *overrides, environment=store.environment)

    assert _same_end(resumed, at_once, store) == [3]
    # The history of the run is continued.
    assert [event.resumed_step for event in resumed.events if isinstance(event, RunStarted)] == [0, 3]
    assert not (folder / "runs" / f"{name}.1").exists()


@pytest.mark.fault("the run's folder lost after SIGTERM, with a mirror", "fetched from the store; the same bits")
@pytest.mark.slow
def test_a_run_that_lost_its_folder_takes_its_checkpoint_from_a_slow_store(
    folder: Path, store: ObjectStore, at_once: Run
) -> None:
    name, overrides = f"folder_lost_{store.protocol}", _mirrored(store)
    run_folder = folder / "runs" / name
    # Time to ask it in the middle of a step.
    faults = [{"point": "optimizer", "of": "actor", "step": 3, "kind": "wait", "seconds": 10}]
    with started(folder, name, *overrides, faults=faults, environment=store.environment) as first:
        _await_event(run_folder, first, StepFinished)
        first.send_signal(signal.SIGTERM)
        first.wait(timeout=1200)
    left = finished(folder, name, first)
    assert left.exit_code == 75, left.output
    saved = read_manifest(run_folder / "checkpoints" / "latest")
    shutil.rmtree(run_folder)

    with slow_network(store, bytes_per_s=saved.num_bytes / FETCH_S) as far:
        resumed = run(folder, name, *overrides, environment=far.environment)

    assert _same_end(resumed, at_once, store) == [saved.step]
    total = f"{saved.num_bytes / 1e9:.3f} GB"
    progress = [line for line in resumed.output.splitlines() if f" of {total}" in line]
    assert progress, resumed.output
    assert f"fetching step {saved.step} from {store.url}/{name}: 0.00" in progress[0]


def _mirrored(store: ObjectStore) -> tuple[str, ...]:
    return (*STEPS, "checkpoint.grace_s=1200", f"checkpoint.mirror={{url: '{store.url}'}}")


def _await_event(run_folder: Path, process: Driver, kind: type[Event], text: str = "") -> None:
    await_events(run_folder, process, lambda events: any(_is(event, kind, text) for event in events))


def _is(event: Event, kind: type[Event], text: str) -> bool:
    return isinstance(event, kind) and (not isinstance(event, Noted) or text in event.text)


def _same_end(resumed: Run, at_once: Run, store: ObjectStore) -> list[int]:
    """Return the steps that were fetched."""
    assert resumed.exit_code == 0, resumed.output
    verify(resumed.folder / "checkpoints" / "latest")
    assert resumed.tensors(4) == at_once.tensors(4)
    url = f"{store.url}/{resumed.folder.name}"
    fetched = [line for line in resumed.output.splitlines() if "fetched step " in line]
    assert all(f" from {url}: " in line and "every digest is right" in line for line in fetched)
    steps = [int(line.split("fetched step ")[1].split()[0]) for line in fetched]
    assert all(f"fetching step {step} from {url}: " in resumed.output for step in steps)
    assert f"resumed after step {steps[-1]}" in resumed.output
    return steps
