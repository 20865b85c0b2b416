"""Memory of the fullest GPU of every kind in every phase, and host memory per node.

Roles that share a pool share its GPUs: each holds its memory at all times, and one at a time computes. A sleeping
engine gives back its KV cache and, with `release: everything`, its weights. Before engines take memory, a trainer gives
back what its allocator holds unused and, with `offload`, its gradients; its optimizer is then in host memory at all
times, and the weights with `everything` while engines generate. With `release: nothing` neither gives back anything.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import Literal

from megarl.config.algorithm import AlgorithmConfig, KlConfig, KlRewardConfig
from megarl.config.recipe import CheckpointConfig
from megarl.config.roles import NUM_PIECES, PIECE_ELEMENTS, TrainedModelConfig
from megarl.config.section import GIB, REMEMBERED_IMAGE_BYTES, dtype_on
from megarl.planner.activations import (
    activation_bytes,
    chunks_in_flight,
    forward_bytes,
    fp8_weight_bytes,
    head_bytes,
    scoring_bytes,
)
from megarl.planner.deployment import Deployment, PlannedModel, PublishWay
from megarl.planner.memory import (
    COMMUNICATOR_BYTES,
    ENGINE_CONTEXT_BYTES,
    NCCL_BYTES,
    PUBLISH_COMMUNICATOR_BYTES,
    EngineMemory,
    StageMemory,
)
from megarl.planner.tower import num_tower_parameters
from megarl.weights.algebra.buckets import DEFAULT_BUCKET_BYTES, NUM_LANES
from megarl.weights.algebra.slices import ITEM_BYTES

TRAINER_CONTEXT_BYTES = 7 * GIB // 2
"""Allowance for CUDA context, loaded kernels, workspaces and NCCL buffers of one rank; 3.7 GiB seen on an H200."""
GRAPH_BYTES = 3 * GIB // 2
"""Allowance for CUDA graphs and activations of an engine; with the context, 1.4 GiB seen for 0.5B on an H200."""

_DERIVED, _MERGED = "FP8 tensors", "merged weights"
_PIECE_ITEM_BYTES = 16
"""Master weight and moments in float32, and as much again as one of them for Adam's arithmetic."""
SPARE_SHARE = 0.05
"""Share of the memory that must be left for engines and trainers to keep theirs at the same time."""
ALLOCATOR_SHARE = 0.05
"""Allowance for blocks that PyTorch's allocator holds and cannot use, as a share of what a pass allocates."""


