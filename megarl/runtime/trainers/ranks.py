"""A trainer rank as a Ray actor, and all ranks of a model together.

The processes add to the ranks of `train` what belongs to their place in the run: meeting each other, and, those of the
actor, sending their share of the weights to the engines.
"""

from __future__ import annotations

import asyncio
import logging
import socket
import threading
from collections.abc import Sequence
from contextlib import AbstractAsyncContextManager, AsyncExitStack
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Generic, TypeVar, cast

import ray
from ray.actor import ActorHandle

from megarl.checkpoint.manifest import Contents, FileDigest
from megarl.checkpoint.state import TrainerState
from megarl.config.algorithm import AlgorithmConfig, PolicyGradientConfig
from megarl.config.recipe import CriticConfig, TrainConfig
from megarl.env import GLOO_INTERFACE, trainer_environment
from megarl.errors import WeightSyncError, WorkerError
from megarl.results import CriticResult, UpdateResult
from megarl.rollout.commands import Rendezvous
from megarl.runtime.cluster import Place, own_address
from megarl.runtime.trainers.hang import Answer, Silence, explain_hang, write_report
from megarl.runtime.trainers.remote_process import RemoteProcess, describe, end, this_process
from megarl.runtime.trainers.stacks import RankStacks, capture
from megarl.runtime.trainers.worker_group import WorkerGroup
from megarl.system.network import interface_of
from megarl.train.actor import ActorRank, TrainerRecord
from megarl.train.critic import CriticRank
from megarl.train.rank import ModelRank, RankSpec
from megarl.train.reference import ReferenceRank
from megarl.train.trained import TrainedRank
from megarl.types import FloatArray, TrainBatch
from megarl.weights.executors.box_digest import fastest_digest
from megarl.weights.executors.transfer import Sender, TransferGroup
from megarl.weights.layouts.transfer_spec import TransferSpec

logger = logging.getLogger(__name__)

AnyRank = TypeVar("AnyRank", bound=ModelRank)
AnyTrainedRank = TypeVar("AnyTrainedRank", bound=TrainedRank)

_BESIDE_TRAINING = "beside_training"
"""Calls that a rank answers in a thread of its own, while it does something else."""
_WATCHED = "watched"
"""Those that it answers whatever it does, or does not do any more."""

START_TIMEOUT_S = 300.0
"""For a process to be there, and for the weights where `train.operation_timeout_s` is shorter: disks are slow."""
_ANSWER_S = 2.0
"""For a rank to say where it is."""
_END_GRACE_S = 1.0
_KILL_S = 30.0
"""For the system to take a process apart: one with much memory on a device needs a while."""


class ModelProcess(Generic[AnyRank]):
    """One process of a model. Methods are collective: the driver calls them on every rank at once."""

    def __init__(self, bind: str | None) -> None:
        self._model: AnyRank | None = None
        self._host = own_address(bind)
        # Gloo would listen on the interface the host's name resolves to.
        if (interface := interface_of(self._host)) is not None:
            GLOO_INTERFACE.set(interface)

    def find_address(self) -> tuple[str, int]:
        """Where the others can meet rank 0: this node's address and a port that is free now."""
        with socket.create_server((self._host, 0)) as listener:
            port: int = listener.getsockname()[1]
        return self._host, port

    @ray.method(concurrency_group=_WATCHED)  # type: ignore[untyped-decorator]
    def whereabouts(self) -> RemoteProcess:
        return this_process()

    @ray.method(concurrency_group=_WATCHED)  # type: ignore[untyped-decorator]
    def watch(self) -> None:
        """Does not return: who waits for it learns at once that this process has ended."""
        threading.Event().wait()

    @ray.method(concurrency_group=_WATCHED)  # type: ignore[untyped-decorator]
    def stacks(self) -> RankStacks:
        return capture(__name__)

    @property
    def model(self) -> AnyRank:
        assert self._model is not None, "start comes first"
        return self._model


