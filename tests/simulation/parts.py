"""Stand-ins for the parts around drivers: engines that answer with the hash of their weights, the Ray of the world,
and a process of the world for each transfer of a mirror.
"""

from __future__ import annotations

import asyncio
import inspect
import signal
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import ExitStack, asynccontextmanager, contextmanager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast
from unittest import mock

import fsspec
import safetensors.numpy

from megarl.checkpoint import carried, manifest, mirror, mirror_owner, store
from megarl.cluster import cluster, leases, worker_group
from megarl.observe.observer import Observer
from megarl.ranks import rank_process, watched_ranks
from megarl.ranks import ranks as rank_hosts
from megarl.ranks import start as rank_starts
from megarl.ranks.calls import ActorCalls
from megarl.ranks.start import Trainers
from megarl.results import PublishResult, UpdateResult
from megarl.rollout.task import AnsweredPrompt, RolloutTask
from megarl.run import begin, build, launch, preemption, rank_sets
from megarl.run import run as run_module
from megarl.run.build import LoopBuilder
from megarl.run.saver import RunSaver
from megarl.serving.connect import Roles
from megarl.stages import SeparatePhases
from megarl.system import lease, run_lock
from megarl.types import ONE_POLICY, Estimates, PolicyVersion, Prompt, ScoredGroup, TrainSample
from tests.simulation.actors import START_STATE, IntegerRank, SimulatedRay
from tests.simulation.disk import SHARED, disk_of_caller
from tests.simulation.drivers import observing_driver
from tests.simulation.sample_run import answer_of, batch_of
from tests.simulation.seams import THREADING, PerProcess, PerProcessList, SerialPool, clocks_of
from tests.simulation.store import StoreFiles
from tests.simulation.world import Process, WorldLoop, calling_process, current_process

STILL_S = 20.0
"""The time after which a silent driver counts as gone; shorter than the real one, so that histories are short."""
_ANSWER_S = 1.0
_Replacement = tuple[object, str, object]


@dataclass
class Engines:
    """Stands for the serving side of a driver: they serve what was published last."""

    weights: str = START_STATE
    version: PolicyVersion = field(default_factory=lambda: PolicyVersion(0))

    def committed_version(self, _policy: str = ONE_POLICY) -> PolicyVersion:
        return self.version

    @property
    def fleet(self) -> Engines:
        return self

    @property
    def engines(self) -> list[Any]:
        return [SimpleNamespace(is_live=True)]

    async def answer(self, prompt: Prompt, task: RolloutTask) -> AnsweredPrompt:
        weights, version = self.weights, self.version
        await asyncio.sleep(_ANSWER_S * calling_process().world.random.random())
        return AnsweredPrompt(scored=answer_of(prompt, weights, version), seconds=1.0)

    async def announce(self) -> None:
        pass

    async def lost(self, groups: Sequence[ScoredGroup]) -> list[int]:
        return []


@dataclass
class Publishing:
    trainers: Trainers
    engines: Engines

    async def publish(self, version: PolicyVersion) -> PublishResult:
        weights: str = await self.trainers.actor.compute(cast("Any", IntegerRank.weights))
        self.engines.weights, self.engines.version = weights, version
        return PublishResult(version=version, num_bytes=1, busiest_bytes=1, floor_bytes=1, seconds=0.0, num_engines=1)


@dataclass
class Training:
    """The loop's Trainer: the ranks get the hash of the samples."""

    trainers: Trainers

    async def estimate(self, groups: Sequence[ScoredGroup]) -> Estimates:
        return Estimates()

    async def update(self, samples: Sequence[TrainSample]) -> UpdateResult:
        batch = batch_of((sample.prompt_ids, sample.rollout) for sample in samples)
        return await self.trainers.actor.compute(ActorCalls.update, cast("Any", batch))


class WorldLoopBuilder(LoopBuilder):
    def _models(self, algorithm: object) -> Any:
        return Training(self.roles.trainers)

    def _trainer(self, models: Any) -> Any:
        return models


@contextmanager
def _joined(address: str, *, namespace: str | None = None, **_: object) -> Iterator[None]:
    calling_process().values["namespace"] = namespace
    yield


def _reserve_pools(opened: cluster.Cluster, *_: object) -> dict[str, Any]:
    place = SimpleNamespace(options=lambda *_, **__: {}, node="ray")
    pool = cluster.Pool([cast("Any", place)] * 2, 1, opened.actors, has_ranks=True)
    return {"train": pool, "rollout": pool}


