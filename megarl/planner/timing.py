"""Time of a step: training, publishing and switching at the rates that runs reach, and rollouts by simulation.

`estimate` adds up the phases of a step; `RolloutTime` simulates the decoding of its responses on the engines;
`TrainingTime` has the passes of a model: arithmetic by kind of work, and the traffic between its ranks, which nothing
hides.
"""

from __future__ import annotations

import heapq
import math
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from itertools import chain
from typing import TypeAlias

from megarl.config.algorithm import AlgorithmConfig, KlConfig, KlRewardConfig
from megarl.config.recipe import SamplingConfig, TrainConfig
from megarl.config.roles import CriticConfig
from megarl.config.section import REMEMBERED_IMAGE_BYTES
from megarl.families import family_of, uniform_shapes
from megarl.families.shape import ModelShape
from megarl.planner.activations import recomputed_share
from megarl.planner.deployment import Deployment, Placement, PlannedModel, StepWorkload
from megarl.planner.flops import ForwardWork, forward_work, num_multiplied
from megarl.planner.hardware import (
    ALL_TO_ALL_EFFICIENCY,
    ATTENTION_EFFICIENCY,
    DECODE_EFFICIENCY,
    DECODE_LAYER_S,
    DECODE_REQUEST_S,
    DECODE_STEP_S,
    DENSE_EFFICIENCY,
    DETERMINISTIC_SLOWDOWN,
    EXPERT_EFFICIENCY,
    FLOAT32_SLOWDOWN,
    FP8_SPEEDUP,
    HOST_GB_PER_S,
    LINK_EFFICIENCY,
    NETWORK_ALL_REDUCE_S,
    NODE_ALL_REDUCE_S,
    PASS_S,
    PREFILL_EFFICIENCY,
    SWITCH_S,
    GpuModel,
)
from megarl.planner.ledger import offload_of
from megarl.planner.memory import EngineMemory
from megarl.planner.sharing import GroupTokens

_MAX_SIMULATED = 2048
"""Requests; further ones run while the engine is full."""

_ITEM_BYTES = 2
"""Activations are bfloat16."""
_GRADIENT_BYTES = 4


