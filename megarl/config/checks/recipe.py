"""The checks of a well-formed recipe: sizes that do not divide, files that do not exist, keys that contradict.

Each check yields its problems; all are reported together. `advise` warns of what is allowed but probably not meant, and
stops no run. Needs no torch and reads no weights and no data.
"""

from __future__ import annotations

import ipaddress
from collections.abc import Iterator
from dataclasses import replace

from megarl.config.algorithm import AlgorithmConfig
from megarl.config.checks.algorithm import check_algorithm, check_rewards, check_staleness
from megarl.config.checks.draft import check_draft, check_drafted_model
from megarl.config.checks.files import (
    check_data_files,
    check_key_files,
    check_loggers,
    check_mirror,
    check_model_folder,
    check_run_folder,
    shape_or_problem,
)
from megarl.config.checks.frozen import check_frozen, check_frozen_models, check_teachers
from megarl.config.checks.policies import check_policies, check_seen
from megarl.config.checks.roles import (
    check_dropout,
    check_endpoints,
    check_lora_roles,
    check_role_split,
    check_split,
    check_step,
    check_unused_keys,
)
from megarl.config.checks.secrets import check_own_key_files, check_secrets
from megarl.config.environment import EnvironmentConfig, HarborEnvironmentConfig, has_agent
from megarl.config.kernels import check_engine_precision, check_kernels
from megarl.config.lora import check_adapter_file, check_served_modules
from megarl.config.model import read_model_shape
from megarl.config.native import check_native
from megarl.config.recipe import (
    POLICIES_FOLDER,
    CheckpointConfig,
    DataConfig,
    EvaluationConfig,
    Recipe,
    SampledEvaluationConfig,
    SamplingConfig,
    TrainConfig,
)
from megarl.config.roles import CriticConfig, RolesConfig, RolloutRoleConfig
from megarl.errors import ConfigError, Problem
from megarl.families.shape import ModelShape

_HOT = 1.5
"""Above this temperature most of the probability goes to tokens the model would never choose."""


def check_recipe(recipe: Recipe) -> list[Problem]:
    """Return every problem that can be found without starting anything, and without the machines of the run."""
    problems = _check_recipe(recipe)
    for name, policy in recipe.by_policy().items():
        own = [problem for problem in _check_recipe(policy) if problem not in problems]
        problems += [replace(problem, key=f"{POLICIES_FOLDER}.{name}.{problem.key}") for problem in own]
    return problems


def _check_recipe(recipe: Recipe) -> list[Problem]:
    problems = [
        *check_data_files(recipe.data),
        *check_run_folder(recipe.run_folder),
        *check_key_files(recipe.roles.on_engines),
        *check_loggers(recipe.observe),
        *check_mirror(recipe.checkpoint.mirror),
        *check_own_key_files(recipe.environment, recipe.checkpoint.mirror),
        *check_model_folder(recipe.model.path, needs_template=recipe.data.template == "chat"),
        *_network(recipe.network.bind),
        *_agents_in_containers(recipe.environment, recipe.network.bind),
        *_without_shape(recipe),
    ]
    try:
        shape = read_model_shape(recipe.model.path)
    except ConfigError as error:
        return [*problems, *error.problems]
    if shape.has_value_head and not recipe.algorithm.needs.is_scorer:
        message = f"{recipe.model.path} is a critic and has no language head; name it in roles.critic.path"
        return [*problems, Problem(key="model.path", message=message)]
    return [
        *problems,
        *check_split(recipe, shape),
        *_other_models(recipe.roles, shape),
        *check_drafted_model(recipe, shape),
        *check_frozen_models(recipe.roles, device=recipe.run.device),
        *check_teachers(
            recipe.roles,
            recipe.model.path,
            shape,
            num_top=_num_top(recipe.algorithm),
            max_context_tokens=recipe.max_context_tokens,
            device=recipe.run.device,
        ),
        *check_adapter_file(recipe.model.lora, shape),
        *check_seen(recipe, shape),
    ]


def _num_top(algorithm: AlgorithmConfig) -> int:
    distillation = algorithm.distillation
    return 0 if distillation is None else distillation.top_k


def _network(bind: str | None) -> Iterator[Problem]:
    if bind is None or bind == "private":
        return
    try:
        network = ipaddress.IPv4Network(bind, strict=False)
    except ValueError:
        yield Problem(
            key="network.bind", message=f"{bind!r} is not `private`, nor an IPv4 network or address such as 10.1.0.0/16"
        )
        return
    if network.network_address.is_unspecified:
        yield Problem(key="network.bind", message=f"{bind} means every network; name the one the machines share")


