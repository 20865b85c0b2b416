"""Ray, started on this machine or joined, and the pools as placement groups. Knows devices and slots, not roles."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass

import ray
from ray.util.placement_group import PlacementGroup, placement_group, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from megarl.config.recipe import PoolConfig, RunConfig
from megarl.errors import EnvironmentProblem

logger = logging.getLogger(__name__)

CPU_SLOT = "megarl_slot"
"""On a CPU run a Ray resource stands for the GPU a process would have."""

PLACEMENT_TIMEOUT_S = 120.0
OBJECT_STORE_BYTES = 256 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """One GPU (or CPU slot) of a pool."""

    group: PlacementGroup
    bundle: int
    resource: str

    def options(self, environment: Mapping[str, str], *, share: float) -> dict[str, object]:
        """What `Actor.options` needs to run here, taking `share` of the device."""
        options: dict[str, object] = {
            "num_cpus": 0,
            "scheduling_strategy": PlacementGroupSchedulingStrategy(self.group, self.bundle),
            "runtime_env": {"env_vars": dict(environment)},
            "max_restarts": 0,
        }
        if self.resource == "GPU":
            return options | {"num_gpus": share}
        return options | {"num_gpus": 0, "resources": {self.resource: share}}


class Cluster:
    """The Ray a run uses and the pools it holds there."""

    def __init__(self, device: str) -> None:
        self._resource = "GPU" if device == "cuda" else CPU_SLOT
        self._groups: list[PlacementGroup] = []

    def reserve(self, pools: Mapping[str, PoolConfig]) -> dict[str, list[Place]]:
        """Take the GPUs of every pool, or say which pool the cluster cannot hold."""
        places: dict[str, list[Place]] = {}
        for name, pool in pools.items():
            bundle = {self._resource: 1.0}
            strategy = "STRICT_PACK" if pool.nodes == 1 else "PACK"
            group = placement_group([bundle] * pool.gpus, strategy=strategy, name=f"megarl-{name}")
            self._groups.append(group)
            if not group.wait(PLACEMENT_TIMEOUT_S):
                free = ray.available_resources().get(self._resource, 0.0)
                raise EnvironmentProblem(
                    f"pools.{name}: {pool.gpus} gpus not free within {PLACEMENT_TIMEOUT_S:.0f} s; "
                    f"the Ray cluster has {free:g}; make the pool smaller or the cluster larger"
                )
            places[name] = [Place(group=group, bundle=index, resource=self._resource) for index in range(pool.gpus)]
        return places

    def release(self) -> None:
        for group in self._groups:
            remove_placement_group(group)
        self._groups.clear()


def _start_ray(*, device: str, num_slots: int) -> None:
    """A Ray of our own: loopback only, token auth, no dashboard (see `launch`). It dies with this process."""
    ray.init(
        address="local",
        num_cpus=num_slots + 2,
        resources={} if device == "cuda" else {CPU_SLOT: float(num_slots)},
        include_dashboard=False,
        object_store_memory=OBJECT_STORE_BYTES,
        log_to_driver=False,
        configure_logging=False,
    )


def _join_ray(address: str) -> None:
    try:
        ray.init(address=address, log_to_driver=False, configure_logging=False)
    except (ConnectionError, RuntimeError, ValueError) as error:
        reason = str(error).splitlines()[0]
        raise EnvironmentProblem(f"run.ray_address: cannot join {address}: {reason}") from None


@contextmanager
def open_cluster(run: RunConfig, *, address: str | None, num_slots: int) -> Iterator[Cluster]:
    """Ray for one run; everything placed on it is gone when the block ends."""
    if address is None:
        _start_ray(device=run.device, num_slots=num_slots)
    else:
        _join_ray(address)
    cluster = Cluster(run.device)
    try:
        yield cluster
    finally:
        cluster.release()
        ray.shutdown()