class PhaseName(StrEnum):
    ROLLOUT = "rollout"
    OLD = "old log-probabilities"
    REFERENCE = "reference log-probabilities"
    TEACHER = "teacher log-probabilities"
    VALUES = "values"
    UPDATE = "update"
    CRITIC_UPDATE = "critic update"
    DRAFT_UPDATE = "draft update"
    PUBLISH = "publish"
    SWITCH = "change of hands"
    """In a shared pool: engines go to sleep and wake up, trainers leave their memory and take it again."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PhaseTime:
    name: PhaseName
    seconds: float
    is_waited_for: bool
    """False if another pool works longer at the same time."""
    is_longest: bool = True
    """False if another pool trains or scores longer at the same time, whatever generating takes."""


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
    computed_tokens: int
    """Tokens of `trained_tokens` that the actor computes: a prompt once for the rows that share it."""
    shared_s: float
    """Time of passes that this saves in a step, over all models."""
    images_s: float
    """Part of the phases in which towers compute images, engines and ranks together."""

    @property
    def step_s(self) -> float:
        return sum(phase.seconds for phase in self.phases if phase.is_waited_for)

    def seconds(self, name: PhaseName) -> float:
        return sum(phase.seconds for phase in self.phases if phase.name is name)


_Work: TypeAlias = dict[PhaseName, tuple[str, float]]
"""The role that does the work, and its seconds."""


def estimate(
    deployment: Deployment,
    workload: StepWorkload,
    *,
    algorithm: AlgorithmConfig,
    train: TrainConfig,
    sampling: SamplingConfig,
    snapshots: Mapping[str, Sequence[int]],
    publish_s: float,
    file_system_gb_per_s: float,
) -> Timing:
    """Return the time of a step: generating and training alternate, or with `max_staleness` above 0 run concurrently
    except for the publish. `snapshots` are the bytes per rank of each stage that a checkpoint copies, by role."""
    sequences = train.prompts_per_step * algorithm.needs.samples_per_prompt(sampling.rollouts_per_prompt)
    models = _training_times(deployment, workload, train=train, num_sequences=sequences)
    running, rollout, images_s = 0, list[PhaseTime](), 0.0
    if deployment.engine is not None and algorithm.needs.has_engines:
        num_rounds, num_prompts = generated_prompts(algorithm, train, workload)
        # Prompts of so many steps are under way at once, and only the last of them waits for its longest response.
        num_steps = max(1, train.max_staleness)
        num_sequences = num_steps * num_prompts * sampling.rollouts_per_prompt
        engines = RolloutTime(deployment, workload, num_sequences=num_sequences)
        running = engines.num_running
        seconds = num_rounds * engines.seconds(num_prompts=num_steps * num_prompts) / num_steps
        images_s = num_rounds * engines.images_s(num_prompts=num_prompts)
        rollout = [PhaseTime(name=PhaseName.ROLLOUT, seconds=seconds, is_waited_for=True)]
    publish = [PhaseTime(name=PhaseName.PUBLISH, seconds=publish_s, is_waited_for=True)] if deployment.engine else []
    scoring, learning = _work(deployment, models, train, algorithm.kl)
    images_s += sum(_image_seconds(models, scoring, learning, epochs=train.epochs).values())
    apart = _training_times(deployment, workload, train=train, num_sequences=sequences, shares_prompts=False)
    alone = chain.from_iterable(work.values() for work in _work(deployment, apart, train, algorithm.kl))
    together = chain(scoring.values(), learning.values())
    pools = deployment.roles.used_pools
    training = [*_side_by_side(scoring, pools), *_side_by_side(learning, pools)]
    if train.max_staleness > 0:
        rollout, training = _overlapped(rollout, training)
    actor = models["actor"]
    return Timing(
        phases=(*rollout, *training, *publish, *_switch(deployment)),
        copy_s=max(max(sizes) for sizes in snapshots.values()) / (HOST_GB_PER_S * 1e9),
        save_s=_save_bytes(deployment.placement, snapshots) / (file_system_gb_per_s * 1e9),
        bubble=actor.bubble / (1 + actor.bubble),
        num_micro_batches=actor.num_micro_batches,
        running_requests=running,
        trained_tokens=sequences * workload.sequence_tokens,
        computed_tokens=round(actor.tokens.num_computed),
        shared_s=sum(seconds for _, seconds in alone) - sum(seconds for _, seconds in together),
        images_s=images_s,
    )


def longest_call_s(
    deployment: Deployment,
    workload: StepWorkload,
    *,
    algorithm: AlgorithmConfig,
    train: TrainConfig,
    sampling: SamplingConfig,
) -> float:
    """Return the time of the longest call to the ranks of a model in a step; each has one deadline."""
    sequences = train.prompts_per_step * algorithm.needs.samples_per_prompt(sampling.rollouts_per_prompt)
    models = _training_times(deployment, workload, train=train, num_sequences=sequences)
    scoring, learning = _work(deployment, models, train, algorithm.kl)
    # Old log-probabilities that only an update needs are computed in its call.
    update_s = sum(seconds for role, seconds in learning.values() if role == "actor")
    drafter = deployment.roles.drafter
    # Learning has its mean over steps.
    draft_s = 0.0 if drafter is None else drafter.every_steps * learning[PhaseName.DRAFT_UPDATE][1]
    return max(update_s, draft_s, *(seconds for _, seconds in (*scoring.values(), *learning.values())))


def _training_times(
    deployment: Deployment,
    workload: StepWorkload,
    *,
    train: TrainConfig,
    num_sequences: int,
    shares_prompts: bool = True,
) -> dict[str, TrainingTime]:
    return {
        role: TrainingTime(
            model,
            deployment.gpu,
            workload,
            tokens=workload.in_groups(
                model.group if shares_prompts else 1,
                num_rows=num_sequences,
                tokens_per_micro_batch=train.micro_batch_tokens,
            ),
            tokens_per_micro_batch=train.micro_batch_tokens,
            num_mini_batches=_mini_batches(train, deployment.roles.critic if role == "critic" else None),
        )
        for role, model in deployment.models.items()
    }


def generated_prompts(algorithm: AlgorithmConfig, train: TrainConfig, workload: StepWorkload) -> tuple[float, int]:
    """Return how many rounds a step generates in, and the prompts of a round.

    Dropped groups are replaced in a further round, unless oversampling has replaced them already. With `max_staleness`
    prompts are replaced at once.
    """
    filtering = algorithm.filter
    oversampling = 1.0 if filtering is None else filtering.oversampling
    at_once = train.prompts_per_step * oversampling
    kept_share = workload.kept_share if filtering is not None else None
    needed = at_once if kept_share is None else train.prompts_per_step / max(kept_share, 0.01)
    num_rounds = 1.0 if train.max_staleness else max(1.0, needed / at_once)
    return num_rounds, math.ceil(needed / num_rounds)


def _switch(deployment: Deployment) -> Iterator[PhaseTime]:
    """Yield the time in which a shared pool changes hands: offloaded weights go over the host link, twice a step."""
    if not deployment.placement.is_shared or deployment.engine is None or deployment.engines_stay:
        return
    rollout = deployment.roles.used_pools["rollout"]
    models = [model for model in deployment.models.values() if model.pool == rollout]
    leaving = [model for model in models if offload_of(model) == "everything"]
    copied = sum(max(stage.weight_bytes for stage in model.stages) for model in leaving)
    seconds = SWITCH_S + 2 * copied / (HOST_GB_PER_S * 1e9)
    yield PhaseTime(name=PhaseName.SWITCH, seconds=seconds, is_waited_for=True)


def _work(
    deployment: Deployment, models: Mapping[str, TrainingTime], train: TrainConfig, kl: KlConfig | None
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
    teachers = deployment.roles.teacher_ranks
    if teachers:
        # Pools of several teachers work side by side; how prompts divide among them is not known here.
        slowest = max(teachers, key=lambda role: models[role].forward_s)
        scoring[PhaseName.TEACHER] = (slowest, models[slowest].forward_s)
    learning[PhaseName.UPDATE] = ("actor", train.epochs * actor.update_s)
    if critic is not None:
        values = models["critic"]
        # A critic that is a language model compares itself with the weights that it started from.
        compared_s = values.forward_s + values.exchange_s if deployment.has_reference("critic") else 0.0
        scoring[PhaseName.VALUES] = ("critic", values.forward_s + compared_s)
        learning[PhaseName.CRITIC_UPDATE] = ("critic", critic.epochs * models["critic"].update_s)
    learning |= _drafter_work(deployment, models)
    for name, images_s in _image_seconds(models, scoring, learning, epochs=train.epochs).items():
        for work in (scoring, learning):
            if name in work:
                work[name] = (work[name][0], work[name][1] + images_s)
    return scoring, learning


def _drafter_work(deployment: Deployment, models: Mapping[str, TrainingTime]) -> _Work:
    """Return the mean work of a step: a drafter learns in one of several."""
    drafter = deployment.roles.drafter
    if drafter is None:
        return {}
    return {PhaseName.DRAFT_UPDATE: ("drafter", drafter.epochs * models["drafter"].update_s / drafter.every_steps)}


def _image_seconds(
    models: Mapping[str, TrainingTime], scoring: _Work, learning: _Work, *, epochs: int
) -> dict[PhaseName, float]:
    """Return the time of towers in each phase: in every pass of a model, or in its first if it remembers them."""
    seconds, seen = dict[PhaseName, float](), set[str]()
    for name, (role, _) in (*scoring.items(), *learning.items()):
        num_passes = epochs if name is PhaseName.UPDATE else 1
        if models[role].remembers_images:
            num_passes = 0 if role in seen else 1
        seen.add(role)
        seconds[name] = num_passes * models[role].images_s
    return seconds


def _side_by_side(work: _Work, pools: Mapping[str, str]) -> Iterator[PhaseTime]:
    """Yield the phases: pools work concurrently, models of a pool in turn; the step waits for the slowest pool."""
    by_pool: defaultdict[str, float] = defaultdict(float)
    for role, seconds in work.values():
        by_pool[pools[role]] += seconds
    longest = max(by_pool, key=lambda pool: by_pool[pool], default=None)
    for name, (role, seconds) in work.items():
        is_longest = pools[role] == longest
        yield PhaseTime(name=name, seconds=seconds, is_waited_for=is_longest, is_longest=is_longest)


def _overlapped(rollout: Sequence[PhaseTime], training: Sequence[PhaseTime]) -> tuple[list[PhaseTime], list[PhaseTime]]:
    """Return both sides with only the longer one waited for."""
    generating_s = sum(phase.seconds for phase in rollout if phase.is_waited_for)
    training_s = sum(phase.seconds for phase in training if phase.is_waited_for)
    shorter = training if generating_s > training_s else rollout
    meanwhile = [replace(phase, is_waited_for=False) for phase in shorter]
    return (list(rollout), meanwhile) if shorter is training else (meanwhile, list(training))


def _save_bytes(placement: Placement, snapshots: Mapping[str, Sequence[int]]) -> int:
    """Return the bytes of all snapshots, which go to one file system however many nodes write."""
    return sum(snapshots[role][rank.pipeline] for role in snapshots for rank in placement.models[role].ranks)


def _mini_batches(train: TrainConfig, critic: CriticConfig | None) -> int:
    """Return the updates per epoch of the actor, or of the critic."""
    own = critic.prompts_per_update if critic is not None else None
    return train.prompts_per_step // (own or train.prompts_per_update or train.prompts_per_step)


class RolloutTime:
    """Time of generating all sequences of a step."""

    def __init__(self, deployment: Deployment, workload: StepWorkload, *, num_sequences: int) -> None:
        rollout, engine = deployment.roles.rollout, deployment.engine
        assert rollout is not None, "an engine without a role"
        assert engine is not None, "no engine"
        placement, gpu = deployment.placement, deployment.gpu
        self._shape = deployment.models["actor"].work.shape
        self._tower = deployment.models["actor"].tower
        self._gpu = gpu
        self._engine = engine
        self._workload = workload
        self._tensor = rollout.tensor
        self.num_engines = placement.num_engines
        nodes = {rank.place.node for rank in placement.engine_ranks if rank.engine == 0}
        self._all_reduce_s = NODE_ALL_REDUCE_S if len(nodes) == 1 else NETWORK_ALL_REDUCE_S
        self._link_bytes_per_s = (
            1e9 * LINK_EFFICIENCY * (gpu.node_gb_per_s if len(nodes) == 1 else gpu.network_gb_per_s * rollout.tensor)
        )
        self._slowdown = (
            DETERMINISTIC_SLOWDOWN if rollout.is_deterministic_on(deployment.device) else 1.0
        ) / gpu.reached
        self._num_requests = max(1, -(-num_sequences // self.num_engines))
        self.num_running = max(
            1, min(self._num_requests, rollout.running_requests, engine.cached_tokens // workload.mean_context_tokens)
        )
        """Requests that run per engine, limited by its cache and its own limit."""

    def seconds(self, *, num_prompts: int) -> float:
        """Return the time of one prefill per prompt and of all decoding steps."""
        prompts = num_prompts * self._workload.mean_prompt_tokens
        rate = self.num_engines * self._tensor * self._gpu.flops * PREFILL_EFFICIENCY
        prefill_s = 2 * num_multiplied(self._shape) * prompts / rate
        return prefill_s + self.images_s(num_prompts=num_prompts) + self._decoding_s()

    def images_s(self, *, num_prompts: int) -> float:
        """Return the time in which the engines' towers compute the image of each prompt."""
        if self._tower is None:
            return 0.0
        tokens = min(self._tower.mean_tokens, self._workload.mean_prompt_tokens)
        operations = self._tower.work(tokens).total / (self._tensor * self._gpu.flops * PREFILL_EFFICIENCY)
        return num_prompts / self.num_engines * max(operations, self._tower.start_s)

    def _decoding_s(self) -> float:
        """Simulate one engine from one end of a request to the next."""
        count = min(self._num_requests, max(_MAX_SIMULATED, 4 * self.num_running))
        waiting = iter(self._workload.lengths(count))
        prompt = self._workload.mean_prompt_tokens
        # By the step at which a request ends, with the step at which it began.
        running: list[tuple[int, int]] = []
        step = 0
        total_began = 0
        seconds = 0.0
        full_s = 0.0
        num_full = 0
        while True:
            while len(running) < self.num_running and (length := next(waiting, None)) is not None:
                heapq.heappush(running, (step + length, step))
                total_began += step
            if not running:
                break
            end, began = heapq.heappop(running)
            num_steps, num_running = end - step, len(running) + 1
            context = num_running * (prompt + step + num_steps / 2) - total_began
            spent = num_steps * self.step_s(num_running, context)
            seconds += spent
            if num_running == self.num_running:
                full_s, num_full = full_s + spent, num_full + 1
            step, total_began = end, total_began - began
        left = self._num_requests - count
        return seconds + (left * full_s / num_full if left else 0.0)

    def step_s(self, running: int, context_tokens: float) -> float:
        """Return the time of one token for each running request: the weights and all contexts are read, and states are
        read and written."""
        gpu, shape, tensor = self._gpu, self._shape, self._tensor
        read = _read_bytes(shape, self._engine, running) + context_tokens * self._engine.cache_bytes_per_token
        read += 2 * running * self._engine.state_bytes_per_request
        read_s = read / (gpu.memory_gb_per_s * 1e9 * DECODE_EFFICIENCY)
        compute_s = 2 * num_multiplied(shape) * running / (tensor * gpu.flops * PREFILL_EFFICIENCY)
        overhead_s = DECODE_STEP_S + shape.num_layers * DECODE_LAYER_S + running * DECODE_REQUEST_S
        if tensor > 1:
            reduced = 2 * running * shape.hidden * 2
            overhead_s += 2 * shape.num_layers * (self._all_reduce_s + reduced / self._link_bytes_per_s)
        return self._slowdown * (max(read_s, compute_s) + overhead_s)


