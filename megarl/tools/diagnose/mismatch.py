"""Record trainer and engine module by module on one prompt. Starts no process and moves no weights."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from typing import TypeAlias

import numpy as np

from megarl.compare.hook_points import hook_points
from megarl.compare.recordings import DigestedModel, Recording, differing_tensors
from megarl.config.section import PAD_MULTIPLE
from megarl.data.packing import pack
from megarl.rollout.control import ToolControl
from megarl.rollout.fleet import Fleet
from megarl.rollout.tool_commands import FILE_PREFIX
from megarl.stages import Generator
from megarl.tools.diagnose.diagnosis import TOLERANCES, Conversation, Diagnosis, diagnose
from megarl.train.actor import RECORD_PREFIX, TrainerRecord
from megarl.types import Prompt, RolloutGroup, TrainBatch, TrainSample
from megarl.weights.layouts.megatron import MegatronParallel, megatron_layout
from megarl.weights.layouts.transfer_spec import TransferSpec

NUM_SAMPLED_TOKENS = 8
"""Enough to see the engine decode; it reads the prompt in one pass."""


RecordTrainer: TypeAlias = Callable[[TrainBatch, Path], Awaitable[Sequence[TrainerRecord]]]
"""Scores a batch on every rank; each rank writes its recording into the folder. Returns the records in rank order."""


async def compare(
    prompt: Prompt,
    *,
    record_trainer: RecordTrainer,
    fleet: Fleet,
    control: ToolControl,
    generator: Generator,
    transfer: TransferSpec,
    temperature: float,
    folder: Path,
) -> Diagnosis:
    """Let the engine answer the prompt, run prompt and answer through the trainer, and return what differs.

    The fleet has one engine, the generator makes one rollout, and the recordings go to `folder`.
    """
    _clear(folder)
    # A prompt whose prefix is cached would not be computed.
    await fleet.engines[0].client.flush_cache()
    await control.start_recording(transfer)
    group = await generator.generate(prompt)
    engine_digests = await control.write_recording(folder)
    batch = _batch(group, transfer.parallel, temperature)
    records = await record_trainer(batch, folder)
    (rollout,) = group.rollouts
    conversation = Conversation(
        prompt_ids=prompt.token_ids,
        response_ids=rollout.token_ids,
        engine_logprobs=rollout.logprobs,
        trainer_logprobs=records[0].logprobs,
        temperature=temperature,
    )
    trainer_layout = megatron_layout(transfer.shape, transfer.parallel, dtype=transfer.trainer_dtype)
    num_tokens = conversation.num_positions
    return diagnose(
        hook_points(transfer.shape),
        Recording(sorted(folder.glob(f"{RECORD_PREFIX}*")), num_tokens=num_tokens),
        Recording(sorted(folder.glob(f"{FILE_PREFIX}*")), num_tokens=num_tokens),
        conversation,
        differing_tensors=differing_tensors(
            DigestedModel(layout=trainer_layout, digests=[record.weight_digests for record in records]),
            DigestedModel(layout=transfer.engine_layout(), digests=engine_digests),
        ),
        tolerance=TOLERANCES[transfer.engine_dtype],
    )


def _clear(folder: Path) -> None:
    """Remove the files of an earlier diagnosis, which may have had more ranks."""
    folder.mkdir(parents=True, exist_ok=True)
    for prefix in (RECORD_PREFIX, FILE_PREFIX):
        for path in folder.glob(f"{prefix}*.safetensors"):
            path.unlink()


def _batch(group: RolloutGroup, parallel: MegatronParallel, temperature: float) -> TrainBatch:
    (rollout,) = group.rollouts
    sample = TrainSample(
        prompt_ids=group.prompt.token_ids, rollout=rollout, advantages=np.zeros(len(rollout.token_ids), np.float32)
    )
    return pack(
        [sample],
        data_parallel=1,
        tokens_per_micro_batch=len(sample.prompt_ids) + len(rollout.token_ids),
        samples_per_update=None,
        pad_multiple=PAD_MULTIPLE * parallel.tensor,
        micro_batch_multiple=parallel.pipeline if parallel.virtual_pipeline > 1 else 1,
        temperature=temperature,
    )
