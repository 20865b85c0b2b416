"""Compare one trainer and one engine of a recipe, with the same weights, on one prompt, and reach a verdict.

Both are recorded at every hook point of the forward pass; `weights.diagnosis` finds the first point where they differ
and the tensors to blame. Import this module inside `ray_environment`.
"""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from typing import TypeAlias

import numpy as np

from megarl.checkpoint.manifest import MODEL_FOLDER, verify
from megarl.config.model import ModelShape, read_model_shape
from megarl.config.recipe import Recipe
from megarl.config.roles import FP8_TOKENS
from megarl.data.packing import Packing
from megarl.data.shares import make_shares
from megarl.data.tokenizer import Tokenizer, load_tokenizer
from megarl.engine.fleet import Fleet
from megarl.engine.tool_commands import FILE_PREFIX
from megarl.engine.tool_control import ToolControl
from megarl.errors import ConfigError, DataError, Problem
from megarl.ranks.calls import ActorCalls
from megarl.rollout.generator import FleetGenerator, Sampling, Vocabulary
from megarl.run.inputs import read_inputs
from megarl.serving.connect import started_roles
from megarl.serving.engine_transfer import transfer_spec
from megarl.serving.serving import ManagedServing
from megarl.stages import Generator, Phases
from megarl.tools.small_recipe import SmallRecipe, single_copy
from megarl.train.rank_spec import RECORD_PREFIX, TrainerRecord
from megarl.types import PolicyVersion, Prompt, RolloutGroup, TrainBatch, TrainSample
from megarl.weights.diagnosis import TOLERANCES, Conversation, Diagnosis, diagnose
from megarl.weights.hook_points import hook_points
from megarl.weights.layouts.megatron import MegatronParallel, megatron_layout
from megarl.weights.layouts.transfer_spec import TransferSpec
from megarl.weights.recordings import DigestedModel, Recording, differing_tensors

_FOLDER = "diagnose"
"""Inside the folder of the run."""
_MAX_CPU_PROCESSES = 8
NUM_SAMPLED_TOKENS = 8
"""Enough to see the engine decode; it reads the prompt in one pass."""
RecordTrainer: TypeAlias = Callable[[TrainBatch, Path], Awaitable[Sequence[TrainerRecord]]]
"""Scores a batch on every rank; each rank writes its recording into the folder. Returns the records in rank order."""


def diagnose_recipe(
    recipe: Recipe,
    *,
    question: str | int,
    checkpoint: Path | None,
    ray_address: str | None,
    on_start: Callable[[SmallRecipe], None],
) -> Diagnosis:
    """Compare trainer and engine on a text or on a row of data.train, with the recipe's model or a checkpoint's.

    `on_start` receives the recipe that is started.
    """
    if checkpoint is not None:
        verify(checkpoint)
        model = recipe.model.model_copy(update={"path": checkpoint / MODEL_FOLDER})
        recipe = recipe.model_copy(update={"model": model})
    shape = read_model_shape(recipe.model.path)
    if shape.experts is not None:
        problem = Problem(
            key="model.path",
            message="a mixture of experts cannot be compared module by module yet; diagnose a dense model",
        )
        raise ConfigError(problem.key, (problem,))
    small = single_copy(recipe, name=_FOLDER, num_devices=_num_devices(recipe.run.device, ray_address))
    tokenizer = load_tokenizer(recipe.model.path, vocab=shape.vocab, template=recipe.data.template)
    if isinstance(question, str):
        prompt = _prompt_of_text(question, tokenizer)
    else:
        prompt = _prompt_of_row(read_inputs(recipe).train.prompts, question)
    on_start(small)
    return asyncio.run(_diagnose(small, shape, tokenizer, prompt, ray_address))


def _num_devices(device: str, ray_address: str | None) -> int:
    """Return the number of GPUs of this machine, a small number of processes on CPU, no limit on a cluster."""
    if ray_address is not None:
        return sys.maxsize
    if device == "cpu":
        return _MAX_CPU_PROCESSES
    from torch import cuda  # noqa: PLC0415 - torch takes seconds, and only this branch needs it

    return cuda.device_count()


async def _diagnose(
    small: SmallRecipe, shape: ModelShape, tokenizer: Tokenizer, prompt: Prompt, ray_address: str | None
) -> Diagnosis:
    recipe = small.recipe
    rollout = recipe.roles.rollout
    sampling = recipe.sampling
    assert rollout is not None, "a diagnosis without an engine"
    async with started_roles(recipe, shape, ray_address=ray_address) as roles:
        serving = roles.serving
        assert isinstance(serving, ManagedServing), "a diagnosis without an engine"
        await roles.publisher.publish(PolicyVersion(0))
        return await compare(
            prompt,
            phases=roles.phases,
            record_trainer=lambda batch, folder: roles.trainers.actor.call(ActorCalls.record, batch, folder),
            fleet=serving.fleet,
            control=ToolControl(serving.fleet, timeout_s=rollout.publish_timeout_s, host=serving.host),
            generator=FleetGenerator(
                serving.fleet,
                sampling=Sampling(
                    num_rollouts=1,
                    temperature=sampling.temperature,
                    top_p=sampling.top_p,
                    top_k=sampling.top_k,
                    max_response_tokens=min(NUM_SAMPLED_TOKENS, sampling.max_response_tokens),
                ),
                vocabulary=Vocabulary.of(shape, tokenizer),
                seed=recipe.run.seed,
                # A second attempt would be recorded behind the first.
                max_attempts=1,
            ),
            transfer=transfer_spec(recipe, rollout, shape, num_engines=1),
            temperature=sampling.temperature,
            folder=recipe.run_folder.absolute(),
        )


def _prompt_of_text(text: str, tokenizer: Tokenizer) -> Prompt:
    (token_ids,) = tokenizer.encode([tokenizer.render_chat([{"role": "user", "content": text}])])
    return Prompt(
        uid="--prompt", position=0, epoch=0, token_ids=token_ids, data_source="", ground_truth="", extra_info={}
    )


def _prompt_of_row(prompts: Sequence[Prompt], row: int) -> Prompt:
    if row >= len(prompts):
        raise DataError(f"--row {row}: data.train has {len(prompts)} prompts, counted from 0; choose a smaller number")
    return prompts[row]


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
        prompt_ids=group.prompt.token_ids, rollout=rollout, advantages=np.zeros(rollout.num_tokens, np.float32)
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
