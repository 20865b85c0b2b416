"""The roles of a run on their GPUs: the shape of each model, its split, and the places of its ranks and of the engines.

Ranks and engines fill a pool in the order in which a run fills it. `StepWorkload` is the second input of all estimates:
the lengths of the prompts and responses of a step.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum
from functools import cache, cached_property
from pathlib import Path

from megarl.config.algorithm import AlgorithmConfig
from megarl.config.hub import public_model_name
from megarl.config.model import read_model_shape
from megarl.config.recipe import DataConfig, ModelConfig, Recipe, SamplingConfig
from megarl.config.roles import (
    ActorConfig,
    CriticConfig,
    EngineRoleConfig,
    ModelParallelConfig,
    PoolConfig,
    RolesConfig,
    TrainedModelConfig,
)
from megarl.config.section import Device
from megarl.errors import ConfigError, Problem
from megarl.families import PUBLIC_MODELS
from megarl.families.shape import ModelShape
from megarl.planner.activations import ModelWork
from megarl.planner.hardware import GpuModel
from megarl.planner.memory import (
    BareWeights,
    EngineMemory,
    StageMemory,
    adapter_slots,
    bare_weights,
    engine_memory,
    stage_memory,
)
from megarl.planner.sharing import GroupTokens, prompt_obstacle
from megarl.planner.tower import TowerWork
from megarl.routes import RouteShape
from megarl.weights.layouts.megatron import MegatronParallel

_NUM_SAMPLES = 256
_MOST_REQUESTS = 4096
"""More than SGLang chooses by itself, whatever the memory."""
EVALUATED_AT_ONCE = 256
"""Prompts of an evaluation, which are not counted before they are read."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RoleShapes:
    policy: ModelShape
    """Shape of the actor, the reference and the engines."""
    critic: ModelShape
    """Shape with a value head; set even for a run without a critic."""
    source: str
    """Folder or public model that the policy's shape comes from."""
    others: Mapping[str, ModelShape] = field(default_factory=dict)
    """Shapes of the teachers and the drafter, by their key below `roles`."""

    def of(self, role: str) -> ModelShape:
        return self.critic if role == "critic" else self.others.get(role, self.policy)


@dataclass(frozen=True, slots=True, kw_only=True)
class GpuPlace:
    """One GPU. Two roles in a shared pool have equal places."""

    pool: str
    node: str
    gpu: int


@dataclass(frozen=True, slots=True, kw_only=True)
class RankPlace:
    rank: int
    tensor: int
    context: int
    data: int
    pipeline: int
    place: GpuPlace


@dataclass(frozen=True, slots=True, kw_only=True)
class EnginePlace:
    """One TP rank of one engine."""

    engine: int
    tensor: int
    place: GpuPlace


@dataclass(frozen=True, kw_only=True)
class ModelPlacement:
    """All ranks of one model."""

    parallel: MegatronParallel
    ranks: tuple[RankPlace, ...]

    @cached_property
    def nodes_with_all(self) -> frozenset[str]:
        """The nodes on which ranks together hold every weight."""
        parallel, parts = self.parallel, defaultdict[str, set[tuple[str, int, int]]](set)
        for rank in self.ranks:
            in_stage = (rank.data * parallel.context + rank.context) * parallel.tensor + rank.tensor
            share = in_stage // parallel.ranks_per_expert % parallel.expert
            parts[rank.place.node] |= {("dense", rank.pipeline, rank.tensor), ("expert", rank.pipeline, share)}
        num_parts = parallel.pipeline * (parallel.tensor + parallel.expert)
        return frozenset(node for node, found in parts.items() if len(found) == num_parts)


@dataclass(frozen=True, kw_only=True)
class Placement:
    models: Mapping[str, ModelPlacement]
    """By role: the actor, critic and teachers, and the reference if it has a pool."""
    engine_ranks: tuple[EnginePlace, ...]

    @property
    def parallel(self) -> MegatronParallel:
        """Split of the actor."""
        return self.models["actor"].parallel

    @property
    def ranks(self) -> tuple[RankPlace, ...]:
        """Ranks of the actor."""
        return self.models["actor"].ranks

    @cached_property
    def is_shared(self) -> bool:
        """Whether actor and engines take turns on the same GPUs."""
        return bool({rank.place for rank in self.ranks} & {rank.place for rank in self.engine_ranks})

    @property
    def num_engines(self) -> int:
        return 1 + max((rank.engine for rank in self.engine_ranks), default=-1)

    @property
    def num_gpus(self) -> int:
        return len(set(self.places))

    @property
    def num_nodes(self) -> int:
        return len({place.node for place in self.places})

    @cached_property
    def places(self) -> tuple[GpuPlace, ...]:
        """Places of all processes, role after role."""
        return tuple(self._places())

    def _places(self) -> Iterator[GpuPlace]:
        for model in self.models.values():
            yield from (rank.place for rank in model.ranks)
        yield from (rank.place for rank in self.engine_ranks)


