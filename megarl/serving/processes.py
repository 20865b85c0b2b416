"""Engines as Ray actors: an SGLang server starts on free ports, as a child of an actor on its node, and ends with it.

An engine of several nodes has an actor and a process on each. It is one engine: it answers at its first node, and when
one of its processes ends, all are ended and started again.

The actors may outlive a driver that dies (`cluster.leases`). The next driver adopts the engines: it brings each
into a known state and publishes to it; one that does not answer is started again.
"""

from __future__ import annotations

import asyncio
import logging
import socket
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from itertools import groupby
from typing import TypeVar, TypeVarTuple

import ray
from ray.actor import ActorHandle

from megarl.cluster.cluster import NodeBundle, Place, own_address
from megarl.cluster.leases import AdoptableActors
from megarl.cluster.worker_group import Fence, exit_detail
from megarl.config.roles import RolloutRoleConfig
from megarl.engine import admin
from megarl.engine.client import EngineClient, EngineEndpoint
from megarl.engine.process import EngineProcess, EngineSpec, PortTakenError
from megarl.env import ENGINE_HOST_ENVIRONMENT, visible_gpus
from megarl.errors import EngineError, MegarlError
from megarl.system.run_lock import held_token, is_held

logger = logging.getLogger(__name__)

Arguments = TypeVarTuple("Arguments")
Result = TypeVar("Result")

_STOP_TIMEOUT_S = 60.0
_MAX_STARTS = 3
"""Starts of one engine, if each finds a port taken."""


class EngineHost:
    """The actor that starts, watches and stops one engine on one node. It runs several calls at a time.

    Each call has the token of its driver. One of a driver that another has followed is refused.
    """

    def __init__(self) -> None:
        self._fence = Fence()
        self._engine: EngineProcess | None = None
        self._is_ready = False

    async def find_address(self, token: int, bind: str | None) -> str:
        """Return this node's address with a port that is free now, where the processes of an engine meet."""
        self._fence.enter(token)
        with socket.create_server((own_address(bind), 0)) as listener:
            host, port = listener.getsockname()[:2]
        return f"{host}:{port}"

    async def start(self, token: int, spec: EngineSpec) -> EngineEndpoint:
        """Start an engine; return when it generates."""
        await self.stop(token)
        self._engine = engine = EngineProcess(replace(spec, host=own_address(spec.bind)))
        engine.start()
        await engine.wait_ready()
        self._is_ready = True
        return engine.endpoint

    async def serving(self, token: int) -> EngineEndpoint:
        """Return where the engine is that was started for an earlier driver."""
        self._fence.enter(token)
        if self._engine is None or not self._is_ready or self._engine.exit_code is not None:
            raise EngineError("was not running")
        return self._engine.endpoint

    async def wait_end(self, token: int) -> str:
        """Wait for the end of the engine; return the reason."""
        self._fence.enter(token)
        assert self._engine is not None, "start comes first"
        return await self._engine.wait_end()

    async def stop(self, token: int) -> None:
        """Stop the engine."""
        self._fence.enter(token)
        engine = self._engine
        self._engine = None
        self._is_ready = False
        if engine is not None:
            await asyncio.to_thread(engine.stop)


