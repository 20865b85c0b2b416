"""Places as pure numbers; tests/cluster/test_local_ray.py reserves them on a real Ray."""

from __future__ import annotations

import signal
import sys
from contextlib import nullcontext
from pathlib import Path

import pytest
import ray
from ray._raylet import PlacementGroupID
from ray.util.placement_group import PlacementGroup

from megarl.cluster.cluster import (
    WITHIN_S,
    NodeBundle,
    NodeFaults,
    Place,
    Pool,
    accelerators,
    gpu_numbers,
    joined,
    nodes_of,
    refuse_missing,
)
from megarl.config.roles import PoolConfig
from megarl.config.section import CPU_SLOT, EXCLUDED_FILE
from megarl.errors import MachineError, PreemptedError


def places(pool: str, *nodes: str, gpus: tuple[int, ...] = (), size: int = 2) -> list[Place]:
    group = PlacementGroup(PlacementGroupID(pool.encode() * 18))
    found = []
    for index, node in enumerate(nodes):
        bundle = NodeBundle(group, index, resource="GPU" if gpus else CPU_SLOT, size=len(gpus) or size)
        bundle.node, bundle.gpus = node, gpus
        found += [Place(bundle=bundle, slot=slot) for slot in range(bundle.size)]
    return found


def test_gpus_of_two_pools_are_numbered_by_node() -> None:
    trainers = places("t", "a", gpus=(0, 1))
    engines = [*places("e", "b", gpus=(3,)), *places("e", "a", gpus=(1,))]
    assert gpu_numbers(trainers, engines) == [((0, 0), (0, 1)), ((1, 3), (0, 1))]


def test_slots_are_the_same_place_only_in_the_same_pool() -> None:
    first, second = (places(pool, "a") for pool in "te")
    assert gpu_numbers(first, second) == [((0, 0), (0, 1)), ((0, 2), (0, 3))]
    assert gpu_numbers(first, first[::-1]) == [((0, 0), (0, 1)), ((0, 1), (0, 0))]


def test_the_nodes_of_a_run_are_listed_once_in_order() -> None:
    assert nodes_of([Pool(places("t", "b", "a"), 1), Pool(places("e", "a", "c"), 1)]) == ["b", "a", "c"]


def test_a_gpu_is_visible_by_its_number_unless_the_caller_names_several() -> None:
    last = places("t", "a", gpus=(4, 6))[-1]
    alone, several = (
        last.options(given, gpu_fraction=0.5)["runtime_env"] for given in ({}, {"CUDA_VISIBLE_DEVICES": "4,6"})
    )
    assert isinstance(alone, dict)
    assert isinstance(several, dict)
    assert alone["env_vars"]["CUDA_VISIBLE_DEVICES"] == "6"
    assert several["env_vars"]["CUDA_VISIBLE_DEVICES"] == "4,6"


@pytest.mark.parametrize(
    ("devices", "expected"),
    [
        ([8, 8, 0], None),
        ([16, 8], None),
        ([8], "pools.train: needs 2 nodes with 8 GPUs, and the Ray cluster has 1 node with 8 GPUs; add such nodes"),
        ([8, 4, 4], "the Ray cluster has 1 node with 8 GPUs, 2 nodes with 4 GPUs; "),
        ([0], "the Ray cluster has no node with a GPU; "),
    ],
)
def test_a_cluster_without_enough_whole_nodes_is_refused(devices: list[int], expected: str | None) -> None:
    pools = {"train": PoolConfig(nodes=2, gpus_per_node=8)}
    if expected is None:
        refuse_missing(pools, devices, resource="GPU")
        return
    with pytest.raises(MachineError) as caught:
        refuse_missing(pools, devices, resource="GPU")
    assert expected in str(caught.value)
    assert "\n" not in str(caught.value)


def test_pools_that_fit_one_by_one_and_not_together_are_refused() -> None:
    pools = {name: PoolConfig(nodes=2, gpus_per_node=8) for name in ("train", "rollout")}
    with pytest.raises(MachineError, match="pools: need 32 GPUs together, and the Ray cluster has 3 nodes with 8 GPUs"):
        refuse_missing(pools, [8, 8, 8], resource="GPU")
    refuse_missing(pools, [8, 8, 8, 8], resource="GPU")


def test_the_kinds_of_gpus_are_those_that_ray_reports(monkeypatch: pytest.MonkeyPatch) -> None:
    resources = {"GPU": 16.0, "accelerator_type:H100": 1.0, "accelerator_type:H200": 1.0, "node:10.0.0.1": 1.0}
    monkeypatch.setattr("ray.cluster_resources", lambda: resources)
    assert accelerators() == ["H100", "H200"]


def test_faults_within_seconds_are_one_accident_and_old_ones_do_not_count() -> None:
    now = 0.0
    faults = NodeFaults(lambda: now)
    assert faults.count("a") == 1
    now = 29.0
    assert faults.count("a") == 1
    assert faults.count("b") == 1
    now = 60.0
    assert faults.count("a") == 2
    now = WITHIN_S + 1.0
    assert faults.count("a") == 2, "the first is too old"


def test_a_node_that_is_taken_back_has_no_faults() -> None:
    faults = NodeFaults(lambda: 0.0)
    faults.count("a")
    faults.excluded |= {"a", "b"}
    faults.forgive("a")
    assert faults.excluded == {"b"}
    assert faults.count("a") == 1


def test_excluded_nodes_are_known_to_the_next_driver_until_they_are_taken_back(tmp_path: Path) -> None:
    record = tmp_path / EXCLUDED_FILE
    faults = NodeFaults(record=record)
    faults.exclude("10.0.0.7")
    faults.exclude("10.0.0.3")
    assert record.read_text() == "10.0.0.3\n10.0.0.7\n"
    later = NodeFaults(record=record)
    assert later.excluded == {"10.0.0.3", "10.0.0.7"}
    later.forgive("10.0.0.3")
    assert NodeFaults(record=record).excluded == {"10.0.0.7"}


@pytest.mark.parametrize("is_early", [True, False])
def test_sigterm_while_ray_is_joined_is_a_preemption_and_rays_handler_does_not_stay(
    monkeypatch: pytest.MonkeyPatch, is_early: bool
) -> None:
    def init(**_options: object) -> None:
        """Set a handler as Ray does."""
        signal.signal(signal.SIGTERM, lambda number, _frame: sys.exit(number))
        if is_early:
            signal.raise_signal(signal.SIGTERM)

    monkeypatch.setattr(ray, "init", init)
    monkeypatch.setattr(ray, "shutdown", lambda: None)
    before = signal.getsignal(signal.SIGTERM)
    with pytest.raises(PreemptedError, match="stopped by SIGTERM") if is_early else nullcontext(), joined("ray:1"):
        assert signal.getsignal(signal.SIGTERM) is before
    assert signal.getsignal(signal.SIGTERM) is before