@dataclass(frozen=True, kw_only=True)
class PlannedModel:
    """One Megatron model of the run: its work, and the GPUs that do it."""

    role: str
    pool: str
    work: ModelWork
    placement: ModelPlacement
    tower: TowerWork | None = None
    """None for text alone."""
    num_adapters: int = 1
    """Adapters of policies that are trained side by side."""
    group: int = 1
    """Rows of a data-parallel rank that begin with one prompt, which is computed once; 1 where rows stay apart."""

    @property
    def is_trained(self) -> bool:
        return isinstance(self.work.split, TrainedModelConfig)

    @cached_property
    def stages(self) -> tuple[StageMemory, ...]:
        """Memory of a trained model, per pipeline stage."""
        dtype = self.work.split.dtype_on(self.work.device)
        shape, parallel = self.work.shape, self.placement.parallel
        return stage_memory(shape, parallel, dtype=dtype, lora=self.work.lora, num_adapters=self.num_adapters)

    @property
    def bare_weights(self) -> tuple[BareWeights, ...]:
        """Weights without Megatron's buffers, per pipeline stage."""
        return bare_weights(self.work.shape, self.placement.parallel, dtype=self.work.split.dtype_on(self.work.device))


class PublishWay(StrEnum):
    MEMORY = "memory"
    """Every engine rank reads all its weights from the memory of trainer ranks on its node (CUDA IPC)."""
    NCCL = "nccl"
    """One communicator of all trainer and engine ranks carries what comes from other nodes."""
    HOST = "host"
    """Gloo carries it through host memory: NCCL refuses two processes on one GPU."""


@dataclass(frozen=True, kw_only=True)
class Deployment:
    """The roles of a run on their GPUs; memory, publishing and time are computed from it."""

    roles: RolesConfig
    device: Device
    gpu: GpuModel
    """The kind of all GPUs; on a CPU run only its link rates are used."""
    models: Mapping[str, PlannedModel]
    """By role, in the order of the placement."""
    engine: EngineMemory | None
    """None without engines."""
    frozen: Mapping[str, EngineMemory]
    """Engines of models that are never trained, by role."""
    placement: Placement
    routes: RouteShape | None = None
    """Set where engines record the experts of tokens."""

    def with_micro_batch(self, recipe: Recipe, shapes: RoleShapes) -> Deployment:
        """Return the deployment of a recipe that differs in the tokens of a micro-batch only."""
        return replace(self, models=_planned_models(recipe, shapes, self.placement))

    @property
    def recorded_bytes(self) -> int:
        """Host memory in which each rank of an engine records the experts of all tokens of its cache, as int32."""
        if self.engine is None or self.routes is None:
            return 0
        return 4 * self.engine.cached_tokens * self.routes.num_layers * self.routes.per_token

    @property
    def capacity_bytes(self) -> int | None:
        """Memory of one GPU; None on a CPU run, which has no stated limit."""
        return None if self.device == "cpu" else self.gpu.memory_bytes

    @property
    def sleeping(self) -> dict[str, str]:
        """The pool of each frozen model that leaves its GPUs to others between its turns; a CPU run moves nothing."""
        return self.roles.frozen_in_turns if self.device != "cpu" else {}

    def places_in(self, pool: str) -> set[GpuPlace]:
        """Return the GPUs of a pool that has ranks or rollout engines."""
        models = [model for model in self.models.values() if model.pool == pool]
        engines = self.placement.engine_ranks if self.roles.used_pools.get("rollout") == pool else ()
        return {rank.place for model in models for rank in model.placement.ranks} | {each.place for each in engines}

    @property
    def keeps_reference(self) -> bool:
        """Whether the actor's ranks keep the reference in host memory; the base of an adapter they have anyway."""
        has_own = self.roles.reference is not None and self.roles.reference.pool is None
        return has_own and self.models["actor"].work.lora is None

    def has_reference(self, role: str) -> bool:
        """Whether the ranks of a role keep a reference: the actor's, and those of a critic that is a language model."""
        if role == "critic":
            return not self.models[role].work.shape.has_value_head
        return role == "actor" and self.keeps_reference

    @property
    def publishes_adapters(self) -> bool:
        lora = self.models["actor"].work.lora
        return lora is not None and not lora.is_merged

    @property
    def keeps_engine_weights(self) -> bool:
        """Whether engines keep their weights while trainers compute on the same GPUs."""
        return self.roles.rollout is not None and self.roles.rollout.release != "everything"

    @property
    def engines_stay(self) -> bool:
        """Whether engines keep all their memory while trainers compute on the same GPUs, and trainers theirs."""
        return self.roles.rollout is not None and not self.roles.rollout.gives_up_memory

    @cached_property
    def publish_way(self) -> PublishWay | None:
        """The way of the weights that a publish moves between nodes; None without engines, and for adapters."""
        if self.engine is None or self.publishes_adapters:
            return None
        if self.device == "cpu":
            return PublishWay.HOST
        engine_nodes = {rank.place.node for rank in self.placement.engine_ranks}
        if engine_nodes <= self.placement.models["actor"].nodes_with_all:
            return PublishWay.MEMORY
        return PublishWay.HOST if self.placement.is_shared else PublishWay.NCCL


