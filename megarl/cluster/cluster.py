"""The Ray of a run, joined or started, the placement of its pools, and the faults of nodes. It knows no role."""

from __future__ import annotations

import asyncio
import math
import signal
import threading
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

import ray

# Ray's public calls give the free resources of the whole cluster only.
from ray._private.state import available_resources_per_node
from ray.util.placement_group import (
    PlacementGroup,
    get_placement_group,
    placement_group,
    placement_group_table,
    remove_placement_group,
)
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from megarl.cluster.leases import AdoptableActors, leased
from megarl.cluster.local_ray import RAY_LOG, LocalRay, local_ray, running_ray, take_early
from megarl.config.recipe import RunConfig
from megarl.config.roles import PoolConfig
from megarl.config.section import CPU_SLOT, EXCLUDED_FILE
from megarl.env import visible_gpus
from megarl.errors import MachineError, PreemptedError, first_line
from megarl.system.lease import JoinedLease, Lease, PrivateLease
from megarl.system.network import address_in
from megarl.system.start_log import note_piece
from megarl.weights.algebra.slices import Gpu

WITHIN_S = 3600.0
"""Faults that are older no longer count."""
_ONE_ACCIDENT_S = 30.0
"""Processes of a node that are lost within this time are lost for one reason."""
PLACEMENT_TIMEOUT_S = 120.0
_LOCATE_TIMEOUT_S = 120.0
GROUP_PREFIX = "megarl-"
RAY_FAILURES = (ray.exceptions.RayError, RuntimeError, ConnectionError)
"""Raised by Ray's functions when its head or a node does not answer."""
_NAMESPACE = "megarl"


class NodeFaults:
    """The faults of each node, of its engines and of its trainer ranks, and which nodes are excluded after too many.

    A node is known by its address: one that comes back after a crash is another one to Ray, and has its faults here.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic, *, record: Path | None = None) -> None:
        """`record` has the excluded nodes for the next driver, and for the script of a scheduler's job."""
        self._clock = clock
        self._faults: defaultdict[str, list[float]] = defaultdict(list)
        self._record = record
        is_known = record is not None and record.exists()
        self.excluded: set[str] = set(record.read_text().split()) if record is not None and is_known else set()

    def count(self, node: str) -> int:
        """Note a fault of a node; return how many it had within an hour."""
        now = self._clock()
        faults = [at for at in self._faults[node] if at > now - WITHIN_S]
        self._faults[node] = faults if faults and now < faults[-1] + _ONE_ACCIDENT_S else [*faults, now]
        return len(self._faults[node])

    def exclude(self, node: str) -> None:
        self.excluded.add(node)
        self._write()

    def forgive(self, node: str) -> None:
        self._faults.pop(node, None)
        self.excluded.discard(node)
        self._write()

    def _write(self) -> None:
        if self._record is not None:
            with suppress(OSError):  # a full disk: it is noted again with the next node
                self._record.write_text("".join(f"{node}\n" for node in sorted(self.excluded)))


class NodeBundle:
    """The devices of one node that a pool holds. Ray moves them to another node when their node is lost."""

    def __init__(self, group: PlacementGroup, index: int, *, resource: str, size: int) -> None:
        self.group = group
        self.index = index
        self.resource = resource
        self.size = size
        self.node = ""
        """Ray's id of the node."""
        self.gpus: tuple[int, ...] = ()
        """Their numbers on the node; empty for CPU slots."""
        self.is_lost = False
        """Its node is gone, and Ray has no other one for it yet."""
        self.is_bound = False
        """It was moved to a node of our choice: Ray moves it nowhere else."""

    @property
    def strategy(self) -> PlacementGroupSchedulingStrategy:
        return PlacementGroupSchedulingStrategy(self.group, self.index)


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """One GPU (or CPU slot) of a pool."""

    bundle: NodeBundle
    slot: int
    """Its number among the devices of the bundle."""

    @property
    def node(self) -> str:
        """Ray's id of the node."""
        return self.bundle.node

    @property
    def gpu(self) -> int | None:
        """Its number on its node; None for a CPU slot."""
        return self.bundle.gpus[self.slot] if self.bundle.gpus else None

    def options(self, environment: Mapping[str, str], *, gpu_fraction: float) -> dict[str, object]:
        """Return Ray's options for an actor that takes `gpu_fraction` of this device.

        Ray would choose any GPU of the bundle, so the GPU is named in the environment unless `environment` names some.
        """
        visible = {} if self.gpu is None else visible_gpus([str(self.gpu)])
        options: dict[str, object] = {
            "num_cpus": 0,
            "max_restarts": 0,
            "scheduling_strategy": self.bundle.strategy,
            "runtime_env": {"env_vars": {**visible, **environment}},
        }
        if self.bundle.resource == "GPU":
            return options | {"num_gpus": gpu_fraction}
        return options | {"num_gpus": 0, "resources": {self.bundle.resource: gpu_fraction}}