def _agents_in_containers(environment: EnvironmentConfig | None, bind: str | None) -> Iterator[Problem]:
    if not isinstance(environment, HarborEnvironmentConfig) or environment.sandbox == "bubblewrap":
        return
    if has_agent(environment) and bind is None:
        message = "agents inside of containers do not reach the loopback device of their node; name a network of it"
        yield Problem(key="network.bind", message=message)


def _other_models(roles: RolesConfig, policy: ModelShape) -> Iterator[Problem]:
    """Check the models that start from a folder of their own."""
    critic, reference = roles.critic, roles.reference
    if critic is not None and critic.path is not None:
        shape = shape_or_problem(critic.path, "roles.critic.path")
        if isinstance(shape, Problem):
            yield shape
        else:
            yield from _critic(critic, shape, policy)
    if reference is not None and reference.path is not None:
        shape = shape_or_problem(reference.path, "roles.reference.path")
        if isinstance(shape, Problem):
            yield shape
        elif shape != policy:
            yield Problem(key="roles.reference.path", message="not a model of the same shape and dtype as model.path")


def _critic(critic: CriticConfig, shape: ModelShape, policy: ModelShape) -> Iterator[Problem]:
    yield from check_role_split(shape, critic, role="critic")
    if shape.vocab != policy.vocab:
        yield Problem(
            key="roles.critic.path",
            message=f"its vocabulary has {shape.vocab} tokens, that of model.path {policy.vocab}; "
            "a critic reads the policy's tokens",
        )


def check_without_files(recipe: Recipe, shape: ModelShape, *, critic: ModelShape) -> list[Problem]:
    """Return the problems that can be found on a machine that has neither the models nor the data."""
    problems = [*_without_shape(recipe), *check_split(recipe, shape)]
    if recipe.roles.critic is not None and recipe.roles.critic.path is not None:
        problems += _critic(recipe.roles.critic, critic, shape)
    return problems


def _without_shape(recipe: Recipe) -> Iterator[Problem]:
    if recipe.run.steps is None and recipe.run.epochs is None:
        yield Problem(key="run.steps", message="missing; set run.steps or run.epochs")
    yield from check_policies(recipe)
    yield from check_step(recipe)
    yield from check_algorithm(recipe)
    yield from check_rewards(recipe.reward)
    yield from check_secrets(recipe)
    yield from check_native(recipe.roles, device=recipe.run.device)
    for role, engines in recipe.roles.on_engines.items():
        yield from check_endpoints(role, engines)
    yield from check_frozen(
        recipe.roles,
        recipe.reward,
        device=recipe.run.device,
        max_staleness=recipe.train.max_staleness,
        has_environment=recipe.environment is not None,
    )
    yield from _evaluation(recipe.evaluation, recipe.data, recipe.roles.rollout)
    yield from check_staleness(recipe)
    yield from check_unused_keys(recipe.roles)
    yield from check_draft(recipe)
    device = recipe.run.device
    lora = recipe.model.lora
    is_adapted, adapts_experts = lora is not None, lora is not None and lora.is_merged
    gpu = recipe.cluster.gpu
    yield from check_kernels(recipe.roles, is_adapted=is_adapted, adapts_experts=adapts_experts, device=device, gpu=gpu)
    if recipe.roles.rollout is not None:
        yield from check_engine_precision(recipe.roles.rollout, is_adapted=is_adapted, device=device, gpu=gpu)
    if lora is not None:
        yield from check_lora_roles(recipe.roles, is_served=recipe.model.served_lora is not None)
        yield from check_dropout(lora, recipe.algorithm, recipe.roles)
        if recipe.roles.rollout is not None and recipe.model.served_lora is not None:
            yield from check_served_modules(lora)
    yield from _keep_best(recipe.checkpoint, recipe.evaluation)


def _keep_best(checkpoint: CheckpointConfig, evaluation: EvaluationConfig | None) -> Iterator[Problem]:
    if checkpoint.keep_best is not None and (evaluation is None or evaluation.every_steps is None):
        yield Problem(
            key="checkpoint.keep_best",
            message="only the last step would be evaluated; set evaluation.every_steps or remove it",
        )