def deploy(recipe: Recipe, shapes: RoleShapes, gpu: GpuModel) -> Deployment:
    """Return the deployment of a recipe that passed its checks."""
    device, rollout = recipe.run.device, recipe.roles.rollout
    placement = place(recipe.roles, recipe.pools, is_cluster=recipe.run.ray_address is not None)
    capacity_bytes = None if device == "cpu" else gpu.memory_bytes
    roles = _with_requests(recipe, _engines(recipe, shapes, capacity_bytes))
    if placement.is_shared and capacity_bytes is not None:
        roles = _with_cache(recipe, roles, shapes, capacity_bytes)
    # The states of requests take memory from the cache.
    engines = _engines(recipe.model_copy(update={"roles": roles}), shapes, capacity_bytes)
    return Deployment(
        roles=roles,
        device=device,
        gpu=gpu,
        models=_planned_models(recipe, shapes, placement),
        engine=None if rollout is None else engines["rollout"],
        frozen={role: memory for role, memory in engines.items() if role != "rollout"},
        placement=placement,
        routes=shapes.policy.routes if recipe.replays_routing(shapes.policy) else None,
    )


def has_cache(recipe: Recipe, shapes: RoleShapes, gpu: GpuModel) -> bool:
    """Return whether the weights of rollout engines leave room for a KV cache; true without engines."""
    capacity_bytes = None if recipe.run.device == "cpu" else gpu.memory_bytes
    rollout = _engines(recipe, shapes, capacity_bytes).get("rollout")
    return rollout is None or rollout.cached_tokens > 0


def _planned_models(recipe: Recipe, shapes: RoleShapes, placement: Placement) -> dict[str, PlannedModel]:
    return {
        role: _planned_model(recipe, shapes.of(role), role, split, placement.models[role])
        for role, split in recipe.roles.megatron_roles.items()
    }


def _planned_model(
    recipe: Recipe, shape: ModelShape, role: str, split: ModelParallelConfig, placement: ModelPlacement
) -> PlannedModel:
    group, train = _group(recipe, shape, split, placement), recipe.train
    half = StepWorkload.half(recipe.data, recipe.sampling)
    tokens = half.in_groups(group, num_rows=group, tokens_per_micro_batch=train.micro_batch_tokens)
    return PlannedModel(
        role=role,
        pool=recipe.roles.used_pools[role],
        work=ModelWork.of(
            shape,
            split,
            tokens_per_micro_batch=train.most_tokens,
            keys_per_token=tokens.num_trained / tokens.num_computed,
            device=recipe.run.device,
            lora=recipe.model.lora if isinstance(split, ActorConfig | CriticConfig) else None,
        ),
        placement=placement,
        tower=TowerWork.of(shape, recipe.data),
        num_adapters=max(1, len(recipe.policies)),
        group=group,
    )


