"""Two real engines under a real supervisor; trainer ranks are threads of the test that hold weights from a folder."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from safetensors.torch import load_file

from megarl.engine.client import EngineClient, EngineEndpoint, EngineKeys
from megarl.engine.commands import Rendezvous
from megarl.engine.fleet import Engine, Fleet
from megarl.engine.lifecycle import RestartPolicy
from megarl.engine.process import EngineProcess
from megarl.engine.tool_commands import ToolControl
from megarl.families.shape import ModelShape
from megarl.serving.processes import Engines
from megarl.serving.publisher import TransferPublisher
from megarl.serving.supervisor import Supervisor
from megarl.system.network import LOOPBACK
from megarl.types import PolicyVersion
from megarl.weights.executors.digest import fastest_digest
from megarl.weights.executors.group import TransferGroup
from megarl.weights.executors.transfer import Sender
from megarl.weights.layouts.megatron import MegatronParallel
from megarl.weights.layouts.transfer_spec import TransferSpec
from tests.engine.engines import COMMAND_TIMEOUT_S, REQUEST_TIMEOUT_S, engine_spec
from tests.ranks.local_ranks import LocalRanks
from tests.tiny_models import write_tiny_model
from tests.weights.transfer_peers import cut

SILENCE_TIMEOUT_S = 6.0
START_TIMEOUT_S = 900.0
_SPLIT = MegatronParallel(tensor=2)


class LocalProcesses(Engines):
    """Engines as children of the test."""

    def __init__(self, folder: Path, model: Path, num_engines: int) -> None:
        spec = replace(engine_spec(model, folder), keys=EngineKeys.fresh())
        self._specs = [replace(spec, index=index) for index in range(num_engines)]
        self.running: dict[int, EngineProcess] = {}

    async def start(self, index: int) -> EngineEndpoint:
        process = EngineProcess(self._specs[index])
        self.running[index] = process
        process.start()
        try:
            await process.wait_ready()
        except BaseException:
            # A test that ends meanwhile leaves no half-started engine to the next one.
            process.stop()
            raise
        return process.endpoint

    async def start_missing(self) -> None:
        """All that do not run."""
        missing = [
            index
            for index in range(len(self._specs))
            if index not in self.running or self.running[index].exit_code is not None
        ]
        await asyncio.gather(*(self.start(index) for index in missing))

    def has_nodes(self, index: int) -> bool:
        return True

    async def wait_end(self, index: int) -> str:
        return await self.running[index].wait_end()

    async def end(self, index: int) -> None:
        await asyncio.to_thread(self.running[index].stop)

    def signal(self, index: int, number: signal.Signals) -> None:
        """To everything an engine consists of."""
        os.killpg(self.running[index].pid, number)

    def stop_all(self) -> None:
        for process in self.running.values():
            process.stop()


class ThreadRanks:
    """The actor's ranks as the publisher sees them; version v is whatever `folders[v]` holds."""

    def __init__(self, folders: dict[int, Path]) -> None:
        self.held = min(folders)
        self._folders = folders
        self._senders: list[Sender] = []
        self._tensors: list[dict[str, torch.Tensor]] = []
        self._groups: list[TransferGroup] = []
        self.before_send: Callable[[], Awaitable[None]] | None = None

    async def version(self) -> int:
        return self.held

    async def join(self, transfer: TransferSpec, rendezvous: Rendezvous) -> None:
        self.close()
        plan = transfer.plan()
        tensors = load_file(self._folders[self.held] / "model.safetensors")

        def join_rank(rank: int) -> TransferGroup:
            return TransferGroup.join(
                rendezvous.address,
                name=rendezvous.name,
                peer=rank,
                num_peers=transfer.num_peers,
                timeout_s=rendezvous.timeout_s,
            )

        world = transfer.parallel.world_size
        self._groups = list(await asyncio.gather(*(asyncio.to_thread(join_rank, rank) for rank in range(world))))
        self._layout = plan.source
        self._tensors = [cut(plan.source.by_rank[rank], tensors, padding=float("nan")) for rank in range(world)]
        self._senders = [
            Sender(
                plan,
                rank,
                self._tensors[rank],
                group,
                bucket_bytes=rendezvous.bucket_bytes,
                digest=fastest_digest(is_on_host=True),
            )
            for rank, group in enumerate(self._groups)
        ]

    async def send(self, version: int) -> list[dict[tuple[int, str], int]]:
        assert version == self.held, f"asked for {version}, there is {self.held}"
        if self.before_send is not None:
            await self.before_send()
        return list(await asyncio.gather(*(asyncio.to_thread(sender.send, version) for sender in self._senders)))

    def take(self, version: int) -> None:
        """Hold other weights, as after an update."""
        self.held = version
        tensors = load_file(self._folders[version] / "model.safetensors")
        for rank, held in enumerate(self._tensors):
            mine = cut(self._layout.by_rank[rank], tensors, padding=float("nan"))
            for name, tensor in held.items():
                with torch.no_grad():
                    tensor.copy_(mine[name])

    def close(self) -> None:
        for group in self._groups:
            group.close()
        self._groups, self._senders, self._tensors = [], [], []