class Engines:
    """The processes of all engines, by index. The fleet knows what they serve."""

    def __init__(
        self,
        specs: Sequence[EngineSpec],
        places: Sequence[Sequence[Place]],
        *,
        gpu_fraction: float,
        actors: AdoptableActors,
    ) -> None:
        """`places` has those of each engine, node by node."""
        self._actors = actors
        self._run_folder = specs[0].run_folder
        self._token = held_token(self._run_folder)
        self._specs = list(specs)
        self._places = [on_nodes(of_engine) for of_engine in places]
        self._gpu_fraction = gpu_fraction
        self._hosts: dict[tuple[int, int], ActorHandle] = {}
        """Actors by engine and node."""
        self._started_on: dict[tuple[int, int], str] = {}
        """Ray's id of the node on which each host was started."""

    def extend(self, places: Sequence[Place], host: str) -> EngineEndpoint:
        """Have another engine like the others, which is still to be started; return its address, without a port."""
        spec = replace(self._specs[0], index=len(self._specs))
        self._specs.append(spec)
        self._places.append(on_nodes(places))
        endpoint = partial(EngineEndpoint, index=spec.index, host=host, port=0, keys=spec.keys)
        return endpoint(tensor=self.tensor, device=spec.device)

    @property
    def tensor(self) -> int:
        """Devices of an engine."""
        return self._specs[0].config.tensor

    @property
    def places(self) -> list[Place]:
        """The places of all engines, in their order."""
        return [place for nodes in self._places for of_node in nodes for place in of_node]

    async def start(self, index: int) -> EngineEndpoint:
        """Start or restart an engine in its places; a MegarlError has the reason of a failure."""
        for node, places in enumerate(self._places[index]):
            if (index, node) not in self._hosts:
                options = places[0].options(_environment(places), gpu_fraction=self._gpu_fraction)
                options |= self._actors.options(f"engine-{index}-{node}")
                self._hosts[index, node] = ray.remote(EngineHost).options(**options).remote()
                self._started_on[index, node] = places[0].node
        return await with_free_ports(lambda: self._start_nodes(index))

    def nodes_of(self, index: int) -> list[NodeBundle]:
        """Return the devices of an engine on each of its nodes, in their order."""
        return [places[0].bundle for places in self._places[index]]

    def is_elsewhere(self, index: int) -> bool:
        """Whether a process of an engine was started on another node than its devices are on now."""
        nodes = {(index, node): bundle.node for node, bundle in enumerate(self.nodes_of(index))}
        return any(key in self._hosts and self._started_on.get(key, node) != node for key, node in nodes.items())

    def has_nodes(self, index: int) -> bool:
        """Whether an engine has a living node for all its devices."""
        return not any(bundle.is_lost for bundle in self.nodes_of(index))

    async def _start_nodes(self, index: int) -> EngineEndpoint:
        spec, num_nodes = self._specs[index], len(self._places[index])
        deadline_s = spec.start_timeout_s + _STOP_TIMEOUT_S
        if num_nodes > 1:
            address = await self._call(index, 0, EngineHost.find_address, spec.bind, timeout_s=deadline_s)
            spec = replace(spec, num_nodes=num_nodes, rendezvous=address)
        starts = [
            self._call(index, node, EngineHost.start, replace(spec, node=node), timeout_s=deadline_s)
            for node in range(num_nodes)
        ]
        try:
            endpoints = await asyncio.gather(*starts)
        except MegarlError:
            # The processes of the other nodes would wait for the one that failed.
            await self.end(index)
            raise
        return _one_endpoint(endpoints)

    async def adopt(self, index: int, adoption: Adoption) -> EngineEndpoint | None:
        """Take over an engine that an earlier driver left; return None if there is none, or none that can be used."""
        nodes = range(len(self._places[index]))
        left = {(index, node): adoption.actors.take(f"engine-{index}-{node}") for node in nodes}
        self._hosts |= {key: host for key, host in left.items() if host is not None}
        if not any(left.values()):
            return None

        async def find_endpoint() -> EngineEndpoint:
            endpoints = [self._call(index, node, EngineHost.serving, timeout_s=adoption.timeout_s) for node in nodes]
            return _one_endpoint(await asyncio.gather(*endpoints))

        endpoint = await adoption.take_over(index, find_endpoint)
        if endpoint is None:
            await self.end(index)
        return endpoint

    async def wait_end(self, index: int) -> str:
        """Wait for the end of a process of an engine or of its host; return the reason."""
        waits = [asyncio.create_task(self._wait_node(index, node)) for node in range(len(self._places[index]))]
        try:
            done, _ = await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
            return done.pop().result()
        finally:
            for wait in waits:
                wait.cancel()

    async def _wait_node(self, index: int, node: int) -> str:
        try:
            reason = await self._call(index, node, EngineHost.wait_end, timeout_s=None)
        except EngineError as error:
            return str(error)
        return f"node {node}: {reason}" if len(self._places[index]) > 1 else reason

    async def end(self, index: int) -> None:
        """End an engine at once, in any state."""
        await asyncio.gather(*(self._end_node(*key) for key in list(self._hosts) if key[0] == index))

    async def _end_node(self, index: int, node: int) -> None:
        try:
            await self._call(index, node, EngineHost.stop, timeout_s=_STOP_TIMEOUT_S)
        except EngineError:
            # A host that cannot end its engine is killed; the engine ends with it.
            host = self._hosts.pop((index, node), None)
            if host is not None:
                ray.kill(host)

    async def leave(self, index: int) -> None:
        """End an engine together with its hosts: it starts in other places."""
        await self.end(index)
        for key in [key for key in self._hosts if key[0] == index]:
            ray.kill(self._hosts.pop(key))

    async def stop(self) -> None:
        """Stop all engines, unless another driver has them."""
        if not await asyncio.to_thread(is_held, self._run_folder):
            return
        calls = [self._call(*key, EngineHost.stop, timeout_s=_STOP_TIMEOUT_S) for key in self._hosts]
        outcomes = await asyncio.gather(*calls, return_exceptions=True)
        for outcome in outcomes:
            if isinstance(outcome, BaseException) and not isinstance(outcome, EngineError):
                raise outcome
        for host in self._hosts.values():
            ray.kill(host)

    async def _call(
        self,
        index: int,
        node: int,
        method: Callable[[EngineHost, int, *Arguments], Coroutine[None, None, Result]],
        *arguments: *Arguments,
        timeout_s: float | None,
    ) -> Result:
        name = method.__name__
        host = self._hosts.get((index, node))
        if host is None:
            raise EngineError(f"engine {index}: its host process is gone")
        reference = getattr(host, name).remote(self._token, *arguments)
        try:
            async with asyncio.timeout(timeout_s):
                result: Result = await reference
                return result
        except TimeoutError:
            raise EngineError(f"engine {index}: {name} did not finish within {timeout_s:.0f} s") from None
        except ray.exceptions.RayTaskError as error:
            if isinstance(error.cause, MegarlError):
                raise error.cause from None
            raise EngineError(f"engine {index}: {name} failed: {error.cause}") from error
        except (ray.exceptions.RayActorError, ray.exceptions.OutOfMemoryError) as error:
            self._hosts.pop((index, node), None)
            raise EngineError(f"engine {index}: its host process died during {name}: {exit_detail(error)}") from error