class Pool:
    """The places of a pool, divided equally between the roles that use it."""

    def __init__(
        self,
        places: Sequence[Place],
        num_roles: int,
        actors: AdoptableActors | None = None,
        faults: NodeFaults | None = None,
        *,
        has_ranks: bool = False,
        is_private: bool = False,
    ) -> None:
        self.places = places
        self.has_ranks = has_ranks
        self.is_private = is_private
        """Whether the only node is that of the driver: without it there is no run either."""
        self.faults = faults or NodeFaults()
        self.actors = actors or AdoptableActors(outlive_driver=False)
        self.is_shared = num_roles > 1
        # Ray counts in ten-thousandths of a device.
        self.gpu_fraction = math.floor(10_000 / num_roles) / 10_000
        self.device_lock = asyncio.Lock()
        """Held by the ranks or engines that use the devices of a shared pool."""

    @property
    def bundles(self) -> list[NodeBundle]:
        return list(dict.fromkeys(place.bundle for place in self.places))


class Cluster:
    """The Ray a run uses and the pools it holds there."""

    def __init__(
        self, device: str, lease: Lease | None = None, *, excluded: Path | None = None, is_private: bool = False
    ) -> None:
        """`excluded` is the record of excluded nodes. A private Ray has the node of this process and gets no other."""
        self.is_private = is_private
        self._resource = "GPU" if device == "cuda" else CPU_SLOT
        self._groups: list[PlacementGroup] = []
        self._gpus: dict[str, list[tuple[int, ...]]] = {}
        """The numbers of the GPUs by pool and bundle."""
        self._lease = lease if lease is not None and lease.outlives_driver else None
        finds = self._lease is not None and self._lease.adopted is not None
        self.actors = AdoptableActors(outlive_driver=self._lease is not None, finds=finds)
        self.faults = NodeFaults(record=excluded)

    def outlive_driver(self) -> None:
        """Leave everything to the next driver if this one dies from now on."""
        if self._lease is not None:
            self._lease.take()

    def reserve(self, pools: Mapping[str, PoolConfig]) -> dict[str, list[Place]]:
        """Reserve the devices of every pool, one bundle per node; the places of a node are neighbours in the list.

        Raise MachineError where the cluster has no such nodes.
        """
        refuse_missing(pools, [devices_of(node, self._resource) for node in live_nodes()], resource=self._resource)
        groups = {}
        # The largest bundles first: small ones fit into what is left.
        for name, pool in sorted(pools.items(), key=lambda item: -item[1].gpus_per_node):
            bundles = [{self._resource: float(pool.gpus_per_node)}] * pool.nodes
            groups[name] = self._group(f"{GROUP_PREFIX}{name}", bundles)
            self._groups.append(groups[name])
        deadline = time.monotonic() + PLACEMENT_TIMEOUT_S
        located = {
            name: self._located(name, pool, groups[name], timeout_s=max(0.0, deadline - time.monotonic()))
            for name, pool in pools.items()
        }
        if self._lease is not None:
            self._lease.placed(self._gpus)
        return located

    def _group(self, name: str, bundles: list[dict[str, float]]) -> PlacementGroup:
        """Return a new placement group, or the one that an earlier driver left."""
        if self._lease is not None and self._lease.adopted is not None:
            with suppress(ValueError):
                return get_placement_group(name)
        lifetime = None if self._lease is None else "detached"
        return placement_group(bundles, strategy="STRICT_SPREAD", name=name, lifetime=lifetime)

    def _located(self, name: str, pool: PoolConfig, group: PlacementGroup, *, timeout_s: float) -> list[Place]:
        size = pool.gpus_per_node
        if not group.wait(timeout_s):
            free = ray.available_resources().get(self._resource, 0.0)
            raise MachineError(
                f"pools.{name}: {name_nodes(pool.nodes, size)} not free within {PLACEMENT_TIMEOUT_S:.0f} s; {free:g} "
                "device(s) of the Ray cluster are free, the others are in use; end other jobs or add nodes"
            )
        bundles = [NodeBundle(group, index, resource=self._resource, size=size) for index in range(pool.nodes)]
        places = placement_group_table(group)["bundles_to_node_id"]
        for bundle in bundles:
            bundle.node = places[bundle.index]
        adopted = None if self._lease is None else self._lease.adopted
        if self._resource == "GPU" and adopted is not None:
            for bundle, gpus in zip(bundles, adopted.gpus[name], strict=True):
                bundle.gpus = tuple(gpus)
        elif self._resource == "GPU":
            find_gpus(bundles)
        self._gpus[name] = [bundle.gpus for bundle in bundles]
        addresses = {str(node["NodeID"]): str(node["NodeManagerAddress"]) for node in live_nodes()}
        bundles.sort(key=lambda bundle: (_order(addresses.get(bundle.node, "")), bundle.node))
        return [Place(bundle=bundle, slot=slot) for bundle in bundles for slot in range(size)]

    def release(self) -> None:
        """Give the devices back, unless another driver has them."""
        if self._lease is not None and not self._lease.is_ours:
            return
        for group in self._groups:
            remove_placement_group(group)
        self._groups.clear()


