"""A Ray of the world: actors are processes, calls are messages that may be late, and names outlive drivers.

The ranks behind the package's own `RankHost` are integers: a state is the hash of the state before and of its batch.
"""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import ray.exceptions

from megarl.checkpoint.manifest import Contents, FileDigest, digest_file, sync
from megarl.checkpoint.resume import TrainerState
from megarl.errors import CheckpointError, DamagedError
from megarl.results import MonitorState, UpdateResult
from megarl.train.rank_spec import RankSpec
from megarl.types import PolicyVersion
from tests.simulation.seams import WorldEvent
from tests.simulation.world import Process, World, calling_process, current_thread

_DELAY_S = 0.004
STEP_S = 2.0
"""The most that an update takes."""
START_STATE = "0" * 16


class Reference:
    """The result of a call, which may still be under way."""

    def __init__(self, world: World) -> None:
        self._world = world
        self.is_done = False
        self._result: Any = None
        self._error: BaseException | None = None
        self._waiting: list[tuple[asyncio.AbstractEventLoop, asyncio.Future[Any]]] = []
        self._event = WorldEvent()

    def settle(self, result: Any, error: BaseException | None) -> None:
        if self.is_done:
            return
        self.is_done, self._result, self._error = True, result, error
        self._event.set()
        for loop, future in self._waiting:
            if not loop.is_closed():
                loop.call_soon_threadsafe(self._pass_on, future)

    def _pass_on(self, future: asyncio.Future[Any]) -> None:
        if future.done():
            return
        if self._error is None:
            future.set_result(self._result)
        else:
            future.set_exception(self._error)

    def __await__(self) -> Generator[Any, None, Any]:
        loop = asyncio.get_running_loop()
        future = loop.create_future()
        if self.is_done:
            self._pass_on(future)
        else:
            self._waiting.append((loop, future))
        return future.__await__()

    def get(self, timeout: float | None) -> Any:
        if not self._event.wait(timeout):
            raise ray.exceptions.GetTimeoutError("no answer in time")
        if self._error is not None:
            raise self._error
        return self._result


@dataclass(frozen=True)
class Stored:
    value: Any


@dataclass(eq=False)
class Actor:
    """An object in a process of its own."""

    name: str
    namespace: str
    process: Process
    target: Any = None
    open_calls: list[Reference] = field(default_factory=list)
    queues: dict[str, list[Callable[[], None]]] = field(default_factory=dict)
    arrivals: dict[str, WorldEvent] = field(default_factory=dict)

    def enqueue(self, group: str, call: Callable[[], None]) -> None:
        """Run a call after the earlier ones of its group; those of `always` run at once."""
        if group == "always":
            self.process.spawn(call, group)
            return
        if group not in self.queues:
            self.queues[group], self.arrivals[group] = [], WorldEvent()
            self.process.spawn(lambda: self._serve(group), group)
        self.queues[group].append(call)
        self.arrivals[group].set()

    def _serve(self, group: str) -> None:
        while True:
            while not self.queues[group]:
                self.arrivals[group].clear()
                self.arrivals[group].wait()
            self.queues[group].pop(0)()


class Handle:
    def __init__(self, cluster: SimulatedRay, actor: Actor) -> None:
        self._cluster, self._actor = cluster, actor
        self._actor_id = SimpleNamespace(hex=lambda: actor.process.name)

    def __getattr__(self, name: str) -> Method:
        if name.startswith("_"):
            raise AttributeError(name)
        return Method(self._cluster, self._actor, name)


class Method:
    def __init__(self, cluster: SimulatedRay, actor: Actor, name: str, group: str | None = None) -> None:
        self._cluster, self._actor, self._name, self._group = cluster, actor, name, group

    def options(self, *, concurrency_group: str | None = None, name: str = "") -> Method:
        return Method(self._cluster, self._actor, self._name, concurrency_group)

    def remote(self, *arguments: Any, **named: Any) -> Reference:
        return self._cluster.send(self._actor, self._name, self._group, arguments, named)