@dataclass(frozen=True, slots=True, kw_only=True)
class WeightOrigin:
    """Where the weights of a model come from."""

    folder: Path
    """In Hugging Face format, or a checkpoint's."""
    resumed: TrainerState | None = None
    """Where training stood, if `folder` is a checkpoint's."""

    def fill(self, model: TrainedRank) -> None:
        if self.resumed is None:
            model.load(self.folder)
        else:
            model.resume(self.folder, self.resumed)


class TrainedProcess(ModelProcess[AnyTrainedRank]):
    def release(self) -> None:
        self.model.release()

    def reload(self) -> None:
        self.model.reload()

    def snapshot(self, contents: Contents) -> TrainerState:
        return self.model.snapshot(contents)

    @ray.method(concurrency_group=_BESIDE_TRAINING)  # type: ignore[untyped-decorator]
    def write(self, folder: Path, source_folder: Path) -> dict[str, FileDigest]:
        return self.model.write(folder, source_folder)


class ActorProcess(TrainedProcess[ActorRank]):
    def __init__(self, bind: str | None) -> None:
        super().__init__(bind)
        self._rank = 0
        self._group: TransferGroup | None = None
        self._sender: Sender | None = None

    def start(
        self,
        spec: RankSpec,
        origin: WeightOrigin,
        algorithm: AlgorithmConfig,
        train: TrainConfig,
        total_steps: int,
        reference_folder: Path | None,
    ) -> None:
        """Build the model and fill it."""
        self._rank = spec.rank
        self._model = ActorRank(
            spec, algorithm=algorithm, optimizer=train.optimizer, total_steps=total_steps, epochs=train.epochs
        )
        origin.fill(self._model)
        if reference_folder is not None:
            self._model.keep_reference(reference_folder)

    def update(self, batch: TrainBatch) -> UpdateResult:
        return self.model.update(batch)

    def logprobs(self, batch: TrainBatch) -> tuple[FloatArray, ...]:
        return self.model.logprobs(batch)

    def reference_logprobs(self, batch: TrainBatch) -> tuple[FloatArray, ...]:
        return self.model.reference_logprobs(batch)

    def record(self, batch: TrainBatch, folder: Path) -> TrainerRecord:
        return self.model.record(batch, folder)

    def export(self, folder: Path, source_folder: Path) -> dict[str, FileDigest]:
        return self.model.export(folder, source_folder)

    def join(self, transfer: TransferSpec, meeting: Rendezvous) -> None:
        """Meet the engine ranks; they join at the same time."""
        self.leave()
        plan = transfer.plan()
        self._group = TransferGroup.join(
            meeting.address,
            name=meeting.name,
            peer=self._rank,
            num_peers=transfer.num_peers,
            timeout_s=meeting.timeout_s,
            backend=meeting.backend,
            host=self._host,
        )
        self._sender = Sender(
            plan,
            self._rank,
            self.model.tensors(),
            self._group,
            bucket_bytes=meeting.bucket_bytes,
            digest=fastest_digest(is_on_host=transfer.is_cpu_engine),
            shares_device=transfer.shares_devices,
            keeps_open=transfer.keeps_open,
        )

    def send(self, version: int) -> dict[tuple[int, str], int]:
        """Send this rank's share; answers with a digest per (engine rank, tensor) of what it sent."""
        if not self.model.has_weights:
            raise WeightSyncError(
                "the weights are in host memory until the next step (roles.actor.offload: everything)"
            )
        assert self._sender is not None, "join comes first"
        held = self.version()
        if held != version:
            raise WeightSyncError(f"actor rank {self._rank} holds version {held}: it cannot send version {version}")
        return self._sender.send(version)

    def version(self) -> int:
        """Of the weights this rank holds."""
        return self.model.state.num_updates

    def leave(self) -> None:
        group, self._group, self._sender = self._group, None, None
        if group is not None:
            group.close()


