"""Where the time of a step goes: a roofline from stated rates, for responses of an assumed mean length."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from functools import cache
from typing import TypeAlias

from megarl.config.algorithm import KlRewardConfig, PolicyGradientConfig, SftConfig
from megarl.config.model import ModelShape
from megarl.config.recipe import Recipe
from megarl.planner.activations import ModelWork, recomputed_share
from megarl.planner.hardware import (
    DECODE_EFFICIENCY,
    DISK_GB_PER_S_PER_NODE,
    HOST_GB_PER_S,
    PREFILL_EFFICIENCY,
    TRAIN_EFFICIENCY,
    GpuModel,
)
from megarl.planner.ledger import keeps_reference, snapshot_bytes
from megarl.planner.memory import EngineMemory, bare_weights
from megarl.planner.placement import ModelPlacement, Placement
from megarl.planner.shapes import RoleShapes
from megarl.weights.layouts.canonical import num_active_parameters


@dataclass(frozen=True, slots=True, kw_only=True)
class StepWorkload:
    """What the recipe bounds but does not say."""

    mean_prompt_tokens: int
    mean_response_tokens: int

    @classmethod
    def half(cls, recipe: Recipe) -> StepWorkload:
        """Half of what is allowed, until measured."""
        return cls(
            mean_prompt_tokens=max(1, recipe.data.max_prompt_tokens // 2),
            mean_response_tokens=max(1, recipe.sampling.max_response_tokens // 2),
        )

    @property
    def sequence_tokens(self) -> int:
        return self.mean_prompt_tokens + self.mean_response_tokens


class PhaseName(StrEnum):
    ROLLOUT = "rollout"
    OLD = "old log-probabilities"
    REFERENCE = "reference log-probabilities"
    VALUES = "values"
    UPDATE = "update"
    CRITIC_UPDATE = "critic update"
    PUBLISH = "publish"


@dataclass(frozen=True, slots=True, kw_only=True)
class PhaseTime:
    name: PhaseName
    seconds: float
    is_waited_for: bool
    """False where another pool works longer at the same time."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Timing:
    phases: tuple[PhaseTime, ...]
    """In the order of a step, without those that it does not have."""
    copy_s: float
    """Training waits so long for the copy to host memory that a checkpoint is written from; not part of a step."""
    save_s: float
    """Writing it, while training goes on."""
    bubble: float
    """Share of the actor's update in which a pipeline stage waits for the others."""
    num_micro_batches: int
    """Per rank and update of the actor."""
    running_requests: int
    """Per engine, as far as its cache and its limit allow."""
    trained_tokens: int

    @property
    def step_s(self) -> float:
        return sum(phase.seconds for phase in self.phases if phase.is_waited_for)

    def seconds(self, name: PhaseName) -> float:
        return sum(phase.seconds for phase in self.phases if phase.name is name)


def estimate(
    recipe: Recipe,
    shapes: RoleShapes,
    placement: Placement,
    gpu: GpuModel,
    workload: StepWorkload,
    *,
    engine: EngineMemory | None,
    publish_s: float,
) -> Timing:
    """Generating and training take turns, or with `max_staleness` above 0 go on side by side but for the publish."""
    is_sft = isinstance(recipe.algorithm, SftConfig)
    sequences = recipe.train.prompts_per_step * (1 if is_sft else recipe.sampling.rollouts_per_prompt)
    models = {
        role: _TimedModel(recipe, shapes, role, model, gpu, workload, sequences)
        for role, model in placement.models.items()
    }
    running, rollout = 0, list[PhaseTime]()
    if engine is not None and not is_sft:
        running = _running_requests(recipe, placement, workload, engine, sequences)
        rollout_s = _rollout_s(recipe, shapes.policy, placement, gpu, workload, engine, sequences, running)
        rollout = [PhaseTime(name=PhaseName.ROLLOUT, seconds=rollout_s, is_waited_for=True)]
    publish = [] if engine is None else [PhaseTime(name=PhaseName.PUBLISH, seconds=publish_s, is_waited_for=True)]
    scoring, learning = _work(recipe, models)
    training = [*_side_by_side(recipe, scoring), *_side_by_side(recipe, learning)]
    if recipe.train.max_staleness > 0:
        rollout, training = _overlapped(rollout, training)
    trained = {role: model for role, model in placement.models.items() if role != "reference"}
    copies = {role: snapshot_bytes(recipe, shapes, role, model) for role, model in trained.items()}
    saved = sum(copies[role][rank.pipeline] for role, model in trained.items() for rank in model.ranks)
    nodes = {rank.place.node for model in trained.values() for rank in model.ranks}
    return Timing(
        phases=(*rollout, *training, *publish),
        copy_s=max(max(sizes) for sizes in copies.values()) / (HOST_GB_PER_S * 1e9),
        save_s=saved / (DISK_GB_PER_S_PER_NODE * 1e9 * len(nodes)),
        bubble=models["actor"].bubble / (1 + models["actor"].bubble),
        num_micro_batches=models["actor"].num_micro_batches,
        running_requests=running,
        trained_tokens=sequences * workload.sequence_tokens,
    )


