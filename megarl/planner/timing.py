"""Time of a step: a roofline from stated rates, for responses of an assumed mean length."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from functools import cache
from typing import TypeAlias

from megarl.config.algorithm import AlgorithmConfig, KlConfig, KlRewardConfig, SftConfig
from megarl.config.model import ModelShape
from megarl.config.recipe import DataConfig, SamplingConfig, TrainConfig
from megarl.config.roles import CriticConfig
from megarl.planner.activations import recomputed_share
from megarl.planner.deployment import Deployment, Placement, PlannedModel
from megarl.planner.hardware import (
    DECODE_EFFICIENCY,
    DISK_GB_PER_S_PER_NODE,
    HOST_GB_PER_S,
    PREFILL_EFFICIENCY,
    TRAIN_EFFICIENCY,
    GpuModel,
)
from megarl.planner.ledger import kl_config
from megarl.planner.memory import EngineMemory
from megarl.weights.layouts.canonical import num_active_parameters


@dataclass(frozen=True, slots=True, kw_only=True)
class StepWorkload:
    """Mean lengths that the estimate assumes; a recipe states only their upper bounds."""

    mean_prompt_tokens: int
    mean_response_tokens: int

    @classmethod
    def half(cls, data: DataConfig, sampling: SamplingConfig) -> StepWorkload:
        """Assume half of the upper bounds."""
        return cls(
            mean_prompt_tokens=max(1, data.max_prompt_tokens // 2),
            mean_response_tokens=max(1, sampling.max_response_tokens // 2),
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
    """False if another pool works longer at the same time."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Timing:
    phases: tuple[PhaseTime, ...]
    """The phases that the step has, in their order."""
    copy_s: float
    """Time that training waits for the copy to host memory before a checkpoint is written; not part of a step."""
    save_s: float
    """Time of writing the checkpoint, during which training continues."""
    bubble: float
    """Share of the actor's update in which a pipeline stage waits for other stages."""
    num_micro_batches: int
    """Micro-batches per rank and update of the actor."""
    running_requests: int
    """Requests that run per engine, limited by its cache and `max_running_requests`."""
    trained_tokens: int

    @property
    def step_s(self) -> float:
        return sum(phase.seconds for phase in self.phases if phase.is_waited_for)

    def seconds(self, name: PhaseName) -> float:
        return sum(phase.seconds for phase in self.phases if phase.name is name)


def estimate(
    deployment: Deployment,
    workload: StepWorkload,
    *,
    algorithm: AlgorithmConfig,
    train: TrainConfig,
    sampling: SamplingConfig,
    snapshots: Mapping[str, Sequence[int]],
    publish_s: float,
) -> Timing:
    """Return the time of a step: generating and training alternate, or with `max_staleness` above 0 run concurrently
    except for the publish. `snapshots` are the bytes per rank of each stage that a checkpoint copies, by role."""
    is_sft = isinstance(algorithm, SftConfig)
    sequences = train.prompts_per_step * (1 if is_sft else sampling.rollouts_per_prompt)
    models = {
        role: _ModelTime(
            model,
            deployment.gpu,
            num_sequences=sequences,
            sequence_tokens=workload.sequence_tokens,
            tokens_per_micro_batch=train.tokens_per_micro_batch,
            num_mini_batches=_mini_batches(train, deployment.roles.critic if role == "critic" else None),
        )
        for role, model in deployment.models.items()
    }
    running, rollout = 0, list[PhaseTime]()
    if deployment.engine is not None and not is_sft:
        engines = _EngineTime(deployment, workload, num_sequences=sequences)
        running = engines.num_running
        seconds = engines.rollout_s(
            num_prompts=train.prompts_per_step, max_response_tokens=sampling.max_response_tokens
        )
        rollout = [PhaseTime(name=PhaseName.ROLLOUT, seconds=seconds, is_waited_for=True)]
    publish = [PhaseTime(name=PhaseName.PUBLISH, seconds=publish_s, is_waited_for=True)] if deployment.engine else []
    scoring, learning = _work(deployment, models, train, kl_config(algorithm))
    pools = deployment.roles.used_pools
    training = [*_side_by_side(scoring, pools), *_side_by_side(learning, pools)]
    if train.max_staleness > 0:
        rollout, training = _overlapped(rollout, training)
    actor = models["actor"]
    return Timing(
        phases=(*rollout, *training, *publish),
        copy_s=max(max(sizes) for sizes in snapshots.values()) / (HOST_GB_PER_S * 1e9),
        save_s=_save_s(deployment.placement, snapshots),
        bubble=actor.bubble / (1 + actor.bubble),
        num_micro_batches=actor.num_micro_batches,
        running_requests=running,
        trained_tokens=sequences * workload.sequence_tokens,
    )