class CriticProcess(TrainedProcess[CriticRank]):
    def start(
        self,
        spec: RankSpec,
        origin: WeightOrigin,
        algorithm: PolicyGradientConfig,
        critic: CriticConfig,
        total_steps: int,
    ) -> None:
        self._model = CriticRank(
            spec,
            algorithm=algorithm,
            optimizer=critic.optimizer,
            total_steps=total_steps,
            epochs=critic.epochs,
            clip=critic.clip,
        )
        origin.fill(self._model)

    def values(self, batch: TrainBatch) -> tuple[FloatArray, ...]:
        return self.model.values(batch)

    def update(self, batch: TrainBatch) -> CriticResult:
        return self.model.update(batch)


class ReferenceProcess(ModelProcess[ReferenceRank]):
    def start(self, spec: RankSpec, folder: Path) -> None:
        self._model = ReferenceRank(spec)
        self._model.load(folder)

    def logprobs(self, batch: TrainBatch) -> tuple[FloatArray, ...]:
        return self.model.logprobs(batch)


class RankGroup(WorkerGroup):
    """The processes of one model. They belong together: when one is lost, so are the others."""

    def __init__(self, role: str, workers: Sequence[ActorHandle], *, timeout_s: float, report_folder: Path) -> None:
        """`report_folder` gets a file about every call that does not end."""
        super().__init__(role, workers, timeout_s=timeout_s)
        self.is_lost = False
        """Whether one of them is known to be dead."""
        self._report_folder = report_folder
        self._whereabouts: list[RemoteProcess] = []

    async def locate(self) -> None:
        """Once all of them run; comes first."""
        self._whereabouts = cast("list[RemoteProcess]", await self.call("whereabouts", timeout_s=START_TIMEOUT_S))

    async def watch(self) -> None:
        """Returns never; raises when one of them has died."""
        watches = [
            asyncio.ensure_future(self._await(rank, "the run", worker.watch.remote()))
            for rank, worker in enumerate(self.workers)
        ]
        try:
            await asyncio.gather(*watches)
        except WorkerError:
            self.is_lost = True
            raise
        finally:
            for watch in watches:
                watch.cancel()

    async def end(self) -> None:
        """All of them, frozen ones too; they are gone when this returns."""
        for worker in self.workers:
            ray.kill(worker, no_restart=True)
        gone = await asyncio.gather(
            *(end(where, grace_s=_END_GRACE_S, timeout_s=_KILL_S) for where in self._whereabouts),
            return_exceptions=True,
        )
        for rank, outcome in enumerate(gone):
            if outcome is not True:
                logger.warning("role=%s rank=%d may still be there: %s", self.role, rank, outcome or "it does not end")

    async def _explain(self, method: str, late: Sequence[int], timeout_s: float) -> str:
        answers = await asyncio.gather(*(self._where_is(rank) for rank in range(len(self))))
        verdict = explain_hang(answers, method=method, late=late)
        headline = f"{self.role}: {method} did not finish within {timeout_s:g} s (train.operation_timeout_s): {verdict}"
        write = partial(write_report, self._report_folder, role=self.role, method=method)
        path = await asyncio.to_thread(write, headline=headline, answers=answers)
        return f"{headline}; all stacks are in {path}"

    async def _where_is(self, rank: int) -> Answer:
        try:
            async with asyncio.timeout(_ANSWER_S):
                return cast("RankStacks", await self.workers[rank].stacks.remote())
        except TimeoutError:
            if not self._whereabouts:
                return Silence(reason="its process has not started")
            where = self._whereabouts[rank]
            return Silence(reason=f"it does not answer; {await describe(where)} (pid {where.pid})")
        except ray.exceptions.RayActorError:
            return Silence(reason="it is dead")


class Ranks:
    """All ranks of one model."""

    def __init__(self, workers: RankGroup, turn: asyncio.Lock) -> None:
        self._workers = workers
        self._turn = turn
        """Models of one pool compute one after the other."""

    @property
    def is_lost(self) -> bool:
        return self._workers.is_lost

    async def watch(self) -> None:
        await self._workers.watch()

    async def _compute(self, method: str, *arguments: object) -> object:
        """Every rank has the same answer."""
        async with self._turn:
            return (await self._workers.call(method, *arguments))[0]