_Work: TypeAlias = dict[PhaseName, tuple[str, float]]
"""The role whose pool does it, and how long."""


def _work(recipe: Recipe, models: Mapping[str, _TimedModel]) -> tuple[_Work, _Work]:
    """What is asked before credit is assigned, and what is learned after."""
    algorithm, actor = recipe.algorithm, models["actor"]
    kl = algorithm.kl if isinstance(algorithm, PolicyGradientConfig) else None
    scoring: _Work = {}
    learning: _Work = {}
    if isinstance(kl, KlRewardConfig):
        scoring[PhaseName.OLD] = ("actor", actor.forward_s)
    elif recipe.train.updates_per_step > 1:
        # A single update's own forward pass serves as the old policy.
        learning[PhaseName.OLD] = ("actor", actor.forward_s)
    if kl is not None and "reference" in models:
        scoring[PhaseName.REFERENCE] = ("reference", models["reference"].forward_s)
    elif keeps_reference(recipe):
        scoring[PhaseName.REFERENCE] = ("actor", actor.forward_s + actor.exchange_s)
    learning[PhaseName.UPDATE] = ("actor", recipe.train.epochs * actor.update_s)
    if recipe.roles.critic is not None:
        scoring[PhaseName.VALUES] = ("critic", models["critic"].forward_s)
        learning[PhaseName.CRITIC_UPDATE] = ("critic", recipe.roles.critic.epochs * models["critic"].update_s)
    return scoring, learning


def _side_by_side(recipe: Recipe, work: _Work) -> Iterator[PhaseTime]:
    """Pools work at the same time, the models of one pool in turn: the step waits for the pool that needs longest."""
    pools = recipe.roles.used_pools
    by_pool: defaultdict[str, float] = defaultdict(float)
    for role, seconds in work.values():
        by_pool[pools[role]] += seconds
    longest = max(by_pool, key=lambda pool: by_pool[pool], default=None)
    for name, (role, seconds) in work.items():
        yield PhaseTime(name=name, seconds=seconds, is_waited_for=pools[role] == longest)


def _overlapped(rollout: Sequence[PhaseTime], training: Sequence[PhaseTime]) -> tuple[list[PhaseTime], list[PhaseTime]]:
    """The step waits for whichever side needs longer."""
    generating_s = sum(phase.seconds for phase in rollout if phase.is_waited_for)
    training_s = sum(phase.seconds for phase in training if phase.is_waited_for)
    shorter = training if generating_s > training_s else rollout
    meanwhile = [replace(phase, is_waited_for=False) for phase in shorter]
    return (list(rollout), meanwhile) if shorter is training else (meanwhile, list(training))


