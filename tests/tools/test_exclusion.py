"""Whole runs on several Ray nodes, of which some are lost or excluded, and spare and further ones join."""

from __future__ import annotations

import re
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import psutil
import pytest
import yaml

from megarl.cli.trials import write_files
from megarl.cluster.local_ray import LocalRay, local_ray, private_ray
from megarl.config.load import read_recipe
from megarl.config.recipe import ClusterConfig, NetworkConfig, Recipe
from megarl.observe.event_file import EVENTS_FILE
from megarl.observe.events import (
    ALL_TRAINERS,
    CheckpointSaved,
    EngineChanged,
    Event,
    Published,
    Restarted,
    RunFinished,
    RunStatus,
    StepFinished,
    Warned,
)
from megarl.planner.deployment import find_shapes
from megarl.tools.small_recipe import RehearsalFiles, small_topology, tiny_shape
from tests.repository import ROOT
from tests.tools.test_rehearsal import COMMAND, SMALL

if TYPE_CHECKING:
    from megarl.tools.rehearse import WatchedRun


def small_recipe(folder: Path, *, name: str = "grpo_70b", num_steps: int = 10_000, max_node_faults: int = 4) -> Recipe:
    recipe = read_recipe(ROOT / "recipes" / f"{name}.yaml", SMALL if name == "grpo_70b" else ()).recipe
    files = RehearsalFiles(model=folder / "model", data=folder / "data.parquet", reward=folder / "reward.py")
    small = small_topology(recipe, folder=folder, files=files, max_nodes=2).recipe
    shape = tiny_shape(find_shapes(recipe.model, recipe.roles).policy, small.roles.actor)
    write_files(files.model, files.data, files.reward, shape, kind="grpo")
    changed = {"network": NetworkConfig(), "run": small.run.model_copy(update={"steps": num_steps})}
    return small.model_copy(update={**changed, "cluster": ClusterConfig(max_node_faults=max_node_faults)})


def processes_of(nodes: LocalRay, addresses: list[str], title: str) -> dict[str, psutil.Process]:
    """Return a process with this title of every node that has one."""
    return {
        address: process
        for address in addresses
        for process in psutil.Process(nodes.pid_of(address)).children(recursive=True)
        if process.cmdline()[:1] and process.cmdline()[0].startswith(title)
    }


def kill_one(nodes: LocalRay, addresses: list[str], title: str) -> str:
    """Kill a process with this title; return its node's address."""
    address, process = next(iter(processes_of(nodes, addresses, title).items()))
    process.kill()
    return address


@contextmanager
def started_run(
    recipe: Recipe, folder: Path, *, num_spare: int = 0
) -> Iterator[tuple[LocalRay, list[str], WatchedRun]]:
    """Yield the nodes of a run, their addresses, the spare ones included, and the run."""
    with ExitStack() as stack:
        stack.enter_context(private_ray())
        from megarl.tools.rehearse import WatchedRun

        path = folder / "recipe.yaml"
        path.write_text(yaml.safe_dump(recipe.model_dump(mode="json", exclude_defaults=True)))
        nodes = LocalRay(device="cpu", log_folder=folder, has_several_nodes=True)
        stack.enter_context(local_ray(nodes, num_slots=0))
        num_nodes = sum(pool.nodes for pool in recipe.pools.values()) + num_spare
        num_slots = max(pool.gpus_per_node for pool in recipe.pools.values())
        addresses = [nodes.start_node(num_slots=num_slots) for _ in range(num_nodes)]
        nodes.wait_started()
        run = WatchedRun(path, folder, recipe.run_folder / EVENTS_FILE, nodes.address, say=print)
        stack.callback(run.stop)
        yield nodes, addresses, run


def warned(words: str, event: Event) -> str | None:
    found = re.search(words, event.text) if isinstance(event, Warned) else None
    return None if found is None else found.group(1)


def healthy_on(spares: list[str], event: Event) -> str | None:
    host = event.address.rpartition(":")[0] if isinstance(event, EngineChanged) and event.state == "healthy" else ""
    return host if host in spares else None


@pytest.mark.slow
@pytest.mark.usefixtures("whole_run")
@pytest.mark.fault(
    "repeated deaths of engines, and of trainer ranks, of one node",
    "the node is excluded; its engines and its ranks go on on spare nodes",
)
def test_engines_and_ranks_of_excluded_nodes_go_on_on_spare_ones(tmp_path: Path) -> None:
    with started_run(small_recipe(tmp_path, max_node_faults=1), tmp_path) as (nodes, addresses, run):
        run.wait_for(lambda event: event if isinstance(event, CheckpointSaved) else None)
        left = kill_one(nodes, addresses, "ray::EngineHost")
        assert run.wait_for(lambda event: warned(r"^node (\S+) is excluded", event)) == left
        assert run.wait_for(lambda event: warned(r"stay out for now: (no) spare node is free", event)) == "no"
        addresses += [spare := nodes.start_node(num_slots=1)]
        nodes.wait_started()
        assert run.wait_for(lambda event: healthy_on([spare], event)) == spare
        addresses += [nodes.start_node(num_slots=1)]
        nodes.wait_started()
        left = kill_one(nodes, addresses, "ray::ActorRank")
        assert run.wait_for(lambda event: warned(r"^node (\S+) is excluded", event)) == left
        other = run.wait_for(lambda event: warned(r"its ranks start on (\S+)", event))
        assert len({left, spare, other}) == 3
        run.wait_for(lambda event: event if isinstance(event, StepFinished) else None)
        kill_one(nodes, [other], "ray::ActorRank")  # there are ranks
        assert run.wait_for(lambda event: warned(r"its ranks stay there: (no) spare", event)) == "no"
        run.wait_for(lambda event: event if isinstance(event, StepFinished) else None)
        run.ask_to_leave()
        end = run.wait_for(lambda event: event if isinstance(event, RunFinished) else None)
    assert end.status is RunStatus.PREEMPTED


