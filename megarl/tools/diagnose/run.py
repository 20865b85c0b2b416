"""Trainer and engine of a recipe, started small, given the same weights, compared on one prompt, and taken down."""

from __future__ import annotations

import asyncio
from contextlib import AsyncExitStack

from megarl.config.model import ModelShape, read_model_shape
from megarl.config.recipe import Recipe
from megarl.data.tokenizer import Tokenizer, load_tokenizer
from megarl.errors import ConfigError, DataError, Problem
from megarl.observe.observer import Observer
from megarl.rollout.control import EngineControl
from megarl.rollout.generator import FleetGenerator, Sampling, Vocabulary
from megarl.runtime.cluster import open_cluster, own_address
from megarl.runtime.engines.serving import connect, reserve_pools, start_rollout, transfer_spec
from megarl.runtime.inputs import read_inputs
from megarl.runtime.tasks import task_group
from megarl.runtime.trainers.start import start_trainers
from megarl.tools.diagnose.diagnosis import Diagnosis
from megarl.tools.diagnose.mismatch import NUM_SAMPLED_TOKENS, compare
from megarl.train.actor import ActorRank
from megarl.types import PolicyVersion, Prompt


def run_diagnosis(recipe: Recipe, small: Recipe, question: str | int, *, ray_address: str | None) -> Diagnosis:
    """Both sides as `small` says, on a text, or on a row of the recipe's training data, counted from 0."""
    shape = read_model_shape(small.model.path)
    if shape.experts is not None:
        problem = Problem(
            key="model.path",
            message="the experts of a mixture cannot be compared module by module yet; diagnose a dense model",
        )
        raise ConfigError(problem.key, (problem,))
    tokenizer = load_tokenizer(small.model.path, vocab=shape.vocab)
    prompt = _prompt_of_text(question, tokenizer) if isinstance(question, str) else _prompt_of_row(recipe, question)
    return asyncio.run(_diagnose(small, shape, tokenizer, prompt, ray_address))


async def _diagnose(
    recipe: Recipe, shape: ModelShape, tokenizer: Tokenizer, prompt: Prompt, ray_address: str | None
) -> Diagnosis:
    rollout, sampling = recipe.roles.rollout, recipe.sampling
    assert rollout is not None, "a diagnosis without an engine"
    recipe.run_folder.mkdir(parents=True, exist_ok=True)
    with open_cluster(recipe, address=ray_address) as cluster:
        async with AsyncExitStack() as stack:
            pools, observer = reserve_pools(recipe, cluster), Observer(())
            async with task_group() as tasks:
                starting = tasks.create_task(start_trainers(recipe, shape, pools, stack, resume=None))
                generating = tasks.create_task(start_rollout(recipe, shape, pools, stack, observer=observer))
            roles = await connect(recipe, starting.result(), generating.result(), stack, observer=observer)
            assert roles.fleet is not None, "roles without an engine"
            await roles.publisher.publish(PolicyVersion(0))
            return await compare(
                prompt,
                record_trainer=roles.trainers.actor.calling(ActorRank.record),
                fleet=roles.fleet,
                control=EngineControl(
                    roles.fleet, timeout_s=rollout.publish_timeout_s, host=own_address(recipe.network.bind)
                ),
                generator=FleetGenerator(
                    roles.fleet,
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


def _prompt_of_row(recipe: Recipe, row: int) -> Prompt:
    prompts = read_inputs(recipe).train.prompts
    if row >= len(prompts):
        raise DataError(f"--row {row}: data.train has {len(prompts)} prompts, counted from 0; choose a smaller number")
    return prompts[row]