_Work: TypeAlias = dict[PhaseName, tuple[str, float]]
"""The role that does the work, and its seconds."""


def _work(
    deployment: Deployment, models: Mapping[str, _ModelTime], train: TrainConfig, kl: KlConfig | None
) -> tuple[_Work, _Work]:
    """Return the work before and after credit is assigned."""
    actor, critic = models["actor"], deployment.roles.critic
    scoring: _Work = {}
    learning: _Work = {}
    if isinstance(kl, KlRewardConfig):
        scoring[PhaseName.OLD] = ("actor", actor.forward_s)
    elif train.updates_per_step > 1:
        # With a single update its own forward pass gives the old log-probabilities.
        learning[PhaseName.OLD] = ("actor", actor.forward_s)
    if kl is not None and "reference" in models:
        scoring[PhaseName.REFERENCE] = ("reference", models["reference"].forward_s)
    elif deployment.keeps_reference:
        scoring[PhaseName.REFERENCE] = ("actor", actor.forward_s + actor.exchange_s)
    learning[PhaseName.UPDATE] = ("actor", train.epochs * actor.update_s)
    if critic is not None:
        scoring[PhaseName.VALUES] = ("critic", models["critic"].forward_s)
        learning[PhaseName.CRITIC_UPDATE] = ("critic", critic.epochs * models["critic"].update_s)
    return scoring, learning


def _side_by_side(work: _Work, pools: Mapping[str, str]) -> Iterator[PhaseTime]:
    """Yield the phases: pools work concurrently, models of a pool in turn; the step waits for the slowest pool."""
    by_pool: defaultdict[str, float] = defaultdict(float)
    for role, seconds in work.values():
        by_pool[pools[role]] += seconds
    longest = max(by_pool, key=lambda pool: by_pool[pool], default=None)
    for name, (role, seconds) in work.items():
        yield PhaseTime(name=name, seconds=seconds, is_waited_for=pools[role] == longest)


def _overlapped(rollout: Sequence[PhaseTime], training: Sequence[PhaseTime]) -> tuple[list[PhaseTime], list[PhaseTime]]:
    """Return both sides with only the longer one waited for."""
    generating_s = sum(phase.seconds for phase in rollout if phase.is_waited_for)
    training_s = sum(phase.seconds for phase in training if phase.is_waited_for)
    shorter = training if generating_s > training_s else rollout
    meanwhile = [replace(phase, is_waited_for=False) for phase in shorter]
    return (list(rollout), meanwhile) if shorter is training else (meanwhile, list(training))


def _save_s(placement: Placement, snapshots: Mapping[str, Sequence[int]]) -> float:
    """Return the time of writing all snapshots, each node to its own disk."""
    ranks = [(role, rank) for role in snapshots for rank in placement.models[role].ranks]
    num_bytes = sum(snapshots[role][rank.pipeline] for role, rank in ranks)
    nodes = {rank.place.node for _, rank in ranks}
    return num_bytes / (DISK_GB_PER_S_PER_NODE * 1e9 * len(nodes))


