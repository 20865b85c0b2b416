"""Start one trainer and one engine of a recipe with the same weights, compare them on one prompt, and reach a verdict.

`comparison` records both; `verdict` finds the first point where they differ and the tensors to blame. Import
this module inside `ray_environment`.
"""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

from megarl.checkpoint.manifest import MODEL_FOLDER, verify
from megarl.config.model import read_model_shape
from megarl.config.recipe import Recipe
from megarl.data.tokenizer import Tokenizer, load_tokenizer
from megarl.engine.tool_commands import ToolControl
from megarl.errors import ConfigError, DataError, Problem
from megarl.families.shape import ModelShape
from megarl.ranks.calls import ActorCalls
from megarl.rollout.generator import FleetGenerator
from megarl.rollout.task import Sampling, Vocabulary
from megarl.run.inputs import read_inputs
from megarl.serving.connect import started_roles
from megarl.serving.serving import ManagedServing
from megarl.serving.specs import transfer_spec
from megarl.tools.diagnose.comparison import compare
from megarl.tools.diagnose.verdict import Diagnosis
from megarl.tools.small_recipe import SmallRecipe, single_copy
from megarl.types import PolicyVersion, Prompt

_FOLDER = "diagnose"
"""Inside the folder of the run."""
_MAX_CPU_PROCESSES = 8
NUM_SAMPLED_TOKENS = 8
"""Enough to see the engine decode; it reads the prompt in one pass."""


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
