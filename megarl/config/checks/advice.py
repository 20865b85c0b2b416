"""Warnings about what is allowed but probably not meant. Nothing here stops a run."""

from __future__ import annotations

from collections.abc import Iterator

from megarl.config.algorithm import AlgorithmConfig
from megarl.config.model import ModelShape
from megarl.config.recipe import CheckpointConfig, DataConfig, EvaluationConfig, Recipe, SamplingConfig, TrainConfig
from megarl.config.roles import RolesConfig
from megarl.errors import Problem

_HOT = 1.5
"""Above this temperature most of the probability goes to tokens the model would never choose."""


def advise(recipe: Recipe, shape: ModelShape) -> list[Problem]:
    algorithm = recipe.algorithm
    train = recipe.train
    steps = recipe.run.max_steps
    critic = recipe.roles.critic
    return [
        *_sampling(recipe.sampling, algorithm),
        *_staleness(train.max_staleness, algorithm),
        *_evaluation(recipe.evaluation, recipe.data, steps),
        *_replicated_heads(recipe.roles, shape),
        *_idle_ranks(
            train,
            recipe.roles,
            rollouts_per_prompt=recipe.samples_per_prompt,
            actor_ranks=recipe.data_parallel,
            critic_ranks=0 if critic is None else recipe.pools[critic.pool].gpus // critic.model_parallel,
        ),
        *_unused_data(recipe.data, algorithm),
        *_unused_saves(recipe.checkpoint, steps),
    ]


def _sampling(sampling: SamplingConfig, algorithm: AlgorithmConfig) -> Iterator[Problem]:
    if not algorithm.needs.has_engines:
        for name in sorted(sampling.model_fields_set - {"max_response_tokens"}):
            yield Problem(key=f"sampling.{name}", message=f"has no effect in {algorithm.kind}")
        return
    if sampling.temperature > _HOT:
        yield Problem(
            key="sampling.temperature", message=f"{sampling.temperature:g} is close to noise; 0.6 to 1.2 is usual"
        )


def _staleness(staleness: int, algorithm: AlgorithmConfig) -> Iterator[Problem]:
    if staleness and algorithm.needs.has_engines and algorithm.correction is None:
        yield Problem(
            key="train.max_staleness",
            message=f"{staleness} trains on what earlier policies chose as if the current one had chosen it; "
            "`algorithm.correction: {kind: tis}` weighs it by how likely it is now",
        )


def _evaluation(evaluation: EvaluationConfig | None, data: DataConfig, steps: int) -> Iterator[Problem]:
    shared = sorted(set(data.train) & set(data.eval))
    if shared:
        yield Problem(key="data.eval", message=f"{shared[0]} is trained on as well: its accuracy will be too high")
    every_steps = evaluation.every_steps if evaluation else None
    if every_steps is not None and every_steps > steps:
        yield Problem(
            key="evaluation.every_steps",
            message=f"{every_steps} is more than run.steps {steps}: evaluates only before and after the run",
        )


def _replicated_heads(roles: RolesConfig, shape: ModelShape) -> Iterator[Problem]:
    splits = [(f"roles.{role}.tensor", split.tensor) for role, split in roles.megatron_roles.items()]
    splits += [("roles.rollout.tensor", roles.rollout.tensor)] if roles.rollout else []
    for key, tensor in splits:
        if tensor > shape.num_kv_heads:
            copies = tensor // shape.num_kv_heads
            yield Problem(key=key, message=f"each of the {shape.num_kv_heads} key/value heads is on {copies} ranks")


def _idle_ranks(
    train: TrainConfig, roles: RolesConfig, *, rollouts_per_prompt: int, actor_ranks: int, critic_ranks: int
) -> Iterator[Problem]:
    """Yield updates that have fewer sequences than data-parallel ranks."""
    key = "train.prompts_per_step" if train.prompts_per_update is None else "train.prompts_per_update"
    updates = [(key, train.prompts_per_update or train.prompts_per_step, actor_ranks)]
    if roles.critic is not None and roles.critic.prompts_per_update is not None:
        updates.append(("roles.critic.prompts_per_update", roles.critic.prompts_per_update, critic_ranks))
    elif critic_ranks > actor_ranks:
        updates.append((key, updates[0][1], critic_ranks))
    for key, prompts, ranks in updates:
        sequences = prompts * rollouts_per_prompt
        if sequences < ranks:
            yield Problem(
                key=key,
                message=f"{sequences} sequences per update for {ranks} data-parallel ranks: "
                f"{ranks - sequences} of them compute padding only",
            )


def _unused_data(data: DataConfig, algorithm: AlgorithmConfig) -> Iterator[Problem]:
    for key in sorted(data.model_fields_set & {"response_key", "imitates"}):
        if algorithm.needs.rows != "demonstrations":
            yield Problem(key=f"data.{key}", message="only sft and spin read it")
    for key in sorted(data.model_fields_set & {"chosen_key", "rejected_key"}):
        if algorithm.needs.rows != "pairs":
            yield Problem(key=f"data.{key}", message="only dpo and reward_model read it")


def _unused_saves(checkpoint: CheckpointConfig, steps: int) -> Iterator[Problem]:
    every_steps = checkpoint.save_every_steps
    if "save_every_steps" in checkpoint.model_fields_set and every_steps is not None and every_steps > steps:
        yield Problem(
            key="checkpoint.save_every_steps",
            message=f"{every_steps} is more than run.steps {steps}: "
            + ("only the last step is saved" if checkpoint.save_at_end else "nothing is saved"),
        )
