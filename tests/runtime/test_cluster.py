from __future__ import annotations

from ray._raylet import PlacementGroupID
from ray.util.placement_group import PlacementGroup

from megarl.config.section import CPU_SLOT
from megarl.runtime.cluster import Place, gpu_numbers


def place(pool: str, bundle: int, node: str, gpu: int | None = None) -> Place:
    group = PlacementGroup(PlacementGroupID(pool.encode() * 18))
    return Place(group=group, bundle=bundle, resource="GPU" if gpu is not None else CPU_SLOT, gpu=gpu, node=node)


def test_gpus_of_two_pools_are_numbered_by_node() -> None:
    trainers = [place("t", bundle, "a", gpu=bundle) for bundle in range(2)]
    engines = [place("e", 0, "b", gpu=3), place("e", 1, "a", gpu=1)]
    assert gpu_numbers(trainers, engines) == [((0, 0), (0, 1)), ((1, 3), (0, 1))]


def test_slots_are_the_same_place_only_in_the_same_pool() -> None:
    first, second = ([place(pool, bundle, "a") for bundle in range(2)] for pool in "te")
    assert gpu_numbers(first, second) == [((0, 0), (0, 1)), ((0, 2), (0, 3))]
    assert gpu_numbers(first, first[::-1]) == [((0, 0), (0, 1)), ((0, 1), (0, 0))]