class MemoryPhase(StrEnum):
    STARTING = "starting"
    """Engines were started first and sleep, and the trainers of their pool are built."""
    GENERATING = "generating"
    JUDGING = "judging"
    """Frozen models score. Other engines of their pool have no KV cache meanwhile; at other times they hold nothing."""
    SCORING = "scoring"
    """Values, and log-probabilities of the reference and of the policy before its update."""
    TRAINING = "training"
    PUBLISHING = "publishing"
    """The engines have their weights and no KV cache; trainers in other pools keep the memory of their last pass."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LedgerItem:
    name: str
    num_bytes: int
    is_exact: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryLedger:
    """Memory of one GPU, the fullest of its kind, in one phase."""

    where: str
    """The roles that share the GPU."""
    phase: MemoryPhase
    items: tuple[LedgerItem, ...]
    capacity_bytes: int | None
    """None on a CPU run, whose ledger is of host memory."""

    @property
    def total_bytes(self) -> int:
        return _total(self.items)

    @property
    def margin_bytes(self) -> int | None:
        return None if self.capacity_bytes is None else self.capacity_bytes - self.total_bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class HostLedger:
    """Host memory that ranks of one node hold; the node is the fullest of its kind."""

    where: str
    """The roles of the node."""
    items: tuple[LedgerItem, ...]

    @property
    def total_bytes(self) -> int:
        return _total(self.items)


def ledgers(deployment: Deployment, algorithm: AlgorithmConfig) -> tuple[MemoryLedger, ...]:
    """Return the ledgers of all phases, pool after pool."""
    return tuple(
        ledger
        for pool in dict.fromkeys(deployment.roles.used_pools.values())
        for ledger in _PoolLedgers(deployment, pool, algorithm).ledgers()
    )


def with_release(deployment: Deployment, algorithm: AlgorithmConfig) -> Deployment:
    """Return the deployment with what its engines give up in a shared pool, where the recipe does not say.

    A cache of 40 GB takes about a second to come back on an H200, and ranks that gave up theirs allocate it again.
    """
    roles = deployment.roles
    if roles.rollout is None or roles.rollout.release is not None or not roles.beside_engines:
        return deployment
    kept, released = (
        replace(deployment, roles=roles.model_copy(update={"rollout": rollout}))
        for rollout in (roles.rollout.model_copy(update={"release": each}) for each in ("nothing", "kv_cache"))
    )
    if roles.in_turns_with_engines or deployment.capacity_bytes is None:
        return released
    spare = min(each.margin_bytes or 0 for each in ledgers(kept, algorithm))
    return kept if spare >= SPARE_SHARE * deployment.capacity_bytes else released


class _PoolLedgers:
    """Makes the ledgers of one pool's GPUs."""

    def __init__(self, deployment: Deployment, pool: str, algorithm: AlgorithmConfig) -> None:
        self._deployment = deployment
        roles = [role for role, used in deployment.roles.used_pools.items() if used == pool]
        self._where = " + ".join("engine" if role == "rollout" else role for role in roles)
        models = {role: deployment.models[role] for role in roles if role in deployment.models}
        prefixes = {role: "" if len(models) == 1 else f"{role} " for role in models}
        self._models = {
            role: _ModelMemory(deployment, model, prefix=prefixes[role], kl=algorithm.kl)
            for role, model in models.items()
        }
        self._engine = deployment.engine if "rollout" in roles else None
        self._frozen = [deployment.frozen[role] for role in roles if role in deployment.frozen]

    def ledgers(self) -> Iterator[MemoryLedger]:
        awake, deployment = [*self._engine_items(has_cache=True)], self._deployment
        is_shared = bool(self._models) and self._engine is not None
        alternates = is_shared and not deployment.engines_stay
        # While trainers compute in its pool.
        asleep = [*self._engine_items(has_weights=deployment.keeps_engine_weights, has_cache=deployment.engines_stay)]
        kept_bytes = 0
        if self._frozen:
            beside = [*self._all(lambda model: model.resting), *self._engine_items()]
            models = [item for frozen in self._frozen for item in self._frozen_items(frozen)]
            yield self._ledger(MemoryPhase.JUDGING, [*beside, *models])
        if is_shared or any(model.shares_base for model in self._models.values()):
            yield self._ledger(MemoryPhase.STARTING, [*self._all(lambda model: model.built), *asleep])
        if self._engine is not None and (alternates or not is_shared):
            yield self._ledger(MemoryPhase.GENERATING, [*self._all(lambda model: model.resting), *awake])
        for phase in (MemoryPhase.SCORING, MemoryPhase.TRAINING):
            busy = {role: model.busy(phase) for role, model in self._models.items()}
            possible = [
                [*computing, *(item for other, model in self._models.items() if other != role for item in model.held)]
                for role, computing in busy.items()
                if computing
            ]
            if possible:
                fullest = max(possible, key=_total)
                kept_bytes = max(kept_bytes, _total(fullest) - _total(self._all(lambda model: model.held)))
                yield self._ledger(phase, [*fullest, *asleep])
        if "actor" in self._models and deployment.engine is not None:
            sending = self._all(lambda model: model.trimmed if alternates else model.held)
            if deployment.capacity_bytes is not None and not alternates:
                sending.append(LedgerItem(name="allocator", num_bytes=kept_bytes, is_exact=False))
            engine = [*self._engine_items(has_cache=deployment.engines_stay)]
            if is_shared and deployment.engines_stay:
                yield self._ledger(MemoryPhase.GENERATING, [*sending, *engine])
            yield self._ledger(MemoryPhase.PUBLISHING, [*sending, *engine])

    def _all(self, items_of: Callable[[_ModelMemory], Sequence[LedgerItem]]) -> list[LedgerItem]:
        return [item for model in self._models.values() for item in items_of(model)]

    def _engine_items(self, *, has_weights: bool = True, has_cache: bool = False) -> Iterator[LedgerItem]:
        engine, deployment = self._engine, self._deployment
        if engine is None:
            return
        if has_weights:
            text_bytes = engine.weight_bytes - engine.tower_bytes - engine.draft_bytes
            yield LedgerItem(name="engine weights", num_bytes=text_bytes, is_exact=True)
            others = {"engine tower": engine.tower_bytes, "engine draft": engine.draft_bytes}
            yield from (LedgerItem(name=name, num_bytes=size, is_exact=True) for name, size in others.items() if size)
        if engine.adapter_bytes:
            yield LedgerItem(name="adapter slots", num_bytes=engine.adapter_bytes, is_exact=True)
        if has_cache:
            yield LedgerItem(name="KV cache", num_bytes=engine.cache_bytes, is_exact=True)
        yield from _publish_items(deployment)
        if deployment.capacity_bytes is not None:
            yield LedgerItem(name="engine graphs", num_bytes=GRAPH_BYTES, is_exact=False)
            if (tower := deployment.models["actor"].tower) is not None:
                num_bytes = tower.activation_bytes(tower.most_tokens, ITEM_BYTES[dtype_on(deployment.device)])
                yield LedgerItem(name="engine images", num_bytes=num_bytes, is_exact=False)
            has_ranks = deployment.roles.rollout is not None and deployment.roles.rollout.tensor > 1
            if has_ranks:
                yield LedgerItem(name="communicators", num_bytes=COMMUNICATOR_BYTES, is_exact=False)
            if has_ranks or deployment.publish_way is PublishWay.NCCL:
                yield LedgerItem(name="NCCL", num_bytes=NCCL_BYTES, is_exact=False)

    def _frozen_items(self, engine: EngineMemory) -> Iterator[LedgerItem]:
        yield LedgerItem(name="frozen weights", num_bytes=engine.weight_bytes, is_exact=True)
        yield LedgerItem(name="frozen KV cache", num_bytes=engine.cache_bytes, is_exact=True)
        if self._deployment.capacity_bytes is not None:
            yield LedgerItem(name="frozen graphs", num_bytes=GRAPH_BYTES, is_exact=False)

    def _ledger(self, phase: MemoryPhase, items: Sequence[LedgerItem]) -> MemoryLedger:
        capacity_bytes = self._deployment.capacity_bytes
        num_engines = (self._engine is not None) + len(self._frozen)
        sizes = [TRAINER_CONTEXT_BYTES] * len(self._models) + [ENGINE_CONTEXT_BYTES] * num_engines
        contexts = [LedgerItem(name="context", num_bytes=size, is_exact=False) for size in sizes]
        everything = (*items, *(contexts if capacity_bytes is not None else ()))
        return MemoryLedger(where=self._where, phase=phase, items=everything, capacity_bytes=capacity_bytes)