async def _connect(_roles: object, trainers: Trainers, serving: Engines, _stack: object, **_: object) -> Roles:
    return Roles(
        trainers=trainers,
        serving=cast("Any", serving),
        publisher=cast("Any", Publishing(trainers, serving)),
        phases=SeparatePhases(),
    )


async def _engines(*_: object, **__: object) -> Engines:
    process = calling_process()
    engines: Engines = process.values.setdefault("engines", Engines())
    return engines


async def _nothing(*_: object, **__: object) -> None:
    return None


async def _no_frozen(*_: object, **__: object) -> dict[str, Any]:
    return {}


@asynccontextmanager
async def _unwatched(*_: object, **__: object) -> AsyncIterator[None]:
    yield


async def _end(where: Any, *, grace_s: float, timeout_s: float) -> bool:
    """End a rank's process, as a signal on its node does."""
    caller = calling_process()
    caller.values["cluster"].ended_by_caller(caller.world.processes[where.pid])
    caller.world.processes[where.pid].kill()
    return True


def _this_process() -> Any:
    process = calling_process()
    return SimpleNamespace(node="ray", pid=process.world.processes.index(process), started=0)


def _build_rank(spec: Any, *, origin: Any, **_: object) -> IntegerRank:
    rank = IntegerRank(spec)
    origin.fill(rank)
    return rank


def _run_transfer(self: mirror.Transfer) -> None:
    """Run the process of a transfer in the world; a stopped one is killed."""
    parent = calling_process()
    world = parent.world
    child = Process(world, f"{parent.name}:{self.words[0]}", host=parent.host, parent=parent)
    child.values.update({key: parent.values[key] for key in ("disk", "store")})
    child.values["transfer"] = self
    codes: list[int] = []
    errors: list[str] = []

    def work() -> None:
        try:
            codes.append(mirror.main(self.words))
        except Exception as error:  # noqa: BLE001 - as a process that prints its traceback ends
            errors.append(f"{type(error).__name__}: {error}")
            codes.append(1)

    thread = child.spawn(work)
    while not thread.is_done and child.is_alive:
        if self.is_stopped.is_set():
            child.kill()
            self.problem, self.code = "stopped", -1
            return
        world.pause(0.2)
    self.code = codes[0] if codes else -9
    if self.code:
        self.problem = errors[0] if errors else self._last or f"exit code {self.code}"


def _print_line(*words: object) -> None:
    transfer: mirror.Transfer = calling_process().values["transfer"]
    transfer._take(" ".join(map(str, words)))


def _asyncio_run(real: Callable[..., Any]) -> Callable[..., Any]:
    def run(main: Any, **named: Any) -> Any:
        process = current_process()
        if process is None:
            return real(main, **named)
        return WorldLoop(process).run(lambda: main)

    return run


@contextmanager
def _preemptible(*, grace_s: float, run_folder: Path) -> Iterator[preemption.Preemption]:
    """Do as the package's, which gets no signals outside the main thread; they come from the world."""
    process, loop = calling_process(), asyncio.get_running_loop()
    with preemption.preemptible(grace_s=grace_s, run_folder=run_folder) as preempted:

        def receive(number: int) -> None:
            loop.call_soon_threadsafe(preempted.request, signal.Signals(number))

        process.on_signal = receive
        try:
            yield preempted
        finally:
            process.on_signal = None


class _Stderr:
    """Takes the last line of a transfer's process."""

    def write(self, text: str) -> int:
        process = current_process()
        transfer = None if process is None else process.values.get("transfer")
        if transfer is not None and text.strip():
            transfer._last = text.strip()
        return len(text)

    def flush(self) -> None:
        pass


def _boot_id() -> str:
    return f"boot of {calling_process().host}"