@pytest.mark.slow
@pytest.mark.usefixtures("whole_run")
@pytest.mark.fault(
    "loss of a node of trainer ranks, with a spare node in the Ray cluster",
    "the ranks start on the spare node from the newest checkpoint, and the run takes its last step",
)
def test_a_lost_node_of_ranks_is_replaced_by_a_spare_one_and_the_run_finishes(
    tmp_path: Path, record_property: Callable[[str, object], None]
) -> None:
    with started_run(small_recipe(tmp_path, num_steps=12), tmp_path, num_spare=1) as (nodes, addresses, run):
        run.wait_for(lambda event: event if isinstance(event, CheckpointSaved) else None)
        victim = next(iter(processes_of(nodes, addresses, "ray::ActorRank")))
        killed = time.monotonic()
        nodes.kill_node(victim)
        addresses.remove(victim)
        again = run.wait_for(lambda e: e if isinstance(e, Restarted) and e.role == ALL_TRAINERS else None)
        assert again.reason.startswith("from step ")
        run.wait_for(lambda event: event if isinstance(event, StepFinished) else None)
        record_property("seen", f"ranks train {time.monotonic() - killed:.0f} s after the loss")
        with_ranks = processes_of(nodes, addresses, "ray::ActorRank")
        end = run.wait_for(lambda event: event if isinstance(event, RunFinished) else None)
    assert end.status is RunStatus.DONE
    assert len(with_ranks) == 2, "both ranks run, one of them on the spare node"


def fleet(run_folder: Path, *words: str) -> list[list[str]]:
    """Return the rows of `megarl fleet`, after the title."""
    command = [sys.executable, "-c", COMMAND, "fleet", str(run_folder), *words]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return [line.split() for line in done.stdout.splitlines()[1:] if line.split()[:1] and line.split()[0].isdigit()]


@pytest.mark.slow
@pytest.mark.usefixtures("whole_run")
def test_engines_are_added_on_a_node_that_joins_and_are_retired_again(tmp_path: Path) -> None:
    recipe = small_recipe(tmp_path)
    with started_run(recipe, tmp_path) as (nodes, _, run):
        from megarl.serving.operator import OperatorRequest, ask

        run.wait_for(lambda event: event if isinstance(event, CheckpointSaved) else None)
        joined = nodes.start_node(num_slots=1)
        nodes.wait_started()
        rows = fleet(recipe.run_folder, "add", "--node", joined)
        assert [row[:2] for row in rows][2:] == [["2", "restarting"]]
        assert run.wait_for(lambda event: healthy_on([joined], event)) == joined
        run.wait_for(lambda event: event if isinstance(event, Published) and event.result.num_engines == 3 else None)
        assert processes_of(nodes, [joined], "ray::RolloutHost"), "a worker sends requests to it"
        deadline, is_asked = time.monotonic() + 300, False
        while not is_asked and time.monotonic() < deadline:
            reports = ask(recipe.run_folder, OperatorRequest(action="list"))
            is_asked = any(report.index == 2 and report.num_outstanding for report in reports)
            time.sleep(0.05)
        assert is_asked, "no request reaches the engine"
        rows = fleet(recipe.run_folder, "retire", "--node", joined)
        assert [row[:2] for row in rows][2:] == [["2", "retired"]]
        run.wait_for(lambda event: event if isinstance(event, Published) and event.result.num_engines == 2 else None)
        run.wait_for(lambda event: event if isinstance(event, StepFinished) else None)
        run.ask_to_leave()
        end = run.wait_for(lambda event: event if isinstance(event, RunFinished) else None)
    assert end.status is RunStatus.PREEMPTED


@pytest.mark.slow
@pytest.mark.usefixtures("whole_run")
@pytest.mark.fault(
    "repeated deaths of trainer ranks of one node of a pool that engines share",
    "the node is excluded; its ranks and its engines go on on a spare node",
)
def test_ranks_and_engines_of_a_shared_pool_leave_an_excluded_node(tmp_path: Path) -> None:
    recipe = small_recipe(tmp_path, name="dapo_32b", max_node_faults=1)
    with started_run(recipe, tmp_path, num_spare=1) as (nodes, addresses, run):
        run.wait_for(lambda event: event if isinstance(event, CheckpointSaved) else None)
        (spare,) = set(addresses) - set(processes_of(nodes, addresses, "ray::ActorRank"))
        left = kill_one(nodes, addresses, "ray::ActorRank")
        assert run.wait_for(lambda event: warned(r"^node (\S+) is excluded", event)) == left
        assert run.wait_for(lambda event: warned(r"its ranks start on (\S+)", event)) == spare
        assert run.wait_for(lambda event: healthy_on([spare], event)) == spare
        run.wait_for(lambda event: event if isinstance(event, StepFinished) else None)
        for title in ("ray::ActorRank", "ray::EngineHost"):
            assert left not in processes_of(nodes, addresses, title)
            assert spare in processes_of(nodes, addresses, title)
        run.ask_to_leave()
        end = run.wait_for(lambda event: event if isinstance(event, RunFinished) else None)
    assert end.status is RunStatus.PREEMPTED
