"""Which rank and which engine runs on which GPU of which node, in the order the runtime fills a pool."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

from megarl.config.recipe import Recipe
from megarl.weights.megatron import MegatronParallel


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
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
    place: Place


@dataclass(frozen=True, slots=True, kw_only=True)
class EnginePlace:
    """One TP rank of one engine."""

    engine: int
    tensor: int
    place: Place


@dataclass(frozen=True, kw_only=True)
class Placement:
    parallel: MegatronParallel
    ranks: tuple[RankPlace, ...]
    engine_ranks: tuple[EnginePlace, ...]

    @cached_property
    def is_shared(self) -> bool:
        """Whether trainer and engines take turns on the same GPUs."""
        return bool({rank.place for rank in self.ranks} & {rank.place for rank in self.engine_ranks})

    @property
    def num_engines(self) -> int:
        return 1 + max((rank.engine for rank in self.engine_ranks), default=-1)

    @cached_property
    def num_gpus(self) -> int:
        return len({rank.place for rank in self.ranks} | {rank.place for rank in self.engine_ranks})

    @cached_property
    def num_nodes(self) -> int:
        return len({rank.place.node for rank in self.ranks} | {rank.place.node for rank in self.engine_ranks})


def place(recipe: Recipe) -> Placement:
    """Ranks fill the actor's pool in their order; engine after engine fills the rollout pool.

    A pool has nodes of its own, unless everything runs on the one machine where megarl is started.
    """
    actor, rollout = recipe.roles.actor, recipe.roles.rollout
    parallel = MegatronParallel.of(actor, data=recipe.data_parallel)
    actor_places = _places(recipe, actor.pool)
    ranks = tuple(_rank_place(parallel, rank, actor_places[rank]) for rank in range(parallel.world_size))
    engine_ranks: tuple[EnginePlace, ...] = ()
    if rollout is not None:
        places = _places(recipe, rollout.pool)
        engine_ranks = tuple(
            EnginePlace(engine=index // rollout.tensor, tensor=index % rollout.tensor, place=where)
            for index, where in enumerate(places[: len(places) // rollout.tensor * rollout.tensor])
        )
    return Placement(parallel=parallel, ranks=ranks, engine_ranks=engine_ranks)


def _rank_place(parallel: MegatronParallel, rank: int, where: Place) -> RankPlace:
    """The inverse of `MegatronParallel.rank`."""
    rest, tensor = divmod(rank, parallel.tensor)
    pipeline, data = divmod(rest, parallel.data)
    return RankPlace(rank=rank, tensor=tensor, data=data, pipeline=pipeline, place=where)


def _places(recipe: Recipe, pool_name: str) -> list[Place]:
    pool = recipe.pools[pool_name]
    is_one_machine = recipe.run.ray_address is None and all(other.nodes == 1 for other in recipe.pools.values())
    first_gpu = _gpus_before(recipe, pool_name) if is_one_machine else 0
    return [
        Place(
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
