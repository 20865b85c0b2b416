"""Which rank and which engine runs on which GPU of which node, in the order the runtime fills a pool."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property

from megarl.config.recipe import Recipe
from megarl.config.roles import ModelParallelConfig
from megarl.weights.layouts.megatron import MegatronParallel


@dataclass(frozen=True, slots=True, kw_only=True)
class PlannedPlace:
    """One GPU. Two roles in a shared pool have equal places."""

    pool: str
    node: str
    gpu: int


@dataclass(frozen=True, slots=True, kw_only=True)
class RankPlace:
    rank: int
    tensor: int
    data: int
    pipeline: int
    place: PlannedPlace


@dataclass(frozen=True, slots=True, kw_only=True)
class EnginePlace:
    """One TP rank of one engine."""

    engine: int
    tensor: int
    place: PlannedPlace


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelPlacement:
    """All ranks of one model."""

    parallel: MegatronParallel
    ranks: tuple[RankPlace, ...]


@dataclass(frozen=True, kw_only=True)
class Placement:
    models: Mapping[str, ModelPlacement]
    """By role: the actor and, where they have a pool, critic and reference."""
    engine_ranks: tuple[EnginePlace, ...]

    @property
    def parallel(self) -> MegatronParallel:
        """Of the actor."""
        return self.models["actor"].parallel

    @property
    def ranks(self) -> tuple[RankPlace, ...]:
        """Of the actor."""
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
    def places(self) -> tuple[PlannedPlace, ...]:
        """Of every process, role after role."""
        return tuple(self._places())

    def _places(self) -> Iterator[PlannedPlace]:
        for model in self.models.values():
            yield from (rank.place for rank in model.ranks)
        yield from (rank.place for rank in self.engine_ranks)


def place(recipe: Recipe) -> Placement:
    """Ranks fill their role's pool in their order; engine after engine fills the rollout pool.

    A pool has nodes of its own, unless everything runs on the one machine where megarl is started.
    """
    pools = recipe.roles.used_pools
    rollout = recipe.roles.rollout
    engine_ranks: tuple[EnginePlace, ...] = ()
    if rollout is not None and rollout.pool is not None:
        places = _places(recipe, rollout.pool)
        engine_ranks = tuple(
            EnginePlace(engine=index // rollout.tensor, tensor=index % rollout.tensor, place=where)
            for index, where in enumerate(places[: len(places) // rollout.tensor * rollout.tensor])
        )
    return Placement(
        models={
            role: _model(split, _places(recipe, pools[role])) for role, split in recipe.roles.megatron_roles.items()
        },
        engine_ranks=engine_ranks,
    )


def _model(split: ModelParallelConfig, places: list[PlannedPlace]) -> ModelPlacement:
    parallel = MegatronParallel.of(split, data=len(places) // split.model_parallel)
    ranks = tuple(_rank_place(parallel, rank, places[rank]) for rank in range(parallel.world_size))
    return ModelPlacement(parallel=parallel, ranks=ranks)


def _rank_place(parallel: MegatronParallel, rank: int, where: PlannedPlace) -> RankPlace:
    """The inverse of `MegatronParallel.rank`."""
    rest, tensor = divmod(rank, parallel.tensor)
    pipeline, data = divmod(rest, parallel.data)
    return RankPlace(rank=rank, tensor=tensor, data=data, pipeline=pipeline, place=where)


def _places(recipe: Recipe, pool_name: str) -> list[PlannedPlace]:
    pool = recipe.pools[pool_name]
    is_one_machine = recipe.run.ray_address is None and all(other.nodes == 1 for other in recipe.pools.values())
    first_gpu = _gpus_before(recipe, pool_name) if is_one_machine else 0
    return [
        PlannedPlace(
            pool=pool_name,
            node="this machine" if is_one_machine else f"{pool_name}-{node}",
            gpu=first_gpu + gpu,
        )
        for node in range(pool.nodes)
        for gpu in range(pool.gpus_per_node)
    ]


def _gpus_before(recipe: Recipe, pool_name: str) -> int:
    """On one machine the pools lie side by side."""
    names = list(recipe.pools)
    return sum(recipe.pools[name].gpus for name in names[: names.index(pool_name)])
