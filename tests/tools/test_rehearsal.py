"""Whole rehearsals: several Ray nodes, a real run, and a node that is killed; and what is read off a run's events."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest

from megarl.observe.events import ALL_TRAINERS, CheckpointSaved, Event, Published, Restarted, RunFinished, RunStatus
from megarl.results import PublishResult
from megarl.types import PolicyVersion
from tests.repository import ROOT

COMMAND = "from megarl.cli.main import main; main()"
ROWS = ("cluster", "placement", "node lost", "node replaced", "publish", "rollouts", "checkpoints", "resume", "end")


ENGINES = ("engines lost", "engines back")
SMALL = (
    "pools={train: {nodes: 2, gpus_per_node: 1}, rollout: {nodes: 2, gpus_per_node: 1}}",
    "roles.actor.tensor=1",
    "roles.actor.pipeline=1",
    "roles.actor.is_sequence_parallel=false",
    "roles.rollout.tensor=1",
)


def rehearse(name: str, folder: Path, *overrides: str, loses_engines: bool = False) -> str:
    recipe = str(ROOT / "recipes" / f"{name}.yaml")
    words = [word for override in overrides for word in ("--set", override)]
    done = subprocess.run(
        [sys.executable, "-c", COMMAND, "rehearse", recipe, *words, "--out", str(folder)],
        capture_output=True,
        text=True,
        timeout=1500,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    rows = dict(re.findall(r"^ {2}(\w[\w ]*?) {2,}(yes|NO) ", done.stdout, flags=re.MULTILINE))
    # Metrics are read from another node where the nodes have namespaces, since the recipes bind private addresses.
    has_metrics = ("metrics",) if "a network namespace of its own" in done.stdout else ()
    expected = (*ROWS, *has_metrics, *(ENGINES if loses_engines else ()))
    assert rows == dict.fromkeys(expected, "yes"), done.stdout
    assert "not shown:" in done.stdout
    assert "is published to" in done.stderr, "no progress"
    left = [process.pid for process in psutil.process_iter(["cmdline"]) if _is_of(process, folder)]
    assert left == []
    return done.stdout


def _is_of(process: psutil.Process, folder: Path) -> bool:
    return any(str(folder) in word for word in process.info["cmdline"] or ())


def can_make_namespaces() -> bool:
    """Ask another process: the network of a process that may is another one from then on."""
    code = "from megarl.cluster.local_ray import NodeNetwork; NodeNetwork()"
    return subprocess.run([sys.executable, "-c", code], capture_output=True, check=False, cwd=ROOT).returncode == 0


@pytest.mark.slow
@pytest.mark.usefixtures("whole_run")
def test_a_shared_pool_over_nodes_loses_one_and_goes_on(tmp_path: Path) -> None:
    shown = rehearse("dapo_32b", tmp_path)
    assert "pools.all: 16 node(s) of 8 -> 2 of 2" in shown
    assert re.search(r"all: 2 on [\d.]+, 2 on [\d.]+", shown), shown
    if can_make_namespaces():
        assert re.search(r"all: 2 on 10\.0\.0\.\d, 2 on 10\.0\.0\.\d", shown), shown
        assert "each with a network namespace of its own" in shown
    else:
        assert "the nodes share this machine's loopback; " in shown


@pytest.mark.slow
@pytest.mark.usefixtures("whole_run")
@pytest.mark.fault(
    "loss of a node of engines, then of a node of trainer ranks",
    "steps go on with the other engines; both use the nodes that join next, ranks from a checkpoint",
)
def test_a_run_loses_a_node_of_engines_and_one_of_ranks(
    tmp_path: Path, record_property: Callable[[str, object], None]
) -> None:
    shown = rehearse("grpo_70b", tmp_path, *SMALL, loses_engines=True)
    dead, trains = re.search(r"dead after \d+ s", shown), re.search(r"\d+ s after the loss", shown)
    assert dead is not None, shown
    assert trains is not None, shown
    record_property("seen", f"engine {dead.group()}, ranks train {trains.group()}")


@pytest.mark.slow
@pytest.mark.usefixtures("whole_run")
@pytest.mark.parametrize(("name", "num_pools"), [("ppo_70b", 3), ("dapo_70b_async", 2)])
def test_separate_pools_lose_nodes_and_go_on(name: str, num_pools: int, tmp_path: Path) -> None:
    shown = rehearse(name, tmp_path, loses_engines=True)
    assert len(set(re.findall(r"(\w+): 2 on\b", shown))) == num_pools, shown


def published(num_engines: int) -> Published:
    result = PublishResult(version=PolicyVersion(0), num_bytes=1, seconds=1.0, num_engines=num_engines)
    return Published(result=result)


def test_what_a_run_did_not_do_is_not_shown() -> None:
    from megarl.cluster.local_ray import private_ray

    with private_ray():
        from megarl.tools.rehearse import read_off

    saved = CheckpointSaved(step=1, path="x", num_bytes=1, blocking_seconds=0.0, seconds=0.0)
    again = Restarted(role=ALL_TRAINERS, index=0, reason="from the beginning: actor rank 2: died during the run")
    events: list[Event] = [published(2), saved, again, published(1), RunFinished(status=RunStatus.DONE)]
    found = {item.what: item.is_shown for item in read_off(events, num_engines=2, num_steps=6)}
    assert found == {"publish": False, "rollouts": False, "checkpoints": True, "resume": False, "end": False}
    left = [*events[:-1], RunFinished(status=RunStatus.PREEMPTED)]
    (end,) = (item for item in read_off(left, num_engines=0, num_steps=None) if item.what == "end")
    assert not end.is_shown, "the step of the checkpoint is not the last one"
