"""Jobs of the rank processes in the tests of saving. Each function runs in every rank of a `Cluster`."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch

from megarl.env import FAULTS
from megarl.system.faults import planned_faults
from megarl.train.actor import ActorRank
from megarl.types import FloatArray, TrainBatch
from tests.train.jobs import Setup, build, copied, on_actor, write


@on_actor
def train_while_writing(
    trainer: ActorRank,
    setup: Setup,
    before: Sequence[TrainBatch],
    after: Sequence[TrainBatch],
    folder: Path | None,
) -> tuple[list[bool], dict[str, FloatArray]]:
    """Save after some batches while training on the others; return whether it still wrote as each of them ended."""
    for batch in before:
        trainer.update(batch)
    is_writing: list[bool] = []
    with ThreadPoolExecutor(1) as pool:
        if folder is not None:
            # One rank is slow, and all wait for it.
            fault = {"point": "file_written", "rank": 1, "kind": "wait", "seconds": 2}
            plan(fault)
            trainer.snapshot("everything")
            writing = pool.submit(trainer.write, folder, setup.folder)
        for batch in after:
            trainer.update(batch)
            is_writing.append(folder is not None and not writing.done())
        if folder is not None:
            writing.result()
    plan()
    return is_writing, copied(trainer.tensors())


def plan(*faults: dict[str, object]) -> None:
    os.environ[FAULTS.name] = json.dumps(faults)
    planned_faults.cache_clear()


@on_actor
def break_a_weight_and_save(trainer: ActorRank, setup: Setup, folder: Path) -> str:
    """Return the error of saving weights that are not finite on one rank."""
    if torch.distributed.get_rank() == 1:
        next(iter(trainer.tensors().values())).view(-1)[0] = torch.inf
    return write(trainer, folder, setup)


@on_actor
def save_again_and_again(trainer: ActorRank, setup: Setup, folder: Path) -> tuple[list[str], int]:
    """Return the errors of saves, of which the third fails, and how often the rank joined a new group for them.

    After the second rank 0 leaves the group, and the other ranks do not notice.
    """
    saver, joined = trainer._checkpoints.saver, []
    join = saver._join_new
    saver._join_new = lambda: joined.append(1) or join()  # type: ignore[func-returns-value,method-assign]
    messages = [write(trainer, folder / str(number), setup) for number in range(2)]
    group = saver._group
    assert group is not None
    if torch.distributed.get_rank() == 0:
        group.abandon("it was late")
        saver._group = None
    messages.append(write(trainer, folder / "2", setup))
    plan({"point": "file_written", "rank": 1, "kind": "ENOSPC"})
    messages.append(write(trainer, folder / "3", setup))
    plan()
    messages += [write(trainer, folder / str(number), setup) for number in (4, 5)]
    return messages, len(joined)


def lose_a_rank(rank: int, world: int, port: int, setup: Setup, folder: Path, point: str) -> None:
    """Kill rank 1 while it saves; rank 0 writes the error of its own write to a file."""
    trainer = build(rank, world, port, setup)
    plan({"point": point, "rank": 1, "kind": "kill"})
    message = write(trainer, folder, setup)
    (folder.parent / f"rank {rank}").write_text(message)


@on_actor
def draw_no_random_number(trainer: ActorRank, _: Setup, batch: TrainBatch) -> bool:
    """Return whether an update leaves the state of the random generator unchanged."""
    before = torch.get_rng_state()
    trainer.update(batch)
    return bool(torch.equal(before, torch.get_rng_state()))