async def with_free_ports(start: Callable[[], Awaitable[Result]]) -> Result:
    """Start something; if another process took one of its ports meanwhile, it is tried again with others."""
    for _ in range(_MAX_STARTS - 1):
        try:
            return await start()
        except PortTakenError:
            continue
    return await start()


def on_nodes(places: Sequence[Place]) -> list[list[Place]]:
    """Return the places of one engine by node. Nodes have equal parts, in the order of the TP ranks."""
    nodes = [list(of_node) for _, of_node in groupby(places, key=lambda place: place.node)]
    sizes = {of_node[0].node: len(of_node) for of_node in nodes}
    assert len(sizes) == len(nodes), f"TP ranks alternate between {[place.node for place in places]}"
    assert len(set(sizes.values())) == 1, f"unequal parts of an engine: {sizes}"
    return nodes


async def start_engines(
    specs: Sequence[EngineSpec], places: Sequence[Place], *, gpu_fraction: float, adoption: Adoption | None = None
) -> tuple[Engines, list[EngineEndpoint]]:
    """Adopt or start one engine per spec, each on the next `tensor` places; returns when all of them generate."""
    tensor = len(places) // len(specs)
    actors = AdoptableActors(outlive_driver=False) if adoption is None else adoption.actors
    of_engines = [places[index * tensor :][:tensor] for index in range(len(specs))]
    engines = Engines(specs, of_engines, gpu_fraction=gpu_fraction, actors=actors)

    async def started(index: int) -> EngineEndpoint:
        adopted = None if adoption is None else await engines.adopt(index, adoption)
        return adopted or await engines.start(index)

    endpoints = await asyncio.gather(*(started(index) for index in range(len(specs))))
    return engines, endpoints


