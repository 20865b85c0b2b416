"""Whole runs whose driver is killed: the next driver adopts engines and ranks, and ends with the same bits."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path

import psutil
import pytest

from megarl.cluster.local_ray import LocalRay, local_ray, private_ray
from megarl.env import RAY_ADDRESS
from megarl.observe.event_file import EVENTS_FILE, read_events
from megarl.observe.events import CheckpointSaved, StepFinished
from megarl.system.lease import find_leased
from tests.faults.leftovers import Footprint, nothing_left
from tests.run.runs import Driver, Run, driver_of, finished, run, started, write_recipe

RECIPE = (
    "run.steps=5",
    "pools.train.gpus_per_node=1",
    "roles.actor={pool: train, tensor: 1}",
    "checkpoint.save_every_steps=1",
    "train.optimizer={learning_rate: 1e-3, decay: cosine}",
    "evaluation=null",
    "data.eval=[]",
)
LEASE = ("cluster.lease_s=300",)


@pytest.fixture(scope="module")
def at_once(folder: Path) -> Run:
    done = run(folder, "at_once", *RECIPE)
    assert done.exit_code == 0, done.output
    return done


@pytest.mark.fault(
    "kill -9 of the driver, with a lease",
    "the next driver adopts engines and ranks; the same bits; nothing is left",
)
@pytest.mark.slow
def test_the_next_driver_adopts_engines_and_ranks_and_ends_with_the_same_bits(folder: Path, at_once: Run) -> None:
    recipe = (*RECIPE, *LEASE, "roles.rollout.workers=1")
    with nothing_left(within_s=60) as footprint:
        with started(folder, "killed", *recipe, footprint=footprint) as first:
            _await(lambda: 2 in _saved_steps(folder / "runs" / "killed"), first)
            before, workers = _serving(footprint), _pids(footprint, "ray::RolloutHost")
            first.kill()
            first.wait(timeout=60)
        assert workers
        _await(lambda: not workers & _pids(footprint, "ray::RolloutHost"), None, 60)
        assert _serving(footprint) == before
        assert "waits 300 s for the next driver" in (folder / "killed.out").read_text()
        resumed = run(folder, "killed", *recipe, footprint=footprint)
    assert resumed.exit_code == 0, resumed.output
    assert "adopted 1 engines of 1" in resumed.output
    log = (resumed.folder / "engines" / "engine_0.log").read_text()
    assert log.count("server_args=") == 1, "the engine was started again"
    assert _tensors(resumed) == _tensors(at_once)
    assert find_leased(resumed.folder) is None


@pytest.mark.fault(
    "kill -9 of the driver below its command, with a lease",
    "the command forks another one, which adopts; the same bits",
)
@pytest.mark.slow
def test_a_command_follows_a_killed_driver_with_another(
    folder: Path, at_once: Run, record_property: Callable[[str, object], None]
) -> None:
    with (
        nothing_left(within_s=60) as footprint,
        started(folder, "followed", *RECIPE, *LEASE, footprint=footprint) as process,
    ):
        run_folder = folder / "runs" / "followed"
        _await(lambda: 2 in _saved_steps(run_folder), process)
        before, num_steps = _serving(footprint), _num_steps(run_folder)
        driver_of(run_folder).kill()
        began = time.monotonic()
        _await(lambda: _num_steps(run_folder) > num_steps, process)
        record_property("seen", f"next step after {time.monotonic() - began:.1f} s")
        assert _serving(footprint) == before
        process.wait(timeout=1200)
    done = finished(folder, "followed", process)
    assert done.exit_code == 0, done.output
    assert "the driver was killed (SIGKILL); another one takes over what it left" in done.output
    assert "adopted 1 engines of 1" in done.output
    assert _tensors(done) == _tensors(at_once)


@pytest.mark.fault("kill -9 of the driver inside a publish, with a lease", "the open update is closed; the same bits")
@pytest.mark.slow
def test_an_update_that_was_left_open_is_closed_and_sent_again(folder: Path, at_once: Run) -> None:
    reached = folder / "receiving"
    fault = {"point": "bucket_received", "of": "publish", "step": 3, "kind": "wait", "seconds": 5, "once": str(reached)}
    with nothing_left(within_s=60) as footprint:
        _kill_when(folder, "publishing", reached, fault, footprint=footprint)
        resumed = run(folder, "publishing", *RECIPE, *LEASE, footprint=footprint)
    assert resumed.exit_code == 0, resumed.output
    assert "adopted 1 engines of 1" in resumed.output
    assert _tensors(resumed) == _tensors(at_once)


@pytest.mark.fault("kill -9 of the driver inside an update, with a lease", "ranks load the checkpoint; the same bits")
@pytest.mark.slow
def test_ranks_that_went_on_load_the_checkpoint(folder: Path, at_once: Run) -> None:
    reached = folder / "updating"
    fault = {"point": "optimizer", "of": "actor", "step": 4, "kind": "wait", "seconds": 5, "once": str(reached)}
    with nothing_left(within_s=60) as footprint:
        _kill_when(folder, "updating_run", reached, fault, footprint=footprint)
        ranks = _pids(footprint, "ray::ActorRank")
        with started(folder, "updating_run", *RECIPE, *LEASE, footprint=footprint) as second:
            _await(lambda: 4 in _saved_steps(folder / "runs" / "updating_run"), second)
            assert _pids(footprint, "ray::ActorRank") == ranks
            second.wait(timeout=1200)
    assert second.returncode == 0
    assert _tensors(Run(folder=folder / "runs" / "updating_run", exit_code=0, output="")) == _tensors(at_once)


@pytest.mark.fault("a lease that nobody renews", "engines, ranks and Ray end, and so do their files")
@pytest.mark.slow
def test_nothing_is_left_of_a_run_that_nobody_adopts(folder: Path) -> None:
    with nothing_left(within_s=120) as footprint:
        with started(folder, "left", *RECIPE, "cluster.lease_s=20", footprint=footprint) as process:
            _await(lambda: 1 in _saved_steps(folder / "runs" / "left"), process)
            process.kill()
            process.wait(timeout=60)
        kept = find_leased(folder / "runs" / "left")
        assert kept is not None
        assert kept.guard is not None
    assert not Path(kept.guard.folder).exists()


@pytest.mark.slow
def test_another_recipe_ends_what_was_left_and_starts_its_own(folder: Path) -> None:
    with nothing_left(within_s=60) as footprint:
        with started(folder, "changed", *RECIPE, *LEASE, footprint=footprint) as process:
            _await(lambda: 1 in _saved_steps(folder / "runs" / "changed"), process)
            process.kill()
            process.wait(timeout=60)
        before = _serving(footprint)
        resumed = run(folder, "changed", *RECIPE, *LEASE, "roles.rollout.max_attempts=4", footprint=footprint)
        assert not before & _serving(footprint)
    assert resumed.exit_code == 0, resumed.output
    assert "adopted" not in resumed.output


@pytest.fixture(scope="module")
def nodes(folder: Path) -> Iterator[LocalRay]:
    """A Ray that others started, with a node beside its head."""
    nodes = LocalRay(device="cpu", log_folder=folder, has_several_nodes=True)
    with private_ray(), local_ray(nodes, num_slots=1):
        nodes.start_node(num_slots=1)
        nodes.wait_started()
        yield nodes


def _command(folder: Path, name: str, nodes: LocalRay, *overrides: str) -> subprocess.Popen[bytes]:
    words = ["train", str(write_recipe(folder, name)), *(word for item in overrides for word in ("--set", item))]
    with (folder / f"{name}.out").open("ab") as output:
        return subprocess.Popen(
            [sys.executable, "-c", "from megarl.cli.main import main; main()", *words],
            env={**os.environ, RAY_ADDRESS.name: nodes.address},
            cwd=folder,
            stdout=output,
            stderr=subprocess.STDOUT,
        )


def _serving_on(nodes: LocalRay) -> set[int]:
    """The processes of engines and trainer ranks on a Ray."""
    found = set()
    for node in nodes.addresses:
        for process in psutil.Process(nodes.pid_of(node)).children(recursive=True):
            with suppress(psutil.Error):
                words = " ".join(process.cmdline())
                if "megarl.engine.cpu" in words or "ray::ActorRank" in words:
                    found.add(process.pid)
    return found


@pytest.mark.fault(
    "kill -9 of a driver that has joined a Ray, then of its command, with a lease",
    "the next driver adopts engines and ranks; the same bits; nothing is left there",
)
@pytest.mark.slow
def test_what_runs_on_a_ray_that_was_joined_is_adopted(
    folder: Path, at_once: Run, nodes: LocalRay, record_property: Callable[[str, object], None]
) -> None:
    run_folder, recipe = folder / "runs" / "on_nodes", (*RECIPE, *LEASE)
    with _command(folder, "on_nodes", nodes, *recipe) as first:
        _await(lambda: 2 in _saved_steps(run_folder), None)
        before, num_steps = _serving_on(nodes), _num_steps(run_folder)
        assert before
        driver_of(run_folder).kill()
        began = time.monotonic()
        _await(lambda: _num_steps(run_folder) > num_steps, None)
        record_property("seen", f"next step after {time.monotonic() - began:.1f} s")
        first.kill()
    assert _serving_on(nodes) == before
    with _command(folder, "on_nodes", nodes, *recipe) as second:
        assert second.wait(timeout=1200) == 0, (folder / "on_nodes.out").read_text()
    output = (folder / "on_nodes.out").read_text()
    assert output.count("adopted 1 engines of 1") == 2, output
    assert _tensors(Run(folder=run_folder, exit_code=0, output="")) == _tensors(at_once)
    _await(lambda: not _serving_on(nodes), None, 60)


@pytest.mark.fault("a lease on a Ray that was joined, and nobody renews it", "engines and ranks end, Ray goes on")
@pytest.mark.slow
def test_nothing_is_left_on_a_ray_that_was_joined_when_nobody_adopts(folder: Path, nodes: LocalRay) -> None:
    with _command(folder, "left_there", nodes, *RECIPE, "cluster.lease_s=20") as command:
        _await(lambda: 1 in _saved_steps(folder / "runs" / "left_there"), None)
        command.kill()
    assert _serving_on(nodes)
    _await(lambda: not _serving_on(nodes), None, 120)
    with _command(folder, "left_there", nodes, *RECIPE) as command:
        assert command.wait(timeout=1200) == 0, (folder / "left_there.out").read_text()
    assert "adopted" not in (folder / "left_there.out").read_text()


def _kill_when(folder: Path, name: str, reached: Path, fault: Mapping[str, object], *, footprint: Footprint) -> None:
    with started(folder, name, *RECIPE, *LEASE, faults=[fault], footprint=footprint) as process:
        _await(reached.exists, process)
        process.kill()
        process.wait(timeout=60)


def _await(happened: Callable[[], bool], process: Driver | None, timeout_s: float = 1200) -> None:
    deadline = time.monotonic() + timeout_s
    while not happened():
        assert process is None or process.poll() is None, "the run ended before"
        assert time.monotonic() < deadline
        time.sleep(0.1)


def _saved_steps(run_folder: Path) -> Sequence[int]:
    path = run_folder / EVENTS_FILE
    if not path.exists():
        return ()
    return [record.event.step for record in read_events(path) if isinstance(record.event, CheckpointSaved)]


def _num_steps(run_folder: Path) -> int:
    return sum(isinstance(record.event, StepFinished) for record in read_events(run_folder / EVENTS_FILE))


def _serving(footprint: Footprint) -> set[int]:
    """The processes of engines and trainer ranks."""
    return _pids(footprint, "megarl.engine.cpu") | _pids(footprint, "ray::ActorRank")


def _pids(footprint: Footprint, word: str) -> set[int]:
    found = set()
    for process in footprint.processes():
        try:
            if word in " ".join(process.cmdline()):
                found.add(process.pid)
        except psutil.Error:
            continue
    return found


def _tensors(done: Run) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in sorted(done.model.glob("*.safetensors"))}