class _ModelTime:
    """Times of one model for all sequences of a step."""

    def __init__(
        self,
        model: PlannedModel,
        gpu: GpuModel,
        *,
        num_sequences: int,
        sequence_tokens: int,
        tokens_per_micro_batch: int,
        num_mini_batches: int,
    ) -> None:
        parallel = model.placement.parallel
        self._work = model.work
        self._weight_bytes = max(stage.num_bytes for stage in model.bare_weights)
        per_rank = num_sequences * sequence_tokens / num_mini_batches / parallel.data
        self.num_micro_batches = max(1, -(-int(per_rank) // tokens_per_micro_batch))
        self.bubble = (parallel.pipeline - 1) / (parallel.virtual_pipeline * self.num_micro_batches)
        rate = len(model.placement.ranks) * gpu.flops * TRAIN_EFFICIENCY
        flops = forward_flops(
            model.work.shape,
            num_tokens=num_sequences * sequence_tokens,
            num_squared_tokens=num_sequences * sequence_tokens**2,
        )
        self.forward_s = flops / rate * (1 + self.bubble)

    @property
    def update_s(self) -> float:
        """Time of one epoch."""
        return (3 + recomputed_share(self._work)) * self.forward_s

    @property
    def exchange_s(self) -> float:
        """Time to swap the weights on the GPU and in host memory, for a pass and back; one direction at a time."""
        return 4 * self._weight_bytes / (HOST_GB_PER_S * 1e9)


def _mini_batches(train: TrainConfig, critic: CriticConfig | None) -> int:
    """Return the updates per epoch of the actor, or of the critic."""
    own = critic.prompts_per_update if critic is not None else None
    return train.prompts_per_step // (own or train.prompts_per_update or train.prompts_per_step)


class _EngineTime:
    """Time of generating all sequences of a step; the engines share them equally."""

    def __init__(self, deployment: Deployment, workload: StepWorkload, *, num_sequences: int) -> None:
        rollout, engine = deployment.roles.rollout, deployment.engine
        assert rollout is not None, "an engine without a role"
        assert engine is not None, "no engine"
        self._shape = deployment.models["actor"].work.shape
        self._gpu = deployment.gpu
        self._engine = engine
        self._workload = workload
        self._num_gpus = len(deployment.placement.engine_ranks)
        self._num_engines = deployment.placement.num_engines
        self._num_sequences = num_sequences
        self._mean_context = workload.mean_prompt_tokens + workload.mean_response_tokens // 2
        wanted = -(-num_sequences // self._num_engines)
        self.num_running = max(1, min(wanted, rollout.max_running_requests, engine.cached_tokens // self._mean_context))
        """Requests that run per engine, limited by its cache and its own limit."""

    def rollout_s(self, *, num_prompts: int, max_response_tokens: int) -> float:
        """Return the time of one prefill per prompt and of the decoding steps; each step reads the weights and the
        cache of all running requests."""
        gpu, running, weights = self._gpu, self.num_running, _num_multiplied(self._shape)
        tensor = self._num_gpus // self._num_engines
        prompts = num_prompts * self._workload.mean_prompt_tokens
        prefill_s = 2 * weights * prompts / (self._num_gpus * gpu.flops * PREFILL_EFFICIENCY)
        read = _read_bytes(self._shape, self._engine, running)
        read += running * self._mean_context * self._engine.cache_bytes_per_token
        read_s = read / (gpu.memory_gb_per_s * 1e9 * DECODE_EFFICIENCY)
        compute_s = 2 * weights * running / (tensor * gpu.flops * PREFILL_EFFICIENCY)
        per_engine = self._num_sequences / self._num_engines
        # The longest response cannot be divided: it takes one step per token, however few requests are left.
        steps = max(per_engine * self._workload.mean_response_tokens / running, max_response_tokens)
        return prefill_s + steps * max(read_s, compute_s)


def forward_flops(shape: ModelShape, *, num_tokens: float, num_squared_tokens: float) -> float:
    """Return two operations per weight and token, and those of the causal half of the attention matrix.

    `num_squared_tokens` is the sum over all sequences of their length squared.
    """
    attention = 2 * shape.num_layers * shape.num_heads * shape.head_dim
    return float(2 * _num_multiplied(shape) * num_tokens + attention * num_squared_tokens)


@cache
def _num_multiplied(shape: ModelShape) -> int:
    """Return the weights that a token is multiplied with: those of its experts, without an embedding table."""
    looked_up = 0 if shape.has_tied_embeddings else shape.vocab * shape.hidden
    return num_active_parameters(shape) - looked_up


def _read_bytes(shape: ModelShape, engine: EngineMemory, running: int) -> float:
    """Return the weights that a decoding step reads; experts that no running request uses are not read."""
    if shape.experts is None:
        return engine.weight_bytes
    missed = (1 - shape.experts.per_token / shape.experts.num) ** running
    return engine.weight_bytes - missed * engine.expert_bytes