class SimulatedRay:
    """Stands for the module `ray` in those of the package."""

    exceptions = ray.exceptions
    method = staticmethod(ray.method)
    ObjectRef = Reference

    def __init__(self, world: World, *, host: str = "ray") -> None:
        self.world, self.host = world, host
        self.actors: list[Actor] = []
        self.longest_delay_s = _DELAY_S
        """Delay of some messages."""
        self.executed: list[tuple[str, str, int]] = []
        """Changes of ranks: process, method, and the token of the driver that asked."""
        self.drivers: dict[tuple[str, int], set[str]] = {}
        """The drivers that changed ranks, by lock and token."""
        self.foreign: list[str] = []
        """Processes that were ended by another run, or by a driver that has lost its run."""
        self._arrivals: dict[tuple[int, int], float] = {}
        self.util = SimpleNamespace(
            list_named_actors=lambda: [actor.name for actor in self._of_namespace()],
            get_node_ip_address=lambda: self.host,
        )

    def put(self, value: Any) -> Stored:
        return Stored(value)

    def get(self, reference: Any, timeout: float | None = None) -> Any:
        if isinstance(reference, list):
            return [self.get(each, timeout) for each in reference]
        return reference.value if isinstance(reference, Stored) else reference.get(timeout)

    def remote(self, target: Any = None, **_options: object) -> Any:
        if target is None:
            return lambda named: self.remote(named)

        def options(**chosen: Any) -> SimpleNamespace:
            return SimpleNamespace(remote=lambda *arguments: self._start(target, chosen, arguments))

        return SimpleNamespace(options=options, remote=options().remote)

    def _start(self, target: type, options: dict[str, Any], arguments: Sequence[Any]) -> Handle:
        owner = calling_process()
        is_detached = options.get("lifetime") == "detached"
        process = Process(
            self.world,
            f"{target.__name__}#{self.world.count()}",
            host=self.host,
            parent=None if is_detached else owner,
        )
        for key in ("disk", "store", "namespace", "cluster", "run"):
            process.values[key] = owner.values.get(key)
        namespace = str(owner.values.get("namespace"))
        actor = Actor(str(options.get("name", process.name)), namespace, process)
        process.values["actor"] = actor
        self.actors.append(actor)
        process.at_death.append(lambda: self._died(actor))
        made = Reference(self.world)
        actor.open_calls.append(made)

        def make() -> None:
            self.world.pause(self.world.random.random())
            actor.target = target(*arguments)
            made.settle(None, None)

        actor.enqueue("", make)
        return Handle(self, actor)

    def _died(self, actor: Actor) -> None:
        error = ray.exceptions.ActorDiedError()
        calls, actor.open_calls = actor.open_calls, []
        for call in calls:
            self.world.push(self.world.now + self._delay(), lambda call=call: call.settle(None, error))  # type: ignore[misc]

    def kill(self, handle: Handle, *, no_restart: bool = True) -> None:
        calling_process()
        self.ended_by_caller(handle._actor.process)
        self.world.push(self.world.now + self._delay(), handle._actor.process.kill)

    def ended_by_caller(self, process: Process) -> None:
        """Note who ends a process: the run that asked for it."""
        thread = current_thread()
        assert thread is not None
        run = thread.values.get("run", thread.process.values["run"])
        if not process.is_alive:
            return
        if process.values["run"] is not run:
            self.foreign.append(f"runs are apart: {process.name} of {process.values['run'].name} ended by {run.name}")
        token, newest = thread.values.get("token", token_of(thread.process)), process.values.get("newest_token", 0)
        if 0 < token < newest:
            text = f"{process.name} ended by a driver of token {token}, it obeys {newest}"
            self.foreign.append(f"rising tokens: {text}")

    def get_actor(self, name: str) -> Handle:
        for actor in self._of_namespace():
            if actor.name == name:
                return Handle(self, actor)
        raise ValueError(name)

    def get_runtime_context(self) -> Any:
        process = calling_process()
        actor: Actor = process.values["actor"]
        return SimpleNamespace(
            get_actor_id=lambda: process.name,
            get_node_id=lambda: self.host,
            current_actor=Handle(self, actor),
        )

    def _of_namespace(self) -> list[Actor]:
        namespace = str(calling_process().values.get("namespace"))
        return [actor for actor in self.actors if actor.process.is_alive and actor.namespace == namespace]

    def _delay(self) -> float:
        chance = self.world.random.random()
        return self.longest_delay_s * self.world.random.random() if chance < 0.05 else _DELAY_S * chance

    def send(
        self, actor: Actor, method: str, group: str | None, arguments: Sequence[Any], named: dict[str, Any]
    ) -> Reference:
        """Send a call; those of one caller arrive in order."""
        caller = calling_process()
        reference = Reference(self.world)
        key = (caller.pid, actor.process.pid)
        arrival = max(self.world.now + self._delay(), self._arrivals.get(key, 0.0))
        self._arrivals[key] = arrival
        unpacked = [each.value if isinstance(each, Stored) else each for each in arguments]
        by_name = {name: each.value if isinstance(each, Stored) else each for name, each in named.items()}
        token = token_of(caller)

        def call() -> None:
            thread = current_thread()
            assert thread is not None
            thread.values.update(token=token, run=caller.values["run"], driver=caller)
            found = getattr(actor.target, method)
            try:
                outcome = found(*unpacked, **by_name), None
            except Exception as error:  # noqa: BLE001 - sent back
                outcome = None, _failure(method, error)
            if reference in actor.open_calls:
                actor.open_calls.remove(reference)
            self.world.push(self.world.now + self._delay(), lambda: reference.settle(*outcome))

        def arrive() -> None:
            if not actor.process.is_alive:
                reference.settle(None, ray.exceptions.ActorDiedError())
                return
            actor.open_calls.append(reference)
            declared = getattr(_method_of(actor, method), "__ray_concurrency_group__", "")
            actor.enqueue(group or declared or "", call)

        self.world.push(arrival, arrive)
        return reference