class _TimedModel:
    """How long the ranks of one model take for all sequences of a step."""

    def __init__(
        self,
        recipe: Recipe,
        shapes: RoleShapes,
        role: str,
        placement: ModelPlacement,
        gpu: GpuModel,
        workload: StepWorkload,
        sequences: int,
    ) -> None:
        shape, parallel = shapes.of(role), placement.parallel
        self._work = ModelWork.of(recipe, shape, recipe.roles.megatron_roles[role])
        self._weight_bytes = max(stage.num_bytes for stage in bare_weights(shape, parallel, dtype=recipe.run.dtype))
        per_rank = sequences * workload.sequence_tokens / _mini_batches(recipe, role) / parallel.data
        self.num_micro_batches = max(1, -(-int(per_rank) // recipe.train.tokens_per_micro_batch))
        self.bubble = (parallel.pipeline - 1) / (parallel.virtual_pipeline * self.num_micro_batches)
        rate = len(placement.ranks) * gpu.flops * TRAIN_EFFICIENCY
        tokens = workload.sequence_tokens
        flops = forward_flops(shape, num_tokens=sequences * tokens, num_squared_tokens=sequences * tokens**2)
        self.forward_s = flops / rate * (1 + self.bubble)

    @property
    def update_s(self) -> float:
        """Of one epoch."""
        return (3 + recomputed_share(self._work)) * self.forward_s

    @property
    def exchange_s(self) -> float:
        """Weights on the GPU and in host memory change places, for a pass and back; one way after the other."""
        return 4 * self._weight_bytes / (HOST_GB_PER_S * 1e9)


def _mini_batches(recipe: Recipe, role: str) -> int:
    """Updates per epoch."""
    critic, per_step = recipe.roles.critic, recipe.train.prompts_per_step
    of_critic = critic.prompts_per_update if role == "critic" and critic is not None else None
    return per_step // (of_critic or recipe.train.prompts_per_update or per_step)


def forward_flops(shape: ModelShape, *, num_tokens: float, num_squared_tokens: float) -> float:
    """Two per weight and token, and the causal half of the attention matrix: tokens of each sequence, squared."""
    attention = 2 * shape.num_layers * shape.num_heads * shape.head_dim
    return float(2 * _num_multiplied(shape) * num_tokens + attention * num_squared_tokens)


def _running_requests(
    recipe: Recipe, placement: Placement, workload: StepWorkload, engine: EngineMemory, sequences: int
) -> int:
    rollout = recipe.roles.rollout
    assert rollout is not None, "an engine without a role"
    mean_context = workload.mean_prompt_tokens + workload.mean_response_tokens // 2
    wanted = -(-sequences // placement.num_engines)
    return max(1, min(wanted, rollout.max_running_requests, engine.cached_tokens // mean_context))


def _rollout_s(
    recipe: Recipe,
    shape: ModelShape,
    placement: Placement,
    gpu: GpuModel,
    workload: StepWorkload,
    engine: EngineMemory,
    sequences: int,
    running: int,
) -> float:
    """Prefill of each prompt once, then steps of decoding: each reads the weights and the cache of all that runs."""
    num_gpus = len(placement.engine_ranks)
    tensor = num_gpus // placement.num_engines
    weights = _num_multiplied(shape)
    prompts = recipe.train.prompts_per_step * workload.mean_prompt_tokens
    prefill_s = 2 * weights * prompts / (num_gpus * gpu.flops * PREFILL_EFFICIENCY)
    mean_context = workload.mean_prompt_tokens + workload.mean_response_tokens // 2
    read = _read_bytes(shape, engine, running) + running * mean_context * engine.cache_bytes_per_token
    read_s = read / (gpu.memory_gb_per_s * 1e9 * DECODE_EFFICIENCY)
    compute_s = 2 * weights * running / (tensor * gpu.flops * PREFILL_EFFICIENCY)
    per_engine = sequences / placement.num_engines
    # The longest response cannot be shared out: it takes a step per token however few others are left.
    steps = max(per_engine * workload.mean_response_tokens / running, recipe.sampling.max_response_tokens)
    return prefill_s + steps * max(read_s, compute_s)


@cache
def _num_multiplied(shape: ModelShape) -> int:
    """Weights that a token is multiplied with: its experts, but no embedding that is only looked up."""
    looked_up = 0 if shape.has_tied_embeddings else shape.vocab * shape.hidden
    return num_active_parameters(shape) - looked_up


def _read_bytes(shape: ModelShape, engine: EngineMemory, running: int) -> float:
    """Weights that a step of decoding reads: of the experts those that any of the running requests is sent to."""
    if shape.experts is None:
        return engine.weight_bytes
    missed = (1 - shape.experts.per_token / shape.experts.num) ** running
    return engine.weight_bytes - missed * engine.expert_bytes