def _group(recipe: Recipe, shape: ModelShape, split: ModelParallelConfig, placement: ModelPlacement) -> int:
    """Return the rows of a prompt that one rank has: all, unless ranks outnumber the prompts of an update."""
    if prompt_obstacle(recipe, split, shape) is not None:
        return 1
    prompts = recipe.train.prompts_per_update or recipe.train.prompts_per_step
    return min(recipe.samples_per_prompt, -(-prompts * recipe.samples_per_prompt // placement.parallel.data))


def _engines(recipe: Recipe, shapes: RoleShapes, capacity_bytes: int | None) -> dict[str, EngineMemory]:
    """Return the memory of one engine of each role on engines; frozen models elsewhere have none here."""
    rollout = recipe.roles.rollout
    engines = {
        role: engine_memory(_frozen_shape(config.model, role), config, capacity_bytes)
        for role, config in recipe.roles.frozen.items()
        if config.pool is not None
    }
    if rollout is not None:
        engines["rollout"] = engine_memory(
            shapes.policy,
            rollout,
            capacity_bytes,
            lora=recipe.model.served_lora,
            num_adapters=adapter_slots(recipe),
        )
    return engines


def _with_requests(recipe: Recipe, engines: Mapping[str, EngineMemory]) -> RolesConfig:
    """Return the roles with the requests that each engine computes at a time, where the recipe does not say."""
    requests = {
        role: engine_requests(recipe, config, engines.get(role)).count
        for role, config in recipe.roles.on_engines.items()
    }
    roles = recipe.roles.with_running_requests(requests)
    draft = None if roles.rollout is None else roles.rollout.draft
    if roles.drafter is not None and draft is not None and not draft.is_started(requests["rollout"]):
        raise _error(
            "roles.drafter",
            f"an engine gets {requests['rollout']} requests at a time, and drafts with up to {draft.most_requests}: "
            "none would use what it learns; raise roles.rollout.draft.max_requests, or remove both",
        )
    return roles


def _with_cache(recipe: Recipe, roles: RolesConfig, shapes: RoleShapes, capacity_bytes: int) -> RolesConfig:
    """Return the roles with a cache that holds all requests at their longest, where the recipe does not say.

    Trainers on the same GPUs have a use for what is left.
    """
    rollout = roles.rollout
    granted = _engines(recipe.model_copy(update={"roles": roles}), shapes, capacity_bytes)["rollout"].cached_tokens
    assert rollout is not None, "shared GPUs without engines"
    assert rollout.max_running_requests is not None, "requests are counted first"
    most = rollout.max_running_requests * (recipe.data.max_prompt_tokens + recipe.longest_response_tokens)
    if rollout.max_cached_tokens is not None or granted <= most:
        return roles
    return roles.model_copy(update={"rollout": rollout.model_copy(update={"max_cached_tokens": most})})


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineRequests:
    """The requests that one engine computes at a time, and what limits them."""

    count: int
    limit: str


def engine_requests(recipe: Recipe, config: EngineRoleConfig, engine: EngineMemory | None) -> EngineRequests:
    """Return the recipe's number, else what a step sends to one engine of a role as far as its cache holds it.

    SGLang puts requests off whose tokens do not fit, and takes back some of those that run where it was wrong. The mean
    context of those that run is a load that it seldom has to correct: they are at different places of their responses.
    """
    if config.max_running_requests is not None:
        return EngineRequests(count=config.max_running_requests, limit="max_running_requests of the recipe")
    num_engines = len(config.endpoints) if config.pool is None else recipe.pools[config.pool].gpus // config.tensor
    limits = [
        EngineRequests(
            count=math.ceil(_requests_at_once(recipe) / max(1, num_engines)), limit="all that it gets at once"
        ),
        EngineRequests(count=_MOST_REQUESTS, limit="more are never derived"),
    ]
    if engine is not None:
        tokens = StepWorkload.half(recipe.data, recipe.sampling).mean_context_tokens
        why = f"its cache holds {engine.cached_tokens:,} tokens, {tokens:,} for each"
        if engine.state_bytes_per_request and not engine.is_cache_given:
            why += f" beside a state of {engine.state_bytes_per_request / 1e6:.0f} MB"
        limits.append(EngineRequests(count=engine.most_requests(tokens), limit=why))
    least = min(limits, key=lambda each: each.count)
    return replace(least, count=max(1, least.count))


def _requests_at_once(recipe: Recipe) -> int:
    """Return the requests of all rollouts that are under way together, in a step or in an evaluation."""
    filtering, train = recipe.algorithm.filter, recipe.train
    oversampling = 1.0 if filtering is None else filtering.oversampling
    prompts = train.prompts_per_step * max(1, train.max_staleness) * oversampling
    evaluated = EVALUATED_AT_ONCE if recipe.evaluation is not None else 0
    if not recipe.algorithm.needs.has_engines:
        return evaluated
    return max(math.ceil(prompts) * recipe.sampling.rollouts_per_prompt, evaluated)


def _frozen_shape(folder: Path, role: str) -> ModelShape:
    """Return the shape that counts the weights: the one output of a classifier weighs nothing."""
    shape = _find_shape(folder, f"roles.{role}.model")[0]
    return replace(shape, has_value_head=False, has_tied_embeddings=True) if shape.has_value_head else shape


def place(roles: RolesConfig, pools: Mapping[str, PoolConfig], *, is_cluster: bool) -> Placement:
    """Return the places of all ranks and engines: each role fills its pool in the order of its ranks.

    A pool has nodes of its own, unless everything runs on the one machine where megarl is started.
    """
    gpus, used = _gpus(tuple(pools.items()), is_cluster=is_cluster), roles.used_pools
    rollout = roles.rollout
    return Placement(
        models={
            role: _place_model(
                MegatronParallel.of(split, data=len(gpus[used[role]]) // split.model_parallel), gpus[used[role]]
            )
            for role, split in roles.megatron_roles.items()
        },
        engine_ranks=()
        if rollout is None or rollout.pool is None
        else _place_engines(rollout.tensor, gpus[rollout.pool]),
    )


# These are cached: a search for proposals places the same ranks often.


@cache
def _place_engines(tensor: int, places: tuple[GpuPlace, ...]) -> tuple[EnginePlace, ...]:
    return tuple(
        EnginePlace(engine=index // tensor, tensor=index % tensor, place=gpu)
        for index, gpu in enumerate(places[: len(places) // tensor * tensor])
    )


@cache
def _place_model(parallel: MegatronParallel, places: tuple[GpuPlace, ...]) -> ModelPlacement:
    ranks = tuple(_place_rank(parallel, rank, places[rank]) for rank in range(parallel.world_size))
    return ModelPlacement(parallel=parallel, ranks=ranks)


def _place_rank(parallel: MegatronParallel, rank: int, gpu: GpuPlace) -> RankPlace:
    """Return the coordinates of a rank: the inverse of `MegatronParallel.rank`."""
    rest, tensor = divmod(rank, parallel.tensor)
    rest, context = divmod(rest, parallel.context)
    pipeline, data = divmod(rest, parallel.data)
    return RankPlace(rank=rank, tensor=tensor, context=context, data=data, pipeline=pipeline, place=gpu)


@cache
def _gpus(pools: tuple[tuple[str, PoolConfig], ...], *, is_cluster: bool) -> Mapping[str, tuple[GpuPlace, ...]]:
    """Return the GPUs of each pool; on one machine the pools lie side by side."""
    is_one_machine = not is_cluster and all(pool.nodes == 1 for _, pool in pools)
    places: dict[str, tuple[GpuPlace, ...]] = {}
    first_gpu = 0
    for name, pool in pools:
        places[name] = tuple(
            GpuPlace(
                pool=name,
                node="this machine" if is_one_machine else f"{name}-{node}",
                gpu=first_gpu + gpu,
            )
            for node in range(pool.nodes)
            for gpu in range(pool.gpus_per_node)
        )
        if is_one_machine:
            first_gpu += pool.gpus
    return places


def find_shapes(
    model: ModelConfig, roles: RolesConfig, *, name: str | None = None, algorithm: AlgorithmConfig | None = None
) -> RoleShapes:
    """Return the shapes of the models' folders, or of the public models where a folder does not exist.

    `name` selects a public model for the policy instead of `model.path`. A critic has the policy's shape unless it
    has a path of its own; that of the algorithm `prime` is a language model.
    """
    if name is not None and name not in PUBLIC_MODELS:
        raise _error("--shape", f"unknown {name!r}; one of {', '.join(PUBLIC_MODELS)}")
    policy, source = (PUBLIC_MODELS[name], _entry(name)) if name else _find_shape(model.path, "model.path")
    own = None if roles.critic is None else roles.critic.path
    body = policy if own is None else _find_shape(own, "roles.critic.path")[0]
    others = {role: _find_shape(each.model, f"roles.{role}.model")[0] for role, each in roles.teacher_ranks.items()}
    draft = None if roles.rollout is None else roles.rollout.draft
    if roles.drafter is not None and draft is not None and draft.kind == "model":
        others["drafter"] = _find_shape(draft.path, "roles.rollout.draft.path")[0]
    is_language_model = algorithm is not None and algorithm.needs.implicit_reward_beta is not None
    critic = body if is_language_model else body.as_critic()
    return RoleShapes(policy=policy, critic=critic, source=source, others=others)


def _find_shape(path: Path, key: str) -> tuple[ModelShape, str]:
    if (path / "config.json").is_file():
        return read_model_shape(path), str(path)
    entry = public_model_name(path)
    if entry is None:
        remedy = "name a shape with --shape" if key == "model.path" else "name its folder as one of"
        raise _error(key, f"{path} is neither here nor a known model; {remedy}: {', '.join(PUBLIC_MODELS)}")
    return PUBLIC_MODELS[entry], _entry(entry)


def _entry(name: str) -> str:
    return f"public model {name}"


def _error(key: str, message: str) -> ConfigError:
    return ConfigError("megarl plan", (Problem(key=key, message=message),))


@dataclass(frozen=True, slots=True, kw_only=True)
class StepWorkload:
    """Lengths that an estimate assumes; a recipe states only their upper bounds."""

    mean_prompt_tokens: int
    mean_response_tokens: int
    max_response_tokens: int
    """Length of the longest response."""
    quantiles: tuple[int, ...] = ()
    """Recorded lengths of responses at equal distances of rank, from the shortest to the longest; empty assumes a
    power of the rank that has the mean and the maximum, which is a uniform distribution for a mean of half the
    maximum."""
    kept_share: float | None = None
    """Share of the groups that `algorithm.filter` keeps; None assumes that what oversampling adds is dropped."""

    @classmethod
    def half(cls, data: DataConfig, sampling: SamplingConfig) -> StepWorkload:
        """Assume half of the upper bounds."""
        return cls(
            mean_prompt_tokens=max(1, data.max_prompt_tokens // 2),
            mean_response_tokens=max(1, sampling.max_response_tokens // 2),
            max_response_tokens=sampling.max_response_tokens,
        )

    def limited(self, max_response_tokens: int) -> StepWorkload:
        """Return the lengths that a limit leaves of these."""
        if max_response_tokens >= self.max_response_tokens:
            return self
        cut = [min(length, max_response_tokens) for length in self.lengths(_NUM_SAMPLES)]
        return replace(
            self,
            mean_response_tokens=max(1, round(sum(cut) / len(cut))),
            max_response_tokens=max_response_tokens,
            quantiles=tuple(min(length, max_response_tokens) for length in self.quantiles),
        )

    def in_groups(self, group: int, *, num_rows: int, tokens_per_micro_batch: int) -> GroupTokens:
        """Return the tokens of some rows, of which `group` share each prompt."""
        return GroupTokens.of(
            group=group,
            num_rows=num_rows,
            prompt_tokens=self.mean_prompt_tokens,
            response_tokens=self.mean_response_tokens,
            tokens_per_micro_batch=tokens_per_micro_batch,
        )

    @property
    def mean_context_tokens(self) -> int:
        """Mean length of the requests that run in an engine: halfway through their responses."""
        return self.mean_prompt_tokens + self.mean_response_tokens // 2

    @property
    def sequence_tokens(self) -> int:
        return self.mean_prompt_tokens + self.mean_response_tokens

    @property
    def mean_squared_tokens(self) -> float:
        """Mean of the squared length of a sequence, which attention costs."""
        lengths = self.lengths(_NUM_SAMPLES)
        return sum((self.mean_prompt_tokens + length) ** 2 for length in lengths) / len(lengths)

    def lengths(self, count: int) -> list[int]:
        """Return the lengths of `count` responses, in an order without a trend; one of them is the longest."""
        ranks = [(index + 0.5) / count for index in range(count - 1)] + [1.0]
        ordered = [max(1, round(self._length_at(rank))) for rank in ranks]
        step = _coprime_step(count)
        return [ordered[index * step % count] for index in range(count)]

    def _length_at(self, rank: float) -> float:
        if self.quantiles:
            return _interpolated(self.quantiles, rank)
        mean = min(self.mean_response_tokens, self.max_response_tokens)
        return self.max_response_tokens * math.pow(rank, self.max_response_tokens / mean - 1)


def _interpolated(quantiles: Sequence[int], rank: float) -> float:
    place = rank * (len(quantiles) - 1)
    low = min(int(place), len(quantiles) - 2) if len(quantiles) > 1 else 0
    high = min(low + 1, len(quantiles) - 1)
    return quantiles[low] + (place - low) * (quantiles[high] - quantiles[low])


def _coprime_step(count: int) -> int:
    """Return a step near the golden section of `count` that visits every place once."""
    candidates = range(max(1, int(0.618 * count)), count + 2)
    return next(step for step in candidates if math.gcd(step, count) == 1)