def _one_endpoint(endpoints: Sequence[EngineEndpoint]) -> EngineEndpoint:
    """Return the endpoint of an engine from those of its nodes: it answers at the first."""
    first, hosts = endpoints[0], tuple(endpoint.host for endpoint in endpoints)
    return first if len(endpoints) == 1 else replace(first, node_hosts=hosts)


def _environment(places: Sequence[Place]) -> dict[str, str]:
    """Let an engine see all its GPUs of a node. Its host is placed on the first one."""
    gpus = [str(place.gpu) for place in places if place.gpu is not None]
    return {**ENGINE_HOST_ENVIRONMENT, **(visible_gpus(gpus) if gpus else {})}


class Adoption:
    """The adoption of the engines that an earlier driver left. Each is adopted, or started again."""

    def __init__(
        self,
        actors: AdoptableActors,
        config: RolloutRoleConfig,
        num_engines: int,
        *,
        is_possible: bool,
        noted: Callable[[str], None],
    ) -> None:
        """`is_possible` is False in pools of GPUs that trainers share: no call tells which memory an engine gave up."""
        self.actors = actors
        self.timeout_s = config.silence_timeout_s
        self._num_engines = num_engines
        self._is_possible = is_possible
        self._noted = noted
        numbers = {name: int(name.split("-")[1]) for name in actors.left if name.startswith("engine-")}
        for name in [name for name, number in numbers.items() if number >= num_engines]:
            ray.kill(actors.left.pop(name))  # the operator had added it
        self._num_left = len({number for number in numbers.values() if number < num_engines})
        self._outcomes: list[bool] = []

    async def take_over(
        self, index: int, find_endpoint: Callable[[], Awaitable[EngineEndpoint]]
    ) -> EngineEndpoint | None:
        """Bring the engine at an endpoint into a known state; return None if it cannot be used."""
        endpoint = None
        try:
            if not self._is_possible:
                raise EngineError(f"engine {index}: it may have given up memory to trainers of its GPUs")
            endpoint = await find_endpoint()
            version = await take_over(endpoint, timeout_s=self.timeout_s)
            logger.info("adopted engine=%d version=%s address=%s:%d", index, version, endpoint.host, endpoint.port)
        except EngineError as error:
            endpoint = None
            logger.warning("engine=%d is not adopted, but started again: %s", index, error)
        self._outcomes.append(endpoint is not None)
        if len(self._outcomes) == self._num_left:
            self._noted(f"adopted {sum(self._outcomes)} engines of {self._num_engines}")
        return endpoint


async def take_over(endpoint: EngineEndpoint, *, timeout_s: float) -> str:
    """Bring an engine that another driver left into a known state; return the version that it reports.

    Its requests are aborted, an update that was left open is closed, a pause is ended, and its adapters are forgotten.
    Its weights may be of two versions: it gets no request before a publish.
    """
    client = EngineClient(endpoint, request_timeout_s=timeout_s)
    try:
        version = await client.probe(timeout_s=timeout_s)
        await admin.abort_all(client)
        with suppress(EngineError):  # without an open update SGLang refuses, and nothing changes
            await client.control("end weight update", "/end_weight_update", {})
        await admin.resume(client)
        await admin.unload_all_adapters(client, timeout_s=timeout_s)
        return version
    finally:
        await client.close()