def token_of(process: Process) -> int:
    """Return the token of the lock that a driver holds, or held last."""
    for lock in process.values.get("held", {}).values():
        process.values["token"] = lock.holder.token
    return int(process.values.get("token", 0))


def _method_of(actor: Actor, method: str) -> object:
    return getattr(type(actor.target), method, None)


def _failure(method: str, error: Exception) -> ray.exceptions.RayTaskError:
    return ray.exceptions.RayTaskError(method, f"{type(error).__name__}: {error}", error, "rank", 1, "ray")


def next_state(state: str, batch: str) -> str:
    return hashlib.blake2b(f"{state} {batch}".encode(), digest_size=8).hexdigest()


class IntegerRank:
    """A rank of the actor (`ranks.calls.ActorCalls`) whose weights are one hash."""

    def __init__(self, spec: RankSpec) -> None:
        self._rank = spec.rank
        self._weights, self._num_steps = START_STATE, 0
        self._copy: tuple[str, TrainerState] | None = None
        self._process = calling_process()
        self._cluster: SimulatedRay = self._process.values["cluster"]

    @property
    def state(self) -> TrainerState:
        """The state, which a driver asks for that adopts the rank."""
        self._changed("state")
        return self._state()

    def _state(self) -> TrainerState:
        return TrainerState(num_steps=self._num_steps, num_updates=self._num_steps, monitor=MonitorState())

    def load(self, folder: Path) -> None:
        self._changed("load")
        self._weights, self._num_steps = START_STATE, 0

    def _file(self, folder: Path) -> Path:
        return folder / "model" / f"rank_{self._rank}"

    def verify(self, checkpoint: Path, inner: str) -> None:
        try:
            if len(self._file(checkpoint / inner).read_text()) != len(START_STATE):
                raise DamagedError(f"{checkpoint}: damaged")
        except OSError as error:
            raise CheckpointError(f"{checkpoint}: cannot be read: {error}") from error

    def resume(self, folder: Path, state: TrainerState) -> None:
        self._changed("resume")
        try:
            self._weights, self._num_steps = self._file(folder).read_text(), state.num_steps
        except OSError as error:
            raise CheckpointError(f"{folder}: cannot be read: {error}") from error

    def snapshot(self, contents: Contents) -> TrainerState:
        self._copy = self._weights, self._state()
        return self._state()

    def write(self, folder: Path, source_folder: Path) -> dict[str, FileDigest]:
        assert self._copy is not None, "snapshot comes first"
        path = self._file(folder)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(self._copy[0])
        sync(path)
        return {path.relative_to(folder).as_posix(): digest_file(path)}

    def version(self) -> int:
        return self._num_steps

    def weights(self) -> str:
        return self._weights

    def update(self, batch: str) -> UpdateResult:
        self._changed("update")
        self._process.world.pause(STEP_S * self._process.world.random.random())
        self._weights, self._num_steps = next_state(self._weights, batch), self._num_steps + 1
        return UpdateResult(version=PolicyVersion(self._num_steps), stats=None)

    def _changed(self, method: str) -> None:
        thread = current_thread()
        assert thread is not None
        values, token = self._process.values, thread.values.get("token", 0)
        values["newest_token"] = max(token, values.get("newest_token", 0))
        self._cluster.executed.append((self._process.name, method, token))
        driver: Process | None = thread.values.get("driver")
        if driver is not None:
            # A lock that was lost with its disk begins anew.
            lock = f"{driver.values['run'].name} {driver.values['disk'].num_losses}"
            self._cluster.drivers.setdefault((lock, token), set()).add(driver.name)