def nodes_of(pools: Iterable[Pool]) -> list[str]:
    """Return Ray's id of every node that the pools use, each once, in the order of the places."""
    return list(dict.fromkeys(place.node for pool in pools for place in pool.places))


def gpu_numbers(*pools: Sequence[Place]) -> list[tuple[Gpu, ...]]:
    """Return each place as (node number, GPU or slot number); equal pairs are the same place."""
    nodes: dict[str, int] = {}
    slots: dict[tuple[object, int, int], int] = {}

    def number(place: Place) -> Gpu:
        node = nodes.setdefault(place.node, len(nodes))
        if place.gpu is not None:
            return node, place.gpu
        bundle = place.bundle
        return node, slots.setdefault((bundle.group.id, bundle.index, place.slot), len(slots))

    return [tuple(number(place) for place in places) for places in pools]


def refuse_missing(pools: Mapping[str, PoolConfig], devices: Sequence[int], *, resource: str) -> None:
    """Raise MachineError for pools that no set of nodes with these numbers of devices can hold."""
    kind = "GPU" if resource == "GPU" else "slot"
    there = _described(devices, kind)
    for name, pool in pools.items():
        if sum(count >= pool.gpus_per_node for count in devices) < pool.nodes:
            needed = name_nodes(pool.nodes, pool.gpus_per_node, kind)
            raise MachineError(
                f"pools.{name}: needs {needed}, and the Ray cluster has {there}; add such nodes, or set "
                f"pools.{name}.nodes and gpus_per_node to what a node has"
            )
    total = sum(pool.gpus for pool in pools.values())
    if total > sum(devices):
        raise MachineError(
            f"pools: need {total} {kind}s together, and the Ray cluster has {there}; make a pool smaller or add nodes"
        )


def _described(devices: Sequence[int], kind: str) -> str:
    """Return how many nodes have how many devices, such as "2 nodes with 8 GPUs, 1 node with 4 GPUs"."""
    counts = Counter(count for count in devices if count)
    if not counts:
        return f"no node with a {kind}" + (
            f" (ray start --resources '{{\"{CPU_SLOT}\": N}}')" if kind == "slot" else ""
        )
    return ", ".join(name_nodes(number, count, kind) for count, number in sorted(counts.items(), reverse=True))


def name_nodes(number: int, size: int, kind: str = "device") -> str:
    return f"{number} node{'s' * (number > 1)} with {size} {kind}{'s' * (size > 1)}"


def live_nodes() -> list[Mapping[str, object]]:
    return [node for node in ray.nodes() if node["Alive"]]


def free_devices(resource: str) -> dict[str, int]:
    """Return how many devices of a kind are not reserved on each live node, by Ray's id of the node."""
    return {node: int(free.get(resource, 0)) for node, free in available_resources_per_node().items()}


def address_of(node: str) -> str:
    """Return the address of a node, from Ray's id of it."""
    return next((str(each["NodeManagerAddress"]) for each in ray.nodes() if each["NodeID"] == node), node)


def devices_of(node: Mapping[str, object], resource: str) -> int:
    resources = node["Resources"]
    assert isinstance(resources, Mapping), resources
    return int(resources.get(resource, 0))


def _order(address: str) -> tuple[int, ...]:
    """Sort addresses by their numbers: neighbours in the network are often neighbours in the machine room."""
    return tuple(int(part) for part in address.split(".") if part.isdecimal())