def _evaluation(
    evaluation: EvaluationConfig | None, data: DataConfig, rollout: RolloutRoleConfig | None
) -> Iterator[Problem]:
    files = {
        "data.eval": data.eval,
        "data.eval_demonstrations": data.eval_demonstrations,
        "data.eval_pairs": data.eval_pairs,
    }
    has_given = bool(data.eval_demonstrations or data.eval_pairs)
    if evaluation is None:
        for key in (key for key, paths in files.items() if paths):
            yield Problem(key=key, message="is not used; add `evaluation: {}` or remove it")
        return
    if rollout is None and (data.eval or not has_given):
        yield Problem(key="evaluation", message="needs engines; add roles.rollout or remove the section")
    if not any(files.values()):
        yield Problem(key="evaluation", message="nothing to evaluate on; set data.eval or remove the section")
    if not data.eval and has_given:
        for name in sorted(evaluation.model_fields_set & {"is_greedy", "sampled", "right_from"}):
            yield Problem(key=f"evaluation.{name}", message="needs answers to prompts; set data.eval or remove it")
        return
    if evaluation.sampled is not None:
        yield from _pass_at(evaluation.sampled)
    elif not evaluation.is_greedy:
        yield Problem(key="evaluation.is_greedy", message="false leaves nothing to answer with; add evaluation.sampled")
    response, cached_tokens = evaluation.max_response_tokens, rollout.max_cached_tokens if rollout else None
    if response is not None and cached_tokens is not None and data.max_prompt_tokens + response > cached_tokens:
        yield Problem(
            key="evaluation.max_response_tokens",
            message=f"{response} with data.max_prompt_tokens {data.max_prompt_tokens} "
            f"does not fit in roles.rollout.max_cached_tokens {cached_tokens}",
        )


def _pass_at(sampled: SampledEvaluationConfig) -> Iterator[Problem]:
    ks = sampled.pass_at or ()
    too_large = [k for k in ks if k > sampled.rollouts_per_prompt]
    if too_large:
        yield Problem(
            key="evaluation.sampled.pass_at",
            message=f"{too_large[0]} is more than rollouts_per_prompt {sampled.rollouts_per_prompt}; "
            f"raise that to at least {max(too_large)} or leave {too_large[0]} out",
        )
    twice = [k for index, k in enumerate(ks) if k in ks[:index]]
    if twice:
        yield Problem(key="evaluation.sampled.pass_at", message=f"{twice[0]} is given twice; name it once")


def advise(recipe: Recipe, shape: ModelShape) -> list[Problem]:
    algorithm = recipe.algorithm
    train = recipe.train
    steps = recipe.run.max_steps
    critic = recipe.roles.critic
    return [
        *_advise_sampling(recipe.sampling, algorithm),
        *_advise_staleness(train.max_staleness, algorithm),
        *_advise_left_over(algorithm),
        *_advise_evaluation(recipe.evaluation, recipe.data, steps),
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


def _advise_sampling(sampling: SamplingConfig, algorithm: AlgorithmConfig) -> Iterator[Problem]:
    if not algorithm.needs.has_engines:
        for name in sorted(sampling.model_fields_set - {"max_response_tokens"}):
            yield Problem(key=f"sampling.{name}", message=f"has no effect in {algorithm.kind}")
        return
    if sampling.temperature > _HOT:
        yield Problem(
            key="sampling.temperature", message=f"{sampling.temperature:g} is close to noise; 0.6 to 1.2 is usual"
        )


def _advise_staleness(staleness: int, algorithm: AlgorithmConfig) -> Iterator[Problem]:
    if staleness and algorithm.needs.has_engines and algorithm.correction is None:
        yield Problem(
            key="train.max_staleness",
            message=f"{staleness} trains on what earlier policies chose as if the current one had chosen it; "
            "`algorithm.correction: {kind: tis}` weighs it by how likely it is now",
        )


def _advise_left_over(algorithm: AlgorithmConfig) -> Iterator[Problem]:
    filtering = algorithm.filter
    if filtering is not None and filtering.oversampling > 1 and algorithm.correction is None:
        yield Problem(
            key="algorithm.filter.oversampling",
            message=f"{filtering.oversampling:g} leaves groups for the next step, which trains on what an earlier "
            "policy chose as if it had chosen it itself; `algorithm.correction: {kind: tis}` weighs it by how "
            "likely it is now",
        )


def _advise_evaluation(evaluation: EvaluationConfig | None, data: DataConfig, steps: int) -> Iterator[Problem]:
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
    if isinstance(every_steps, int) and every_steps > steps:
        yield Problem(
            key="checkpoint.save_every_steps",
            message=f"{every_steps} is more than run.steps {steps}: "
            + ("only the last step is saved" if checkpoint.save_at_end else "nothing is saved"),
        )
