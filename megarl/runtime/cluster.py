"""Ray, started on this machine or joined, and the pools as placement groups. It places devices, not roles."""

from __future__ import annotations

import asyncio
import json
import math
import socket
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

import ray
from ray.util.placement_group import (
    PlacementGroup,
    placement_group,
    placement_group_table,
    remove_placement_group,
)
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from megarl.config.recipe import Recipe
from megarl.config.roles import PoolConfig
from megarl.config.section import CPU_SLOT
from megarl.env import current_environment
from megarl.errors import MachineError
from megarl.system.guard import start_guarded, stop_guarded
from megarl.system.network import LOOPBACK, address_in
from megarl.weights.algebra.locality import Gpu

PLACEMENT_TIMEOUT_S = 120.0
OBJECT_STORE_BYTES = 256 << 20
RAY_STOP_GRACE_S = 20.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """One GPU (or CPU slot) of a pool."""

    group: PlacementGroup
    bundle: int
    resource: str
    gpu: int | None = None
    """Its number on its node; None for a CPU slot."""
    node: str = ""
    """Ray's id of the node."""

    def options(self, environment: Mapping[str, str], *, share: float, is_actor: bool = True) -> dict[str, object]:
        """Return Ray's options for an actor or a task that takes `share` of this device."""
        options: dict[str, object] = {
            "num_cpus": 0,
            "scheduling_strategy": PlacementGroupSchedulingStrategy(self.group, self.bundle),
            "runtime_env": {"env_vars": dict(environment)},
            **({"max_restarts": 0} if is_actor else {"max_retries": 0}),
        }
        if self.resource == "GPU":
            return options | {"num_gpus": share}
        return options | {"num_gpus": 0, "resources": {self.resource: share}}


class Pool:
    """The places of a pool, divided equally between the roles that use it."""

    def __init__(self, places: Sequence[Place], num_roles: int) -> None:
        self.places = places
        self.is_shared = num_roles > 1
        # Ray counts in ten-thousandths of a device.
        self.share = math.floor(10_000 / num_roles) / 10_000
        self.turn = asyncio.Lock()


class Cluster:
    """The Ray a run uses and the pools it holds there."""

    def __init__(self, device: str) -> None:
        self._resource = "GPU" if device == "cuda" else CPU_SLOT
        self._groups: list[PlacementGroup] = []

    def reserve(self, pools: Mapping[str, PoolConfig]) -> dict[str, list[Place]]:
        """Reserve the GPUs of every pool; raise MachineError for the first pool that the cluster cannot hold."""
        places: dict[str, list[Place]] = {}
        for name, pool in pools.items():
            bundle = {self._resource: 1.0}
            strategy = "STRICT_PACK" if pool.nodes == 1 else "PACK"
            group = placement_group([bundle] * pool.gpus, strategy=strategy, name=f"megarl-{name}")
            self._groups.append(group)
            if not group.wait(PLACEMENT_TIMEOUT_S):
                free = ray.available_resources().get(self._resource, 0.0)
                raise MachineError(
                    f"pools.{name}: {pool.gpus} gpus not free within {PLACEMENT_TIMEOUT_S:.0f} s; "
                    f"the Ray cluster has {free:g}; make the pool smaller or the cluster larger"
                )
            nodes = placement_group_table(group)["bundles_to_node_id"]
            slots = [
                Place(group=group, bundle=index, resource=self._resource, node=nodes[index])
                for index in range(pool.gpus)
            ]
            places[name] = _in_order(slots) if self._resource == "GPU" else slots
        return places

    def release(self) -> None:
        for group in self._groups:
            remove_placement_group(group)
        self._groups.clear()


def gpu_numbers(*pools: Sequence[Place]) -> list[tuple[Gpu, ...]]:
    """Return each place as (node number, GPU or slot number); equal pairs are the same place."""
    nodes: dict[str, int] = {}
    slots: dict[tuple[object, int], int] = {}

    def number(place: Place) -> Gpu:
        node = nodes.setdefault(place.node, len(nodes))
        if place.gpu is not None:
            return node, place.gpu
        return node, slots.setdefault((place.group.id, place.bundle), len(slots))

    return [tuple(number(place) for place in places) for places in pools]


def _in_order(places: Sequence[Place]) -> list[Place]:
    """Sort by node and GPU, which Ray does not: neighbours in the list are neighbours in the machine."""
    ask = ray.remote(_where)
    locations = ray.get([ask.options(**place.options({}, share=1.0, is_actor=False)).remote() for place in places])
    located = sorted(zip(locations, places, strict=True), key=lambda item: item[0])
    return [replace(place, gpu=gpu) for (_, gpu), place in located]


def own_address(bind: str | None) -> str:
    """Return this machine's address in the network `bind`; without one, the address Ray has for this machine."""
    if bind is not None:
        return address_in(bind)
    address: str = ray.util.get_node_ip_address()
    return address


def _where() -> tuple[str, int]:
    return ray.get_runtime_context().get_node_id(), int(ray.get_gpu_ids()[0])


@contextmanager
def _local_ray(*, device: str, num_slots: int, log_path: Path) -> Iterator[str]:
    """Start a private Ray on loopback, with a token and no dashboard, and yield its address; it ends with this process.

    It is a child in a session of its own, not `ray.init()`: a signal to our process group must not end Ray before
    everything that runs on it is down.
    """
    resources = {} if device == "cuda" else {CPU_SLOT: num_slots}
    with socket.create_server((LOOPBACK, 0)) as listener:
        port = listener.getsockname()[1]
    options = {
        "--port": str(port),
        "--node-ip-address": LOOPBACK,
        "--num-cpus": str(num_slots + 2),
        "--resources": json.dumps(resources),
        "--include-dashboard": "false",
        "--object-store-memory": str(OBJECT_STORE_BYTES),
    }
    words = [word for option in options.items() for word in option]
    command = [sys.executable, "-m", "ray.scripts.scripts", "start", "--head", "--block", *words]
    with log_path.open("wb") as log:
        guard = start_guarded(command, environment=current_environment(), output=log)
    try:
        yield f"{LOOPBACK}:{port}"
    finally:
        stop_guarded(guard, grace_s=RAY_STOP_GRACE_S)


@contextmanager
def _joined(address: str, *, log_hint: str = "") -> Iterator[None]:
    try:
        ray.init(address=address, log_to_driver=False, configure_logging=False)
    except (ConnectionError, RuntimeError, ValueError) as error:
        reason = (str(error).splitlines() or [type(error).__name__])[0]
        raise MachineError(f"cannot join Ray at {address}: {reason}{log_hint}") from None
    try:
        yield
    finally:
        ray.shutdown()


@contextmanager
def open_cluster(recipe: Recipe, *, address: str | None, tasks_file: Path | None = None) -> Iterator[Cluster]:
    """Yield the Ray of one run, joined at `address` or started here; everything placed on it ends with the block.

    A trace of Ray's tasks is then written to `tasks_file`, in Chrome's format.
    """
    with ExitStack() as stack:
        if address is None:
            num_slots = sum(pool.gpus for pool in recipe.pools.values())
            log_path = recipe.run_folder / "ray.log"
            address = stack.enter_context(_local_ray(device=recipe.run.device, num_slots=num_slots, log_path=log_path))
            stack.enter_context(_joined(address, log_hint=f"; log: {log_path}"))
        else:
            stack.enter_context(_joined(address))
        cluster = Cluster(recipe.run.device)
        stack.callback(cluster.release)
        if tasks_file is not None:
            stack.callback(ray.timeline, str(tasks_file))
        yield cluster
