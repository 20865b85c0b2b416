"""Trainer and engine on the same prompt: both are recorded at every hook point of the forward pass."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from typing import TypeAlias

import numpy as np

from megarl.config.roles import FP8_TOKENS
from megarl.data.packing import Packing
from megarl.data.shares import make_shares
from megarl.engine.fleet import Fleet
from megarl.engine.tool_commands import FILE_PREFIX, ToolControl
from megarl.stages import Generator, Phases
from megarl.tools.diagnose.verdict import TOLERANCES, Conversation, Diagnosis, diagnose
from megarl.train.rank_spec import RECORD_PREFIX, TrainerRecord
from megarl.types import Prompt, RolloutGroup, TrainBatch, TrainSample
from megarl.weights.layouts.megatron import MegatronParallel, megatron_layout
from megarl.weights.layouts.transfer_spec import TransferSpec
from megarl.weights.recordings import DigestedModel, Recording, differing_tensors, hook_points

RecordTrainer: TypeAlias = Callable[[TrainBatch, Path], Awaitable[Sequence[TrainerRecord]]]
"""Scores a batch on every rank; each rank writes its recording into the folder. Returns the records in rank order."""


async def compare(
    prompt: Prompt,
    *,
    phases: Phases,
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
    async with phases.generating():
        # A prompt whose prefix is cached would not be computed.
        await fleet.engines[0].client.flush_cache()
        await control.start_recording(transfer)
        group = await generator.generate(prompt)
        engine_digests = await control.write_recording(folder)
    batch = _batch(group, transfer.parallel, temperature)
    async with phases.comparing():
        records = await record_trainer(batch, folder)
    (rollout,) = group.rollouts
    (of_trainer,) = (record.logprobs for record in records if record.logprobs is not None)
    conversation = Conversation(
        prompt_ids=prompt.token_ids,
        response_ids=rollout.token_ids,
        engine_logprobs=rollout.logprobs,
        trainer_logprobs=of_trainer,
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
        prompt_ids=group.prompt.token_ids,
        images=group.prompt.images,
        rollout=rollout,
        advantages=np.zeros(rollout.num_tokens, np.float32),
    )
    packing = Packing(
        data_parallel=1,
        tokens_per_micro_batch=len(sample.prompt_ids) + rollout.num_tokens,
        samples_per_update=None,
        pad_multiple=max(FP8_TOKENS.values()) * parallel.tensor * parallel.context,
        micro_batch_multiple=parallel.pipeline if parallel.virtual_pipeline > 1 else 1,
    )
    (share,) = make_shares([sample], packing, temperature=temperature)
    return share.fill()