def replacements() -> list[_Replacement]:
    """Return what the modules of the package see in place of the machine and of other packages."""
    silent = SimpleNamespace(is_set=True)
    names: list[_Replacement] = [
        (module, "threading", THREADING) for module in (run_lock, lease, leases, rank_process, mirror)
    ]
    names += [(module, "ThreadPoolExecutor", SerialPool) for module in (manifest, mirror)]
    names += [(run_lock, "_held", PerProcess("held")), (run_lock, "boot_id", _boot_id), (lease, "boot_id", _boot_id)]
    names += [(run_lock, "_is_of_one_machine", _is_of_one_machine)]
    names += [(preemption, name, PerProcessList(name)) for name in ("_asked", "_interrupts")]
    names += [(mirror.Transfer, "run", _run_transfer), (mirror, "print_line", _print_line)]
    names += [(store, "print_line", _print_line)]
    names += [(module, "secrets", SimpleNamespace(token_hex=_token)) for module in (run_lock, mirror_owner)]
    names += [(mirror, "sys", SimpleNamespace(stderr=_Stderr()))]
    names += [(begin, "observing", observing_driver), (begin, "checked_resume_point", lambda point, **_: point)]
    names += [(launch, "ray_environment", lambda *_: nullcontext())]
    names += [(run_module, "accelerators", list), (run_module, "gpu_of", lambda *_: None)]
    names += [(run_module, "other_gpu", lambda *_: None), (run_module, "_limited", lambda recipe, *_: recipe)]
    names += [(run_module, "planned", lambda recipe, _: recipe)]
    names += [(run_module, "reserve_pools", _reserve_pools), (run_module, "watched_gpus", _unwatched)]
    names += [(run_module, "start_frozen", _no_frozen), (run_module, "_start_serving", _engines)]
    names += [(run_module, "start_workers", _engines), (run_module, "preemptible", _preemptible)]
    names += [(rank_sets, "wait_for_nodes", _nothing), (rank_sets, "make_room", _nothing)]
    names += [(rank_sets, "sleeping_beside_trainers", _nothing), (rank_sets, "connect", _connect)]
    names += [(rank_sets, "LoopBuilder", WorldLoopBuilder), (rank_sets, "watched_ranks", _unwatched)]
    names += [(rank_sets, "RankNodes", lambda *_, **__: SimpleNamespace(note=_ignore, leave_excluded=_ignore))]
    names += [(rank_sets, "gc", SimpleNamespace(freeze=_ignore, set_threshold=_ignore))]
    names += [(build, "publisher_of", lambda roles, *_: roles.publisher)]
    names += [(cluster, "joined", _joined), (leases, "placement_group_table", dict)]
    names += [(rank_starts, "_build_actor", _build_rank), (rank_process, "_log_to", _ignore)]
    names += [(watched_ranks, "end", _end), (rank_process, "this_process", _this_process)]
    names += [(rank_process, "own_address", lambda _: "ray"), (rank_process, "interface_of", lambda _: None)]
    names += [
        (rank_process, "process_began", lambda: 0.0),
        (rank_process, "NCCL_VARIABLES", ()),
        (rank_process, "FLIGHT_RECORDER", silent),
    ]
    names += [(rank_hosts.RankHost, "find_address", lambda _self: ("ray", 1))]
    names += [(rank_hosts.RankGroup, "_explain", worker_group.WorkerGroup._explain)]
    # Waits that are polled are polled less often, and nobody reads the summary of a step.
    names += [(leases, "_POLL_S", 2.0), (Observer, "step_finished", _ignore), (leases, "uuid4", _number)]
    names += [(carried, "uuid4", _number), (carried, "load_file", _load_file)]
    names += [(asyncio, "run", _asyncio_run(asyncio.run))]
    return names


def _ignore(*_: object, **__: object) -> None:
    pass


def _token(_num_bytes: int = 4) -> str:
    return f"{calling_process().world.count():08x}"


def _number() -> Any:
    return SimpleNamespace(hex=_token())


def _load_file(path: Path) -> Any:
    """Read tensors through the disk of the world: the library opens files by itself."""
    return safetensors.numpy.load(path.read_bytes())


def _is_of_one_machine(_path: Path) -> bool:
    return bool(disk_of_caller().name != SHARED)


class _RayOfCaller:
    """The Ray that the calling process has joined."""

    exceptions = SimulatedRay.exceptions
    ObjectRef = object

    def __getattr__(self, name: str) -> Any:
        return getattr(calling_process().values["cluster"], name)


@contextmanager
def simulated_parts() -> Iterator[None]:
    """Let the package run in worlds."""
    fsspec.register_implementation("sim", StoreFiles, clobber=True)
    caller = _RayOfCaller()
    with ExitStack() as stack:
        for module in (rank_hosts, rank_process, watched_ranks, rank_starts, leases, worker_group, cluster):
            stack.enter_context(mock.patch.object(module, "ray", caller))
        for place, name, value in replacements():
            stack.enter_context(mock.patch.object(place, name, value))
        for clock in clocks_of(RunSaver.__init__):
            stack.enter_context(clock)
        stack.enter_context(mock.patch.dict(inspect.unwrap(run_lock.run_lock).__kwdefaults__, {"still_s": STILL_S}))
        yield
