"""A whole run on several Ray nodes, in which nodes are excluded after a fault and spare ones join."""

from __future__ import annotations

import re
from contextlib import ExitStack
from pathlib import Path

import psutil
import pytest
import yaml

from megarl.cli.rehearse import write_files
from megarl.compare.small_recipe import RehearsalFiles, small_topology, tiny_shape
from megarl.config.cluster import ClusterConfig
from megarl.config.load import read_recipe
from megarl.config.recipe import NetworkConfig, Recipe
from megarl.observe.events import (
    EVENTS_FILE,
    CheckpointSaved,
    EngineChanged,
    Event,
    RunFinished,
    RunStatus,
    StepFinished,
    Warned,
)
from megarl.planner.deployment import find_shapes
from megarl.runtime.local_ray import LocalRay, local_ray, private_ray
from tests.repository import ROOT
from tests.tools.rehearse.test_rehearsal import SMALL


def small_recipe(folder: Path) -> Recipe:
    recipe = read_recipe(ROOT / "recipes" / "grpo_70b.yaml", [*SMALL]).recipe
    files = RehearsalFiles(model=folder / "model", data=folder / "data.parquet", reward=folder / "reward.py")
    small = small_topology(recipe, folder=folder, files=files, max_nodes=2).recipe
    shape = tiny_shape(find_shapes(recipe.model, recipe.roles).policy, small.roles.actor)
    write_files(files.model, files.data, files.reward, shape, kind="grpo")
    changed = {"network": NetworkConfig(), "run": small.run.model_copy(update={"steps": 10_000})}
    return small.model_copy(update={**changed, "cluster": ClusterConfig(max_node_faults=1)})


def kill_one(nodes: LocalRay, addresses: list[str], title: str) -> str:
    """Kill a process on the first of these nodes that has one with this title; return the node's address."""
    for address in addresses:
        for process in psutil.Process(nodes.pid_of(address)).children(recursive=True):
            if process.cmdline()[:1] and process.cmdline()[0].startswith(title):
                process.kill()
                return address
    raise AssertionError(f"no {title} on {addresses}")


def warned(words: str, event: Event) -> str | None:
    found = re.search(words, event.text) if isinstance(event, Warned) else None
    return None if found is None else found.group(1)


def healthy_on(spares: list[str], event: Event) -> str | None:
    host = event.address.rpartition(":")[0] if isinstance(event, EngineChanged) and event.state == "healthy" else ""
    return host if host in spares else None


@pytest.mark.slow
@pytest.mark.fault(
    "repeated deaths of engines, and of trainer ranks, of one node",
    "the node is excluded; its engines and its ranks go on on spare nodes",
)
def test_engines_and_ranks_of_excluded_nodes_go_on_on_spare_ones(tmp_path: Path) -> None:
    recipe = small_recipe(tmp_path)
    with ExitStack() as stack:
        stack.enter_context(private_ray())
        from megarl.tools.rehearse.rehearsal import WatchedRun

        path = tmp_path / "recipe.yaml"
        path.write_text(yaml.safe_dump(recipe.model_dump(mode="json", exclude_defaults=True)))
        nodes = LocalRay(device="cpu", log_folder=tmp_path, has_several_nodes=True)
        stack.enter_context(local_ray(nodes, num_slots=0))
        num_nodes = sum(pool.nodes for pool in recipe.pools.values())
        addresses = [nodes.start_node(num_slots=1) for _ in range(num_nodes)]
        nodes.wait_started()
        run = WatchedRun(path, tmp_path, recipe.run_folder / EVENTS_FILE, nodes.address, say=print)
        stack.callback(run.stop)
        run.wait_for(lambda event: event if isinstance(event, CheckpointSaved) else None)
        left = kill_one(nodes, addresses, "ray::EngineHost")
        assert run.wait_for(lambda event: warned(r"^node (\S+) is excluded", event)) == left
        assert run.wait_for(lambda event: warned(r"stay out: (no) spare node is free", event)) == "no"
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
