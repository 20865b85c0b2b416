"""Start one trainer and one engine of a recipe with the same weights, compare them on one prompt, and reach a verdict.

`compare` records both at every hook point of the forward pass; `diagnose` finds the first point where they differ and
the tensors to blame. Import this module inside `ray_environment`.
"""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import TypeAlias, assert_never

import numpy as np
import torch
from torch import Tensor

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
from megarl.types import FloatArray, PolicyVersion, Prompt, RolloutGroup, TokenArray, TrainBatch, TrainSample
from megarl.weights.hook_points import LM_HEAD, LOGPROBS, HookPoint, hook_points
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


@dataclass(frozen=True, slots=True, kw_only=True)
class Tolerance:
    """The largest errors that rounding explains: well above those of a healthy model, well below those of a mistake."""

    relative: float
    """For hidden states: |trainer's - engine's| / |engine's|, over the columns of a token."""
    logprob: float
    """For log-probabilities: the absolute difference."""


TOLERANCES: Mapping[str, Tolerance] = {
    "float32": Tolerance(relative=1e-4, logprob=1e-4),
    "bfloat16": Tolerance(relative=5e-2, logprob=0.25),
}


class Verdict(StrEnum):
    NOTHING = "nothing differs"
    WEIGHTS = "weights differ"
    COMPUTATION = "computation differs"
    DEFINITION = "definition of log-probabilities differs"


@dataclass(frozen=True, slots=True, kw_only=True)
class HookPointError:
    """The error at one hook point, at the token where it is largest."""

    point: HookPoint
    error: float
    token: int
    """Position in the sequence."""
    tolerance: float

    @property
    def is_beyond(self) -> bool:
        # Not `>`: a NaN is beyond every tolerance.
        return not self.error <= self.tolerance


@dataclass(frozen=True, slots=True, kw_only=True)
class Conversation:
    """The tokens that both sides saw, and the log-probabilities that each gives the response."""

    prompt_ids: TokenArray  # [P]
    response_ids: TokenArray  # [T]
    engine_logprobs: FloatArray  # [T]
    trainer_logprobs: FloatArray  # [T]
    temperature: float

    @property
    def num_positions(self) -> int:
        """One less than the tokens: the last one predicts nothing."""
        return len(self.prompt_ids) + len(self.response_ids) - 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Diagnosis:
    verdict: Verdict
    sentence: str
    errors: tuple[HookPointError, ...]
    """In the order of the forward pass."""
    first: HookPointError | None
    """The first one beyond its tolerance; its inputs agree. None where all agree."""
    differing_tensors: tuple[str, ...]
    conversation: Conversation


def diagnose(
    points: Sequence[HookPoint],
    trainer: Recording,
    engine: Recording,
    conversation: Conversation,
    *,
    differing_tensors: tuple[str, ...],
    tolerance: Tolerance,
) -> Diagnosis:
    from_logits = {
        temperature: _from_logits(engine, conversation, temperature) for temperature in (conversation.temperature, 1.0)
    }
    errors = [
        _point_error(point, trainer, engine, conversation, from_logits[conversation.temperature], tolerance)
        for point in points
    ]
    reported = torch.from_numpy(conversation.engine_logprobs)
    is_before_temperature = bool(((reported - from_logits[1.0]).abs() <= tolerance.logprob).all())
    return reach_verdict(errors, differing_tensors, conversation, is_before_temperature=is_before_temperature)


def reach_verdict(
    errors: Sequence[HookPointError],
    differing_tensors: tuple[str, ...],
    conversation: Conversation,
    *,
    is_before_temperature: bool,
) -> Diagnosis:
    """Return the verdict; `is_before_temperature`: the engine reports log-probabilities at temperature 1."""
    beyond = [index for index, error in enumerate(errors) if error.is_beyond]
    first = errors[beyond[0]] if beyond else None
    # A differing weight shows at its own point, or, where its error is within the tolerance there, further on.
    upstream = errors if first is None else errors[: beyond[0] + 1]
    blamed = tuple(name for error in upstream for name in error.point.weights if name in differing_tensors)
    verdict = _verdict(first, blamed)
    return Diagnosis(
        verdict=verdict,
        sentence=_sentence(
            verdict,
            first,
            blamed,
            before=max((error.error for error in upstream if error is not first), default=0.0),
            num_prompt=len(conversation.prompt_ids),
            num_others=len(set(differing_tensors) - set(blamed)),
            is_before_temperature=is_before_temperature,
        ),
        errors=tuple(errors),
        first=first,
        differing_tensors=differing_tensors,
        conversation=conversation,
    )