class _ModelMemory:
    """One model's memory on a GPU; `prefix` distinguishes it from other models there."""

    def __init__(self, deployment: Deployment, model: PlannedModel, *, prefix: str, kl: KlConfig | None) -> None:
        self._model = model
        self._work = model.work
        self._prefix = prefix
        self._exchanges_weights = deployment.has_reference(model.role)
        if model.role == "actor":
            self._is_scored = isinstance(kl, KlRewardConfig) or self._exchanges_weights
        else:
            self._is_scored = model.role != "drafter"
        self._deployment = deployment
        self._offload = offload_of(model)
        self._held: list[tuple[LedgerItem, ...]]
        if not model.is_trained:
            self._held = [(self._item("weights", stage.num_bytes),) for stage in model.bare_weights]
        else:
            self._held = [tuple(self._trained(stage)) for stage in model.stages]
        # It is loaded on ranks with the embedding.
        self._held[0] = (*self._held[0], *self._tower())

    @property
    def held(self) -> tuple[LedgerItem, ...]:
        """Memory of a rank of the fullest stage after an update, without what its allocator holds unused."""
        return max(self._held, key=_total)

    @property
    def _is_sent(self) -> bool:
        """Whether engines get its weights."""
        return self._model.role in ("actor", "drafter")

    @property
    def shares_base(self) -> bool:
        """Whether several policies share it."""
        return self._model.num_adapters > 1

    @property
    def built(self) -> tuple[LedgerItem, ...]:
        """Memory while the model is built: without an optimizer yet, weights are copied to Megatron's buffer. A further
        policy has a base of its own until it computes with that of the first."""
        trained = self._model.stages if self._model.is_trained else []
        size = 4 if self._work.device == "cpu" else 2  # of a weight; gradients are float32
        copied = [
            (
                *self._without(self._held[stage.stage], "optimizer"),
                self._item("weights before their buffer", stage.gradient_bytes * size // 4),
            )
            for stage in trained
        ]
        if self.shares_base:
            copied += [
                (*held, self._item("base before it is shared", bare.num_bytes))
                for held, bare in zip(self._held, self._model.bare_weights, strict=True)
            ]
        return max((self.held, *copied), key=_total)

    @property
    def trimmed(self) -> tuple[LedgerItem, ...]:
        """Memory that a publish leaves."""
        return self._without(self.held, "gradients") if self._offload != "nothing" else self.held

    @property
    def resting(self) -> tuple[LedgerItem, ...]:
        """Memory while engines generate."""
        return self._without(self.trimmed, _DERIVED, _MERGED, *(("weights",) if self._offload == "everything" else ()))

    def busy(self, phase: MemoryPhase) -> tuple[LedgerItem, ...]:
        """Memory of the fullest stage while the model computes; empty if it does not in this phase."""
        stages = range(self._work.split.pipeline)
        if phase is MemoryPhase.SCORING and self._is_scored:
            unused = ("gradients",) if self._offload != "nothing" else ()
            held = [self._without(items, *unused) for items in self._held]
            return max(((*held[stage], *self._scoring(stage)) for stage in stages), key=_total)
        if phase is MemoryPhase.TRAINING and self._model.is_trained:
            return max(((*self._held[stage], *self._updating(stage)) for stage in stages), key=_total)
        return ()

    def _trained(self, stage: StageMemory) -> Iterator[LedgerItem]:
        yield self._item("weights", stage.weight_bytes)
        yield self._item("gradients", stage.gradient_bytes)
        if self._offload == "nothing":
            yield self._item("optimizer", stage.optimizer_bytes)
        if self._work.device != "cpu":
            number = _num_communicators(self._model)
            yield LedgerItem(name="communicators", num_bytes=number * COMMUNICATOR_BYTES, is_exact=False)
            is_sender = self._is_sent and self._deployment.publish_way is PublishWay.NCCL
            if number or is_sender:
                yield LedgerItem(name="NCCL", num_bytes=NCCL_BYTES, is_exact=False)
        if self._is_sent:
            yield from _publish_items(self._deployment)
        if self._model.role == "actor":
            if self._deployment.roles.rollout and self._deployment.roles.rollout.fp8_keep is not None:
                yield self._item(_DERIVED, stage.weight_bytes // 2, is_exact=False)
            elif self._deployment.engine is not None and self._work.lora is not None and self._work.lora.is_merged:
                yield self._item(_MERGED, stage.weight_bytes, is_exact=False)

    def _tower(self) -> Iterator[LedgerItem]:
        if (tower := self._model.tower) is not None:
            item_bytes = self._work.item_bytes
            yield self._item("tower", item_bytes * num_tower_parameters(self._work.shape))
            num_bytes = max(REMEMBERED_IMAGE_BYTES, tower.output_bytes(tower.most_tokens, item_bytes))
            yield self._item("remembered images", num_bytes, is_exact=False)

    def _scoring(self, stage: int) -> Iterator[LedgerItem]:
        is_last = stage == self._work.split.pipeline - 1
        head = scoring_bytes(self._work, has_gradients=False) if is_last else 0
        yield from self._pass(stage, forward_bytes(self._work), head, in_flight=1)
        if self._exchanges_weights:
            largest_bytes = self._model.bare_weights[stage].largest_bytes
            yield LedgerItem(name="exchanged tensor", num_bytes=largest_bytes, is_exact=True)

    def _updating(self, stage: int) -> Iterator[LedgerItem]:
        in_flight = chunks_in_flight(self._work.split, stage)
        activations, head = activation_bytes(self._work, stage), head_bytes(self._work, stage)
        yield from self._pass(stage, activations, head, in_flight=in_flight)
        if self._offload != "nothing":
            num_bytes = min(self._model.stages[stage].optimizer_bytes, NUM_PIECES * PIECE_ELEMENTS * _PIECE_ITEM_BYTES)
            yield self._item("optimizer in pieces", num_bytes, is_exact=False)

    def _pass(self, stage: int, activations: int, head: int, *, in_flight: int) -> Iterator[LedgerItem]:
        yield self._item("activations", activations, is_exact=False)
        images = self._images(activations, in_flight) if stage == 0 else 0
        if images:
            yield self._item("images", images, is_exact=False)
        if self._work.split.precision == "fp8":
            yield self._item("weights in FP8", fp8_weight_bytes(self._work, stage), is_exact=False)
        if head:
            name = "values" if self._work.shape.has_value_head else "log-probabilities"
            yield LedgerItem(name=name, num_bytes=head, is_exact=False)
        if self._work.device != "cpu":
            num_bytes = int(ALLOCATOR_SHARE * (activations + images + head))
            yield LedgerItem(name="allocator", num_bytes=num_bytes, is_exact=False)

    def _images(self, activations: int, in_flight: int) -> int:
        """Return what the largest image needs beyond the activations of its micro-batch, which begin after it; and
        what micro-batches keep of the tower's deeper outputs, at most for every token."""
        if (tower := self._model.tower) is None:
            return 0
        work = self._work
        one = tower.activation_bytes(tower.most_tokens, work.item_bytes)
        deep = work.item_bytes * work.tokens * len(tower.vision.deep_layers) * tower.hidden // work.sequence_ranks
        return max(0, one - activations // in_flight) + in_flight * deep

    def _without(self, items: Sequence[LedgerItem], *names: str) -> tuple[LedgerItem, ...]:
        return tuple(item for item in items if item.name not in {self._prefix + name for name in names})

    def _item(self, name: str, num_bytes: int, *, is_exact: bool = True) -> LedgerItem:
        return LedgerItem(name=f"{self._prefix}{name}", num_bytes=num_bytes, is_exact=is_exact)


def _publish_items(deployment: Deployment) -> Iterator[LedgerItem]:
    """Yield the memory of one end of a publish: two buckets, and the communicator of all ends."""
    way = deployment.publish_way
    if way not in (None, PublishWay.MEMORY) and deployment.device != "cpu":
        yield LedgerItem(name="publish buckets", num_bytes=NUM_LANES * DEFAULT_BUCKET_BYTES, is_exact=True)
    if way is PublishWay.NCCL:
        yield LedgerItem(name="publish communicator", num_bytes=PUBLISH_COMMUNICATOR_BYTES, is_exact=False)


def _num_communicators(model: PlannedModel) -> int:
    """Return how many groups of ranks a rank talks to: by tensor, context, stage, replica, expert; and all."""
    parallel = model.placement.parallel
    sizes = (parallel.tensor, parallel.pipeline, parallel.replicas, parallel.expert, parallel.world_size)
    return sum(size > 1 for size in (*sizes, parallel.context))


def saves(checkpoint: CheckpointConfig) -> bool:
    return checkpoint.save_at_end or checkpoint.save_every_steps is not None


def offload_of(model: PlannedModel) -> Literal["nothing", "optimizer", "everything"]:
    """Return what the model keeps in host memory; on a CPU everything is there."""
    split = model.work.split
    return split.offload if isinstance(split, TrainedModelConfig) and model.work.device != "cpu" else "nothing"


def host_ledgers(deployment: Deployment, checkpoint: CheckpointConfig) -> tuple[HostLedger, ...]:
    """Return a ledger per kind of node, which is the set of its roles; nodes that hold nothing are left out."""
    by_node: defaultdict[str, dict[str, list[LedgerItem]]] = defaultdict(dict)
    for role, model in deployment.models.items():
        stages = _host_items(model, checkpoint, keeps_reference=deployment.has_reference(role))
        for rank in model.placement.ranks:
            by_node[rank.place.node].setdefault(role, []).extend(stages[rank.pipeline])
    if deployment.publish_way is PublishWay.HOST and deployment.device != "cpu":
        lanes = LedgerItem(name="publish buckets", num_bytes=NUM_LANES * DEFAULT_BUCKET_BYTES, is_exact=True)
        ranks, engine_ranks = deployment.placement.ranks, deployment.placement.engine_ranks
        for place in (*(rank.place for rank in ranks), *(rank.place for rank in engine_ranks)):
            by_node[place.node].setdefault("actor", []).append(lanes)
    if deployment.recorded_bytes:
        recorded = LedgerItem(name="recorded experts", num_bytes=deployment.recorded_bytes, is_exact=True)
        for engine_rank in deployment.placement.engine_ranks:
            by_node[engine_rank.place.node].setdefault("engine", []).append(recorded)
    for role, pool in deployment.sleeping.items():
        weights = LedgerItem(name="frozen weights", num_bytes=deployment.frozen[role].weight_bytes, is_exact=True)
        for place in deployment.places_in(pool):
            by_node[place.node].setdefault(role, []).append(weights)
    kinds: defaultdict[str, list[HostLedger]] = defaultdict(list)
    for by_role in by_node.values():
        where = " + ".join(by_role)
        items = _summed([item for role_items in by_role.values() for item in role_items])
        kinds[where].append(HostLedger(where=where, items=items))
    fullest = [max(nodes, key=lambda ledger: ledger.total_bytes) for nodes in kinds.values()]
    return tuple(ledger for ledger in fullest if ledger.items)


def snapshot_bytes(model: PlannedModel, checkpoint: CheckpointConfig) -> list[int]:
    """Return the bytes per stage that a rank copies to host memory for a checkpoint: replicas share the weights, and
    each rank copies its own part of the optimizer."""
    parallel = model.placement.parallel
    if model.work.lora is not None:
        # What is trained has four bytes of gradient for each element.
        item_bytes = ITEM_BYTES[dtype_on(model.work.device)]
        trained = [stage.gradient_bytes // 4 * item_bytes // parallel.replicas for stage in model.stages]
        has_optimizer = checkpoint.contents == "everything"
        return [
            size + (stage.optimizer_bytes if has_optimizer else 0)
            for size, stage in zip(trained, model.stages, strict=True)
        ]
    sizes = [
        stage.dense_bytes // parallel.replicas + (stage.num_bytes - stage.dense_bytes) // parallel.expert_data
        for stage in model.bare_weights
    ]
    if checkpoint.contents == "weights":
        return sizes
    return [size + stage.optimizer_bytes for size, stage in zip(sizes, model.stages, strict=True)]


def _host_items(model: PlannedModel, checkpoint: CheckpointConfig, *, keeps_reference: bool) -> list[list[LedgerItem]]:
    """Return the items that one rank of each stage holds in host memory."""
    role, work = model.role, model.work
    stages: list[list[LedgerItem]] = [[] for _ in range(work.split.pipeline)]
    if keeps_reference:
        for stage, weights in enumerate(model.bare_weights):
            stages[stage].append(LedgerItem(name="reference weights", num_bytes=weights.num_bytes, is_exact=True))
    if offload_of(model) != "nothing":
        for stage, memory in enumerate(model.stages):
            kept = {f"{role}'s optimizer": memory.optimizer_bytes}
            if offload_of(model) == "everything":
                kept[f"{role}'s weights"] = memory.weight_bytes
            stages[stage] += [LedgerItem(name=name, num_bytes=size, is_exact=True) for name, size in kept.items()]
    if model.is_trained and saves(checkpoint):
        for stage, num_bytes in enumerate(snapshot_bytes(model, checkpoint)):
            name = f"{role}'s snapshot, while saving"
            stages[stage].append(LedgerItem(name=name, num_bytes=num_bytes, is_exact=False))
    return stages


def _summed(items: Sequence[LedgerItem]) -> tuple[LedgerItem, ...]:
    sums: dict[str, LedgerItem] = {}
    for item in items:
        before = sums[item.name].num_bytes if item.name in sums else 0
        sums[item.name] = LedgerItem(name=item.name, num_bytes=before + item.num_bytes, is_exact=item.is_exact)
    return tuple(sums.values())


def _total(items: Sequence[LedgerItem]) -> int:
    return sum(item.num_bytes for item in items)