def find_gpus(bundles: Sequence[NodeBundle]) -> None:
    """Ask each node which of its GPUs Ray has reserved for the bundle."""
    ask = ray.remote(_own_gpus)
    numbers = ray.get(
        [
            ask.options(num_cpus=0, num_gpus=bundle.size, max_retries=0, scheduling_strategy=bundle.strategy).remote()
            for bundle in bundles
        ],
        timeout=_LOCATE_TIMEOUT_S,
    )
    for bundle, gpus in zip(bundles, numbers, strict=True):
        bundle.gpus = tuple(sorted(gpus))


def _own_gpus() -> list[int]:
    return [int(number) for number in ray.get_gpu_ids()]


def accelerators() -> list[str]:
    """Return the kinds of GPUs that Ray reports, such as `H100`."""
    prefix = "accelerator_type:"
    return [name.removeprefix(prefix) for name in ray.cluster_resources() if name.startswith(prefix)]


def own_address(bind: str | None) -> str:
    """Return this machine's address in the network `bind`; without one, the address Ray has for this machine."""
    if bind is not None:
        return address_in(bind, towards=ray.get_runtime_context().gcs_address if ray.is_initialized() else None)
    address: str = ray.util.get_node_ip_address()
    return address


@contextmanager
def joined(address: str, *, log_hint: str = "", namespace: str | None = None) -> Iterator[None]:
    handler = signal.getsignal(signal.SIGTERM)
    try:
        ray.init(address=address, namespace=namespace, log_to_driver=False, configure_logging=False)
    except (ConnectionError, RuntimeError, ValueError) as error:
        raise MachineError(f"cannot join Ray at {address}: {first_line(error)}{log_hint}") from None
    except SystemExit:
        # Ray sets a handler of its own, which exits.
        raise PreemptedError(f"stopped by SIGTERM while it joined Ray at {address}") from None
    finally:
        if threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGTERM, handler or signal.SIG_DFL)
    try:
        yield
    finally:
        ray.shutdown()


@contextmanager
def open_cluster(
    run: RunConfig,
    pools: Mapping[str, PoolConfig],
    *,
    address: str | None,
    lease: Lease | None = None,
    tasks_file: Path | None = None,
) -> Iterator[Cluster]:
    """Yield the Ray of one run, joined at `address` or started here; everything placed on it ends with the block.

    With a `lease`, what runs there outlives a driver that is killed, and what was left so is adopted. At the end a
    trace of Ray's tasks is written to `tasks_file`, in Chrome's format.
    """
    with ExitStack() as stack:
        began = time.time()
        if address is None:
            assert lease is None or isinstance(lease, PrivateLease)
            began = stack.enter_context(_private(run, pools, lease))
        elif isinstance(lease, JoinedLease) and lease.outlives_driver:
            stack.enter_context(joined(address, namespace=lease.namespace))
            stack.enter_context(leased(lease))
        else:
            stack.enter_context(joined(address))
        note_piece("Ray", began=began)
        excluded = run.folder / run.name / EXCLUDED_FILE
        cluster = Cluster(run.device, lease, excluded=excluded, is_private=address is None)
        stack.callback(cluster.release)
        if tasks_file is not None:
            stack.callback(ray.timeline, str(tasks_file))
        yield cluster


@contextmanager
def _private(run: RunConfig, pools: Mapping[str, PoolConfig], lease: PrivateLease | None) -> Iterator[float]:
    """Join a Ray that is started here, was started while the run was checked, or that an earlier driver left.

    Yield when its start began, in seconds since the epoch.
    """
    run_folder, began = run.folder / run.name, time.time()
    log_hint = f"; log: {run_folder / RAY_LOG}"
    with ExitStack() as stack:
        if lease is not None and lease.adopted is not None:
            assert lease.adopted.guard is not None, "it is private"
            lease.take()
            stack.enter_context(running_ray(lease, lease.adopted.guard, run_folder))
            address, log_hint = lease.adopted.address, ""
        elif lease is not None and (guard := take_early(lease, run_folder)) is not None:
            assert lease.early is not None, "it was taken"
            stack.enter_context(running_ray(lease, guard, run_folder))
            address, began = lease.early.address, lease.early.began
        else:
            nodes = LocalRay(device=run.device, log_folder=run_folder, lease=lease)
            stack.enter_context(local_ray(nodes, num_slots=sum(pool.gpus for pool in pools.values())))
            address = nodes.address
        stack.enter_context(joined(address, log_hint=log_hint, namespace=_NAMESPACE))
        yield began
