"""A trainer rank as a Ray actor, and all ranks together as the loop's Trainer.

The actor adds to `TrainerRank` what belongs to its place in the run: meeting the other ranks, and sending its share of
the weights to the engines.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import cast

import ray

from megarl.checkpoint.manifest import Contents, FileDigest
from megarl.checkpoint.resume import ResumePoint
from megarl.checkpoint.state import TrainerState
from megarl.config.recipe import Recipe
from megarl.env import trainer_environment
from megarl.rollout.orders import Meeting, Route
from megarl.runtime.cluster import Place
from megarl.runtime.workers import WorkerGroup
from megarl.train.rank import RankSpec, TrainerRank
from megarl.types import TrainBatch, UpdateResult
from megarl.weights.transfer import Sender, TransferGroup


class RankProcess:
    """One process of the trainer. Methods are collective: the driver calls them on every rank at once."""

    def __init__(self) -> None:
        self._trainer: TrainerRank | None = None
        self._rank = 0
        self._group: TransferGroup | None = None
        self._sender: Sender | None = None

    def find_address(self) -> tuple[str, int]:
        """Where the others can meet rank 0: this node's address and a port that is free now."""
        host = ray.util.get_node_ip_address()
        with socket.create_server((host, 0)) as listener:
            port: int = listener.getsockname()[1]
        return host, port

    def start(self, spec: RankSpec, folder: Path, resumed: TrainerState | None) -> int:
        """Build the model; take the weights of a Hugging Face folder, or go on from a checkpoint. Answers: the pid."""
        self._rank = spec.rank
        self._trainer = TrainerRank(spec)
        if resumed is None:
            self._trainer.load(folder)
        else:
            self._trainer.resume(folder, resumed)
        return os.getpid()

    def update(self, batch: TrainBatch) -> UpdateResult:
        return self._started().update(batch)

    def join(self, route: Route, meeting: Meeting) -> None:
        """Meet the engine ranks; they join at the same time."""
        self.leave()
        plan = route.plan()
        self._group = TransferGroup.join(
            meeting.address,
            name=meeting.name,
            peer=self._rank,
            num_peers=route.num_peers,
            timeout_s=meeting.timeout_s,
            backend=meeting.backend,
            host=ray.util.get_node_ip_address(),
        )
        tensors = self._started().tensors()
        self._sender = Sender(plan, self._rank, tensors, self._group, bucket_bytes=meeting.bucket_bytes)

    def send(self, version: int) -> dict[tuple[int, str], int]:
        """Send this rank's share; answers with a digest per (engine rank, tensor) of what it sent."""
        assert self._sender is not None, "join comes first"
        return self._sender.send(version)

    def leave(self) -> None:
        group, self._group, self._sender = self._group, None, None
        if group is not None:
            group.close()

    def save(self, folder: Path, source_folder: Path, contents: Contents) -> tuple[dict[str, FileDigest], TrainerState]:
        trainer = self._started()
        return trainer.save(folder, source_folder, contents), trainer.state

    def _started(self) -> TrainerRank:
        assert self._trainer is not None, "start comes first"
        return self._trainer


class Ranks:
    """All ranks of the actor: the loop's Trainer, and what the publisher and the checkpoint ask of it."""

    def __init__(self, workers: WorkerGroup) -> None:
        self._workers = workers

    async def update(self, batch: TrainBatch) -> UpdateResult:
        results = cast("list[UpdateResult]", await self._workers.call("update", batch))
        return results[0]

    async def join(self, route: Route, meeting: Meeting) -> None:
        await self._workers.call("join", route, meeting)

    async def send(self, version: int) -> list[dict[tuple[int, str], int]]:
        return cast("list[dict[tuple[int, str], int]]", await self._workers.call("send", version))

    async def save(
        self, folder: Path, source_folder: Path, contents: Contents
    ) -> tuple[dict[str, FileDigest], TrainerState]:
        """Every file that some rank wrote into `folder`, and where the trainer stands."""
        results = cast(
            "list[tuple[dict[str, FileDigest], TrainerState]]",
            await self._workers.call("save", folder, source_folder, contents),
        )
        return {name: digest for files, _ in results for name, digest in files.items()}, results[0][1]


async def start_ranks(
    recipe: Recipe, spec: RankSpec, places: Sequence[Place], *, share: float, resume: ResumePoint | None
) -> Ranks:
    """One process per place, loaded from `model.path` or the checkpoint. `spec` is rank 0's, without its address."""
    actor = ray.remote(RankProcess)
    environment = trainer_environment(recipe.run.device)
    workers = WorkerGroup(
        "actor",
        [actor.options(**place.options(environment, share=share)).remote() for place in places],
        timeout_s=recipe.train.operation_timeout_s,
    )
    host, port = cast("tuple[str, int]", await workers.call_first("find_address"))
    meeting = replace(spec, world=len(places), master_address=host, master_port=port)
    folder = recipe.model.path.absolute() if resume is None else resume.folder
    resumed = None if resume is None else resume.state.trainer
    await workers.call_each("start", [(replace(meeting, rank=rank), folder, resumed) for rank in range(len(places))])
    return Ranks(workers)