class TrainedRanks(Ranks):
    async def release(self) -> None:
        """Leave the devices to others until `reload`."""
        await self._compute("release")

    async def reload(self) -> None:
        await self._compute("reload")

    async def snapshot(self, contents: Contents) -> TrainerState:
        return cast("TrainerState", await self._compute("snapshot", contents))

    async def write(self, folder: Path, source_folder: Path) -> dict[str, FileDigest]:
        """Every file that some rank wrote into `folder`. Runs beside other calls; no rank writes any more after it."""
        results = await self._workers.call("write", folder, source_folder, waits_for_all=True)
        written = cast("list[dict[str, FileDigest]]", results)
        return {name: digest for files in written for name, digest in files.items()}


class ActorRanks(TrainedRanks):
    async def update(self, batch: TrainBatch) -> UpdateResult:
        return cast("UpdateResult", await self._compute("update", batch))

    async def logprobs(self, batch: TrainBatch) -> tuple[FloatArray, ...]:
        return cast("tuple[FloatArray, ...]", await self._compute("logprobs", batch))

    async def reference_logprobs(self, batch: TrainBatch) -> tuple[FloatArray, ...]:
        return cast("tuple[FloatArray, ...]", await self._compute("reference_logprobs", batch))

    async def record(self, batch: TrainBatch, folder: Path) -> Sequence[TrainerRecord]:
        return cast("list[TrainerRecord]", await self._workers.call("record", batch, folder))

    async def export(self, folder: Path, source_folder: Path) -> dict[str, FileDigest]:
        """Write the weights as a Hugging Face folder `model` in `folder`; every file that some rank wrote."""
        async with self._turn:
            results = await self._workers.call("export", folder, source_folder, waits_for_all=True)
        written = cast("list[dict[str, FileDigest]]", results)
        return {name: digest for files in written for name, digest in files.items()}

    async def join(self, transfer: TransferSpec, meeting: Rendezvous) -> None:
        await self._workers.call("join", transfer, meeting)

    def at_rest(self) -> AbstractAsyncContextManager[None]:
        """Inside, no rank computes: weights do not change."""
        return self._turn

    async def version(self) -> int:
        return cast("int", (await self._workers.call("version"))[0])

    async def send(self, version: int) -> list[dict[tuple[int, str], int]]:
        return cast("list[dict[tuple[int, str], int]]", await self._workers.call("send", version))


class CriticRanks(TrainedRanks):
    async def update(self, batch: TrainBatch) -> CriticResult:
        return cast("CriticResult", await self._compute("update", batch))

    async def values(self, batch: TrainBatch) -> tuple[FloatArray, ...]:
        return cast("tuple[FloatArray, ...]", await self._compute("values", batch))


class ReferenceRanks(Ranks):
    async def logprobs(self, batch: TrainBatch) -> tuple[FloatArray, ...]:
        return cast("tuple[FloatArray, ...]", await self._compute("logprobs", batch))


async def start_processes(
    role: str,
    kind: type[ModelProcess[AnyRank]],
    places: Sequence[Place],
    stack: AsyncExitStack,
    spec: RankSpec,
    *arguments: object,
    share: float,
    bind: str | None,
    report_folder: Path,
) -> RankGroup:
    """One process per place; each is started with its own spec, made from rank 0's, and the same arguments.

    `stack` ends them.
    """
    # Two threads: one stays in `watch`, the other answers.
    remote = ray.remote(concurrency_groups={_BESIDE_TRAINING: 1, _WATCHED: 2})(kind)
    environment = trainer_environment(spec.device)
    workers = RankGroup(
        role,
        [remote.options(**place.options(environment, share=share)).remote(bind) for place in places],
        timeout_s=spec.timeout_s,
        report_folder=report_folder,
    )
    stack.push_async_callback(workers.end)
    await workers.locate()
    host, port = cast("tuple[str, int]", await workers.call_first("find_address"))
    meeting = replace(spec, world=len(places), master_address=host, master_port=port)
    await workers.call_each(
        "start",
        [(replace(meeting, rank=rank), *arguments) for rank in range(len(places))],
        timeout_s=max(spec.timeout_s, START_TIMEOUT_S),
    )
    return workers
