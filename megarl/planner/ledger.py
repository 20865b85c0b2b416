"""Who holds how much where and when: the fullest GPU of every kind in every phase, and host memory per node.

Roles that share a pool share its GPUs: all of them hold what they always hold, and one at a time computes. An engine
that sleeps gives back its KV cache and keeps its weights; a trainer that offloads is in host memory while it generates.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from enum import StrEnum

from megarl.config.algorithm import KlRewardConfig, PolicyGradientConfig
from megarl.config.recipe import Recipe
from megarl.config.roles import ModelParallelConfig, TrainedModelConfig
from megarl.planner.activations import ModelWork, activation_bytes, forward_bytes, scoring_bytes
from megarl.planner.hardware import GIB, GpuModel
from megarl.planner.memory import EngineMemory, StageMemory, bare_weights, engine_memory, stage_memory
from megarl.planner.placement import ModelPlacement, Placement
from megarl.planner.shapes import RoleShapes
from megarl.weights.algebra.buckets import DEFAULT_BUCKET_BYTES, NUM_LANES

TRAINER_CONTEXT_BYTES = 7 * GIB // 2
"""CUDA context, loaded kernels, workspaces and NCCL buffers of one rank: an allowance. One on an H200 had 3.7 GiB."""
ENGINE_CONTEXT_BYTES = GIB
"""The same of an engine, without its graphs: an allowance."""
GRAPH_BYTES = 3 * GIB // 2
"""CUDA graphs and activations of an engine: an allowance. With the context, one of 0.5B on an H200 had 1.4 GiB."""


class Phase(StrEnum):
    GENERATING = "generating"
    SCORING = "scoring"
    """Values, and log-probabilities of the reference and of the policy before it learns."""
    TRAINING = "training"
    PUBLISHING = "publishing"


@dataclass(frozen=True, slots=True, kw_only=True)
class Item:
    name: str
    num_bytes: int
    is_exact: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryLedger:
    """One GPU (the fullest of its kind) in one phase."""

    where: str
    """The roles that share it."""
    phase: Phase
    items: tuple[Item, ...]
    capacity_bytes: int | None
    """None on a CPU run: the ledger is then of host memory."""

    @property
    def total_bytes(self) -> int:
        return _total(self.items)

    @property
    def margin_bytes(self) -> int | None:
        return None if self.capacity_bytes is None else self.capacity_bytes - self.total_bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class HostLedger:
    """What is kept in host memory of one node, the fullest of its kind."""

    where: str
    items: tuple[Item, ...]

    @property
    def total_bytes(self) -> int:
        return _total(self.items)


def ledgers(recipe: Recipe, shapes: RoleShapes, placement: Placement, gpu: GpuModel) -> tuple[MemoryLedger, ...]:
    """Pool after pool."""
    return tuple(
        ledger
        for pool in dict.fromkeys(recipe.roles.used_pools.values())
        for ledger in _Pool(recipe, shapes, placement, pool, None if recipe.run.device == "cpu" else gpu).ledgers()
    )


class _Pool:
    """The GPUs of one pool, without a `gpu` on a CPU run."""

    def __init__(
        self, recipe: Recipe, shapes: RoleShapes, placement: Placement, pool: str, gpu: GpuModel | None
    ) -> None:
        self._recipe = recipe
        self._capacity = None if gpu is None else gpu.memory_bytes
        roles = [role for role, where in recipe.roles.used_pools.items() if where == pool]
        self._where = " + ".join("engine" if role == "rollout" else role for role in roles)
        names = [role for role in roles if role in placement.models]
        self._models = {
            role: _Model(
                recipe, shapes, role, placement.models[role], prefix="" if names == [role] else f"{role} ", gpu=gpu
            )
            for role in names
        }
        rollout = recipe.roles.rollout
        self._engine: EngineMemory | None = None
        if rollout is not None and rollout.pool == pool:
            self._engine = engine_memory(shapes.policy, rollout, self._capacity)

    def ledgers(self) -> Iterator[MemoryLedger]:
        held = [item for model in self._models.values() for item in model.held]
        if self._engine is not None:
            cache = Item(name="KV cache", num_bytes=self._engine.cache_bytes, is_exact=True)
            resting = [item for model in self._models.values() for item in model.resting]
            yield self._ledger(Phase.GENERATING, [*resting, *self._asleep(), cache])
        for phase in (Phase.SCORING, Phase.TRAINING):
            busy = {role: model.busy(phase) for role, model in self._models.items()}
            possible = [
                [*computing, *(item for other, model in self._models.items() if other != role for item in model.held)]
                for role, computing in busy.items()
                if computing
            ]
            if possible:
                yield self._ledger(phase, [*max(possible, key=_total), *self._asleep()])
        if "actor" in self._models and self._recipe.roles.rollout is not None:
            yield self._ledger(Phase.PUBLISHING, [*held, *self._asleep()])

    def _asleep(self) -> Iterator[Item]:
        engine = self._engine
        if engine is not None:
            yield Item(name="engine weights", num_bytes=engine.weight_bytes, is_exact=True)
            if not publishes_in_place(self._recipe):
                yield Item(name="staging", num_bytes=engine.staging_bytes, is_exact=True)
            if self._capacity is not None:
                yield Item(name="engine graphs", num_bytes=GRAPH_BYTES, is_exact=False)

    def _ledger(self, phase: Phase, items: Sequence[Item]) -> MemoryLedger:
        sizes = [TRAINER_CONTEXT_BYTES] * len(self._models) + [ENGINE_CONTEXT_BYTES] * (self._engine is not None)
        contexts = [Item(name="context", num_bytes=size, is_exact=False) for size in sizes]
        return MemoryLedger(
            where=self._where,
            phase=phase,
            items=(*items, *(contexts if self._capacity is not None else ())),
            capacity_bytes=self._capacity,
        )


class _Model:
    """One role's share of a GPU; `prefix` tells it from others there."""

    def __init__(
        self,
        recipe: Recipe,
        shapes: RoleShapes,
        role: str,
        placement: ModelPlacement,
        *,
        prefix: str,
        gpu: GpuModel | None,
    ) -> None:
        self._recipe = recipe
        self._role = role
        self._prefix = prefix
        shape = shapes.of(role)
        self._work = ModelWork.of(recipe, shape, recipe.roles.megatron_roles[role])
        self._bare = bare_weights(shape, placement.parallel, dtype=recipe.run.dtype)
        self._held: list[tuple[Item, ...]]
        if role == "reference":
            self._held = [(self._item("weights", stage.num_bytes),) for stage in self._bare]
        else:
            trained = stage_memory(shape, placement.parallel, dtype=recipe.run.dtype)
            self._held = [tuple(self._trained(stage)) for stage in trained]

    @property
    def held(self) -> tuple[Item, ...]:
        """At all times, by a rank of the fullest stage."""
        return max(self._held, key=_total)

    @property
    def resting(self) -> tuple[Item, ...]:
        """While engines generate: what it does not offload."""
        gone = {self._prefix + name for name in _offloaded(self._work.split) if self._work.device != "cpu"}
        return tuple(item for item in self.held if item.name not in gone)

    def busy(self, phase: Phase) -> tuple[Item, ...]:
        """While it computes, on the fullest stage; empty where it does not in this phase."""
        stages = range(self._work.split.pipeline)
        if phase is Phase.SCORING and self._is_asked:
            return max(((*self._held[stage], *self._asked(stage)) for stage in stages), key=_total)
        if phase is Phase.TRAINING and self._role != "reference":
            return max(((*self._held[stage], *self._updated(stage)) for stage in stages), key=_total)
        return ()

    @property
    def _is_asked(self) -> bool:
        if self._role != "actor":
            return True
        algorithm = self._recipe.algorithm
        kl = algorithm.kl if isinstance(algorithm, PolicyGradientConfig) else None
        return isinstance(kl, KlRewardConfig) or keeps_reference(self._recipe)

    def _trained(self, stage: StageMemory) -> Iterator[Item]:
        yield self._item("weights", stage.weight_bytes)
        yield self._item("gradients", stage.gradient_bytes)
        yield self._item("optimizer", stage.optimizer_bytes)
        is_sending = self._role == "actor" and self._recipe.roles.rollout is not None
        if is_sending and not publishes_in_place(self._recipe):
            yield Item(name="send buckets", num_bytes=NUM_LANES * DEFAULT_BUCKET_BYTES, is_exact=True)

    def _asked(self, stage: int) -> Iterator[Item]:
        yield self._item("activations", forward_bytes(self._work), is_exact=False)
        yield from self._scores(stage, has_gradients=False)
        if self._role == "actor" and keeps_reference(self._recipe):
            yield Item(name="exchanged tensor", num_bytes=self._bare[stage].largest_bytes, is_exact=True)

    def _updated(self, stage: int) -> Iterator[Item]:
        yield self._item("activations", activation_bytes(self._work, stage), is_exact=False)
        yield from self._scores(stage, has_gradients=True)

    def _scores(self, stage: int, *, has_gradients: bool) -> Iterator[Item]:
        if stage == self._work.split.pipeline - 1:
            name = "values" if self._work.shape.has_value_head else "log-probabilities"
            num_bytes = scoring_bytes(self._work, has_gradients=has_gradients)
            yield Item(name=name, num_bytes=num_bytes, is_exact=False)

    def _item(self, name: str, num_bytes: int, *, is_exact: bool = True) -> Item:
        return Item(name=f"{self._prefix}{name}", num_bytes=num_bytes, is_exact=is_exact)