def _read_bytes(shape: ModelShape, engine: EngineMemory, running: int) -> float:
    """Return the weights that a decoding step reads; experts that no running request uses are not read."""
    if shape.experts is None:
        return engine.weight_bytes
    missed = (1 - shape.experts.per_token / shape.experts.num) ** running
    return engine.weight_bytes - missed * engine.expert_bytes


def _in_fp8(work: ForwardWork, shape: ModelShape, speedup: float, *, num_tokens: float) -> ForwardWork:
    """Return the work in bfloat16 that takes as long; the head is not in FP8, and experts gain nothing by it."""
    head = 0.0 if shape.has_value_head else 2.0 * shape.vocab * shape.hidden * num_tokens
    return replace(work, dense=head + (work.dense - head) / speedup)


class TrainingTime:
    """Times of one model for all sequences of a step."""

    def __init__(
        self,
        model: PlannedModel,
        gpu: GpuModel,
        workload: StepWorkload,
        *,
        tokens: GroupTokens,
        tokens_per_micro_batch: int,
        num_mini_batches: int,
    ) -> None:
        self.tokens = tokens
        parallel = model.placement.parallel
        self._model = model
        self._work = model.work
        self._gpu = gpu
        self._num_mini_batches = num_mini_batches
        self._weight_bytes = max(stage.num_bytes for stage in model.bare_weights)
        self._gpus_per_node = _most_on_a_node(model)
        num_tokens = tokens.num_computed
        self._rank_tokens = num_tokens / parallel.replicas
        self.num_micro_batches = max(
            1, -(-int(num_tokens / num_mini_batches / parallel.data) // tokens_per_micro_batch)
        )
        self.bubble = (parallel.pipeline - 1) / (parallel.virtual_pipeline * self.num_micro_batches)
        work = forward_work(
            model.work.shape,
            num_tokens=num_tokens,
            num_squared_tokens=tokens.num_rows * workload.mean_squared_tokens - tokens.num_squared_shared,
        )
        if self._work.split.precision == "fp8":
            work = _in_fp8(work, model.work.shape, FP8_SPEEDUP[self._work.split.fp8_scaling], num_tokens=num_tokens)
        if self._work.split.precision == "fp32":
            work = replace(work, dense=FLOAT32_SLOWDOWN * work.dense, expert=FLOAT32_SLOWDOWN * work.expert)
        self._compute_s = (
            work.dense / DENSE_EFFICIENCY + work.expert / EXPERT_EFFICIENCY + work.attention / ATTENTION_EFFICIENCY
        ) / (len(model.placement.ranks) * gpu.flops * gpu.reached)

    @property
    def forward_s(self) -> float:
        """Time of one pass without gradients."""
        traffic_s = self._tensor_s() + self._expert_s() + self._context_s()
        return PASS_S + (1 + self.bubble) * (self._compute_s + traffic_s)

    @property
    def update_s(self) -> float:
        """Time of one epoch: forward and twice as much backward, repeated passes, and per update one reduction and the
        optimizer's way through the GPU, if it is in host memory."""
        repeats = recomputed_share(self._work)
        compute_s = (3 + repeats) * self._compute_s
        # Backward passes of a sequence-parallel model gather the inputs of its layers once more.
        tensor = (2.5 if self._work.split.is_sequence_parallel else 2) + repeats
        traffic_s = tensor * self._tensor_s() + (2 + repeats) * (self._expert_s() + self._context_s())
        per_update_s = self._reduction_s() + self._offload_s()
        return PASS_S + (1 + self.bubble) * (compute_s + traffic_s) + self._num_mini_batches * per_update_s

    @property
    def images_s(self) -> float:
        """Time of the tower in one pass; each rank with the embedding computes all images of its micro-batches."""
        tower = self._model.tower
        if tower is None:
            return 0.0
        work = tower.work(self._image_tokens)
        slowdown = FLOAT32_SLOWDOWN if self._work.split.precision == "fp32" else 1.0
        operations = slowdown * work.dense / DENSE_EFFICIENCY + work.attention / ATTENTION_EFFICIENCY
        return self._num_images * max(operations / (self._gpu.flops * self._gpu.reached), tower.start_s)

    @property
    def remembers_images(self) -> bool:
        """Whether a rank has the tower's outputs of a step for its later passes."""
        tower = self._model.tower
        if tower is None:
            return True
        num_bytes = self._num_images * tower.output_bytes(self._image_tokens, self._work.item_bytes)
        return num_bytes <= REMEMBERED_IMAGE_BYTES

    @property
    def _image_tokens(self) -> int:
        return 0 if self._model.tower is None else min(self._model.tower.mean_tokens, self.tokens.prompt_tokens)

    @property
    def _num_images(self) -> float:
        """Different images of a rank in a step: those of its groups."""
        return self.tokens.num_rows / self._model.placement.parallel.data / self._model.group

    @property
    def exchange_s(self) -> float:
        """Time to swap the weights on the GPU and in host memory, for a pass and back; one direction at a time."""
        return 4 * self._weight_bytes / (HOST_GB_PER_S * 1e9)

    def _tensor_s(self) -> float:
        """Return the traffic of tensor parallelism in a forward pass: two gathers and two scatters per layer."""
        parallel, shape = self._model.placement.parallel, self._work.shape
        if parallel.tensor == 1:
            return 0.0
        layers = shape.num_layers / parallel.pipeline
        share = (parallel.tensor - 1) / parallel.tensor
        num_bytes = 4 * share * self._rank_tokens * shape.hidden * _ITEM_BYTES * layers
        return num_bytes / self._rate(spans_nodes=parallel.tensor > self._gpus_per_node)

    def _context_s(self) -> float:
        """Return the gathering of keys and values in a forward pass, or the exchange of tokens for heads of delta nets;
        a backward pass scatters as many gradients."""
        parallel, num_elements = self._model.placement.parallel, 0.0
        for shape, layers in uniform_shapes(self._work.shape):
            cost = family_of(shape).attention(shape)
            moved: float = cost.cached_on(parallel.tensor)
            if cost.recurrence is not None:
                exchanged = cost.queries + cost.keys + cost.values + cost.gates + cost.outputs
                moved = exchanged / (parallel.tensor * parallel.context)
            num_elements += layers / parallel.pipeline * moved
        num_bytes = (parallel.context - 1) * self._rank_tokens * num_elements * _ITEM_BYTES
        return num_bytes / self._rate(spans_nodes=parallel.tensor * parallel.context > self._gpus_per_node)

    def _expert_s(self) -> float:
        """Return the all-to-all of a mixture in a forward pass: every copy of a token goes to its expert and back."""
        parallel, shape = self._model.placement.parallel, self._work.shape
        if shape.experts is None or parallel.expert == 1:
            return 0.0
        layers = (shape.num_layers - shape.experts.num_dense_layers) / parallel.pipeline
        tokens = self._rank_tokens / parallel.tensor * parallel.ranks_per_expert
        copies = 2 * shape.experts.per_token * tokens * shape.hidden * _ITEM_BYTES * layers
        ranks = parallel.expert * parallel.ranks_per_expert
        num_nodes = -(-ranks // self._gpus_per_node)
        elsewhere = copies * (1 - 1 / num_nodes)
        nearby = copies * (1 / num_nodes - 1 / parallel.expert)
        efficiency = ALL_TO_ALL_EFFICIENCY * 1e9
        return elsewhere / (self._gpu.network_gb_per_s * efficiency) + max(0.0, nearby) / (
            self._gpu.node_gb_per_s * efficiency
        )

    def _reduction_s(self) -> float:
        """Return the time of summing float32 gradients and gathering weights between replicas, once per update."""
        parallel = self._model.placement.parallel
        if parallel.replicas == 1 or not self._model.is_trained:
            return 0.0
        num_elements = max(stage.gradient_bytes for stage in self._model.stages) / _GRADIENT_BYTES
        share = (parallel.replicas - 1) / parallel.replicas
        spans_nodes = parallel.tensor * parallel.replicas > self._gpus_per_node
        return 6 * share * num_elements / self._rate(spans_nodes=spans_nodes)

    def _offload_s(self) -> float:
        """Return the time in which an optimizer in host memory is copied to the GPU, and back at the same time."""
        if offload_of(self._model) == "nothing":
            return 0.0
        return max(stage.optimizer_bytes for stage in self._model.stages) / (HOST_GB_PER_S * 1e9)

    def _rate(self, *, spans_nodes: bool) -> float:
        rate = self._gpu.network_gb_per_s if spans_nodes else self._gpu.node_gb_per_s
        return rate * 1e9 * LINK_EFFICIENCY


def _most_on_a_node(model: PlannedModel) -> int:
    nodes = [rank.place.node for rank in model.placement.ranks]
    return max(nodes.count(node) for node in set(nodes))
