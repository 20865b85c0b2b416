"""A run of one rank without Megatron, with the real saver, tensors and files, in a process that may be killed."""

from __future__ import annotations

import asyncio
import json
import os
import resource
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import cast

import torch

from megarl.algo.algorithm import build_algorithm
from megarl.checkpoint.folder import below
from megarl.checkpoint.manifest import Contents, FileDigest
from megarl.checkpoint.resume import TrainerState
from megarl.checkpoint.save import contribution, copy_to_host, save_hf, save_tensors
from megarl.config.model import read_model_shape
from megarl.config.recipe import Recipe
from megarl.data.stream import PromptStream
from megarl.env import FAULTS
from megarl.observe.events import CheckpointFailed, CheckpointSaved
from megarl.observe.observer import Observer
from megarl.results import MonitorState
from megarl.run.buffer import Buffer
from megarl.run.checkpoint_writer import SavedModel
from megarl.run.preemption import Preemption
from megarl.run.saver import RunSaver
from megarl.types import PolicyVersion
from megarl.weights.algebra.slices import Index
from megarl.weights.executors.group import TransferGroup
from megarl.weights.executors.hf import load_hf
from megarl.weights.executors.meeting import StoreServer
from megarl.weights.executors.tensors import box_of
from megarl.weights.layouts.megatron import MegatronParallel, megatron_layout
from tests.observe.samples import ListSink, scored_group
from tests.ranks.local_ranks import LocalRanks
from tests.run.test_saver import PROMPT


class LocalRank:
    """A rank whose weights are a model's plus the step, and whose moments are the step; one step may break a weight."""

    def __init__(self, source: Path, broken_step: int | None) -> None:
        self._broken_step = broken_step
        self._server = StoreServer()
        self._layout = megatron_layout(read_model_shape(source), MegatronParallel(), dtype="float32")
        (holding,) = self._layout.holdings
        self._first = {name: torch.empty(spec.shape) for name, spec in holding.tensors.items()}
        load_hf(source, holding, self._layout.canonical, self._first)
        self._given = contribution(self._layout, 0)
        self._num_snapshots = 0
        self._taken: dict[str, dict[str, torch.Tensor]] = {}
        self.num_steps = 0

    async def snapshot(self, contents: Contents) -> TrainerState:
        self._num_snapshots += 1
        if self.num_steps == self._broken_step:
            next(iter(self._first.values())).view(-1)[3] = torch.nan
        for folder, values in (
            ("model", {name: tensor + self.num_steps for name, tensor in self._first.items()}),
            ("optimizer/exp_avg", {name: torch.full_like(t, self.num_steps) for name, t in self._first.items()}),
        ):
            self._taken[folder] = copy_to_host(self._given, 0, partial(_box, values))
        return TrainerState(num_steps=self.num_steps, num_updates=self.num_steps, monitor=MonitorState())

    async def write(self, folder: Path, source_folder: Path) -> dict[str, FileDigest]:
        return await asyncio.to_thread(self._write, folder, source_folder, self._taken)

    def _write(
        self, folder: Path, source_folder: Path, taken: dict[str, dict[str, torch.Tensor]]
    ) -> dict[str, FileDigest]:
        name = f"save {self._num_snapshots}"
        group = TransferGroup.join(self._server.address, name=name, peer=0, num_peers=1, timeout_s=60)
        layout, inner = self._given.layout, "optimizer/exp_avg"
        model = save_hf(
            folder / "model", source_folder=source_folder, layout=layout, tensors=taken["model"], group=group
        )
        moments = save_tensors(folder / inner, layout=layout, tensors=taken[inner], group=group)
        return below("model", model) | below(inner, moments)


def _box(tensors: dict[str, torch.Tensor], name: str, offsets: Index, shape: Index) -> torch.Tensor:
    return box_of(tensors[name], offsets, shape)


def train_with_accidents(
    recipe: Recipe, steps: Sequence[int], faults: list[dict[str, object]], max_file_bytes: int | None
) -> tuple[list[int], list[tuple[int, str]]]:
    """Train with these faults and a limit on file sizes; needs a process of its own."""
    os.environ[FAULTS.name] = json.dumps(faults)
    torch.set_num_threads(1)
    if max_file_bytes is not None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (max_file_bytes, max_file_bytes))
    return train(recipe, steps)


def train(
    recipe: Recipe, steps: Sequence[int], *, broken_step: int | None = None
) -> tuple[list[int], list[tuple[int, str]]]:
    """Take and save these steps; return the steps that were saved, and why others were not."""
    display = ListSink()
    asyncio.run(_train(recipe, steps, broken_step, display))
    saved = [event.step for event in display.events if isinstance(event, CheckpointSaved)]
    failed = [(event.step, event.reason) for event in display.events if isinstance(event, CheckpointFailed)]
    return saved, failed


async def _train(recipe: Recipe, steps: Sequence[int], broken_step: int | None, display: ListSink) -> None:
    rank = LocalRank(recipe.model.path, broken_step)
    task = asyncio.current_task()
    assert task is not None
    buffer = Buffer(prompts_per_step=1, max_staleness=0)
    prompts = PromptStream([PROMPT], seed=1)
    actor = SavedModel(
        ranks=LocalRanks(rank), shape=read_model_shape(recipe.model.path), source_folder=recipe.model.path
    )
    saver = RunSaver(
        recipe,
        models={"": actor},
        algorithm=build_algorithm(recipe.algorithm, max_response_tokens=8),
        prompts=prompts,
        buffer=buffer,
        data_digest="of the data",
        preemption=Preemption(cast("asyncio.Task[None]", task), grace_s=60),
        observer=Observer([display]),
    )
    async with saver:
        for step in steps:
            ticket = await buffer.reserve()
            next(prompts)
            await buffer.put(ticket, scored_group([1.0], lengths=[1], version=0))
            await buffer.take_step()
            rank.num_steps = step
            saver.mark(step)
            await saver.after_step(step, is_last=False)
            await buffer.release_step(PolicyVersion(0))
