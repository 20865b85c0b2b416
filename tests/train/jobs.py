"""What rank processes do in tests. Everything here runs in every rank of a `Cluster`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from megarl.config.model import ModelShape
from megarl.config.recipe import ActorConfig, AlgorithmConfig, OptimizerConfig
from megarl.train.rank import RankSpec, TrainerRank
from megarl.types import FloatArray, TrainBatch, UpdateResult


@dataclass(frozen=True, slots=True, kw_only=True)
class Setup:
    actor: ActorConfig
    folder: Path
    shape: ModelShape
    optimizer: OptimizerConfig
    algorithm: AlgorithmConfig


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """Of one rank."""

    logprobs: list[tuple[FloatArray, ...]]
    result: UpdateResult
    tensors: dict[str, FloatArray]


def build(rank: int, world: int, port: int, setup: Setup) -> TrainerRank:
    trainer = TrainerRank(
        RankSpec(
            rank=rank,
            world=world,
            master_address="127.0.0.1",
            master_port=port,
            device="cpu",
            actor=setup.actor,
            shape=setup.shape,
            optimizer=setup.optimizer,
            algorithm=setup.algorithm,
            total_steps=4,
            seed=1,
            timeout_s=60,
        )
    )
    trainer.load(setup.folder)
    return trainer


def train(
    rank: int, world: int, port: int, setup: Setup, scored: Sequence[TrainBatch], trained: TrainBatch
) -> Outcome:
    """Score some batches, then update with one."""
    trainer = build(rank, world, port, setup)
    logprobs = [trainer.logprobs(batch) for batch in scored]
    result = trainer.update(trained, wants_logprobs=True)
    tensors = {name: tensor.numpy().copy() for name, tensor in trainer.tensors().items()}
    trainer.close()
    return Outcome(logprobs=logprobs, result=result, tensors=tensors)


def save(rank: int, world: int, port: int, setup: Setup, folder: Path) -> None:
    trainer = build(rank, world, port, setup)
    trainer.save(folder, setup.folder)
    trainer.close()


def fail_to_update(rank: int, world: int, port: int, setup: Setup, batch: TrainBatch) -> tuple[str, bool]:
    """The error of an update, and whether the weights are as they were."""
    trainer = build(rank, world, port, setup)
    before = {name: tensor.numpy().copy() for name, tensor in trainer.tensors().items()}
    try:
        trainer.update(batch)
        message = "no error"
    except Exception as error:  # noqa: BLE001 - the test says which one it must be
        message = f"{type(error).__name__}: {error}"
    is_unchanged = all(np.array_equal(tensor.numpy(), before[name]) for name, tensor in trainer.tensors().items())
    trainer.close()
    return message, is_unchanged