def keeps_reference(recipe: Recipe) -> bool:
    """Whether the actor's ranks hold it in host memory."""
    return recipe.roles.reference is not None and recipe.roles.reference.pool is None


def publishes_in_place(recipe: Recipe) -> bool:
    """Whether every engine finds the whole model in the memory of the trainer rank on its own GPU."""
    actor, rollout = recipe.roles.actor, recipe.roles.rollout
    if rollout is None or recipe.run.device == "cpu" or rollout.pool != actor.pool:
        return False
    return actor.model_parallel == actor.expert == rollout.tensor == 1


def _offloaded(split: ModelParallelConfig) -> tuple[str, ...]:
    """Names of what leaves the GPU while engines generate."""
    offload = split.offload if isinstance(split, TrainedModelConfig) else "nothing"
    return {
        "nothing": (),
        "optimizer": ("gradients", "optimizer"),
        "everything": ("gradients", "optimizer", "weights"),
    }[offload]


def host_ledgers(recipe: Recipe, shapes: RoleShapes, placement: Placement) -> tuple[HostLedger, ...]:
    """Nodes that hold the same roles are of one kind; those that keep nothing are left out."""
    by_node: defaultdict[str, dict[str, list[Item]]] = defaultdict(dict)
    for role, model in placement.models.items():
        kept = _kept_in_host(recipe, shapes, role, model)
        for rank in model.ranks:
            by_node[rank.place.node].setdefault(role, []).extend(kept[rank.pipeline])
    kinds: defaultdict[str, list[HostLedger]] = defaultdict(list)
    for by_role in by_node.values():
        where = " + ".join(by_role)
        items = _summed([item for found in by_role.values() for item in found])
        kinds[where].append(HostLedger(where=where, items=items))
    fullest = [max(found, key=lambda ledger: ledger.total_bytes) for found in kinds.values()]
    return tuple(ledger for ledger in fullest if ledger.items)


