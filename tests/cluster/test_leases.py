"""Actors and placement groups of a run on a Ray that it joined: they outlive their driver by the lease, no longer."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from megarl.cluster.local_ray import LocalRay, local_ray, private_ray
from megarl.errors import MachineError
from megarl.system.lease import JoinedLease, find_leased
from megarl.system.run_lock import run_lock
from tests.cluster.ray_worker import Worker
from tests.cluster.worker_setup import quick_ray
from tests.waiting import wait_until

with private_ray():
    import ray
    from ray.util.placement_group import placement_group, placement_group_table

    from megarl.cluster.cluster import joined
    from megarl.cluster.leases import leased, take_lease


@pytest.fixture(scope="module")
def address(real_ray: None, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    nodes = LocalRay(device="cpu", log_folder=tmp_path_factory.mktemp("ray"))
    with private_ray(), quick_ray(), local_ray(nodes, num_slots=1):
        yield nodes.address


def lease_of(run_folder: Path, address: str, *, seconds: float = 600, program: str = "digest") -> JoinedLease:
    return JoinedLease(run_folder, address, program=program, seconds=seconds, is_continued=True)


def start_some() -> None:
    group = placement_group([{"CPU": 1}], name="megarl-train", lifetime="detached")
    assert group.wait(120)
    worker = ray.remote(Worker).options(name="actor-0#1", lifetime="detached", num_cpus=0).remote(0)
    assert ray.get(worker.square.remote(3), timeout=300) == 9


def running() -> list[str]:
    groups = [group["name"] for group in placement_group_table().values() if group["state"] != "REMOVED"]
    return sorted([*groups, *(name for name in ray.util.list_named_actors() if "lease" not in name)])


def die(lease: JoinedLease) -> None:
    """Stop renewing, as a driver that was killed."""
    lease._stop.set()
    lease._renewing.join()


def test_what_a_driver_left_is_adopted_ended_by_another_program_or_by_the_end_of_the_lease(
    tmp_path: Path, address: str
) -> None:
    folder = tmp_path / "runs" / "one"
    with run_lock(folder):
        first = lease_of(folder, address)
        with joined(address, namespace=first.namespace):
            take_lease(first)
            start_some()
            first.placed({"train": [[0]]})
            first.take()
            die(first)
        second = lease_of(folder, address)
        assert second.adopted is not None
        assert second.adopted.gpus == {"train": [[0]]}
        with joined(address, namespace=second.namespace):
            take_lease(second)
            assert second.adopted is not None
            assert running() == ["actor-0#1", "megarl-train"]
            die(second)
            third = lease_of(folder, address, seconds=1, program="another")
            assert third.adopted is None
            take_lease(third)
            wait_until(lambda: running() == [])
            start_some()
            die(third)
            wait_until(lambda: running() == [])
            wait_until(lambda: not ray.util.list_named_actors())
            assert find_leased(folder) is not None
            fourth = lease_of(folder, address)
            assert fourth.adopted is not None, "nobody has asked Ray yet"
            with leased(fourth):
                assert fourth.adopted is None
                start_some()
            wait_until(lambda: running() == [])
            assert find_leased(folder) is None


@pytest.mark.fault("two runs whose folders have the same path, on one Ray cluster", "neither ends what the other has")
def test_a_run_in_a_folder_of_the_same_path_on_another_disk_has_another_namespace(tmp_path: Path) -> None:
    folder, names = tmp_path / "runs" / "grpo_7b", list[str]()
    for is_other_disk in (False, False, True):
        if is_other_disk:
            (tmp_path / "runs").rename(tmp_path / "first disk")
        with run_lock(folder):
            names.append(lease_of(folder, "10.0.0.1:6379").namespace)
    assert names[0] == names[1] != names[2]


def test_the_lease_actor_obeys_the_latest_driver_alone_and_a_driver_that_renews_is_left_in_peace(
    tmp_path: Path, address: str
) -> None:
    folder = tmp_path / "runs" / "one"
    with run_lock(folder):
        first = lease_of(folder, address)
        with joined(address, namespace=first.namespace):
            actor = take_lease(first)
            copy = lease_of(folder, address, program="of a copy of the folder")
            with pytest.raises(MachineError, match="another driver of this run works on the Ray cluster"):
                take_lease(copy)
            die(first)
            start_some()
            ray.get(actor.renew.remote(first.token + 1, 600), timeout=60)
            with pytest.raises(ray.exceptions.RayTaskError, match="has taken over"):
                ray.get(actor.end.remote(first.token), timeout=60)
            assert running() == ["actor-0#1", "megarl-train"]
            second = lease_of(folder, address)
            second.adopted = second._leased
            with pytest.raises(MachineError, match="has taken over"):
                take_lease(second)
            ray.get(actor.end.remote(first.token + 1), timeout=60)
            ray.kill(actor)
            wait_until(lambda: running() == [])