def _verdict(first: HookPointError | None, blamed: Sequence[str]) -> Verdict:
    if blamed:
        return Verdict.WEIGHTS
    if first is None:
        return Verdict.NOTHING
    return Verdict.DEFINITION if first.point.name == LOGPROBS else Verdict.COMPUTATION


def _sentence(
    verdict: Verdict,
    first: HookPointError | None,
    blamed: Sequence[str],
    *,
    before: float,
    num_prompt: int,
    num_others: int,
    is_before_temperature: bool,
) -> str:
    others = f"; {num_others} tensor(s) further on differ too" if num_others else ""
    if first is None:
        if verdict is Verdict.NOTHING:
            return f"nothing differs: every module agrees to {before:.1e}, and all weights are the same"
        return f"weights differ, too little to show: {_names(blamed)}; every module agrees to {before:.1e}"
    kind = "sampled token" if first.token >= num_prompt else "prompt token"
    place = f"{first.point.name} is the first module that differs, by {first.error:.1e} at {kind} {first.token}"
    match verdict:
        case Verdict.WEIGHTS:
            return f"weights differ: {_names(blamed)}; {place} (before it at most {before:.1e}){others}"
        case Verdict.COMPUTATION:
            return f"computation differs: {place} (before it at most {before:.1e}), with the same weights{others}"
        case Verdict.DEFINITION:
            hint = "; the engine's are of logits before the temperature" if is_before_temperature else ""
            return (
                f"only the log-probabilities differ, by {first.error:.1e} at {kind} {first.token}: "
                f"those of the engine's own logits agree to {before:.1e}{hint}{others}"
            )
        case Verdict.NOTHING:
            raise AssertionError("something differs")
        case _:
            assert_never(verdict)


def _names(tensors: Sequence[str]) -> str:
    more = f" and {len(tensors) - 3} more" if len(tensors) > 3 else ""
    return ", ".join(tensors[:3]) + more


def _point_error(
    point: HookPoint,
    trainer: Recording,
    engine: Recording,
    conversation: Conversation,
    from_logits: Tensor,
    tolerance: Tolerance,
) -> HookPointError:
    limit = tolerance.logprob
    if point.name == LOGPROBS:
        errors = _gaps(torch.from_numpy(conversation.engine_logprobs), conversation)
    elif point.name == LM_HEAD:
        errors = _gaps(from_logits, conversation)
    else:
        errors, limit = _relative_errors(trainer.whole(point.name), engine.whole(point.name)), tolerance.relative
    worst = int(errors.nan_to_num(nan=torch.inf).argmax())
    return HookPointError(point=point, error=float(errors[worst]), token=worst, tolerance=limit)


def _relative_errors(trainer: Tensor, engine: Tensor) -> Tensor:
    """Return the error per token [tokens]."""
    assert trainer.shape == engine.shape, f"{list(trainer.shape)} and {list(engine.shape)}"
    floor = torch.finfo(torch.float32).tiny
    errors: Tensor = (trainer - engine).norm(dim=1) / engine.norm(dim=1).clamp(min=floor)
    return errors


def _gaps(engine_logprobs: Tensor, conversation: Conversation) -> Tensor:
    """Return the absolute differences [tokens], 0 where the predicted token is in the prompt."""
    gaps = torch.zeros(conversation.num_positions)
    gaps[len(conversation.prompt_ids) - 1 :] = (torch.from_numpy(conversation.trainer_logprobs) - engine_logprobs).abs()
    return gaps


def _from_logits(engine: Recording, conversation: Conversation, temperature: float) -> Tensor:
    """Return the response's log-probabilities [T] computed from the engine's recorded logits."""
    rows = {patch.place.token: patch.values[0] for patch in engine.patches(LM_HEAD)}
    first = len(conversation.prompt_ids) - 1
    logits = torch.stack([rows[first + step] for step in range(len(conversation.response_ids))])
    chosen = torch.from_numpy(conversation.response_ids).to(torch.int64)
    return (logits / temperature).log_softmax(dim=1).gather(1, chosen[:, None])[:, 0]