def snapshot_bytes(recipe: Recipe, shapes: RoleShapes, role: str, model: ModelPlacement) -> list[int]:
    """Per stage, what a rank copies to host memory for a checkpoint: replicas share the weights, and a rank's part of
    the optimizer is its own."""
    shape, parallel = shapes.of(role), model.parallel
    sizes = [
        stage.dense_bytes // parallel.data + (stage.num_bytes - stage.dense_bytes) // parallel.expert_data
        for stage in bare_weights(shape, parallel, dtype=recipe.run.dtype)
    ]
    if recipe.checkpoint.contents == "weights":
        return sizes
    trained = stage_memory(shape, parallel, dtype=recipe.run.dtype)
    return [size + stage.optimizer_bytes for size, stage in zip(sizes, trained, strict=True)]


def saves(recipe: Recipe) -> bool:
    return recipe.checkpoint.save_at_end or recipe.checkpoint.save_every_steps is not None


def _kept_in_host(recipe: Recipe, shapes: RoleShapes, role: str, model: ModelPlacement) -> list[list[Item]]:
    """Per stage, by one rank."""
    stages: list[list[Item]] = [[] for _ in range(model.parallel.pipeline)]
    if role == "actor" and keeps_reference(recipe):
        for stage, weights in enumerate(bare_weights(shapes.policy, model.parallel, dtype=recipe.run.dtype)):
            stages[stage].append(Item(name="reference weights", num_bytes=weights.num_bytes, is_exact=True))
    away = _offloaded(recipe.roles.megatron_roles[role])
    if away and recipe.run.device != "cpu":
        for number, trained in enumerate(stage_memory(shapes.of(role), model.parallel, dtype=recipe.run.dtype)):
            num_bytes = trained.optimizer_bytes + (trained.weight_bytes if "weights" in away else 0)
            stages[number].append(Item(name=f"{role}'s offloaded memory", num_bytes=num_bytes, is_exact=True))
    if role != "reference" and saves(recipe):
        for stage, num_bytes in enumerate(snapshot_bytes(recipe, shapes, role, model)):
            stages[stage].append(Item(name=f"{role}'s snapshot, while saving", num_bytes=num_bytes, is_exact=False))
    return stages


def _summed(items: Sequence[Item]) -> tuple[Item, ...]:
    sums: dict[str, Item] = {}
    for item in items:
        before = sums[item.name].num_bytes if item.name in sums else 0
        sums[item.name] = Item(name=item.name, num_bytes=before + item.num_bytes, is_exact=item.is_exact)
    return tuple(sums.values())


def _total(items: Sequence[Item]) -> int:
    return sum(item.num_bytes for item in items)