@dataclass(frozen=True, kw_only=True)
class Scene:
    """What one test has of the engines that all tests of a module share."""

    processes: LocalProcesses
    fleet: Fleet
    supervisor: Supervisor
    publisher: TransferPublisher
    control: ToolControl
    ranks: ThreadRanks

    async def publish(self, version: int) -> None:
        self.ranks.take(version)
        await self.publisher.publish(PolicyVersion(version))

    async def until_live(self, index: int, timeout_s: float = START_TIMEOUT_S) -> Engine:
        engine = self.fleet.engines[index]
        async with asyncio.timeout(timeout_s):
            while not engine.is_live:
                await asyncio.sleep(0.05)
        return engine


@dataclass(frozen=True, kw_only=True)
class Duo:
    """Two engines and three sets of weights: versions 0 (what engines start with), 1 and 2."""

    processes: LocalProcesses
    folders: dict[int, Path]
    shape: ModelShape

    @asynccontextmanager
    async def scene(self, *, max_restarts: int = 2) -> AsyncIterator[Scene]:
        """Both engines running, whatever became of them before and whatever they serve."""
        await self.processes.start_missing()

        def connect(endpoint: EngineEndpoint) -> EngineClient:
            return EngineClient(endpoint, request_timeout_s=REQUEST_TIMEOUT_S)

        fleet = Fleet(
            [connect(process.endpoint) for _, process in sorted(self.processes.running.items())],
            max_outstanding=128,
            publish_timeout_s=START_TIMEOUT_S,
            policy=RestartPolicy(max_restarts=max_restarts, back_off_s=0.1, silence_timeout_s=SILENCE_TIMEOUT_S),
        )
        control = ToolControl(fleet, timeout_s=COMMAND_TIMEOUT_S)
        ranks = ThreadRanks(self.folders)
        publisher = TransferPublisher(
            ranks=LocalRanks(ranks),
            fleet=fleet,
            control=control,
            transfer=lambda: self._transfer,
            timeout_s=COMMAND_TIMEOUT_S,
            host=LOOPBACK,
        )
        supervisor = Supervisor(fleet, self.processes, connect=connect)
        supervisor.attach(publisher.catch_up)
        try:
            async with supervisor.running():
                await publisher.connect()
                yield Scene(
                    processes=self.processes,
                    fleet=fleet,
                    supervisor=supervisor,
                    publisher=publisher,
                    control=control,
                    ranks=ranks,
                )
        finally:
            ranks.close()
            await fleet.close()

    @property
    def _transfer(self) -> TransferSpec:
        return TransferSpec(
            shape=self.shape,
            parallel=_SPLIT,
            trainer_dtype="float32",
            num_engines=2,
            tensor=1,
            engine_dtype="float32",
            is_cpu_engine=True,
        )


@contextmanager
def open_duo(folder: Path) -> Iterator[Duo]:
    folders = {version: folder / f"model_{version}" for version in range(3)}
    for version, path in folders.items():
        shape = write_tiny_model(path, "qwen2", tied=False, layers=2, seed=version + 1)
    processes = LocalProcesses(folder / "run", folders[0], 2)
    try:
        yield Duo(processes=processes, folders=folders, shape=shape)
    finally:
        processes.stop_all()
